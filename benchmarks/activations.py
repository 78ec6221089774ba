"""Time a network with SiLU, its polynomial and ReLU, in float and in INT8, in OpenVINO and ONNX Runtime, in turns in one process.

Run it in a patched tree on a float checkpoint of one branch and a data YAML. The values of the weights change no time, so nothing is
learnt here:

    cd yolov9
    python ../yolov9-qat/benchmarks/activations.py --weights yolov9-c-converted.pt --data data/coco.yaml
    python ../yolov9-qat/benchmarks/activations.py --weights MODEL.pt --data DATA.yaml --only 'model.[0-4]' model.15 model.22

--only exchanges the activation functions of these layers alone. --nncf adds the INT8 of NNCF, OpenVINO's own quantizer, in the faster
of its two recipes. Prints a Markdown table of CPU ms, and of the time relative to INT8 with SiLU; --json FILE writes the same figures.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
from utils.qat.core.machine import set_environment

set_environment()  # before torch: waiting threads sleep

# isort: split
import torch

from models.deploy.formats.onnx import export_onnx
from models.quantize import checkpoint
from models.quantize.activations import exchangeable, exchanged, finish_exchange
from models.quantize.calibration.calibrate import fit_ranges
from models.quantize.calibration.ptq import prepare
from openvino_nncf import CPU, in_bf16, quantized_by_nncf, time_in_turns
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import ACTIVATIONS, QuantizeConfig
from utils.qat.core.command import Parser, run_command
from utils.qat.core.files import require_data, require_file, write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.text import markdown_table
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Loaders
from utils.qat.vendors.onnxruntime.session import OnnxRuntime
from utils.qat.vendors.openvino.session import OpenVINO


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt) of one branch')
    p.add_argument('--data', type=Path, required=True, help='data YAML')
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--calib-images', type=int, default=8, help='training images to calibrate on')
    p.add_argument('--activations', nargs='+', choices=ACTIVATIONS, default=list(ACTIVATIONS), help='keep is SiLU')
    p.add_argument(
        '--only', nargs='+', default=[], metavar='REGEX', help='layers whose functions are exchanged; default: all'
    )
    p.add_argument('--engines', nargs='+', choices=('openvino', 'onnxruntime'), default=['openvino', 'onnxruntime'])
    p.add_argument('--nncf', action='store_true', help='NNCF too')
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--rounds', type=int, default=30, help='turns of each file')
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


def sessions_of(model: Network, images: Any, config: QuantizeConfig, folder: Path, nncf: bool) -> dict[str, Any]:
    """Write a float model in every precision of the engines, and open the files: engine and precision → session."""
    folder.mkdir()
    target = config.made_for
    export_onnx(model, folder / 'float.onnx', config.imgsz, target=target)
    quantized = deepcopy(model)
    prepare(quantized, config)
    fit_ranges(quantized, images, config)
    export_onnx(quantized, folder / 'int8.onnx', config.imgsz, target=target)
    if config.target == 'onnxruntime':
        files = {'FP32': folder / 'float.onnx', 'INT8': folder / 'int8.onnx'}
        return {
            f'ONNX Runtime {name}': OnnxRuntime(file, CPU, {}, threads=torch.get_num_threads())
            for name, file in files.items()
        }
    sessions = {'FP32': OpenVINO(folder / 'float.onnx', CPU), 'INT8': OpenVINO(folder / 'int8.onnx', CPU)}
    sessions |= in_bf16(folder / 'float.onnx', next(iter(images))[:1])
    if nncf:
        single = [image for batch in images for image in batch.split(1)]
        files = quantized_by_nncf(model, single, folder, {})
        sessions |= {name: OpenVINO(file, CPU) for name, file in files.items()}
    return {f'OpenVINO {name}': session for name, session in sessions.items()}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Export and time all files. Returns 'activation, engine and precision' → median ms and CPU ms."""
    sessions: dict[str, Any] = {}
    with quiet_upstream():
        teacher = TorchModel(checkpoint.CheckpointFile(args.weights).load_float(CPU))
        for engine in args.engines:
            for activation in args.activations:
                config = QuantizeConfig(
                    args.weights,
                    args.data,
                    imgsz=args.imgsz,
                    calib_images=args.calib_images,
                    calib_method='mse',
                    batch_size=4,
                    device='cpu',
                    workers=0,
                    target=engine,
                    activation=activation,
                    activation_only=args.only if activation != 'keep' else (),
                )
                data = teacher.task.load_data(args.data, teacher)
                images = Loaders(data, config, teacher.stride, CPU).calibration()
                model = teacher.model
                if config.exchanges:
                    model = finish_exchange(exchanged(model, activation, exchangeable(model, activation)))
                of_activation = sessions_of(model, images, config, folder / f'{engine}-{activation}', args.nncf)
                sessions |= {f'{activation}, {name}': session for name, session in of_activation.items()}
    return time_in_turns(sessions, next(iter(images))[:1], args.rounds)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    require_file(args.weights, '--weights', ('.pt',))
    require_data(args.data)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        timed = measure(args, Path(folder))
    names = list(dict.fromkeys(key.partition(', ')[2] for key in timed))
    rows = [
        (
            name,
            *(f'{timed[f"{activation}, {name}"]["cpu_ms"]:.1f}' for activation in args.activations),
            *(
                f'{timed[f"{activation}, {name}"]["cpu_ms"] / timed[f"{args.activations[0]}, {name}"]["cpu_ms"]:.2f}'
                for activation in args.activations[1:]
            ),
        )
        for name in names
    ]
    first, *others = ('SiLU' if a == 'keep' else a for a in args.activations)
    print(f'{args.weights.name}, {args.imgsz} px, {args.threads} threads, CPU ms of an image\n')
    print(markdown_table(('', first, *others, *(f'{other} / {first}' for other in others)), rows))
    if args.json:
        write_json(args.json, {'threads': args.threads, 'imgsz': args.imgsz, 'only': args.only, 'times': timed})


if __name__ == '__main__':
    raise SystemExit(run_command(main))
