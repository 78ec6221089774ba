"""Measure the gain of more GPUs in fine-tuning: images/s of all processes, as a ratio to one process in the same run.

Run it inside a patched YOLOv9 tree:

    torchrun --nproc_per_node 2 TOOLKIT/benchmarks/distributed_step.py --weights yolov9-t-converted.pt --amp fp16 off

While the first process measures alone, the others wait. The time of a common step is the time of the slowest process. Each
process has --batch-size random images, already on the device: loading is not measured.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it chooses that waiting threads sleep

# isort: split
import torch

from finetune_step import measure, prepare
from models.quantize.finetuning.losses import relative_error
from models.quantize.finetuning.training_step import GraphedStep, TrainingStep
from utils.qat.config.qat import AMP
from utils.qat.core import distributed
from utils.qat.core.command import Parser, run_command
from utils.qat.core.device import describe, select_device
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER
from utils.qat.core.markdown import markdown_table


class AloneStep(TrainingStep):
    """A training step with the gradients of this process only."""

    def _average(self, loss: Any, terms: Any) -> tuple[Any, Any]:
        return loss, terms


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint, reparameterized')
    p.add_argument('--device', default='', help="'cpu', or by default GPU 0, 1, ..., one for each process")
    p.add_argument('--batch-size', type=int, default=10, help='images per step, of each process')
    p.add_argument('--imgsz', type=int, default=640)
    p.add_argument('--amp', nargs='+', choices=AMP, default=['off'])
    p.add_argument('--steps', type=int, default=30, help='per repeat')
    p.add_argument('--repeats', type=int, default=3)
    p.add_argument('--json', type=Path, default=Path('distributed_step.json'))
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    world = distributed.world_size()
    if world == 1:
        raise QatError('start it with torchrun --nproc_per_node 2 (or more)')
    device = select_device(args.device)
    distributed.join(device)
    images, teacher, quantized, layers = prepare(args, device, seed=distributed.rank())
    distributed.take_from_first(quantized.state_dict().values())

    def timed(step_class: type[TrainingStep], amp: str, compile: bool) -> float:
        """Measure the median milliseconds per step."""
        step = step_class(deepcopy(quantized), teacher, layers, relative_error, 1e-5, amp, capturable=compile)
        ms, *_ = measure(GraphedStep(step) if compile else step, images, args.steps, args.repeats)
        step.check()
        return ms

    rows = []  # of the first process; the others do not have the times
    for amp in args.amp:
        for compile in (False, True) if device.type == 'cuda' else (False,):
            with distributed.first_goes_ahead():
                alone = timed(AloneStep, amp, compile) if distributed.is_first() else math.nan
            slowest = max(distributed.merged([timed(TrainingStep, amp, compile)]), default=math.nan)
            if distributed.is_first():
                rows.append(
                    {
                        'amp': amp,
                        'compile': compile,
                        'ms_alone': alone,
                        'ms_together': slowest,
                        'images_per_s_alone': 1e3 * args.batch_size / alone,
                        'images_per_s_together': 1e3 * args.batch_size * world / slowest,
                        'ratio': world * alone / slowest,
                    }
                )
    gradients = sum(p.numel() for p in quantized.parameters()) * 4 / 2**20
    table = [
        (
            f'{r["amp"]}{" --compile" * r["compile"]}',
            f'{r["ms_alone"]:.1f}',
            f'{r["images_per_s_alone"]:.0f}',
            f'{r["ms_together"]:.1f}',
            f'{r["images_per_s_together"]:.0f}',
            f'{r["ratio"]:.2f}',
        )
        for r in rows
    ]
    LOGGER.info(
        f'\n{args.weights.stem}, {args.batch_size} images of {args.imgsz} px per process, {world} x {describe(device)}, torch '
        f'{torch.__version__}; {gradients:.1f} MiB of gradients per step\n\n'
        + markdown_table(('--amp', 'ms, 1 process', 'images/s', f'ms, {world} processes', 'images/s', 'ratio'), table)
    )
    distributed.on_first(write_json)(
        args.json,
        {
            'device': describe(device),
            'processes': world,
            'torch': torch.__version__,
            'settings': vars(args),
            'rows': rows,
        },
    )
    distributed.leave()


if __name__ == '__main__':
    sys.exit(run_command(main))
