"""Compare ways of fine-tuning that start from one calibration: AP after the last epoch, for several seeds.

Run it in a patched tree, on a float checkpoint and a data YAML:

    cd yolov9
    python ../yolov9-qat/benchmarks/finetuning.py --weights yolov9-t-coco.pt --data coco.yaml --calib-images 128

Each way is a row: AP on val and on the training images, of each seed and their mean. The training images are rectangles, and the
student follows the teacher on them without labels, unless the way has some. `averaged` has the mean of the weights over the last
three epochs. Teacher's labels are detections of the float model with a score of 0.3 or more. Prints a Markdown table after each
run; --json FILE writes the same figures.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it makes waiting threads sleep

# isort: split
import torch
from torch.optim.swa_utils import AveragedModel
from utils.general import xyxy2xywhn

from models.quantize import checkpoint
from models.quantize.calibration.ptq import calibrated
from models.quantize.finetuning.loop import learning_rate_share, supervised_layers
from models.quantize.finetuning.training_step import GraphedStep, TrainingStep
from utils.qat.backends.detections import detect
from utils.qat.backends.pytorch import TorchModel, task_of
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.command import Parser, run_command
from utils.qat.core.files import require_file, write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import select_device
from utils.qat.core.text import markdown_table
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import calibration_images, val_loader
from utils.qat.evaluation.evaluate import evaluate

WAYS: dict[str, dict[str, Any]] = {  # name → differences from the default
    'default': {},
    'lr 3e-6': {'lr': 3e-6},
    'lr 3e-5': {'lr': 3e-5},
    'batch of 32': {'batch': 32},
    'head only': {'head_only': True},
    **{f"teacher's labels, {weight}": {'weight': weight, 'labels': 'teacher'} for weight in (0.02, 0.1, 0.5)},
    'labels, 0.1': {'weight': 0.1, 'labels': 'true'},
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint, of one branch')
    p.add_argument('--data', type=Path, required=True, help='data YAML')
    p.add_argument('--device', default='')
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--calib-images', type=int, default=512)
    p.add_argument('--epochs', type=int, default=5)
    p.add_argument('--seeds', type=int, nargs='+', default=[57, 1, 2])
    p.add_argument('--ways', nargs='+', choices=WAYS, default=list(WAYS))
    p.add_argument('--workers', type=int, default=8)
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


def teachers_labels(teacher: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Convert detections of the float model in uint8 images to labels [n, 5]: class; centre, width, height in 0..1."""
    found: list[torch.Tensor] = []
    height, width = images.shape[2:]
    predict = TorchModel(teacher)
    with torch.inference_mode():
        for batch in images.split(16):
            found += [
                torch.cat((x.rows[:, 5:], xyxy2xywhn(x.rows[:, :4], width, height)), 1)
                for x in detect(predict(batch.float() / 255), batch.shape[2:], 0.3)
            ]
    return [rows.clone() for rows in found]  # ordinary tensors, not tensors of the inference mode


def follow(
    student: Any,
    teacher: torch.nn.Module,
    images: torch.Tensor,
    labels: Sequence[torch.Tensor],
    seed: int,
    epochs: int,
    lr: float = 1e-5,
    batch: int = 10,
    head_only: bool = False,
    weight: float = 0.0,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Fine-tune a calibrated student, in place, to reproduce the float teacher on uint8 images [N, 3, H, W].

    `labels` (see `teachers_labels`) count only with a `weight` other than 0. head_only: compare only the outputs of the
    head.

    Returns:
        The student, and a copy with the mean of its weights over the last three epochs.
    """
    layers = [len(student.model) - 1] if head_only else supervised_layers(student, 1)
    step: Any = TrainingStep(
        student,
        teacher,
        layers,
        lr,
        'fp16' if images.is_cuda else 'off',
        capturable=images.is_cuda and not weight,
        label_loss=task_of(student).label_loss(student, weight) if weight else None,
    )
    step = GraphedStep(step) if images.is_cuda and not weight else step
    batch = min(batch, len(images))
    order, per_epoch, averaged = torch.Generator().manual_seed(seed), len(images) // batch, AveragedModel(student)
    for epoch in range(epochs):
        chosen = torch.randperm(len(images), generator=order)
        for i, indices in enumerate(chosen[: per_epoch * batch].split(batch)):
            step.set_rate(learning_rate_share(epoch * per_epoch + i, epochs * per_epoch))
            of_batch = [
                torch.cat((rows.new_full((len(rows), 1), n), rows), 1)
                for n, rows in enumerate(labels[j] for j in indices)
            ]
            step(images[indices].float() / 255, *[torch.cat(of_batch)] * bool(weight))
            if epoch >= epochs - 3:
                averaged.update_parameters(student)
        step.check()
    return student, averaged.module


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune in all ways with all seeds, and print the table after each run."""
    args = parse_args(argv)
    require_file(args.weights, '--weights', ('.pt', '.pth'))
    require_file(args.data, '--data', ('.yaml', '.yml'))
    device = select_device(args.device)
    torch.backends.cudnn.allow_tf32 = False
    config = QuantizeConfig(
        weights=args.weights,
        data=args.data,
        imgsz=args.imgsz,
        calib_images=args.calib_images,
        device=args.device,
        workers=args.workers,
    )
    with quiet_upstream():
        teacher = TorchModel(checkpoint.CheckpointFile(args.weights).load_float(device))
        data = load_data(args.data, teacher.nc)
        scored = {split: list(val_loader(data, config, teacher.stride, split=split)) for split in ('val', 'train')}
        batches = [
            batch[:2]
            for batch in calibration_images(data, replace(config, calib_images=10**9), teacher.stride, device).loader
        ]
        ptq, found = calibrated(
            teacher.model, calibration_images(data, config, teacher.stride, device), config, lambda it, *_, **__: it
        )
    images = torch.cat([x for x, _ in batches]).to(device)
    labels = {
        'true': [rows[rows[:, 0] == i, 1:].to(device) for x, rows in batches for i in range(len(x))],
        'teacher': teachers_labels(teacher.model, images),
    }
    rows: dict[str, list[list[float]]] = {}

    def score(name: str, model: torch.nn.Module) -> None:
        rows.setdefault(name, []).append(
            [100 * evaluate(TorchModel(model), loader, data.names, device).ap for loader in scored.values()]
        )

    score('float', teacher.model)
    score(f'PTQ ({found["method"]}, biases corrected: {found["biases"]})', ptq)
    for seed in args.seeds:
        for name in args.ways:
            way = {**WAYS[name], 'labels': labels[WAYS[name].get('labels', 'true')]}
            student, averaged = follow(
                deepcopy(ptq), deepcopy(teacher.model), images, seed=seed, epochs=args.epochs, **way
            )
            score(name, student)
            score(f'{name}, averaged', averaged)
            columns = {name: [[run[i] for run in runs] for i in range(2)] for name, runs in rows.items()}
            print(
                markdown_table(
                    ('', *(f'{split}: {what}' for split in scored for what in ('mean', 'runs'))),
                    [
                        (
                            name,
                            *(
                                text
                                for of in both
                                for text in (f'{statistics.mean(of):.2f}', ' '.join(f'{x:.2f}' for x in of))
                            ),
                        )
                        for name, both in columns.items()
                    ],
                ),
                flush=True,
            )
            if args.json:
                write_json(args.json, {'weights': args.weights.name, 'calibration': found, 'ap': rows})


if __name__ == '__main__':
    raise SystemExit(run_command(main))
