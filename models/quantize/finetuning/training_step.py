"""One step of fine-tuning: images → loss, gradients, clipped update. The host queues the work and does not wait for it.

Only upstream's loss on the labels makes it wait. So a step has three parts: the comparison of the models, the gradients of the loss on
the labels, and the update. CUDA graphs replay the first and the last.

A value that is not finite must not reach the weights, but a query after every step would stall the device. So the device
itself tells the optimizer to skip this step and all later ones (`found_inf` of fused Adam), and the host checks from
time to time. With FP16 the loss scale is a power of two that adapts to the gradients, as in GradScaler, but on the
device.

The loss compares the outputs of layers of the student with those of the float model.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypedDict

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from models.quantize.calibration.calibrate import added
from models.quantize.calibration.divergence import divergence_of_sides, split_map
from models.quantize.network import head_of, removed_after
from models.quantize.network import layers as layers_of
from models.quantize.quantizers import QMIN, FixedScales, gpu_kernels
from utils.qat.core.distributed import all_reduce, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.upstream import Network

# Squared relative error, 80 dB below the teacher: where student and teacher agree, the root's gradient stays finite
TINY = 1e-8
DTYPES = {'off': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
MAX_NORM = 10.0  # of the gradient
# The loss is relative to whole layers, so gradients of single activations are near 1e-8; FP16 ends at 6e-8.
LOSS_SCALE, GROW_AFTER = 2.0**13, 100  # the first scale, and the number of good steps after which it doubles
Parts = list[list[torch.Tensor]]  # of a layer's output, see output_parts
BOXES = 'boxes'  # the term of the loss without a layer
# Weight of that term. With 1 a network of many classes learns its boxes, and its classes hardly (docs/measured/activations.csv, COCO
# at 320 px)
BOX_WEIGHT = 0.1
MOMENTS = 'step', 'exp_avg', 'exp_avg_sq'  # Adam's state of a parameter
WARM_UP = 3  # steps before a CUDA graph is recorded, in which libraries choose kernels and allocate memory


class StepState(TypedDict):
    """The tensors of a training step that the next step needs, copied to the CPU."""

    tensors: dict[str, torch.Tensor]
    optimizer: dict[int, dict[str, torch.Tensor]]  # number of a parameter → its state in Adam, by the names MOMENTS


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Sum the squares of each image: [B, ...] → [B]."""
    return x.square().flatten(1).sum(1)


class _SquaredError(torch.autograd.Function):
    """Sum of (student - teacher)² of each image, FP32 [B]; the difference stays in the student's precision."""

    @staticmethod
    def forward(ctx: FunctionCtx, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        difference = student.float() - teacher.float()
        ctx.save_for_backward(difference.to(student.dtype))
        return _energy(difference)

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        gradient = (2 * gradient).view(-1, *[1] * (difference.dim() - 1))
        return (difference.float() * gradient).to(difference.dtype), None


def _error_and_energy(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Sum (student - teacher)² and teacher² of each image: [B, ...] twice → FP32 [B, 2]."""
    if gpu_kernels(student.device):
        from models.quantize.gpu.squared_error import squared_error

        sums = squared_error(student, teacher)
        if sums is not None:
            return sums
    return torch.stack((_SquaredError.apply(student, teacher), _energy(teacher.float())), 1)


def relative_error(outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute |outputs - targets| / |targets| of one layer, the mean over the images: [B, ...] of each tensor → FP32 [].

    The error is relative, so that no layer dominates the loss. It is a root, computed image by image, because some images
    have values far beyond the calibrated ranges. The clipped part of these values cannot be learnt, and would otherwise
    make up most of the loss.
    """
    error, energy = torch.stack([_error_and_energy(s, t) for s, t in zip(outputs, targets)]).sum(0).unbind(1)
    return (error / energy.clamp(min=1e-12) + TINY).sqrt().mean()


def box_divergence(outputs: object, wanted: object, bins: int) -> torch.Tensor:
    """Compute the divergence of the boxes from the teacher's, at a place with an object: raw outputs of two detectors → FP32 [].

    The weight of a place is the teacher's best score there, see divergence.divergence_of_sides. Under torchrun the sum of the
    weights is that of all processes, so that the mean of their losses is the loss of a single process.
    """
    sums = []
    for student, teacher in zip(output_parts(outputs)[0], output_parts(wanted)[0]):
        apart, weights = divergence_of_sides(split_map(student.float(), bins)[0], *split_map(teacher.float(), bins))
        sums.append(torch.stack((apart.sum(), weights.sum())))
    total, weight = torch.stack(sums).sum(0)
    return total / (all_reduce(weight.detach().clone()) / world_size()).clamp(min=1e-12)


class UnfitState(QatError):
    """The state to continue from does not fit the student; the message names the place in it."""


class NotFinite(Exception):
    """The loss or a gradient is not finite; the message says where."""


def _like(given: object, tensor: torch.Tensor) -> bool:
    """Tell whether `given`, read from a file, is a plain finite tensor with the type and shape of `tensor`."""
    return (
        type(given) is torch.Tensor
        and given.layout is torch.strided
        and given.device.type == 'cpu'
        and (given.dtype, given.shape) == (tensor.dtype, tensor.shape)
        and bool(given.isfinite().all())
    )


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each tensor to the CPU, in the same layout."""
    return {name: t.detach().to('cpu', copy=True) for name, t in tensors.items()}


def output_tensors(output: Any) -> list[torch.Tensor]:
    """List the floating-point tensors in a layer's output: a tensor, or lists, tuples and dicts of tensors."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in output_tensors(part)]


def output_parts(output: object) -> Parts:
    """Group a layer's tensors: maps, coefficients and prototypes of a segmentation head in training mode, else one group."""
    if isinstance(output, tuple) and isinstance(output[0], list):
        return [output_tensors(part) for part in output]
    return [output_tensors(output)]


@contextlib.contextmanager
def _watched(model: Network, layers: Sequence[int], see: Callable[[int, Parts], None]) -> Iterator[None]:
    """Context that calls `see(layer, its outputs)` after each of these top-level layers; see `output_parts`."""

    def hook(index: int) -> Callable[..., None]:
        return lambda module, inputs, output: see(index, output_parts(output))

    watched = [*layers_of(model).values()]
    with removed_after(watched[i].register_forward_hook(hook(i)) for i in layers):
        yield


def _cut(output: Any) -> Any:
    """Copy a head's raw output, a tensor or lists and tuples of tensors, so that gradients end at it."""
    if isinstance(output, torch.Tensor):
        return output.detach().requires_grad_()
    return type(output)(map(_cut, output))


def head_emits_raw_maps(model: Network) -> None:
    """Set all layers to eval mode and the head to training mode: it returns raw outputs, without the decoding of boxes.

    Batch norms are fused away, so the training mode changes nothing else. A classifier returns raw scores anyway.
    """
    model.eval()
    head_of(model).training = True  # changes nothing in a classifier's last layer


class Adam(torch.optim.Adam):
    """PyTorch's Adam without the wrappers for its compiler: their first call imports the compiler, which takes seconds."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    found_inf: torch.Tensor  # where it is not 0, fused Adam skips a step


class TrainingStep:
    """One step of fine-tuning, as a callable that takes a batch.

    Args:
        student: calibrated; all its weights will learn.
        teacher: the float model.
        layers: indices of the top-level layers that are compared, by `relative_error`, with equal weights.
        lr: highest learning rate of the weights, see `set_rate`.
        amp: a key of DTYPES. With 'bf16' or 'fp16' the student runs under autocast, beside a copy of the teacher in
            that precision. Weights, scales, loss and update stay FP32.
        capturable: for a CUDA graph; the learning rate is then on the device.
        label_loss: see Task.label_loss; it is added to the loss.
        box_bins: bins of the distances whose `box_divergence` is added to the loss, with BOX_WEIGHT; 0 = it is not.
    """

    def __init__(
        self,
        student: Network,
        teacher: Network,
        layers: Sequence[int],
        lr: float,
        amp: str = 'off',
        capturable: bool = False,
        label_loss: Callable[..., torch.Tensor] | None = None,
        box_bins: int = 0,
    ) -> None:
        for p in student.parameters():
            p.requires_grad_(p.is_floating_point())
        head_emits_raw_maps(student)
        head_emits_raw_maps(teacher)
        self.student, self.teacher, self.layers = student, teacher, layers
        self.label_loss, self.box_bins = label_loss, box_bins
        self.device, self.dtype = next(student.parameters()).device, DTYPES[amp]
        self.cuda = self.device.type == 'cuda'
        self.amp = amp != 'off'
        # Tensor cores read channels-last, and would transpose any other tensor twice. A CPU is faster too, see channels_last
        self.format = torch.channels_last if self.amp or not self.cuda else torch.contiguous_format
        if self.amp:
            self.teacher = deepcopy(teacher).to(self.dtype)  # so its weights are not cast at each step
            if self.cuda:
                self.teacher.to(memory_format=self.format)
                student.to(memory_format=self.format)
        self.scales = FixedScales(student, share=self.amp)
        self.parameters = {n: p for n, p in student.named_parameters() if p.requires_grad}
        self.highest = lr
        rate = torch.tensor(lr, device=self.device) if capturable else lr
        self.optimizer = Adam(
            self.parameters.values(), lr=rate, fused=self.cuda or None, capturable=self.cuda and capturable
        )
        self.loss_scale = torch.tensor(LOSS_SCALE, device=self.device) if amp == 'fp16' else None
        self.good_steps = torch.zeros((), device=self.device)  # since the loss scale changed
        self.at_fault = torch.zeros((), dtype=torch.bool, device=self.device)  # once set, all later steps are skipped
        self.learning: list[str] = []  # names of the parameters that the loss reaches, known after the first step
        # Loss, terms of the layers, norms of the gradients: from the last step, or from the first step at fault
        self.noted: Any = None

    def set_rate(self, share: float) -> None:
        """Set the learning rate of the next steps to this share of the highest, 0..1."""
        [group] = self.optimizer.param_groups
        if isinstance(group['lr'], torch.Tensor):
            group['lr'].fill_(self.highest * share)
        else:
            group['lr'] = self.highest * share

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Collect the tensors that later steps depend on, without copies and without the optimizer's tensors."""
        tensors = {f'student.{name}': tensor for name, tensor in self.student.state_dict().items()}
        if self.loss_scale is not None:
            tensors.update(loss_scale=self.loss_scale, good_steps=self.good_steps)
        return tensors

    def state_dict(self) -> StepState:
        """Copy the state that later steps depend on, without the learning rate, which the caller sets."""
        state = self.optimizer.state_dict()['state']
        return {'tensors': _copies(self._tensors()), 'optimizer': {i: _copies(moments) for i, moments in state.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: StepState) -> None:
        """Continue from the `state_dict` of another TrainingStep, whose student has the same layers and quantizers.

        Raises UnfitState, and changes nothing, if the state does not fit.
        """
        if wrong := self._unlike(state):
            raise UnfitState(wrong)
        for name, tensor in self._tensors().items():
            tensor.copy_(state['tensors'][name])
        # Copies, because the optimizer writes into its state
        moments = {i: _copies(of_one) for i, of_one in state['optimizer'].items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), 'state': moments})

    def _unlike(self, state: StepState) -> str | None:
        """Find the first tensor of a `state_dict` with another name, type, shape or range; None if all fit."""
        mine, given = self._tensors(), state['tensors']
        if given.keys() != mine.keys():
            return f'tensors of {len(given)} names, and the model has {len(mine)}, not the same ones'
        for name, tensor in mine.items():
            if not _like(given[name], tensor) or (
                (name.endswith(('_amax', 'loss_scale')) and not (given[name] > 0).all())
                or (name.endswith('_zero_point') and not (given[name].abs() <= -QMIN).all())
            ):
                return name
        parameters = dict(enumerate(self.parameters.values()))
        for i, moments in state['optimizer'].items():
            if type(i) is not int or i not in parameters or type(moments) is not dict or moments.keys() != set(MOMENTS):
                return f'optimizer {ascii(i)[:20]}'
            step, *others = (moments[name] for name in MOMENTS)
            if not (
                _like(step, torch.zeros(()))
                and step >= 1
                and all(_like(x, parameters[i]) for x in others)
                and (others[1] >= 0).all()
            ):
                return f'optimizer {i}'
        if not state['optimizer']:
            return 'optimizer'
        return None

    def _term(self, outputs: Parts, targets: Parts) -> torch.Tensor:
        """Compute a layer's term of the loss; its parts have equal weights."""
        first, *others = (relative_error(*pair) for pair in zip(outputs, targets))
        return sum(others, first) / (1 + len(others)) if others else first

    def compare(self, images: torch.Tensor) -> tuple[object, dict[int | str, torch.Tensor]]:
        """Run both models on `images`: the student's raw output, and layer → its term of the loss, the boxes at the end."""
        targets: dict[int, Parts] = {}  # layer → the teacher's outputs, until they are compared
        pairs: dict[int, tuple[Parts, Parts]] = {}  # layer → the student's outputs and the teacher's
        terms: dict[int | str, torch.Tensor] = {}
        images = images.contiguous(memory_format=self.format)
        with torch.inference_mode(), _watched(self.teacher, self.layers, targets.__setitem__):
            wanted = self.teacher(images.to(self.dtype))

        def see(layer: int, outputs: Parts) -> None:
            pairs[layer] = outputs, targets.pop(layer)
            # With AMP compare at once, so that no outputs are kept. In FP32 wait, so that gradients keep their order of summation
            if self.amp:
                terms[layer] = self._term(*pairs.pop(layer))

        with (
            self.scales,
            _watched(self.student, self.layers, see),
            torch.autocast(self.device.type, self.dtype, enabled=self.amp, cache_enabled=False),
        ):
            outputs = self.student(images)
        terms = terms or {layer: self._term(*pair) for layer, pair in pairs.items()}
        if self.box_bins:
            terms[BOXES] = BOX_WEIGHT * box_divergence(outputs, wanted, self.box_bins)
        return outputs, terms

    def label_gradients(self, outputs: object, *labels: torch.Tensor) -> list[torch.Tensor]:
        """Compute the loss on the labels, then its scaled gradient for each tensor of the raw output; [] if labels do not count."""
        if not self.label_loss:
            return []
        outputs = _cut(outputs)
        loss = self.label_loss(outputs, *labels)
        gradients = torch.autograd.grad(
            self._scaled(loss), output_tensors(outputs), allow_unused=True, materialize_grads=True
        )
        return [loss.detach(), *gradients]

    def update(
        self, outputs: object, terms: Mapping[int | str, torch.Tensor], on_labels: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Take the step that follows from `compare` and `label_gradients`; return the loss, FP32 [] on the device, without gradient."""
        loss = added(terms[layer] for layer in self.layers) / len(self.layers)
        if self.box_bins:
            loss = loss + terms[BOXES]
        self.optimizer.zero_grad(set_to_none=True)
        roots = [self._scaled(loss), *(output_tensors(outputs) if on_labels else ())]
        torch.autograd.backward(roots, [None, *on_labels[1:]])
        losses = torch.stack([t.detach() for t in (*terms.values(), *on_labels[:1])])
        loss, losses = self._average(added((loss.detach(), *on_labels[:1])), losses)
        skip = self._clip_and_judge(loss, losses)
        if self.cuda:
            self.optimizer.found_inf = skip.float()
        else:  # CPU: a check costs nothing, and its Adam cannot skip a step
            self.check()
        self.optimizer.step()
        return loss

    def __call__(self, images: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """Take one step on images, FP32 [B, 3, H, W] in 0..1; `labels` are further arguments of `label_loss`.

        Returns the loss, FP32 [] on the device, without gradient. Raises NotFinite on a CPU only, see `check`.
        """
        outputs, terms = self.compare(images)
        return self.update(outputs, terms, self.label_gradients(outputs, *labels))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale

    @torch.no_grad()
    def _average(self, loss: torch.Tensor, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Average gradients (in place), loss and terms (returned) over the processes of a torchrun.

        One exchange carries all of them, so every process decides and learns the same: if a value is not finite on one
        process, the mean is not finite.
        """
        if world_size() == 1:
            return loss, terms
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        flat = all_reduce(torch.cat([loss[None], terms, *(g.flatten() for g in gradients)])) / world_size()
        loss, terms, *means = flat.split([1, len(terms), *(g.numel() for g in gradients)])
        torch._foreach_copy_(gradients, [mean.view(g.shape) for mean, g in zip(means, gradients)])
        return loss[0].clone(), terms  # a view would keep all gradients in memory

    @torch.no_grad()
    def _clip_and_judge(self, loss: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        """Unscale and clip the gradients and note a fault; return a flag on the device that skips this step."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        scale = norms.new_ones(()) if self.loss_scale is None else self.loss_scale
        norm = torch.linalg.vector_norm(norms) / scale
        torch._foreach_mul_(gradients, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / scale)
        bad_loss, bad_gradient = ~torch.stack((loss, *terms)).isfinite().all(), ~norm.isfinite()
        fault = bad_loss | bad_gradient
        if self.loss_scale is not None:  # after an overflow the next batch has half the scale
            fault = bad_loss | bad_gradient & (self.loss_scale <= 1)
            grow = self.good_steps >= GROW_AFTER
            self.loss_scale.mul_(torch.where(bad_gradient, 0.5, torch.where(grow, 2.0, 1.0)))
            self.good_steps.add_(1).mul_(~(bad_gradient | grow))
        values = torch.cat((loss[None], terms, norms))
        if self.noted is None:
            self.learning = [n for n, p in self.parameters.items() if p.grad is not None]
            self.noted = torch.zeros_like(values)
        self.noted.copy_(torch.where(self.at_fault, self.noted, values))
        self.at_fault |= fault
        return self.at_fault | bad_gradient

    def check(self) -> None:
        """Wait for the device; raise NotFinite, which names the first layer or parameter, if a value was not finite."""
        if not self.at_fault.item():
            return
        finite, names = self.noted.isfinite().tolist(), [*layers_of(self.student)]
        terms = [
            *(f'from layer {names[layer]} on' for layer in self.layers),
            *['on the boxes'] * bool(self.box_bins),
            *['on the labels'] * bool(self.label_loss),
        ]
        n = 1 + len(terms)
        if not all(finite[:n]):
            at = next((term for term, good in zip(terms, finite[1:n]) if not good), terms[-1])
            raise NotFinite(f'the loss is not finite {at}')
        at = next((name for name, good in zip(self.learning, finite[n:]) if not good), 'all parameters together')
        raise NotFinite(f'the gradient of {at} is not finite')


class GraphedStep:
    """A capturable TrainingStep on a GPU, recorded as two CUDA graphs and replayed: two launches instead of thousands.

    The loss on the labels comes between the two. The recording follows WARM_UP steps, which count as training too. A batch of another
    shape than the first, such as the last of an epoch, is computed without the graphs.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step, self.warm = step, 0
        self.images: torch.Tensor | None = None  # where the graphs read their batch
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None  # of compare and of update
        self.stream = torch.cuda.Stream(step.device)
        self.check, self.set_rate, self.state_dict = step.check, step.set_rate, step.state_dict

    def __call__(self, images: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """Take one step; see TrainingStep."""
        if self.images is None:
            self.images = torch.empty_like(images, memory_format=self.step.format)
        if images.shape != self.images.shape:
            return self.step(images, *labels)
        if self.warm < WARM_UP:
            self.warm += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(images, *labels)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        self.images.copy_(images)
        if self.graphs is None:
            self.graphs = self._record(self.images, *labels)
        compare, update = self.graphs
        compare.replay()
        for mine, new in zip(self.on_labels, self.step.label_gradients(self.outputs, *labels)):
            mine.copy_(new)
        update.replay()
        return self.loss.clone()

    def load_state_dict(self, state: StepState) -> None:
        """Continue from a state, see TrainingStep.load_state_dict; the graphs are recorded anew."""
        self.step.load_state_dict(state)
        self.warm, self.graphs = 0, None

    def _record(self, images: torch.Tensor, *labels: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        self.step.optimizer.zero_grad(set_to_none=True)  # the graphs have their own gradients
        compare, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: meanwhile the loader's thread pins memory
        record = partial(torch.cuda.graph, stream=self.stream, capture_error_mode='thread_local')
        with record(compare):
            self.outputs, terms = self.step.compare(images)
        compare.replay()  # recording computes nothing, and a loss on the labels needs values
        self.on_labels = self.step.label_gradients(self.outputs, *labels)
        with record(update, pool=compare.pool()):
            self.loss = self.step.update(self.outputs, terms, self.on_labels)
        return compare, update
