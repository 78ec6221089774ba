"""A quantized model with some of its parts in float: each part has its forms, and what comes before it is computed once."""

from copy import deepcopy

import torch

from models.quantize.analysis.sqnr import PARTS, decibels, energies
from models.quantize.blocks import Twin
from models.quantize.calibration.divergence import divergence_sums
from models.quantize.head_outputs import Raw
from models.quantize.quantizers import Quantizer
from utils.qat.core.distributed import all_reduce, from_first, is_first, merged
from utils.qat.evaluation.chance import difference, difference_of_merit
from utils.qat.evaluation.evaluate import Scorer
from utils.qat.prediction.detections import detect, prepared
from utils.qat.prediction.pytorch import TorchModel

FLOAT, INT8, ALONE = 'float', 'int8', 'alone'


def untied(model):
    """A copy of the quantized `model` in which every place has a quantizer of its own, with the range that it shared."""
    model = deepcopy(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                module._modules[name] = deepcopy(child)
    return model


class Forms:
    """The twins of a calibrated model, each in one of its forms: FLOAT, as it was; INT8, with the bias that it has among others in
    INT8; ALONE, INT8 with the bias that it has where all others are float.

    model: a copy of the calibrated one; it begins in FLOAT.
    """

    def __init__(self, model, reference):
        self.model = untied(model).eval().requires_grad_(False)
        self.twins = {path: m for path, m in self.model.named_modules() if isinstance(m, Twin)}
        self.biases = {
            path: {FLOAT: reference.get_submodule(path).bias.detach().clone(), INT8: m.bias.clone()}
            for path, m in self.model.named_modules()
            if isinstance(m, torch.nn.Conv2d) and m.bias is not None
        }
        self.take(FLOAT)

    def learn_alone(self, shifts):
        """shifts: {path of a convolution: what its roundings alone move the mean of its outputs by, [C]}, to be taken back."""
        for path, biases in self.biases.items():
            biases[ALONE] = biases[FLOAT] - shifts[path].to(biases[FLOAT]) if path in shifts else biases[FLOAT]

    def take(self, form, paths=None):
        """Bring the twins at `paths` into `form`; default: all, and the biases of the convolutions that are always float."""
        for path in paths or {**self.twins, **self.biases}:
            for name in self.twins[path].quantizer_names if path in self.twins else ():
                getattr(self.twins[path], name)._disabled = form == FLOAT
            if path in self.biases:
                self.model.get_submodule(path).bias.data.copy_(self.biases[path][form])


def walk(model, first, x, saved):
    """The layers of upstream's `model` from number `first` on: yields what there is before each, and behind the last: the output of
    the layer before, and the list of all so far, None where no later layer reads them. x, saved: such a pair, before `first`."""
    for layer in model.model[first:]:
        yield x, saved
        if layer.f != -1:
            x = saved[layer.f] if isinstance(layer.f, int) else [x if j == -1 else saved[j] for j in layer.f]
        x = layer(x)
        saved = [*saved, x if layer.i in model.save else None]
    yield x, saved


def run_from(model, first, x, saved):
    """The model's output, from layer `first` on; see `walk`."""
    for output, _ in walk(model, first, x, saved):
        pass
    return output


class Tally:
    """What a form of the model makes of all images: divergence and SQNR of its outputs; with `scorer` its detections' metrics."""

    def __init__(self, predict, scorer=None):
        """predict: the TorchModel."""
        self.predict, self.scorer = predict, scorer
        energies_of = len(PARTS) if predict.segments else 2
        self.sums = torch.zeros(2 + 2 * energies_of, dtype=torch.float64, device=predict.device)

    def add(self, output, wanted, truth):
        """output: of the model. wanted: Raw of the float one. truth: a detections.Truth."""
        raw, head = Raw.of(output), self.predict.model.model[-1]
        self.sums += torch.stack(
            (*divergence_sums(raw, wanted, head.reg_max), *energies(raw, wanted, head.nc).flatten())
        )
        if self.scorer:
            self.scorer.update(detect(self.predict.predictions(output), truth.shape), truth)

    def result(self):
        """Plain values; of all processes of a torchrun. Sets `resampled`, see chance.resampled_ap."""
        total, weight, *sums = all_reduce(self.sums.clone())
        found = {'divergence': (total / weight).item(), 'sqnr': decibels(torch.stack(sums).view(-1, 2))}
        if self.scorer:
            self.scorer.batches = merged(self.scorer.batches)
            metrics = from_first(self.scorer.metrics(resample=True) if is_first() else None)
            self.resampled, plain = metrics.resampled, metrics.plain()
            found.update({k: plain[k] for k in ('ap', 'ap50', 'precision', 'recall', 'mask') if k in plain})
        return found


@torch.no_grad()
def measure(forms, units, loader, names, scoring, progress):
    """{'float', 'int8', (unit, 'only'), (unit, 'without'): figures of a Tally}: of the float model, of all in INT8, of this unit
    alone in INT8, and of all but this unit in INT8. With `scoring` all but 'only' have metrics, too, 'int8' the difference
    'against_float', and 'without' that of figures.merit 'against_int8': see chance.py.

    units: {unit: paths of its twins}. loader: see loaders.val_loader. Activations of a batch before each layer are kept, of the
    float and of the INT8 model: a unit costs what comes behind it.
    """
    model, predict = forms.model, TorchModel(forms.model)
    tallies = {key: Tally(predict, Scorer(names) if scoring else None) for key in ('float', 'int8')}
    for unit in units:
        tallies[unit, 'only'] = Tally(predict)
        tallies[unit, 'without'] = Tally(predict, Scorer(names) if scoring else None)
    for batch in progress(loader):
        images, truth = prepared(batch, predict.device)
        forms.take(FLOAT)
        *float_states, (output, _) = walk(model, 0, images, [])
        wanted = Raw.of(output)
        tallies['float'].add(output, wanted, truth)
        forms.take(INT8)
        *int8_states, (output, _) = walk(model, 0, images, [])
        tallies['int8'].add(output, wanted, truth)
        for unit, twins in units.items():
            layer = int(unit.split('.')[1])
            forms.take(FLOAT, twins)
            tallies[unit, 'without'].add(run_from(model, layer, *int8_states[layer]), wanted, truth)
            forms.take(INT8, twins)
        forms.take(FLOAT)
        for unit, twins in units.items():
            layer = int(unit.split('.')[1])
            forms.take(ALONE, twins)
            tallies[unit, 'only'].add(run_from(model, layer, *float_states[layer]), wanted, truth)
            forms.take(FLOAT, twins)
    found = {key: tally.result() for key, tally in tallies.items()}
    if scoring:
        resampled = {key: tally.resampled for key, tally in tallies.items() if tally.scorer}
        found['int8']['against_float'] = difference(resampled['float'], resampled['int8'])
        for unit in units:
            found[unit, 'without']['against_int8'] = difference_of_merit(resampled['int8'], resampled[unit, 'without'])
    return found
