"""Compare our INT8 with NNCF's quantization of the same float model, both in OpenVINO, on the same images.

Run it in a patched tree, with the package nncf installed, on a float checkpoint of one branch (.pt) and a data YAML, or on a
classifier and an image folder:

    cd yolov9
    python ../yolov9-qat/benchmarks/openvino_nncf.py --weights yolov9-c-converted.pt --data data/coco.yaml
    python ../yolov9-qat/benchmarks/openvino_nncf.py --weights resnet50.pt --data datasets/flowers --imgsz 224

NNCF quantizes twice: with its preset MIXED (for YOLO by its usual recipe, the arithmetic behind the head's convolutions ignored), and
with its preset PERFORMANCE. It gets the model converted from PyTorch, in which SiLU is one operator. All files run in this process, in turns.
Quantizing is counted from the float model in memory to the quantized model in memory, ours by batches of 10 images, as `qat.py quantize` does. --qat adds fine-tuned checkpoints.
Prints a Markdown table; --json FILE writes the same figures.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
from utils.qat.core.machine import set_environment

set_environment()  # before torch: waiting threads sleep

# isort: split
import torch

from models.deploy.agreement import metadata_of, traceable_copy
from models.deploy.formats.onnx import export_onnx
from models.quantize import checkpoint
from models.quantize.calibration.ptq import calibrated
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel, task_of
from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.tables import load_target
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_data, require_file, write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import select_device
from utils.qat.core.text import markdown_table
from utils.qat.core.upstream import Network
from utils.qat.data.dataset import Data
from utils.qat.data.image_folders import ImageFolders
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.metrics import ClassMetrics
from utils.qat.vendors.openvino.model import load_openvino
from utils.qat.vendors.openvino.session import OpenVINO, float_precisions

CPU = torch.device('cpu')


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt) of one branch')
    p.add_argument('--data', type=Path, required=True, help='data YAML, or the image folder of a classifier')
    p.add_argument('--qat', type=Path, nargs='*', default=[], help='fine-tuned checkpoints of qat.py quantize')
    p.add_argument('--target', choices=('openvino', 'tensorrt'), default='openvino', help='placement of our Q/DQ')
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--calib-images', type=int, default=100, help='training images to calibrate on')
    p.add_argument('--images', type=int, default=10**9, help='images of val to score, at most; 0 = none')
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--rounds', type=int, default=30, help='turns of each file')
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


@contextmanager
def stopwatch(times: dict[str, float]) -> Iterator[None]:
    """Store the seconds and the CPU seconds of the block in `times`."""
    start, cpu = time.perf_counter(), time.process_time()
    yield
    times.update(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu)


def recipes(nncf: Any, head: str | None) -> dict[str, dict[str, Any]]:
    """Return NNCF's two recipes as arguments of nncf.quantize. head: path of the head in the model, such as model.22; None for a classifier."""
    if head is None:
        return {f'NNCF, {preset.name}': {'preset': preset} for preset in nncf.QuantizationPreset}
    arithmetic = nncf.IgnoredScope(
        patterns=[rf'.*{head}.*/aten::{kind}.*' for kind in ('add', 'sub', 'mul', 'div')] + [rf'.*{head}\.dfl.*'],
        types=['Sigmoid'],
        validate=False,
    )
    return {
        'NNCF, usual recipe': {'preset': nncf.QuantizationPreset.MIXED, 'ignored_scope': arithmetic},
        'NNCF, PERFORMANCE': {'preset': nncf.QuantizationPreset.PERFORMANCE},
    }


def quantized_by_nncf(
    model: Network, images: Sequence[torch.Tensor], folder: Path, times: dict[str, dict[str, float]]
) -> dict[str, Path]:
    """Quantize with both recipes of NNCF, calibrated on FP32 images [1, 3, H, W]: name → .xml with our metadata.

    `times` gets the time of each recipe, see `stopwatch`.
    """
    try:
        import nncf
    except ImportError as e:
        raise QatError(f'no package nncf that can be loaded here ({e}); pip install nncf') from e
    openvino = load_openvino()
    files: dict[str, Path] = {}
    traced = torch.jit.trace(traceable_copy(model).requires_grad_(False), images[0], check_trace=False, strict=False)
    converted = openvino.convert_model(traced, example_input=images[0], input=[tuple(images[0].shape)])
    for value, name in zip((*converted.inputs, *converted.outputs), ('images', 'output0', 'output1')):
        value.get_tensor().set_names({name})
    for key, text in metadata_of(model).items():
        converted.set_rt_info(str(text), ['framework', key])
    head = None if not task_of(model).boxes else f'model.{len(model.model) - 1}'
    for name, options in recipes(nncf, head).items():
        times[name] = {}
        with stopwatch(times[name]):
            quantized = nncf.quantize(
                converted.clone(),
                nncf.Dataset([image.numpy() for image in images]),
                subset_size=len(images),
                **options,
            )
        files[name] = folder / f'{len(files)}.xml'
        openvino.save_model(quantized, files[name], compress_to_fp16=False)
    return files


def in_bf16(file: Path, image: torch.Tensor) -> dict[str, OpenVINO]:
    """Open a float file in BF16, under this name; nothing if the CPU has no instructions for it."""
    if 'bf16' in float_precisions():
        with suppress(QatError):  # ONEDNN_MAX_CPU_ISA disables BF16, which OpenVINO does not know
            session = OpenVINO(file, CPU, 'bf16')
            session.run({'images': image})
            return {'BF16': session}
    return {}


def time_in_turns(sessions: dict[str, OpenVINO], image: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Run all files in turns on one image; returns name → median ms and CPU ms of a run.

    The turns are in random order, so that no file always runs after the same one.
    """
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    turns, order = list(sessions.items()), random.Random(0)
    for i in range(rounds + 3):
        order.shuffle(turns)
        for name, session in turns:
            times: dict[str, float] = {}
            with stopwatch(times):
                session.run({next(iter(session.signature().inputs)): image})
            if i >= 3:  # the first runs compile and warm up
                measured[name].append((times['seconds'], times['cpu_seconds']))
    return {
        name: {'ms': 1e3 * statistics.median(s for s, _ in rows), 'cpu_ms': 1e3 * statistics.median(c for _, c in rows)}
        for name, rows in measured.items()
    }


def ours(
    teacher: Network, config: QuantizeConfig, data: Data | ImageFolders, times: dict[str, dict[str, float]]
) -> Network:
    """Calibrate with this toolkit's defaults. times: see `quantized_by_nncf`."""
    times['ours, PTQ'] = {}
    images = Loaders(data, config, int(max(teacher.stride)), CPU).calibration()
    with stopwatch(times['ours, PTQ']):
        return calibrated(teacher, images, config, lambda it, *_, **__: it)[0]


def score(metrics: Any) -> float:
    """Return the AP of a detector, the top-1 of a classifier."""
    return metrics.top1 if isinstance(metrics, ClassMetrics) else metrics.ap


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Quantize, export, time and score. Returns a row of figures for each model."""
    config = QuantizeConfig(
        args.weights,
        args.data,
        imgsz=args.imgsz,
        calib_images=args.calib_images,
        device='cpu',
        workers=0,
        target=args.target,
    )
    times: dict[str, dict[str, float]] = {}

    def write(model: Network, name: str) -> None:
        export_onnx(model, folder / name, (args.imgsz, args.imgsz), target=load_target(args.target))

    with quiet_upstream():
        teacher = TorchModel(checkpoint.CheckpointFile(args.weights).load_float(CPU))
        data = teacher.task.load_data(args.data, teacher)
        images = [
            image for batch in Loaders(data, config, teacher.stride, CPU).calibration() for image in batch.split(1)
        ]
        files = {'float': folder / 'float.onnx', 'ours, PTQ': folder / 'ptq.onnx'}
        write(teacher.model, 'float.onnx')
        write(ours(teacher.model, config, data, times), 'ptq.onnx')
        for i, path in enumerate(args.qat):
            files[f'ours, {path.name}'] = folder / f'qat{i}.onnx'
            write(checkpoint.CheckpointFile(path).load_quantized(CPU)[0], f'qat{i}.onnx')
    files |= quantized_by_nncf(teacher.model, images, folder, times)
    sessions = {name: OpenVINO(file, CPU) for name, file in files.items()}
    sessions |= {f'float, {name}': session for name, session in in_bf16(files['float'], images[0]).items()}
    timed = time_in_turns(sessions, images[0], args.rounds)
    scored = list(Loaders(data, config, teacher.stride).scored(square=True, limit=args.images)) if args.images else []
    fastest = min(row['ms'] for name, row in timed.items() if name.startswith('NNCF'))
    return [
        {
            'model': name,
            **timed[name],
            'against_nncf': timed[name]['ms'] / fastest,
            'score': score(evaluate(FileModel(session), scored, data.names, CPU)) if scored else None,
            'quantize': times.get(name),
            'int8': str(session.int8 or ''),
        }
        for name, session in sessions.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    for path in (args.weights, *args.qat):
        require_file(path, '--weights', ('.pt', '.pth'))
    require_data(args.data)
    torch.set_num_threads(args.threads)
    select_device('cpu')  # freed memory stays with the process, as in our commands
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    print(f'{args.weights.name}, {args.imgsz} px, {args.threads} threads, {args.calib_images} calibration images\n')
    print(
        markdown_table(
            ('model', 'ms', 'CPU ms', 'x faster NNCF', 'AP or top-1', 'quantize: s', 'CPU s', 'in INT8'),
            [
                (
                    r['model'],
                    f'{r["ms"]:.1f}',
                    f'{r["cpu_ms"]:.1f}',
                    f'{r["against_nncf"]:.2f}',
                    f'{r["score"]:.4f}' if r['score'] is not None else '',
                    *((f'{v:.1f}' for v in r['quantize'].values()) if r['quantize'] else ('', '')),
                    r['int8'],
                )
                for r in rows
            ],
        )
    )
    if args.json:
        write_json(args.json, {'threads': args.threads, 'imgsz': args.imgsz, 'rows': rows})


if __name__ == '__main__':
    raise SystemExit(run_command(main))
