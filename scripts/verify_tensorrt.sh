#!/usr/bin/env bash
# Check everything that this toolkit does with TensorRT on this machine: scripts/verify_tensorrt.py, set-up included.
#
# Usage: [PYTHON=python3] [YOLOV9_DIR=an/existing/tree] verify_tensorrt.sh [--backend rtx] [--tensorrt 10|11] [OPTION...]
#        [PYTHON=python3] [YOLOV9_DIR=an/existing/tree] verify_tensorrt.sh --weights INT8.pt --float FLOAT.pt --data DATA.yaml --imgsz 640 [OPTION...]
#   --tensorrt 10|11  the version to install if there is none (default 10)
#   --backend rtx     TensorRT-RTX, whose builder needs no GPU
#   OPTION            of scripts/verify_tensorrt.py: --minutes, --images, --only, --project, --name and others
# The report is verify.md and verify.json. Exit code 0: no row failed; 1: a row failed.
#
# Without --weights it takes the embedded demo: it sets up .venv and .work/yolov9 as quickstart.sh does, makes the data, and quantizes a
# detector, a segmentation model and a classifier. With --weights it takes your model, your data and your Python. TensorRT and pytest are
# installed first if there is none.
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

OPTIONS=() VERSION=10 BACKEND=tensorrt OWN=no
while (($#)); do
    case $1 in
        -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;;
        --tensorrt) VERSION=${2:-} && shift ;;
        *)
            case $1 in
                --backend) BACKEND=${2:-} ;;
                --weights) OWN=yes ;;
            esac
            OPTIONS+=("$1")
            ;;
    esac
    (($# == 0)) || shift
done
[[ $BACKEND != rtx ]] || VERSION=rtx

install_missing() { # TensorRT, and pytest with the packages of the tests; says why where it cannot
    # the folder in place of the current one, whose files must not run
    "$PYTHON" -c 'import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from utils.qat.vendors.tensorrt.engine.api import load_tensorrt
load_tensorrt(sys.argv[2])' "$HERE" "$BACKEND" 2>/dev/null ||
        "$HERE/install_dependencies.sh" --tensorrt "$VERSION"
    "$PYTHON" -c 'import sys; sys.path[:] = filter(None, sys.path); import pytest' 2>/dev/null || "$HERE/install_dependencies.sh" --tests
}

# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"
mkdir -p "$HERE/.work"
exec 9>"$HERE/.work/quickstart.lock" # held until this process and its children have ended; quickstart.sh works in the same folder
flock -n 9 || fail "another quickstart.sh or verify_tensorrt.sh is at work in $HERE" "wait for it, or stop it"
if [[ $OWN == yes ]]; then
    export PYTHON=${PYTHON:-python3}
    install_missing
    [[ -n ${YOLOV9_DIR:-} ]] || set_up_yolov9
    exec "$PYTHON" "$HERE/scripts/verify_tensorrt.py" ${OPTIONS[@]+"${OPTIONS[@]}"}
fi
# shellcheck disable=SC2119  # it takes no options of ours
set_up_python
install_missing
set_up_yolov9
"$HERE/patch_yolov9.sh" "$HERE/.work/yolov9"
cd "$HERE/.work/yolov9"
OUT=$HERE/.work/verify
for task in detect segment classify; do
    [[ ! -f $OUT/$task/int8.pt ]] || continue # made before
    case $task in
        detect) name=demo size=320 made=(--train 200 --val 100) ;;
        segment) name=demo-seg size=320 made=(--train 200 --val 100) ;;
        classify) name=demo-cls size=96 made=(--train 400 --val 600 --size 96) ;;
    esac
    say "The demo: $task"
    rm -rf "${OUT:?}/$task"
    "$PYTHON" "$HERE/demo/make_data.py" --task $task --out "$OUT/$task/data" "${made[@]}"
    "$PYTHON" "$HERE/demo/weights.py" build "$HERE/demo/$name-weights.pt" "$OUT/$task/built.pt"
    if [[ $task == detect ]]; then
        "$PYTHON" reparameterization.py --weights "$OUT/$task/built.pt" --save "$OUT/$task/float.pt"
    else
        mv "$OUT/$task/built.pt" "$OUT/$task/float.pt"
    fi
    data=$OUT/$task/data
    [[ $task == classify ]] || data=$data/data.yaml
    "$PYTHON" qat.py quantize --weights "$OUT/$task/float.pt" --data "$data" --imgsz "$size" \
        --epochs 0 --calib-images 200 --no-eval-origin --no-eval-ptq --project "$OUT/$task" --name ptq
    mv "$OUT/$task"/ptq/weights/ptq_*.pt "$OUT/$task/int8.pt"
done
say "The rows"
exec "$PYTHON" "$HERE/scripts/verify_tensorrt.py" --weights "$OUT/detect/int8.pt" --float "$OUT/detect/float.pt" \
    --data "$OUT/detect/data/data.yaml" --imgsz 320 --segment "$OUT/segment/int8.pt" --segment-data "$OUT/segment/data/data.yaml" \
    --classify "$OUT/classify/int8.pt" --classify-data "$OUT/classify/data" \
    --project "$OUT" --name report ${OPTIONS[@]+"${OPTIONS[@]}"}
