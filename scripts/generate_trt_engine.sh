#!/usr/bin/env bash
# Build a TensorRT engine from an ONNX file, by trtexec if it is found, else by the Python package.
#
# Usage: [PYTHON=python3] generate_trt_engine.sh MODEL.onnx IMGSZ [--generate-graph] [--batch MIN,OPT,MAX] [OPTION...]
#   MODEL.onnx        file of export_qat.py; the engine is written beside it
#   IMGSZ             image size in pixels; it must be the size of the file; one number, or 'HEIGHT WIDTH' in quotes
#   --generate-graph  also measure every layer and draw the engine: MODEL.layer.json, MODEL.profile.json, MODEL.svg, MODEL.png, MODEL.csv
#   --batch           for a file exported with --dynamic
#   OPTION...         any option of scripts/build_engine.py
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}

usage() { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0"; }
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then
    usage >&2
    exit 2
fi
onnx=$1 graph=no
read -ra imgsz <<<"$2"
for option in "${@:3}"; do [[ $option != --generate-graph ]] || graph=yes; done

"$PYTHON" "$HERE/build_engine.py" "$onnx" --imgsz "${imgsz[@]}" "${@:3}"
if [[ $graph == yes ]]; then
    "$PYTHON" "$HERE/draw_engine.py" --layer "${onnx%.onnx}.layer.json" --profile "${onnx%.onnx}.profile.json" --output "${onnx%.onnx}"
fi
