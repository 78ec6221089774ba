#!/usr/bin/env bash
# Do the whole job on a small example, set-up included. A trained YOLOv9 (digits on textured canvases, demo/) becomes a quantized
# checkpoint and an INT8 ONNX file. Every stage is scored. It needs neither a GPU nor GitHub.
#
#   --task detect   a dual-branch detector
#   --task segment  a segmentation model, of one branch
#
#   in:  Python 3.10 or newer, git, a C compiler, a package index
#   out: .venv/ (packages), .work/yolov9/ (upstream, patched), .work/demo/ or .work/demo-seg/
#        (data, checkpoints, ONNX files, metrics)
#
# Each command is printed before it runs. A second run skips finished steps.
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"

TASK=detect FRESH=no LATEST=()
while (($#)); do
    case $1 in
        --task)
            TASK=${2:-}
            shift ;;
        --fresh) FRESH=yes ;;
        --latest) LATEST=(--latest) ;;
        -h | --help)
            cat <<USAGE
Usage: [PYTHON=python3] [YOLOV9_DIR=an/existing/tree] quickstart.sh [--task detect|segment] [--fresh] [--latest]
  (nothing)  set up, then run the whole job on the demo detector; skip the steps that an earlier run finished
  --task segment
             the same on the demo segmentation model
  --fresh    fetch upstream and do the job again (.work/yolov9, and .work/demo or .work/demo-seg); .venv stays
  --latest   if there is no .venv, make it with the newest packages, not with the tested set (constraints.txt)
Downloads several GB (torch with CUDA), once, into .venv. YOLOV9_DIR names a YOLOv9 tree to copy instead of fetching one.
USAGE
            exit 0 ;;
        *) fail "unknown option $1; allowed: --task --fresh --latest --help" ;;
    esac
    (($# == 0)) || shift
done
case $TASK in
    detect) NAME=demo ;;
    segment) NAME=demo-seg ;;
    *) fail "--task ${TASK:-with no value}: allowed are detect and segment" "quickstart.sh --help" ;;
esac
mkdir -p "$HERE/.work"
exec 9>"$HERE/.work/quickstart.lock" # held until this process and what it started have ended
flock -n 9 || fail "another quickstart.sh is at work in $HERE" "wait for it, or stop it"
[[ $FRESH == no ]] || rm -rf "$HERE"/.work/{yolov9,yolov9.origin,"$NAME"}

# ---- set-up -----------------------------------------------------------------------------------------------------------
set_up_python ${LATEST[@]+"${LATEST[@]}"}
set_up_yolov9
say "The toolkit, laid over .work/yolov9"
"$HERE/patch_yolov9.sh" "$HERE/.work/yolov9"

# ---- the job: from here on in the patched tree, with relative paths, as a user works -----------------------------------
cd "$HERE/.work/yolov9"
OUT=../$NAME
mkdir -p "$OUT/.done"
SOURCES=$(cat .yolov9-qat.manifest ../../demo/{make_data.py,weights.py,$NAME-weights.pt} | sha256sum) # all that a result hangs on
STALE=no
START=$SECONDS

# step TEXT OUTPUT COMMAND ...: run COMMAND, unless this very command, of these very sources, has finished OUTPUT before.
# The stamp is written last, so an interrupted step starts over; what follows a step that ran, runs as well.
step() {
    local text=$1 output=$2 stamp=$OUT/.done/${2##*/} start=$SECONDS
    shift 2
    say "$text"
    echo "\$ $*"
    if [[ $STALE == no && -e $output && $(cat "$stamp" 2>/dev/null) == "$SOURCES $*" ]]; then
        echo "done before: $output"
        return
    fi
    STALE=yes
    rm -rf "$stamp" "$output"
    "$@" || fail "that command failed, its message is above" "when the cause is mended, run quickstart.sh again: it goes on here"
    [[ -e $output ]] || fail "that command left no $output; please report it"
    echo "$SOURCES $*" >"$stamp"
    echo "-- $((SECONDS - start)) s"
}

# Sizes chosen so that the job takes two and a half minutes on two quiet cores, half of it in `quantize`.
DATA=(--data "$OUT/data/data.yaml" --imgsz 320)
MODEL=$OUT/yolov9-$NAME
BEST=$OUT/qat/weights/qat_best_yolov9-$NAME
say "From here on in $PWD, with .venv/bin first on the PATH"

step "Data: handwritten digits on textured canvases" $OUT/data \
    python ../../demo/make_data.py --task "$TASK" --out $OUT/data --train 200 --val 100
if [[ $TASK == detect ]]; then
    step "The trained model: a dual-branch checkpoint, as train_dual.py leaves it" $MODEL-dual.pt \
        python ../../demo/weights.py build ../../demo/$NAME-weights.pt $MODEL-dual.pt
    step "Reparameterize: drop the auxiliary branch" $MODEL.pt \
        python reparameterization.py --weights $MODEL-dual.pt --save $MODEL.pt
else
    step "The trained model: a checkpoint of one branch, as segment/train.py leaves it" $MODEL.pt \
        python ../../demo/weights.py build ../../demo/$NAME-weights.pt $MODEL.pt
fi
step "Quantize: calibrate (PTQ), then fine-tune (QAT)" $OUT/qat \
    python qat.py quantize --weights $MODEL.pt "${DATA[@]}" \
    --epochs 2 --iters 10 --task-loss 0.1 --calib-images 100 --project $OUT --name qat
step "Export the quantized model to ONNX with Q/DQ" $BEST.onnx \
    python export_qat.py --weights $BEST.pt --include onnx --imgsz 320 --dynamic --simplify
step "Audit it: does anything keep TensorRT from running it in INT8?" $OUT/audit.json \
    python scripts/audit_onnx.py $BEST.onnx --strict --json $OUT/audit.json
step "Export the float model too, to compare with" $MODEL.onnx \
    python export_qat.py --weights $MODEL.pt --include onnx --imgsz 320 --dynamic --simplify
step "Score the quantized checkpoint, and its ONNX file in ONNX Runtime, on square images, as a deployed model sees them" \
    $OUT/eval-qat_best_yolov9-$NAME.onnx \
    python qat.py eval --weights $BEST.pt $BEST.onnx "${DATA[@]}" --square --project $OUT --name eval --exist-ok
step "Score the INT8 and the float ONNX file in OpenVINO, which computes INT8 in integers" $OUT/eval_openvino-yolov9-$NAME.onnx \
    python qat.py eval --weights $BEST.onnx $MODEL.onnx --backend openvino "${DATA[@]}" --project $OUT --name eval_openvino --exist-ok
step "Measure the speed of both in OpenVINO" $OUT/speed \
    python benchmark_trt.py $MODEL.onnx $BEST.onnx --backend openvino --device cpu --batch 1 --imgsz 320 --warmup 500ms --duration 1 \
    --project $OUT --name speed

say "Result (this run of the job took $((SECONDS - START)) s)"
python ../../demo/summary.py $OUT
printf '\nFiles in %s:\n' "$HERE/.work/$NAME"
printf '  %-41s  %s\n' \
    "yolov9-$NAME.pt" "float, one branch" \
    "qat/weights/ptq_ap_*.pt" "calibrated" \
    "qat/weights/qat_best_yolov9-$NAME.pt" "calibrated and fine-tuned, the best of the run" \
    "qat/weights/qat_best_yolov9-$NAME.onnx" "the same as ONNX with Q/DQ, for TensorRT and ONNX Runtime" \
    "qat/report.md, report.json, ap.png" "figures of every stage" \
    "eval*/metrics.json" "figures of the files that were scored on their own"
cat <<EOT

Next, with your own clone and weights:
  ./patch_yolov9.sh path/to/yolov9 && cd path/to/yolov9
  python reparameterization.py --weights your-yolov9.pt --save your-yolov9-converted.pt
  python qat.py quantize --weights your-yolov9-converted.pt --data your-data.yaml
EOT
