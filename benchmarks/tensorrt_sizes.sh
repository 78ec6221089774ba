#!/usr/bin/env bash
# Time INT8, with SiLU and with ReLU, against FP16 in TensorRT 10, for sizes of YOLOv9 with random weights: the values change no time.
#
# Usage, in a patched tree: [PYTHON=python3] [BATCHES='1 4 8 12'] tensorrt_sizes.sh OUT DATA.yaml CONFIG...
#   such as: ../benchmarks/tensorrt_sizes.sh runs/sizes data/coco.yaml models/detect/yolov9-{s,m,c,e}.yaml
#
#   in:  a GPU and trtexec; of DATA eight training images, and the number of classes
#   out: OUT/SIZE-{fp16,int8,relu}.{onnx,engine}; OUT/speed.csv: a line for each measurement; OUT/*.log: all that the commands said
#
# An engine takes batches from 1 to the last of BATCHES. It is built when nothing else runs, and measured in two rounds, the files in turns.
# A second call keeps the files that are there, and measures again.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;; esac
(($# > 2)) || { echo "$0: OUT DATA.yaml CONFIG..., see --help" >&2 && exit 2; }
PYTHON=${PYTHON:-python3} OUT=$1 DATA=$2 && shift 2
read -ra BATCHES <<<"${BATCHES:-1 4 8 12}"
MOST=${BATCHES[-1]} BEST=${BATCHES[0]}
for batch in "${BATCHES[@]}"; do ((batch > 8)) || BEST=$batch; done
mkdir -p "$OUT"

random_weights() { # CONFIG ACTIVATION CHECKPOINT
    "$PYTHON" - "$DATA" "$@" <<'P'
import sys
import torch
import yaml
sys.path.insert(0, '.')
from models.yolo import DetectionModel, SegmentationModel
data, config, activation, file = sys.argv[1:]
with open(data) as f:
    names = yaml.safe_load(f)['names']
with open(config) as f:
    layers = {**yaml.safe_load(f), 'activation': activation}
torch.manual_seed(0)
model = (SegmentationModel if 'seg' in config else DetectionModel)(layers, ch=3, nc=len(names))
norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
for norm in norms:
    norm.momentum = None  # the statistics of one batch, so that values stay finite
with torch.no_grad():
    model.train()(torch.rand(2, 3, 320, 320))
for norm in norms:
    norm.momentum = 0.03
model.names = names if isinstance(names, dict) else dict(enumerate(names))
torch.save({'model': model.half().eval(), 'ema': None, 'epoch': -1, 'optimizer': None}, file)
P
}
exported() { # CHECKPOINT NAME [FLAG...]
    cp "$1" "$OUT/$2.pt"
    "$PYTHON" export_qat.py --weights "$OUT/$2.pt" --include onnx --imgsz 640 --dynamic --simplify --device cpu "${@:3}"
}
model() { # CONFIG SIZE: three ONNX files
    local activation kind
    for activation in SiLU ReLU; do
        [[ $activation == SiLU ]] && kind=int8 || kind=relu
        random_weights "$1" "nn.$activation()" "$OUT/$2-$activation.pt"
        if [[ $1 == *yolov9* ]]; then # two branches
            "$PYTHON" reparameterization.py --weights "$OUT/$2-$activation.pt" --save "$OUT/$2-$activation.pt.one"
            mv "$OUT/$2-$activation.pt.one" "$OUT/$2-$activation.pt"
        fi
        "$PYTHON" qat.py quantize --weights "$OUT/$2-$activation.pt" --data "$DATA" --imgsz 320 --epochs 0 --calib-images 8 --batch-size 4 \
            --no-eval-origin --no-eval-ptq --project "$OUT" --name "$2-$kind-run" --exist-ok
        exported "$OUT/$2-$kind-run/weights/best.pt" "$2-$kind"
        [[ $kind == relu ]] || exported "$OUT/$2-SiLU.pt" "$2-fp16" --trt 11 --half # strongly typed
    done
}
measure() { # SIZE FILE BATCH ROUND
    local log=$OUT/$2-$3-$4.log engine=$OUT/$2.engine
    trtexec --loadEngine="$engine" --shapes="images:$3x3x640x640" --warmUp=500 --duration=3 --useCudaGraph --useSpinWait --noDataTransfers >"$log"
    echo "$1,$2,$3,$4,$(sed -n 's/.*GPU Compute Time: .*median = \([0-9.]*\) ms.*/\1/p' "$log"),$(
        sed -n 's/.*Throughput: \([0-9.]*\) qps/\1/p' "$log"
    ),$(stat -c %s "$engine"),$(cat "$OUT/$2.seconds")" | tee -a "$OUT/speed.csv"
}

echo 'size,file,batch,round,ms,queries_per_s,bytes,build_s' >"$OUT/speed.csv"
for config in "$@"; do
    size=$(basename "$config" .yaml) files=("$size"-{fp16,int8,relu})
    [[ -f $OUT/$size-relu.onnx ]] || model "$config" "$size" >"$OUT/$size.log" 2>&1 || { tail -n 3 "$OUT/$size.log" >&2 && exit 2; }
    for file in "${files[@]}"; do
        [[ -f $OUT/$file.seconds ]] && continue
        start=$SECONDS
        [[ $file == *relu ]] && cache=$OUT/$size-int8.cache || cache=$OUT/$file.cache
        "$PYTHON" scripts/build_engine.py "$OUT/$file.onnx" --batch "1,$BEST,$MOST" --timing-cache "$cache"
        echo $((SECONDS - start)) >"$OUT/$file.seconds"
    done
    for round in 1 2; do
        for batch in "${BATCHES[@]}"; do
            for file in "${files[@]}"; do measure "$size" "$file" "$batch" "$round"; done
        done
    done
done
