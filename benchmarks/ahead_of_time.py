"""Time a float model and its INT8 form in turns: eager PyTorch, AOTInductor, OpenVINO, ONNX Runtime; on a GPU also as a CUDA graph.

Run it in a patched tree. It compiles and exports into a temporary folder, or into --folder, whose files are used again.

    cd yolov9
    python ../yolov9-qat/benchmarks/ahead_of_time.py --weights yolov9-c.pt --int8 runs/qat/exp/weights/best.pt     # on the CPU
    python ../yolov9-qat/benchmarks/ahead_of_time.py --weights yolov9-c.pt --device 0                      # on a GPU, float only

It needs g++ (or CXX), for INT8 also torchao. On a GPU it needs the headers of CUDA too (CUDA_HOME, or the pip packages of torch) and
Triton, which torch brings. What cannot run is named and left out. On the CPU the time is CPU time of the process, with one thread: it
stays stable beside other work, but is no wall time. On a GPU the time is that of CUDA events. Prints a Markdown table.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it makes waiting threads sleep

# isort: split
import torch

from models.deploy.agreement import made_images, traceable_copy
from models.deploy.formats.aoti import export_aoti
from models.deploy.formats.onnx import export_onnx
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.aoti import AotPackage
from utils.qat.backends.pytorch import TorchModel
from utils.qat.benchmark.measured import Conditions, Measurement
from utils.qat.benchmark.measured_backends import measured_by
from utils.qat.benchmark.model_files import read_model_files, shapes_of
from utils.qat.config.deploy import BenchmarkConfig
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import cpu_name, describe, instruction_sets, select_device
from utils.qat.core.text import markdown_table

Run = Callable[[], object]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt)')
    p.add_argument('--int8', type=Path, help='quantized checkpoint of it, for the CPU')
    p.add_argument('--device', default='cpu', help="'cpu' or a GPU number")
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--batch', type=int, default=1, help='images per run')
    p.add_argument('--rounds', type=int, default=20, help='turns of each')
    p.add_argument('--folder', type=Path, help='for packages and files of this model, image size and batch')
    return p.parse_args(argv)


def load_model(path: Path, device: torch.device) -> torch.nn.Module:
    """Load the model of a checkpoint."""
    require_file(path, '--weights', ('.pt', '.pth'))
    with quiet_upstream():
        return CheckpointFile(path).load_any(device)[0]


def exported(model: torch.nn.Module, file: Path, images: torch.Tensor) -> Path:
    """Export a model to `file` unless it exists."""
    if not file.exists():
        export_onnx(model, file, tuple(images.shape[2:]), len(images), simplify=True)
    return file


def compiled(model: torch.nn.Module, file: Path, images: torch.Tensor, half: bool = False) -> Run:
    """Return a function that runs the model in a package, which is written to `file` unless it exists."""
    if not file.exists():
        export_aoti(model, file, tuple(images.shape[2:]), len(images), half=half)
    package = AotPackage(file, images.device)
    return lambda: package.call(images)


def in_engine(backend: str, onnx: Callable[[], Path], images: torch.Tensor) -> Run:
    """Return a function that runs an .onnx file in a backend, with the backend's optimizations and preallocated inputs and outputs."""
    file = onnx()
    (model,) = read_model_files([file], lambda checkpoint: CheckpointFile(checkpoint).kind)
    inputs = shapes_of(model.inputs, len(images), None, file)
    measurement = Measurement(model, backend, model.precision, None, len(images), inputs)
    conditions = Conditions(
        BenchmarkConfig((file,)), images.device, lambda file, device: TorchModel(load_model(file, device))
    )
    measured = measured_by(backend)(measurement, file, conditions)
    measured.prepare(inputs)
    return measured.compute


def on_cpu(
    float_model: torch.nn.Module, int8: torch.nn.Module | None, images: torch.Tensor, folder: Path
) -> dict[str, Callable[[], Run]]:
    """Return the candidates on the CPU: name → a function that makes the run to time."""
    ways: dict[str, Callable[[], Run]] = {'eager FP32': partial(eager, float_model, images, False)}
    for kind, model in (('FP32', float_model), ('INT8', int8)):
        if model is not None:
            onnx = partial(exported, model, folder / f'{kind}.onnx', images)
            ways[f'AOTInductor {kind}'] = partial(compiled, model, folder / f'{kind}.pt2', images)
            ways[f'OpenVINO {kind}'] = partial(in_engine, 'openvino', onnx, images)
            ways[f'ONNX Runtime {kind}'] = partial(in_engine, 'onnxruntime', onnx, images)
    return ways


def on_gpu(model: torch.nn.Module, images: torch.Tensor, folder: Path) -> dict[str, Callable[[], Run]]:
    """Return the candidates on a GPU: name → a function that makes the run to time."""
    ways: dict[str, Callable[[], Run]] = {}
    for kind, half in (('FP32', False), ('FP16', True)):
        plain = partial(eager, model, images, half)
        package = partial(compiled, model, folder / f'{kind}.pt2', images, half)
        ways[f'eager {kind}'] = plain
        ways[f'CUDA graph {kind}'] = partial(graphed, plain)
        ways[f'AOTInductor {kind}'] = package
        ways[f'AOTInductor {kind} in a CUDA graph'] = partial(graphed, package)
    return ways


def eager(model: torch.nn.Module, images: torch.Tensor, half: bool) -> Run:
    """Return a function that runs a model in PyTorch."""
    copy = traceable_copy(model)
    copy, own = (copy.half(), images.half()) if half else (copy, images)
    return lambda: copy(own)


def graphed(make: Callable[[], Run]) -> Run:
    """Capture a run on a GPU, and return its replay."""
    run = make()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> object:
        graph.replay()
        return run  # keeps the weights alive, which the graph reads

    return replay


def ms_of(run: Run, gpu: bool) -> float:
    """Time one run, in ms."""
    if not gpu:
        start = time.process_time()
        run()
        return 1000 * (time.process_time() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Make everything that can run here, time it in turns, and print the table."""
    args = parse_args(argv)
    device = select_device(args.device)
    gpu = device.type == 'cuda'
    if not gpu:
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False  # as the commands do
    model = load_model(args.weights, device)
    images = made_images(args.batch, (args.imgsz, args.imgsz)).to(device)
    with tempfile.TemporaryDirectory() as scratch:
        int8 = load_model(args.int8, device) if args.int8 else None
        folder = args.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        ways = on_gpu(model, images, folder) if gpu else on_cpu(model, int8, images, folder)
        runs: dict[str, Run] = {}
        for name, make in ways.items():
            try:
                with torch.inference_mode(False), torch.no_grad():
                    runs[name] = make()
                for _ in range(3):
                    runs[name]()
            except (QatError, RuntimeError) as e:
                runs.pop(name, None)
                print(f'left out: {name}: {" ".join(str(e).split())[:300]}', file=sys.stderr)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(ms_of(run, gpu) / args.batch)
    base = statistics.median(times['eager FP32'])
    where = describe(device) if gpu else f'{cpu_name()} ({", ".join(instruction_sets())}), CPU time of one thread'
    print(f'\n{where}; torch {torch.__version__}; {args.imgsz} px, batch {args.batch}, {args.rounds} rounds in turns\n')
    print(
        markdown_table(
            ('ms per image', 'median', 'min', 'times eager FP32'),
            [
                (name, f'{statistics.median(t):.2f}', f'{min(t):.2f}', f'{base / statistics.median(t):.2f}')
                for name, t in times.items()
            ],
        )
    )


if __name__ == '__main__':
    sys.exit(run_command(main))
