"""One step of fine-tuning: images → loss, gradients, clipped update. The host orders the work and never waits for it.

What is not finite must not reach the weights, and asking the device after every step would stall it. So the optimizer
itself is told on the device to skip (`found_inf` of fused Adam), every later step too, and the host looks from time to
time. With FP16 the loss is multiplied by a power of two that follows the gradients, as GradScaler does, on the device.
"""

import contextlib
from copy import deepcopy

import torch

from models.quantize.finetuning.learned_scales import LearnedScales
from models.quantize.finetuning.packed_masks import PackedMasks
from models.quantize.head_outputs import parts
from models.quantize.quantizers import FixedScales
from utils.qat.core.distributed import all_reduce, world_size

DTYPES = {'off': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
MAX_NORM = 10.0  # of the gradient
# The loss is relative to whole layers, so that gradients of single activations are near 1e-8; FP16 ends at 6e-8.
LOSS_SCALE, GROW_AFTER = 2.0**13, 100  # the first, and after how many good steps it doubles
LABELS, LOG2 = 'labels', 'log2 of the scales'  # the term of the loss and the parameter that belong to no layer
SCALES_LR = 1e-3  # highest learning rate of log2 of a scale
MOMENTS = 'step', 'exp_avg', 'exp_avg_sq'  # what Adam keeps of a parameter
WARM_UP = 3  # steps before a CUDA graph is recorded: libraries choose and allocate in them


class NotFinite(Exception):
    """The loss or a gradient is not finite; the message says where."""


def _like(given, tensor):
    """Whether `given`, read from a file, is a plain tensor of the type and shape of `tensor`, with finite values only."""
    return (
        type(given) is torch.Tensor
        and given.layout is torch.strided
        and given.device.type == 'cpu'
        and (given.dtype, given.shape) == (tensor.dtype, tensor.shape)
        and bool(given.isfinite().all())
    )


def _copies(tensors):
    """A dict of tensors, each copied to the CPU, in the same layout."""
    return {name: t.detach().to('cpu', copy=True) for name, t in tensors.items()}


@contextlib.contextmanager
def _watched(model, layers, see):
    """Context: after each of the top-level layers `layers`, `see(layer, its outputs)` is called; see head_outputs.parts."""

    def hook(index):
        return lambda module, inputs, output: see(index, parts(output))

    hooks = [model.model[i].register_forward_hook(hook(i)) for i in layers]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()


def head_emits_raw_maps(model):
    """Eval mode but for the head, which then returns its raw outputs and spares the box decoding. (BN is fused away.)"""
    model.eval()
    model.model[-1].training = True


class Step:
    """Callable: images, FP32 [B, 3, H, W] in 0..1, and labels if they count → loss, a scalar on the device, without gradient.

    student: calibrated; all its weights are made to learn. teacher: float. layers: indices of the top-level layers compared.
    loss: of one layer, such as `losses.relative_error`, or the mean of those of its parts; that of the step is the mean over the layers. amp: with 'bf16' or
    'fp16' the student runs under autocast beside a copy of the teacher in that precision; weights, scales, loss and update
    stay FP32. capturable: for a CUDA graph; the learning rate then lives on the device. label_loss: of (what the student's
    head gives, labels, ...), a scalar that is added, such as losses.LabelLoss; not in a CUDA graph. learn_scales: of activations, too.
    lr: the highest learning rate of the weights, see `set_rate`.
    """

    def __init__(
        self, student, teacher, layers, loss, lr, amp='off', capturable=False, label_loss=None, learn_scales=False
    ):
        for p in student.parameters():
            p.requires_grad_(p.is_floating_point())
        head_emits_raw_maps(student)
        head_emits_raw_maps(teacher)
        self.student, self.teacher, self.layers, self.loss, self.label_loss = student, teacher, layers, loss, label_loss
        self.device, self.dtype = next(student.parameters()).device, DTYPES[amp]
        self.cuda = self.device.type == 'cuda'
        self.amp = amp != 'off'
        self.format = torch.contiguous_format
        if self.amp:
            self.teacher = deepcopy(teacher).to(self.dtype)  # instead of casting its weights at each step
            if self.cuda:  # the layout of tensor cores, which saves transposing every tensor twice
                self.format = torch.channels_last
                self.teacher.to(memory_format=self.format)
                student.to(memory_format=self.format)
        self.scales = (LearnedScales if learn_scales else FixedScales)(student, share=self.amp)
        # In a graph an eighth of the memory is saved for a seventh more time; launched one by one, the kernels cost more than that.
        self.masks = PackedMasks(self.device) if capturable else contextlib.nullcontext()
        self.parameters = {n: p for n, p in student.named_parameters() if p.requires_grad}
        groups = [{'params': list(self.parameters.values()), 'highest': lr}]
        if learn_scales:
            self.parameters[LOG2] = self.scales.log2
            groups.append({'params': [self.scales.log2], 'highest': SCALES_LR})
        for group in groups:
            group['lr'] = torch.tensor(group['highest'], device=self.device) if capturable else group['highest']
        options = {'fused': True, 'capturable': capturable} if self.cuda else {}
        self.optimizer = torch.optim.Adam(groups, **options)
        self.loss_scale = torch.tensor(LOSS_SCALE, device=self.device) if amp == 'fp16' else None
        self.good_steps = torch.zeros((), device=self.device)  # since the loss scale last changed
        self.at_fault = torch.zeros((), dtype=torch.bool, device=self.device)  # once set, no step is taken any more
        self.learning = None  # names of the parameters that the loss reaches
        self.seen = (
            None  # loss, terms of the layers, norms of the gradients: of the last step, or of the first at fault
        )

    def set_rate(self, share):
        """The learning rates of the steps that follow are this share of the highest, 0..1."""
        for group in self.optimizer.param_groups:
            if isinstance(group['lr'], torch.Tensor):
                group['lr'].fill_(group['highest'] * share)
            else:
                group['lr'] = group['highest'] * share

    def _tensors(self):
        """What a step changes, by name: all that the steps to come depend on but the optimizer's state, and copies of nothing."""
        tensors = {f'student.{name}': tensor for name, tensor in self.student.state_dict().items()}
        if LOG2 in self.parameters:
            tensors[LOG2] = self.scales.log2
        if self.loss_scale is not None:
            tensors.update(loss_scale=self.loss_scale, good_steps=self.good_steps)
        return tensors

    def state_dict(self):
        """A copy, on the CPU, of what the steps to come depend on: tensors by name, and the optimizer's state by parameter.

        Not its learning rate, which the caller sets.
        """
        state = self.optimizer.state_dict()['state']
        return {'tensors': _copies(self._tensors()), 'optimizer': {i: _copies(moments) for i, moments in state.items()}}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Go on as the Step whose `state_dict` it was, of a student with the same layers and quantizers.

        Raises ValueError, with nothing changed, if it is of none such.
        """
        if wrong := self._unlike(state):
            raise ValueError(wrong)
        for name, tensor in self._tensors().items():
            tensor.copy_(state['tensors'][name])
        moments = {
            i: _copies(of_one) for i, of_one in state['optimizer'].items()
        }  # or the optimizer would write into `state`
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), 'state': moments})

    def _unlike(self, state):
        """The first tensor of a `state_dict` that is not as this Step has it, None if all are: names, types, shapes, values in range."""
        mine, given = self._tensors(), state['tensors']
        if given.keys() != mine.keys():
            return f'tensors of {len(given)} names, and the model has {len(mine)}, not the same ones'
        for name, tensor in mine.items():
            if not _like(given[name], tensor) or (
                name.endswith(('_amax', 'loss_scale')) and not (given[name] > 0).all()
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

    def _term(self, outputs, targets):
        """The term of the loss of a layer, of whose parts all count alike."""
        first, *others = (self.loss(*pair) for pair in zip(outputs, targets))
        return sum(others, first) / (1 + len(others)) if others else first

    def _compare(self, images, *labels):
        """Both models on `images`: {layer: its term of the loss}, and that of the labels at last."""
        targets, pairs, terms = {}, {}, {}
        with torch.inference_mode(), _watched(self.teacher, self.layers, targets.__setitem__):
            self.teacher(images.to(self.dtype))

        def see(layer, outputs):
            pairs[layer] = outputs, targets.pop(layer)
            if (
                self.amp
            ):  # at once, to keep neither side's outputs; in FP32 gradients keep the order in which they add up
                terms[layer] = self._term(*pairs.pop(layer))

        with (
            self.scales,
            self.masks,
            _watched(self.student, self.layers, see),
            torch.autocast(self.device.type, self.dtype, enabled=self.amp, cache_enabled=False),
        ):
            outputs = self.student(images)
        terms = terms or {layer: self._term(*pair) for layer, pair in pairs.items()}
        if self.label_loss:
            terms[LABELS] = self.label_loss(outputs, *labels)
        return terms

    def __call__(self, images, *labels):
        terms = self._compare(images.contiguous(memory_format=self.format), *labels)
        loss = sum(terms[layer] for layer in self.layers) / len(self.layers)
        if self.label_loss:
            loss = loss + terms[LABELS]
        self.optimizer.zero_grad(set_to_none=True)
        (loss if self.loss_scale is None else loss * self.loss_scale).backward()
        loss, terms = self._average(loss.detach(), torch.stack([t.detach() for t in terms.values()]))
        skip = self._clip_and_judge(loss, terms)
        if self.cuda:
            self.optimizer.found_inf = skip.float()
        else:  # waiting costs nothing there, and its Adam cannot skip
            self.check()
        self.optimizer.step()
        if LOG2 in self.parameters:
            self.scales.write()
        return loss

    @torch.no_grad()
    def _average(self, loss, terms):
        """Mean over the processes of a torchrun: of the gradients, in place, and of loss and terms, which are returned.

        One exchange of them all, so that every process judges and learns the same; what is not finite anywhere is in the mean.
        """
        if world_size() == 1:
            return loss, terms
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        flat = all_reduce(torch.cat([loss[None], terms, *(g.flatten() for g in gradients)])) / world_size()
        loss, terms, *means = flat.split([1, len(terms), *(g.numel() for g in gradients)])
        torch._foreach_copy_(gradients, [mean.view(g.shape) for mean, g in zip(means, gradients)])
        return loss[0].clone(), terms  # a view would keep all of them in memory

    @torch.no_grad()
    def _clip_and_judge(self, loss, terms):
        """Unscale and clip the gradients, note what is not finite; returns a flag: do not take this step."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        scale = norms.new_ones(()) if self.loss_scale is None else self.loss_scale
        norm = torch.linalg.vector_norm(norms) / scale
        torch._foreach_mul_(gradients, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / scale)
        bad_loss, bad_gradient = ~torch.stack((loss, *terms)).isfinite().all(), ~norm.isfinite()
        fault = bad_loss | bad_gradient
        if self.loss_scale is not None:  # an overflow: try the next batch with half the scale
            fault = bad_loss | bad_gradient & (self.loss_scale <= 1)
            grow = self.good_steps >= GROW_AFTER
            self.loss_scale.mul_(torch.where(bad_gradient, 0.5, torch.where(grow, 2.0, 1.0)))
            self.good_steps.add_(1).mul_(~(bad_gradient | grow))
        values = torch.cat((loss[None], terms, norms))
        if self.seen is None:
            self.learning = [n for n, p in self.parameters.items() if p.grad is not None]
            self.seen = torch.zeros_like(values)
        self.seen.copy_(torch.where(self.at_fault, self.seen, values))
        self.at_fault |= fault
        return self.at_fault | bad_gradient

    def check(self):
        """Raise NotFinite if a step met what is not finite, naming the first layer or parameter. Waits for the device."""
        if not self.at_fault.item():
            return
        finite = self.seen.isfinite().tolist()
        places = [
            *(f'from layer model.{layer} on' for layer in self.layers),
            *['on the labels'] * bool(self.label_loss),
        ]
        n = 1 + len(places)
        if not all(finite[:n]):
            at = next((place for place, good in zip(places, finite[1:n]) if not good), places[-1])
            raise NotFinite(f'the loss is not finite {at}')
        at = next((name for name, good in zip(self.learning, finite[n:]) if not good), 'all parameters together')
        raise NotFinite(f'the gradient of {at} is not finite')


class GraphedStep:
    """A Step recorded as one CUDA graph after WARM_UP steps, and replayed: one launch instead of thousands.

    All of them are steps of the training. A batch of another shape than the first, such as the last of an epoch, is not
    replayed.
    """

    def __init__(self, step):
        self.step, self.images, self.warm, self.graph = step, None, 0, None
        self.stream = torch.cuda.Stream(step.device)
        self.check, self.set_rate, self.state_dict = step.check, step.set_rate, step.state_dict

    def __call__(self, images):
        if self.images is None:
            self.images = torch.empty_like(images, memory_format=self.step.format)
        if images.shape != self.images.shape:
            return self.step(images)
        if self.warm < WARM_UP:
            self.warm += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                images.record_stream(self.stream)
                loss = self.step(images)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        self.images.copy_(images)
        if self.graph is None:
            self._record()
        self.graph.replay()
        return self.loss.clone()

    def load_state_dict(self, state):
        """See Step.load_state_dict; the graph is recorded anew."""
        self.step.load_state_dict(state)
        self.warm, self.graph = 0, None

    def _record(self):
        self.step.optimizer.zero_grad(set_to_none=True)  # the graph keeps gradients of its own
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's thread goes on pinning memory meanwhile
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode='thread_local'):
            self.loss = self.step(self.images)
        self.graph = graph
