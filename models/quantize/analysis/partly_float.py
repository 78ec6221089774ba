"""Switch parts of a quantized model between float and INT8, and compute the layers before a part only once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import DataLoader

from models.quantize.activations import exchanges
from models.quantize.blocks import Twin
from models.quantize.calibration.bias_correction import biases_of
from models.quantize.calibration.divergence import ClassScores, HeadOutputs, bins_of, decibels, energies
from models.quantize.network import layer_of, layers
from models.quantize.quantizers import Quantizer
from utils.qat.backends.detections import prepared
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.distributed import all_reduce, from_first, is_first, merged
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import channels_last
from utils.qat.evaluation.classes import ClassScorer
from utils.qat.evaluation.detection_scores import Scorer
from utils.qat.evaluation.interval import difference, difference_of_merit

FLOAT, INT8, ALONE = 'float', 'int8', 'alone'  # forms of a twin


def untied(model: Network) -> Network:
    """Copy the quantized `model` so that no two modules share a quantizer; ranges stay."""
    model = deepcopy(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                module._modules[name] = deepcopy(child)
    return model


class TwinForms:
    """The twins of a copy of a calibrated model, by path, each in one of three forms. All start as FLOAT.

    FLOAT: the block of `reference`. INT8: with the bias of the calibration, for a model whose other blocks are INT8 too.
    ALONE: INT8, with the bias for a model whose other blocks are float.
    """

    def __init__(self, model: Network, reference: Network) -> None:
        self.model = untied(model).eval().requires_grad_(False)
        self.twins = {path: m for path, m in self.model.named_modules() if isinstance(m, Twin)}
        of_float, self.biases_now = biases_of(reference), biases_of(self.model)
        self.biases = {
            path: {FLOAT: of_float[path].detach().clone(), INT8: bias.clone()} for path, bias in self.biases_now.items()
        }
        self.set_form(FLOAT)

    def learn_alone(self, shifts: Mapping[str, torch.Tensor]) -> None:
        """Set the biases of the form ALONE, which cancel `shifts`.

        A shift, [C] by path, is how far a convolution's own rounding moves the mean of its outputs.
        """
        for path, biases in self.biases.items():
            biases[ALONE] = biases[FLOAT] - shifts[path].to(biases[FLOAT]) if path in shifts else biases[FLOAT]

    def set_form(self, form: str, paths: Iterable[str] | None = None) -> None:
        """Switch the twins at `paths` to `form`; without paths all twins, and the biases of all convolutions."""
        for path in paths or {**self.twins, **self.biases}:
            for name in self.twins[path].quantizer_names if path in self.twins else ():
                getattr(self.twins[path], name)._disabled = form == FLOAT
            if path in self.biases:
                self.biases_now[path].data.copy_(self.biases[path][form])


class ActivationForms:
    """The exchanges of a copy of an exchanged float model, by path: FLOAT is the old function, INT8 and ALONE are the new one."""

    def __init__(self, model: Network) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.twins = exchanges(self.model)
        for exchange in self.twins.values():
            exchange.share = torch.zeros_like(exchange.share)  # of its own

    def learn_alone(self, shifts: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: no bias is corrected."""

    def set_form(self, form: str, paths: Iterable[str] | None = None) -> None:
        """Switch the exchanges at `paths` to `form`; without paths all of them."""
        for path in paths or self.twins:
            self.twins[path].share.fill_(form != FLOAT)


def layer_states(model: Network, first: int, x: object, saved: Sequence) -> Iterator[tuple[object, Sequence]]:
    """Run the layers of an upstream model from `first`, and yield x and saved, before each layer and after the last.

    `x` is the output of the layer before `first`, or the images; `saved` has the outputs of all layers before, None for
    one that no later layer reads. A model of torchvision is run as a whole.
    """
    if not hasattr(model, 'model'):  # torchvision: each network has a forward of its own
        yield x, saved
        yield model(x), saved
        return
    for layer in model.model[first:]:
        yield x, saved
        if layer.f != -1:
            x = saved[layer.f] if isinstance(layer.f, int) else [x if j == -1 else saved[j] for j in layer.f]
        x = layer(x)
        saved = [*saved, x if layer.i in model.save else None]
    yield x, saved


class FormMetrics:
    """The figures of one form of the model over all images: divergence and SQNR, and with a scorer the metrics.

    With a scorer, `result` sets `resampled`, see interval.resampled_ap.
    """

    def __init__(self, predict: TorchModel, scorer: Scorer | ClassScorer | None = None) -> None:
        self.predict, self.scorer = predict, scorer
        self.sums = torch.zeros(2 + 2 * len(predict.task.parts), dtype=torch.float64, device=predict.device)

    def add(self, output: object, wanted: ClassScores | HeadOutputs, truth: Any) -> None:
        """Add the outputs of a batch, in eval mode; `wanted`: those of the float model's head on the same images."""
        raw, predict = HeadOutputs.of(output), self.predict
        self.sums += torch.stack(
            (
                *map(torch.sum, raw.divergence_sums(wanted, bins_of(predict.model))),
                *energies(raw, wanted, predict.nc).flatten(),
            )
        )
        if self.scorer:
            task = predict.task
            self.scorer.update(task.postprocess(task.predictions(output), truth.shape), truth)

    def result(self) -> dict[str, object]:
        """Compute the figures, as plain values, over all processes of a torchrun."""
        total, weight, *sums = all_reduce(self.sums.clone())
        figures: dict[str, object] = {
            'divergence': (total / weight).item(),
            'sqnr': decibels(torch.stack(sums).view(-1, 2), self.predict.task.parts),
        }
        if self.scorer:
            self.scorer.batches = merged(self.scorer.batches)
            metrics = from_first(self.scorer.metrics(resample=True) if is_first() else None)
            self.resampled, plain = metrics.resampled, metrics.to_json()
            figures.update({k: plain[k] for k in (*metrics.columns, 'mask') if k in plain})
        return figures


@torch.no_grad()
def measure_units(
    forms: TwinForms | ActivationForms,
    units: Mapping[str, Sequence[str]],
    loader: DataLoader,
    names: Mapping[int, str],
    scoring: bool,
    progress: Callable[[Iterable], Iterable],
) -> dict[Any, dict[str, Any]]:
    """Measure the model in float, in INT8, with only one unit in INT8, and with all units but one in INT8.

    The inputs of each layer are kept for a batch, of the float and of the INT8 model. So a unit costs only the layers
    behind it. ALONE must be set, see `learn_alone`.

    Returns 'float', 'int8', (unit, 'only') and (unit, 'without') → measurements of a FormMetrics. With `scoring` all but 'only'
    have metrics; 'int8' has 'against_float', and 'without' has 'against_int8', the difference of Metrics.merit (see
    interval.py).
    """
    model, predict = forms.model, TorchModel(forms.model)
    metrics_of: dict[object, FormMetrics] = {
        key: FormMetrics(predict, predict.task.scorer(names) if scoring else None) for key in (FLOAT, INT8)
    }
    # The number of each unit's layer, as `layer_states` counts; 0 in a model that is run as a whole
    numbers = {path: i for i, path in enumerate(layers(model))} if hasattr(model, 'model') else {}
    first = {unit: numbers.get(layer_of(model, unit)[0], 0) for unit in units}
    for unit in units:
        metrics_of[unit, 'only'] = FormMetrics(predict)
        metrics_of[unit, 'without'] = FormMetrics(predict, predict.task.scorer(names) if scoring else None)
    for batch in progress(loader):
        images, truth = prepared(batch, predict.device)
        images = channels_last(images)
        wanted = None
        for others, form, way in ((FLOAT, ALONE, 'only'), (INT8, FLOAT, 'without')):
            forms.set_form(others)
            *states, (output, _) = layer_states(model, 0, images, [])
            wanted = wanted or HeadOutputs.of(output)  # of the float model
            metrics_of[others].add(output, wanted, truth)
            for unit, twins in units.items():
                forms.set_form(form, twins)
                *_, (output, _) = layer_states(model, first[unit], *states[first[unit]])
                metrics_of[unit, way].add(output, wanted, truth)
                forms.set_form(others, twins)
    forms.set_form(FLOAT)
    figures = {key: metrics.result() for key, metrics in metrics_of.items()}
    if scoring:
        resampled = {key: metrics.resampled for key, metrics in metrics_of.items() if metrics.scorer}
        figures['int8']['against_float'] = difference(resampled['float'], resampled['int8'])
        for unit in units:
            figures[unit, 'without']['against_int8'] = difference_of_merit(
                resampled['int8'], resampled[unit, 'without']
            )
    return figures
