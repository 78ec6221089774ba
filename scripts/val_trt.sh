#!/usr/bin/env bash
# Checkpoint → ONNX → TensorRT engine → metrics: export_qat.py, build_engine.py and val_trt.py in one go.
#
# Usage: [PYTHON=python3] val_trt.sh WEIGHTS.pt DATA IMGSZ [--float FLOAT.pt] [--level N] [--jobs N] [--generate-graph]
#   WEIGHTS.pt        checkpoint, quantized by qat.py or float
#   DATA              data YAML; the engine is evaluated on its val: images. Of a classifier the folder of its images
#   IMGSZ             image size in pixels: of the file, the engine and the evaluation; one number, or 'HEIGHT WIDTH' in quotes
#   --float FLOAT.pt  also score this model and its FP16 engine, compare WEIGHTS and its engine with them, and time both engines in turns
#   --level N         TensorRT's optimization level, 0 (built in a minute, for a first look) to 5 (fast engine); default: TensorRT's, 3
#   --jobs N          engines that are built at a time, 1 or 2; default: 1, or of --level 0 two. Above level 0 they wait for the GPU
#   --generate-graph  also measure every layer and draw the engine
#   --no-pad          leave the widths of the ONNX file as they are, see export_qat.py
# It ends with a table of AP, AP50, P and R in PyTorch and in the engine, and their differences, which runs/qat_eval/exp/report.md has
# too. The ONNX files, the engines and their other files are written beside WEIGHTS and FLOAT.pt.
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}

usage() { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0"; }
refuse() {
    printf 'val_trt.sh: error: %s\n' "$1" >&2
    exit 2
}
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
if (($# < 3)); then
    usage >&2
    exit 2
fi
weights=$1 data=$2 model=${1%.*} float=() graph=() pad=() level=() jobs=''
[[ -f $weights ]] || refuse "WEIGHTS $weights: no such file"
[[ -e $data ]] || refuse "DATA $data: no such file"
[[ $3 =~ ^[0-9]+( [0-9]+)?$ ]] || refuse "IMGSZ $3: must be one number, or 'HEIGHT WIDTH' in quotes"
read -ra imgsz <<<"$3"
shift 3
while (($#)); do
    case $1 in
        --generate-graph) graph=("$1") ;;
        --no-pad) pad=("$1") ;;
        --level)
            [[ ${2:-} =~ ^[0-5]$ ]] || refuse "--level ${2:-}: must be a number from 0 to 5"
            level=("$1" "$2") && shift
            ;;
        --jobs)
            [[ ${2:-} =~ ^[12]$ ]] || refuse "--jobs ${2:-}: must be 1 or 2"
            jobs=$2 && shift
            ;;
        --float)
            [[ -f ${2:-} ]] || refuse "--float ${2:-}: no such file"
            float=("$2") && shift
            ;;
        *) refuse "$1: no such option; see val_trt.sh -h" ;;
    esac
    shift
done

trt=$("$PYTHON" "$HERE/build_engine.py" --which) # which TensorRT to export for; says what to do if there is none
export=("$PYTHON" "$HERE/../export_qat.py" --include onnx --imgsz "${imgsz[@]}" --simplify ${pad[@]+"${pad[@]}"})
typed=(--trt "$trt")
((trt < 10)) || typed=(--trt 11 --half) # FP16 by the types of the file: built in half the time, and as fast
((${#float[@]} == 0)) || "${export[@]}" --weights "${float[@]}" "${typed[@]}"
((trt == 11)) || typed=(--trt "$trt")
"${export[@]}" --weights "$weights" "${typed[@]}"
engines=("$model.engine") how=(--imgsz "${imgsz[@]}" ${level[@]+"${level[@]}"})
[[ -n $jobs ]] || jobs=$((1 + (${level[1]:-3} == 0)))
((${#graph[@]} == 0)) || jobs=1 # layers are measured
if ((${#float[@]})); then
    engines=("${float[0]%.*}.engine" "${engines[@]}")
    build=("$PYTHON" "$HERE/build_engine.py" "${float[0]%.*}.onnx" "${how[@]}")
    if ((jobs == 1)); then
        "${build[@]}"
    else
        "${build[@]}" --quiet & # two bars would share a line
        beside=$!
        trap 'kill "$beside" 2>/dev/null || true' EXIT # where the other one fails, or by Ctrl-C
    fi
fi
"$PYTHON" "$HERE/build_engine.py" "$model.onnx" "${how[@]}" ${graph[@]+"${graph[@]}"}
[[ -z ${beside:-} ]] || wait "$beside"
trap - EXIT
"$PYTHON" "$HERE/../qat.py" eval --weights ${float[@]+"${float[@]}"} "$weights" "${engines[@]}" --data "$data" --imgsz "${imgsz[@]}" --square
((${#float[@]} == 0)) || "$PYTHON" "$HERE/../benchmark_trt.py" "${engines[@]}" --duration 5
if ((${#graph[@]})); then # last: what else there is shall not wait for a picture
    "$PYTHON" "$HERE/draw_engine.py" --layer "$model.layer.json" --profile "$model.profile.json" --output "$model"
fi
