#!/usr/bin/env bash
# The recipe of the demo weights: make the data, train with upstream's train_dual.py, pack, and test what was packed.
#
#   demo/train.sh YOLOV9_DIR OUT_DIR [--device 0] [--epochs 80] [--batch 128] [--workers 8]
#                                    [--train 3200] [--val 100] [--size 320] [--minutes M]
#
# YOLOV9_DIR is a patched tree (patch_yolov9.sh). OUT_DIR receives data/, run/ (log, results.csv, weights/) and
# demo-weights.pt. The last line printed is "AP=...": the main branch, of the packed file, by val_dual.py.
# The quickstart uses 400 training images; these weights see 3200, of which the 400 are the first. Val is the same.
# --minutes ends the training early (the best epoch so far is packed). PYTHON names the interpreter.
set -euo pipefail

fail() { echo "train.sh: $1" >&2; exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
device= epochs=80 batch=128 workers=8 train=3200 val=100 size=320 minutes=
(( $# >= 2 )) || fail "needs YOLOV9_DIR and OUT_DIR"
[[ -f $1/train_dual.py ]] || fail "$1 is not a YOLOv9 tree (no train_dual.py)"
tree=$(cd "$1" && pwd)
out=$2
shift 2
while (( $# )); do
  case $1 in
    --device | --epochs | --batch | --workers | --train | --val | --size | --minutes)
      (( $# >= 2 )) || fail "$1 needs a value"
      [[ $1 == --device || $2 =~ ^[1-9][0-9]*$ || $1$2 == --workers0 ]] || fail "$1 $2: not a positive whole number"
      printf -v "${1#--}" %s "$2"
      shift 2 ;;
    *) fail "unknown argument $1 (allowed: --device --epochs --batch --workers --train --val --size --minutes)" ;;
  esac
done
mkdir -p "$out" 2> /dev/null || fail "cannot make the folder $out"
out=$(cd "$out" && pwd)

"$python" "$here/make_data.py" --out "$out/data" --train "$train" --val "$val" --size "$size"

# Images fit in memory. Mosaic is off in the last sixth: the net ends on pictures like those it will be tested on.
# An older run in OUT_DIR goes first, so that its best.pt cannot pass for this one's.
rm -rf "$out/run" "$out/val"
limit=()
if [[ -n $minutes ]]; then limit=(timeout "$((minutes * 60))"); fi
status=0
(cd "$tree" && ${limit[@]+"${limit[@]}"} "$python" train_dual.py \
  --cfg "$here/yolov9-demo.yaml" --hyp "$here/hyp.yaml" --data "$out/data/data.yaml" --weights '' --imgsz "$size" \
  --device "$device" --epochs "$epochs" --batch-size "$batch" --workers "$workers" --close-mosaic "$((epochs / 6))" \
  --optimizer AdamW --cos-lr --cache ram --noplots --project "$out" --name run --exist-ok) || status=$?
if (( status == 124 )); then
  echo "train.sh: stopped after $minutes minutes; going on with the best epoch so far"
elif (( status )); then
  fail "train_dual.py ended with exit code $status"
fi
[[ -f $out/run/weights/best.pt ]] || fail "no finished epoch in $out/run"

# Test the file that will be committed, not the one it came from.
"$python" "$here/weights.py" pack "$out/run/weights/best.pt" "$out/demo-weights.pt" --yolov9 "$tree"
"$python" "$here/weights.py" build "$out/demo-weights.pt" "$out/demo-dual.pt" --yolov9 "$tree"
(cd "$tree" && "$python" val_dual.py --weights "$out/demo-dual.pt" --data "$out/data/data.yaml" --imgsz "$size" \
  --device "$device" --batch-size 32 --workers "$workers" --project "$out" --name val --exist-ok) 2>&1 |
  tee "$out/val.log"
awk '$1 == "all" { print "AP50=" $6 "\nAP=" $7 }' "$out/val.log"
