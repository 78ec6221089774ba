#!/usr/bin/env bash
# The recipe of the demo weights: make the data, train with upstream's scripts, pack, and test what was packed.
#
#   demo/train.sh YOLOV9_DIR OUT_DIR [--task detect|segment|classify] [--device 0] [--epochs 80|20] [--batch 128]
#                                    [--workers 8] [--train 3200] [--val 100] [--size 320] [--minutes M]
#
# YOLOV9_DIR is a patched tree (patch_yolov9.sh), a clone: the one from the package index lacks segment/train.py. OUT_DIR
# receives data/, run/ (log, results.csv, weights/) and demo-weights.pt or demo-seg-weights.pt. The last lines printed are
# AP50 and AP on val, of the packed file, by upstream's val_dual.py (the main branch) or segment/val.py (boxes, then masks).
# The quickstart uses 400 training images; these weights see 3200, of which the 400 are the first. Val is the same.
# --minutes ends the training early (the best epoch so far is packed). PYTHON names the interpreter.
set -euo pipefail

fail() { echo "train.sh: $1" >&2; exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
task=detect device="" epochs="" batch=128 workers=8 train=3200 val=100 size=320 minutes=""
(( $# >= 2 )) || fail "needs YOLOV9_DIR and OUT_DIR"
[[ -d $1 ]] || fail "$1 is no folder"
tree=$(cd "$1" && pwd)
out=$2
shift 2
while (( $# )); do
  case $1 in
    --task | --device | --epochs | --batch | --workers | --train | --val | --size | --minutes)
      (( $# >= 2 )) || fail "$1 needs a value"
      [[ $1 == --task || $1 == --device || $2 =~ ^[1-9][0-9]*$ || $1$2 == --workers0 ]] ||
        fail "$1 $2: not a positive whole number"
      printf -v "${1#--}" %s "$2"
      shift 2 ;;
    *) fail "unknown argument $1 (allowed: --task --device --epochs --batch --workers --train --val --size --minutes)" ;;
  esac
done
case $task in
  detect) name=demo epochs=${epochs:-80} trainer=train_dual.py tester=val_dual.py ;;
  segment) name=demo-seg epochs=${epochs:-20} trainer=segment/train.py tester=segment/val.py ;;
  classify) name=demo-cls epochs=${epochs:-20} trainer=classify/train.py tester=classify/val.py ;;
  *) fail "--task $task: allowed are detect, segment and classify" ;;
esac
[[ -f $tree/$trainer ]] || fail "$tree is not a YOLOv9 tree with $trainer"
mkdir -p "$out" 2> /dev/null || fail "cannot make the folder $out"
out=$(cd "$out" && pwd)

"$python" "$here/make_data.py" --task "$task" --out "$out/data" --train "$train" --val "$val" --size "$size"

# Images fit in memory. Mosaic is off in the last sixth: the net ends on pictures like those it will be tested on.
# An older run in OUT_DIR goes first, so that its best.pt cannot pass for this one's.
rm -rf "$out/run" "$out/val"
limit=()
if [[ -n $minutes ]]; then limit=(timeout "$((minutes * 60))"); fi
status=0
if [[ $task == classify ]]; then # the first nine layers of the demo's detector, with a head of its own
  (cd "$tree" && "$python" "$here/weights.py" build "$here/demo-weights.pt" "$out/detector.pt")
  options=(--model "$out/detector.pt" --cutoff 10 --data "$out/data" --lr0 0.002)
else
  options=(--cfg "$here/yolov9-$name.yaml" --hyp "$here/hyp.yaml" --data "$out/data/data.yaml" --weights '' --close-mosaic
    "$((epochs / 6))" --cos-lr --noplots)
fi
(cd "$tree" && ${limit[@]+"${limit[@]}"} "$python" "$trainer" \
  "${options[@]}" --imgsz "$size" --device "$device" --epochs "$epochs" --batch-size "$batch" --workers "$workers" \
  --optimizer AdamW --cache ram --project "$out" --name run --exist-ok) || status=$?
if (( status == 124 )); then
  echo "train.sh: stopped after $minutes minutes; going on with the best epoch so far"
elif (( status )); then
  fail "$trainer ended with exit code $status"
fi
[[ -f $out/run/weights/best.pt ]] || fail "no finished epoch in $out/run"

# Test the file that will be committed, not the one it came from.
cd "$tree"
"$python" "$here/weights.py" pack "$out/run/weights/best.pt" "$out/$name-weights.pt"
"$python" "$here/weights.py" build "$out/$name-weights.pt" "$out/yolov9-$name.pt"
data=$out/data
[[ $task == classify ]] || data+=/data.yaml
("$python" "$tester" --weights "$out/yolov9-$name.pt" --data "$data" --imgsz "$size" \
  --device "$device" --batch-size 32 --workers "$workers" --project "$out" --name val --exist-ok) 2>&1 |
  tee "$out/val.log"
if [[ $task == classify ]]; then
  awk '$1 == "all" { print "top-1=" $3 "\ntop-5=" $4 }' "$out/val.log"
  exit
fi
awk '$1 == "all" { print "AP50=" $6 "\nAP=" $7; if (NF > 7) print "mask AP50=" $10 "\nmask AP=" $11 }' "$out/val.log"
