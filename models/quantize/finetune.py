"""Quantization-aware fine-tuning: the quantized student learns to repeat the float teacher, layer by layer.

No labels are needed: the student starts as the teacher plus rounding noise, and the target of every layer is what the
teacher computes there. The fake-quantizers pass gradients straight through inside their range; scales stay frozen.
"""
import contextlib
import math
import time
from dataclasses import dataclass
from itertools import islice

import torch

from utils.qat.errors import QatError


@dataclass
class Epoch:
    """What one epoch of fine-tuning did."""
    number: int  # from 1
    loss: float  # mean over the steps
    steps: int
    seconds: float


def _tensors(output):
    """The floating-point tensors in a layer's output (a tensor, or lists, tuples and dicts of them)."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in _tensors(part)]


@contextlib.contextmanager
def _recorded(model, layers):
    """Context: a dict that holds, after each forward, the output tensors of the top-level layers `layers`."""
    outputs = {}

    def keep(index):
        return lambda module, inputs, output: outputs.__setitem__(index, _tensors(output))

    hooks = [model.model[i].register_forward_hook(keep(i)) for i in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def supervised_layers(model, stride):
    """Indices of the top-level layers whose outputs are compared: every `stride`-th that has weights, and the head."""
    with_weights = [i for i, layer in enumerate(model.model) if any(True for _ in layer.parameters())]
    head = len(model.model) - 1
    return sorted({*with_weights[:-1][::-1][::stride], head})


def distillation_loss(student, teacher):
    """Mean over layers of |student - teacher|² / |teacher|²: relative, so that no layer drowns the others.

    student, teacher: {layer: [tensor, ...]}. Returns (loss, {layer: its term}), all scalars.
    """
    terms = {}
    for layer, targets in teacher.items():
        error = sum((s.float() - t.float()).square().sum() for s, t in zip(student[layer], targets))
        terms[layer] = error / sum(t.float().square().sum() for t in targets).clamp(min=1e-12)
    return sum(terms.values()) / len(terms), terms


def _head_emits_raw_maps(model):
    """Eval mode but for the head, which then returns its raw maps and spares the box decoding. (BN is fused away.)"""
    model.eval()
    model.model[-1].training = True


def finetune(student, teacher, loader, config, progress=None):
    """Fine-tune `student` (calibrated, fused) in place; yields an Epoch after each, for the caller to judge and save.

    loader: re-iterable over images, FP32 [B, 3, H, W] in 0..1 on the model's device. config: epochs, iters, lr,
    supervision_stride. progress: wraps the iterator of batches, e.g. tqdm. The learning rate rises over the first 5 %
    of the steps and falls along a cosine. Raises QatError if the loss is not finite, naming the first layer at fault.
    """
    for p in student.parameters():
        p.requires_grad_(p.is_floating_point())
    _head_emits_raw_maps(student)
    _head_emits_raw_maps(teacher)
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=config.lr)
    per_epoch = min(config.iters, len(loader))
    total = config.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, 0.05 * total), 0.5 + 0.5 * math.cos(math.pi * step / total)))
    layers = supervised_layers(student, config.supervision_stride)

    for number in range(1, config.epochs + 1):
        start, losses = time.perf_counter(), []
        batches = islice(loader, per_epoch)
        with _recorded(student, layers) as ours, _recorded(teacher, layers) as theirs:
            for images in progress(batches, number, per_epoch) if progress else batches:
                with torch.no_grad():
                    teacher(images)
                student(images)
                loss, terms = distillation_loss(ours, theirs)
                if not torch.isfinite(loss):
                    at = next(i for i, term in terms.items() if not torch.isfinite(term))
                    raise QatError(f'fine-tuning: the loss is not finite from layer model.{at} on (epoch {number}); '
                                   f'finished epochs are kept; try a smaller --lr than {config.lr}')
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 10.0)
                if not torch.isfinite(norm):  # one step would make every weight NaN, and INT8 rounding would hide it
                    at = next(n for n, p in student.named_parameters() if p.grad is not None and not p.grad.isfinite().all())
                    raise QatError(f'fine-tuning: the gradient of {at} is not finite (epoch {number}); '
                                   f'finished epochs are kept; try a smaller --lr than {config.lr}')
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
        student.zero_grad(set_to_none=True)
        yield Epoch(number, torch.stack(losses).mean().item(), len(losses), time.perf_counter() - start)
