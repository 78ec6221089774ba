#!/usr/bin/env bash
# Do the whole job on a small example, set-up included. A trained YOLOv9 (digits on textured canvases, demo/) becomes a quantized
# checkpoint and an INT8 ONNX file. Every stage is scored. It needs neither a GPU nor GitHub.
#
# Usage: [PYTHON=python3] [YOLOV9_DIR=an/existing/tree] quickstart.sh [--task detect|segment|classify] [--fresh] [--latest]
#   --task    what the model is: a dual-branch detector (the default), a segmentation model of one branch, or a classifier, cut from
#             the detector
#   --fresh   fetch upstream and do the job again (.work/yolov9, and .work/demo, .work/demo-seg or .work/demo-cls); .venv stays
#   --latest  if there is no .venv, make it with the newest packages, not with the tested set (constraints.txt)
#
#   in:  Python 3.10 or newer, git, a C compiler, a package index; it downloads several GB (torch with CUDA), once, into .venv
#   out: .venv/ (packages), .work/yolov9/ (upstream, patched; a copy of YOLOV9_DIR if that is set), .work/demo/, .work/demo-seg/ or
#        .work/demo-cls/ (data, checkpoints, ONNX files, metrics)
#
# Each command is printed before it runs. A second run skips the steps that an earlier one finished.
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
        -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;;
        *) fail "unknown option $1; allowed: --task --fresh --latest --help" ;;
    esac
    (($# == 0)) || shift
done
case $TASK in
    detect) NAME=demo ;;
    segment) NAME=demo-seg ;;
    classify) NAME=demo-cls ;;
    *) fail "--task ${TASK:-with no value}: allowed are detect, segment and classify" "quickstart.sh --help" ;;
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
SIZE=320 MADE=() DATA=(--data "$OUT/data/data.yaml" --imgsz 320)
[[ $TASK != classify ]] || SIZE=96 MADE=(--train 400 --val 600 --size 96) DATA=(--data "$OUT/data" --imgsz 96)
MODEL=$OUT/yolov9-$NAME
BEST=$OUT/qat/weights/best
say "From here on in $PWD, with .venv/bin first on the PATH"

step "Data: handwritten digits on textured canvases" $OUT/data \
    python ../../demo/make_data.py --task "$TASK" --out $OUT/data --train 200 --val 100 ${MADE[@]+"${MADE[@]}"}
if [[ $TASK == detect ]]; then
    step "The trained model: a dual-branch checkpoint, as train_dual.py leaves it" $MODEL-dual.pt \
        python ../../demo/weights.py build ../../demo/$NAME-weights.pt $MODEL-dual.pt
    step "Reparameterize: drop the auxiliary branch" $MODEL.pt \
        python reparameterization.py --weights $MODEL-dual.pt --save $MODEL.pt
else
    step "The trained model: a checkpoint of one branch, as $TASK/train.py leaves it" $MODEL.pt \
        python ../../demo/weights.py build ../../demo/$NAME-weights.pt $MODEL.pt
fi
step "Quantize: calibrate (PTQ), then fine-tune (QAT)" $OUT/qat \
    python qat.py quantize --weights $MODEL.pt "${DATA[@]}" \
    --epochs 2 --iters 10 --task-loss 0.1 --calib-images 100 --project $OUT --name qat
step "Export the quantized model to ONNX with Q/DQ, and for OpenVINO; the float model too, to compare with" $BEST.onnx \
    python export_qat.py --weights $MODEL.pt $BEST.pt --include onnx openvino --imgsz "$SIZE" --dynamic --simplify
step "Audit it: does anything keep TensorRT from running it in INT8?" $OUT/audit.json \
    python scripts/audit_onnx.py $BEST.onnx --strict --json $OUT/audit.json
step "Score it on square images, as a deployed model sees them: PyTorch and ONNX Runtime simulate INT8, OpenVINO computes in integers" \
    $OUT/eval-yolov9-$NAME.xml \
    python qat.py eval --weights $BEST.pt $BEST.onnx $BEST.xml $MODEL.xml "${DATA[@]}" --square --project $OUT --name eval --exist-ok
step "Measure the speed of INT8 and float in OpenVINO" $OUT/speed \
    python benchmark_trt.py $MODEL.xml $BEST.xml --backend openvino --device cpu --batch 1 --imgsz "$SIZE" --warmup 500ms --duration 1 \
    --project $OUT --name speed

say "Result (this run of the job took $((SECONDS - START)) s)"
python ../../demo/summary.py $OUT
printf '\nFiles in %s:\n' "$HERE/.work/$NAME"
printf '  %-41s  %s\n' \
    "yolov9-$NAME.pt" "float, one branch" \
    "qat/weights/ptq_*.pt" "calibrated" \
    "qat/weights/best.pt" "calibrated and fine-tuned, the best of the run" \
    "qat/weights/best.onnx" "the same as ONNX with Q/DQ, for TensorRT and ONNX Runtime" \
    "qat/weights/best.xml" "the same for OpenVINO, with a .bin" \
    "qat/report.md, report.json" "figures of every stage, with pictures" \
    "eval/report.md, metrics.json" "figures of the files that were scored on their own, each also in eval-FILE"
cat <<EOT

Next, with your own clone and weights:
  ./patch_yolov9.sh path/to/yolov9 && cd path/to/yolov9
EOT
if [[ $TASK == classify ]]; then
    echo "  python qat.py quantize --weights your-classifier.pt --data your-folder-of-classes"
else
    echo "  python reparameterization.py --weights your-yolov9.pt --save your-yolov9-converted.pt"
    echo "  python qat.py quantize --weights your-yolov9-converted.pt --data your-data.yaml"
fi
