"""Measure latency, throughput, memory and size of networks in TensorRT, TensorRT-RTX, ONNX Runtime, OpenVINO, AOTInductor and PyTorch.

python benchmark_trt.py yolov9-c.onnx runs/qat/exp/weights/best.onnx --batch 1,4,8,12 --duration 10
python benchmark_trt.py yolov9-c.onnx runs/qat/exp/weights/best.onnx --data data/coco.yaml --baseline pytorch    # AP beside speed
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.deploy import BenchmarkConfig
from utils.qat.config.settings import read
from utils.qat.config.tasks import TASKS, Task, load_task, task_named
from utils.qat.core.command import command, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.core.log import LOGGER, RESULT, finish, quiet_upstream
from utils.qat.core.run_folder import own_folder

if TYPE_CHECKING:
    import torch

    from utils.qat.benchmark.rows import Report, Row
    from utils.qat.vendors.measured import Measurement

EPILOG = (
    'PyTorch runs a YOLOv9 checkpoint: MODEL.pt, or the .pt of the same name and precision beside MODEL.onnx. It simulates INT8, '
    'and this time says nothing about INT8 speed. ONNX Runtime and engines compute in the precision of the file; TensorRT '
    'before 11 builds FP32 and FP16 engines of a float file, and OpenVINO computes one in FP32, and in BF16 and FP16 where the CPU '
    'has instructions for them.'
)


def parse_args(argv: Sequence[str] | None) -> BenchmarkConfig:
    """Parse the command line into settings."""
    return read(BenchmarkConfig, argv, __doc__.splitlines()[0], epilog=EPILOG)


def next_command(models: Sequence[Path], data: Path | None, tasks: Mapping[Path, Task]) -> str:
    """Return the command to type next: the audit of an ONNX file, the score of an engine, or the export of a checkpoint."""
    from utils.qat.untrusted.program_archive import is_package
    from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar

    onnx, *others, engines = (
        [m for m in models if m.suffix.lower() == suffix] for suffix in ('.onnx', '.xml', '.tflite', '.pt2', '.engine')
    )
    if onnx:
        return command('scripts/audit_onnx.py', onnx[-1])
    if engines:
        built = read_sidecar(engines[-1])
        size = ['--imgsz', next(iter(built['inputs'].values()))['opt'][-1]] if built else []
        scored = data or tasks[engines[-1]].placeholder
        return command('val_trt.py', '--engine-file', engines[-1], '--data', scored, *size)
    if other := next(filter(None, others), None):
        file = other[-1]
        backend = ['--backend', 'aoti'] * is_package(file)
        return command('val_trt.py', '--weights', file, '--data', data or tasks[file].placeholder, *backend)
    return command('export_qat.py', '--weights', models[-1])


def require_labels(data: Path, tasks: Collection[Task]) -> None:
    """Check --data before anything is measured. Raises QatError if it fits no task of the models."""
    if not data.exists():
        raise QatError(f'--data {data}: no such file or folder')
    suitable = [task for task in tasks if task.has_data(data)]
    if not suitable:
        takes = ', '.join(f'{task.title} takes {task.takes}' for task in tasks)
        raise QatError(f'--data {data}: not for these models; {takes}')
    suitable[0].require_labels(data)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)

    import torch

    from models.quantize.checkpoint import CheckpointFile
    from utils.qat.backends.pytorch import TorchModel
    from utils.qat.benchmark.model_files import give_sizes, read_model_files, with_float_beside
    from utils.qat.benchmark.report import disturbance, write_benchmark
    from utils.qat.benchmark.run import run_in_groups, score
    from utils.qat.benchmark.sweep import measurements_of
    from utils.qat.benchmark.usage import Usage
    from utils.qat.core.machine import machine, select_device
    from utils.qat.vendors.measured import Conditions

    def open_checkpoint(file: Path, device: torch.device) -> TorchModel:
        with quiet_upstream():
            return TorchModel(*CheckpointFile(file).load_any(device))

    if config.files != config.models:
        require_file(config.files[0], '--baseline')
    device = select_device(config.device, exact=False)
    files = config.files if config.precision else with_float_beside(config.files)
    models = read_model_files(files, lambda file: CheckpointFile(file).kind)
    give_sizes(models, open_checkpoint)
    if config.data:
        known = {load_task(model.task) for model in models if model.task in TASKS}
        if known or not config.data.is_dir():  # the folders of a third-party classifier are read when it is scored
            require_labels(config.data, known or {load_task('detect')})
    tasks = {model.file: task_named(model.task) for model in models}
    measurements, left_out = measurements_of(models, config, device)
    torch.backends.cudnn.benchmark = True  # choose the fastest convolution for the shape, as a builder of engines does
    conditions, usage = Conditions(config, device, open_checkpoint), Usage(device)
    here = machine(device)
    LOGGER.info(f'{here["device"]}: {len(measurements)} measurements of {config.duration:g} s')
    for line in left_out:
        LOGGER.info(f'left out: {line}')

    def leave_out(line: str) -> None:
        left_out.append(line)
        LOGGER.warning(f'left out: {line}')

    done: list[tuple[Measurement, Row]] = []
    with own_folder(config) as folder:
        try:
            for pair in run_in_groups(measurements, conditions, usage, leave_out):
                done.append(pair)
            if config.data:  # afterwards: memory that scoring leaves allocated would count in the next measurement
                score(done, conditions, leave_out)
        finally:  # finished measurements stay, whatever ended the run
            if done:
                rows = [row for _, row in sorted(done, key=lambda pair: measurements.index(pair[0]))]
                report: Report = {
                    'settings': asdict(config),
                    'machine': here,
                    'left_out': left_out,
                    'results': rows,
                    'usage': usage.samples,
                }
                said = write_benchmark(folder, report)
                LOGGER.log(RESULT, '\n' + '\n\n'.join(said) + '\n')
                if disturbed := disturbance(rows):
                    LOGGER.warning(disturbed)
                finish(next_command(config.models, config.data, tasks), results=folder, report=folder / 'benchmark.md')
    if not done:
        raise QatError('; '.join(dict.fromkeys(left_out)))


if __name__ == '__main__':
    sys.exit(run_command(main))
