"""The cost of INT8 in each unit of a network: estimated for all units at once, and measured for some.

With --activation it is the cost of the exchanged activation functions of a unit, by the same means. Rounding, or the exchange,
moves the output of a place by δ, and the outputs of the model by J δ. With a probe v of the outputs (see divergence.py) one
backward pass gives v · J δ for every place. To second order, half its mean square is the divergence that
this place alone causes. Each image has its own probe: n images estimate a figure to sqrt(2 / n) of itself. The places
of a unit are added before they are squared. For a large δ, or if one rounding changes another, only a measurement
tells: see partly_float.py.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from models.quantize.activations import Exchange, exchanges
from models.quantize.analysis.partly_float import ActivationForms, TwinForms, measure_units
from models.quantize.blocks import QuantConv2d, Twin
from models.quantize.calibration.calibrate import added
from models.quantize.calibration.divergence import AT_ONCE, backward_from_probe
from models.quantize.network import find_units, removed_after, within
from models.quantize.quantizers import Quantizer, quantizers_off
from utils.qat.backends.detections import prepared
from utils.qat.config.qat import SensitiveConfig
from utils.qat.core.distributed import all_reduce, rank, world_size
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import channels_last
from utils.qat.run.sensitivity_summary import Costs, Unit

MEASURED = 10  # units with the highest estimate, which are measured


class DivergenceEstimate:
    """An estimate of the divergence with one unit quantized, and with all but one: `add` batches, then take `result`.

    All `forms` are FLOAT. `correcting`: the bias of a quantized convolution cancels the shift of the mean of its
    outputs. `seed`: of the probes.
    """

    def __init__(
        self, forms: TwinForms | ActivationForms, units: Mapping[str, Sequence[str]], correcting: bool, seed: int
    ) -> None:
        self.units, self.correcting, self.seed = units, correcting, seed
        self.model = forms.model
        device = next(self.model.parameters()).device
        # Sums of squares: only this unit, all but it
        self.sums = torch.zeros(2, len(units), dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.twins = {path: self.model.get_submodule(path) for paths in units.values() for path in paths}
        # Shift of the mean of the outputs, summed over the images
        self.shifts = {
            path: torch.zeros(m.out_channels, dtype=torch.float64, device=device)
            for path, m in self.twins.items()
            if isinstance(m, QuantConv2d)
        }
        self.images = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, images: torch.Tensor, number: int) -> None:
        """Add images, FP32 [B, 3, H, W] in 0..1, with one forward and one backward pass of the float model.

        `number`, of the batch over all processes, seeds the probes.
        """
        generator = torch.Generator().manual_seed(hash((self.seed, number)) % 2**63)
        for part in images.split(AT_ONCE):
            changes = {path: torch.zeros(len(part), dtype=torch.float64, device=part.device) for path in self.twins}
            with self._places(changes), quantizers_off(self.model):
                self.weight += backward_from_probe(self.model, part, generator)
            # [units, B]
            of_units = torch.stack([added(changes[path] for path in twins) for twins in self.units.values()])
            self.sums += torch.stack((of_units, of_units.sum(0) - of_units)).square().sum(2)
            self.images += len(part)

    @contextlib.contextmanager
    def _places(self, changes: dict[str, torch.Tensor]) -> Iterator[None]:
        """Context in which the backward pass adds v · J δ of each twin's rounding to `changes` ([B] by path)."""

        def note(path: str, tensor: torch.Tensor, error: torch.Tensor) -> None:
            def add(gradient: torch.Tensor) -> None:
                changes[path] += (gradient * error).flatten(1).sum(1, dtype=torch.float64)

            tensor.register_hook(add)

        def of_conv(path: str) -> Callable[..., None]:
            @torch.no_grad()
            def hook(conv: QuantConv2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                quantized = (
                    conv.input_quantizer._quant_forward(inputs[0]),
                    conv.weight_quantizer._quant_forward(conv.weight),
                )
                error = conv.weighted(*quantized) - output
                if path in self.shifts:
                    mean = error.mean((0, 2, 3))
                    self.shifts[path] += mean * len(output)
                    error = error - mean[:, None, None] if self.correcting else error
                note(path, output, error)

            return hook

        def of_input(path: str) -> Callable[..., torch.Tensor]:
            def hook(quantizer: Quantizer, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    error = quantizer._quant_forward(inputs[0]) - inputs[0]
                output = output.view_as(output)  # a view: it is the input, and other layers read it too
                note(path, output, error)
                return output

            return hook

        def of_exchange(path: str) -> Callable[..., None]:
            @torch.no_grad()
            def hook(exchange: Exchange, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                note(path, output, exchange.new(inputs[0]) - output)

            return hook

        hooks = []
        for path, twin in self.twins.items():
            if isinstance(twin, nn.Conv2d | nn.Linear):
                hooks.append(twin.register_forward_hook(of_conv(path)))
            elif isinstance(twin, Exchange):
                hooks.append(twin.register_forward_hook(of_exchange(path)))
            else:
                assert isinstance(twin, Twin)
                hooks += [getattr(twin, name).register_forward_hook(of_input(path)) for name in twin.quantizer_names]
        with removed_after(hooks):
            yield

    def result(self) -> tuple[dict[str, Sequence[float]], dict[str, torch.Tensor]]:
        """Compute the estimates over all processes of a torchrun.

        Returns unit → divergence with only this unit quantized, and with all units but this one; and path of a convolution →
        shift of the mean of its outputs, FP64 [C].
        """
        sums, weight, images = (all_reduce(x.clone()) for x in (self.sums, self.weight, self.images))
        values = (sums / 2 / weight).t().tolist()
        return dict(zip(self.units, values)), {path: all_reduce(s.clone()) / images for path, s in self.shifts.items()}


def unit_costs(model: Network, units: Mapping[str, Sequence[str]], imgsz: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Count the FLOPs (2 per multiply-add) and parameters of the convolutions and linear layers of each unit.

    In an exchanged model they are the values that the exchanged functions compute, which take the time. The key '' has the whole model's. `imgsz` is height and width in pixels.
    """
    flops: dict[str, int] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(
            module: Exchange | nn.Conv2d | nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> None:
            each = 1 if isinstance(module, Exchange) else 2 * module.weight[0].numel()
            flops[path] = each * output[0].numel()

        return hook

    convs: dict[str, nn.Module] = {**exchanges(model)} or {
        path: m for path, m in model.named_modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))
    }
    hooks = [conv.register_forward_hook(note(path)) for path, conv in convs.items()]
    parameter = next(model.parameters())
    with removed_after(hooks), torch.no_grad(), quantizers_off(model):
        model.eval()(torch.zeros(1, 3, *imgsz, device=parameter.device))

    def total(paths: Iterable[str]) -> tuple[int, int]:
        return sum(flops[p] for p in paths), sum(x.numel() for p in paths for x in convs[p].parameters(recurse=False))

    return {'': total(convs), **{unit: total([p for p in twins if p in convs]) for unit, twins in units.items()}}


def _ranges(model: Network, twins: Iterable[str]) -> dict[str, float | list[float]]:
    """Collect the amax of each quantizer by path; for weights the smallest and the largest of the channels."""
    ranges: dict[str, float | list[float]] = {}
    for path in twins:
        twin = model.get_submodule(path)
        for name in getattr(twin, 'quantizer_names', ()):
            amax = getattr(twin, name)._amax
            ranges[f'{path}.{name}'] = amax.item() if amax.dim() == 0 else [amax.min().item(), amax.max().item()]
    return ranges


def analyse(
    model: Network,
    reference: Network,
    loader: DataLoader,
    names: Mapping[int, str],
    config: SensitiveConfig,
    corrected: bool,
    progress: Callable[..., Iterable],
    times: dict[str, float],
) -> Costs:
    """Estimate the cost of INT8 in each unit of `model`, and measure it for the worst units; for all with --metric ap.

    `loader` (loaders.Loaders.scored) has this process's share of a torchrun. `corrected`: the biases of `model` are corrected.
    `times` gets the seconds of 'estimate' and 'measure'.
    """
    start = time.perf_counter()
    forms = ActivationForms(model) if config.exchanges else TwinForms(model, reference)
    units = find_units(reference, list(forms.twins), config.granularity)
    costs = unit_costs(model, units, config.imgsz)
    estimate = DivergenceEstimate(forms, units, corrected, config.seed)
    device = next(model.parameters()).device
    for number, batch in enumerate(progress(loader, 'estimating')):
        estimate.add(channels_last(prepared(batch, device)[0]), rank() + number * world_size())
    estimated, shifts = estimate.result()
    forms.learn_alone(shifts if corrected else {})

    times['estimate'] = time.perf_counter() - start

    chosen = list(units) if config.metric == 'ap' else sorted(units, key=lambda u: -estimated[u][0])[:MEASURED]
    measurements = measure_units(
        forms,
        {u: units[u] for u in units if u in chosen},
        loader,
        names,
        config.metric != 'distortion',
        lambda it: progress(it, f'measuring {len(chosen)}'),
    )
    times['measure'] = time.perf_counter() - start - times['estimate']
    rows: list[Unit] = []
    for unit, paths in units.items():
        measured = {way: measurements[unit, way] for way in ('only', 'without')} if unit in chosen else None
        module = reference.get_submodule(unit)
        rows.append(
            {
                'unit': unit,
                'kind': type(module).__name__,
                'convolutions': sum(within(p, unit) for p in estimate.shifts),
                'flops': costs[unit][0],
                'parameters': costs[unit][1],
                'estimated': dict(zip(('only', 'without'), estimated[unit])),
                'measured': measured,
                'distortion': measured['only']['divergence'] if measured else estimated[unit][0],
                'twins': paths,
                'ranges': _ranges(forms.model, paths),
            }
        )
    return {'float': measurements['float'], 'int8': measurements['int8'], 'flops': costs[''][0], 'units': rows}
