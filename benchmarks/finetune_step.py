"""Measure the time and memory of a step of fine-tuning, as ratios to the float step in the same run.

Run it inside a patched YOLOv9 tree:

    python TOOLKIT/benchmarks/finetune_step.py --weights yolov9-t-converted.pt --batch-size 10 --imgsz 640 --amp fp16 bf16 off

The float step is the least work of any distillation: student forward and backward, teacher forward, in the same precision. Images are
random and already on the device; loading is not measured.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it makes waiting threads sleep

# isort: split
import torch

from models.quantize import checkpoint
from models.quantize.calibration.calibrate import fit_ranges
from models.quantize.convert import quantize_model
from models.quantize.finetuning.loop import supervised_layers
from models.quantize.finetuning.training_step import DTYPES, GraphedStep, TrainingStep, head_emits_raw_maps
from models.quantize.scales import tie_scales
from utils.qat.config.qat import AMP, QuantizeConfig
from utils.qat.core.command import Parser, run_command
from utils.qat.core.files import write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import describe, select_device, versions
from utils.qat.core.text import markdown_table


def float_step(student: torch.nn.Module, teacher: torch.nn.Module, amp: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a float step, images → loss, which computes gradients and updates nothing; `amp` is one of AMP."""
    head_emits_raw_maps(student.requires_grad_())
    head_emits_raw_maps(teacher)

    def step(images: torch.Tensor) -> torch.Tensor:
        student.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, DTYPES[amp], enabled=amp != 'off'):
            with torch.no_grad():
                teacher(images)
            loss = sum(x.float().square().mean() for x in student(images))
        loss.backward()
        return loss

    return step


def measure(
    step: Callable[[torch.Tensor], Any], images: torch.Tensor, steps: int, repeats: int
) -> tuple[float, float, float]:
    """Return the ms per step (median of the repeats), and the peak MiB allocated and reserved (0 without a GPU).

    The step must not wait for the device. images: FP32 [B, 3, H, W] in 0..1.
    """
    cuda = images.device.type == 'cuda'
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(5 if cuda else 1):
        step(images)
    wait()
    if cuda:
        torch.cuda.set_sync_debug_mode('error')
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            step(images)
        if cuda:
            torch.cuda.set_sync_debug_mode('default')
        wait()
        times.append((time.perf_counter() - start) / steps * 1e3)
    allocated, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return statistics.median(times), allocated / 2**20, reserved / 2**20


def prepare(
    args: argparse.Namespace, device: torch.device
) -> tuple[torch.Tensor, torch.nn.Module, torch.nn.Module, list[int]]:
    """Set PyTorch as qat.py does; return random images, the float teacher, the calibrated model, and indices of layers to compare."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    images = torch.rand(args.batch_size, 3, args.imgsz, args.imgsz, device=device)
    with quiet_upstream():
        teacher = checkpoint.CheckpointFile(args.weights).load_float(device)
    quantized = deepcopy(teacher)
    quantize_model(quantized)
    tie_scales(quantized)
    fit_ranges(quantized, [images], QuantizeConfig(weights=args.weights, data=Path(), calib_method='mse'))
    return images, teacher, quantized, supervised_layers(quantized, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all kinds of steps, print a table and write the figures to --json."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', type=Path, required=True, help='float checkpoint, reparameterized')
    parser.add_argument('--device', default='')
    parser.add_argument('--batch-size', type=int, default=10)
    parser.add_argument('--imgsz', type=int, default=640)
    parser.add_argument('--amp', nargs='+', choices=AMP, default=['off'])
    parser.add_argument('--steps', type=int, default=30, help='per repeat')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--json', type=Path, default=Path('finetune_step.json'))
    args = parser.parse_args(argv)

    device = select_device(args.device)
    cuda = device.type == 'cuda'
    images, teacher, quantized, layers = prepare(args, device)

    rows: list[dict[str, Any]] = []
    for amp in args.amp:
        kinds: dict[str, Callable[[], Any]] = {
            'float pair': lambda: float_step(deepcopy(teacher), teacher, amp),
            'step': lambda: TrainingStep(deepcopy(quantized), teacher, layers, 1e-5, amp),
        }
        if cuda:
            kinds['step --compile'] = lambda: GraphedStep(
                TrainingStep(deepcopy(quantized), teacher, layers, 1e-5, amp, capturable=True)
            )
        for kind, make in kinds.items():
            if cuda:
                gc.collect()  # reference cycles keep the previous step alive
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step = make()
            ms, allocated, reserved = measure(step, images, args.steps, args.repeats)
            if kind.startswith('step'):
                step.check()
            del step
            rows.append({'amp': amp, 'kind': kind, 'ms': ms, 'allocated_mib': allocated, 'reserved_mib': reserved})
            base = next(r for r in rows if r['amp'] == amp)
            rows[-1]['times_float'] = ms / base['ms']
            rows[-1]['memory_times_float'] = reserved / base['reserved_mib'] if cuda else None

    def cells(row: dict[str, Any]) -> list[str]:
        shown = [row['amp'], row['kind'], f'{row["ms"]:.1f}', f'{row["times_float"]:.2f}']
        memory = f'{row["allocated_mib"]:.0f} / {row["reserved_mib"]:.0f}', f'{row["memory_times_float"] or 0:.2f}'
        return [*shown, *(memory if cuda else ())]

    memory = ['peak MiB (allocated / reserved)', 'x float pair (reserved)'] * cuda
    print(
        f'\n{args.weights.stem}, batch {args.batch_size}, {args.imgsz} px, {describe(device)}, torch {torch.__version__}\n'
    )
    print(markdown_table(('--amp', '', 'ms', 'x float pair', *memory), [cells(row) for row in rows]))
    write_json(args.json, {'device': describe(device), 'versions': versions(), 'settings': vars(args), 'rows': rows})


if __name__ == '__main__':
    sys.exit(run_command(main))
