"""Read the layers of a model that OpenVINO compiled, and the type in which each computes.

Re-encodings are layers that only write the values of an INT8 layer in another type or order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from utils.qat.core.text import listed, markdown_table
from utils.qat.graph.passes import AVERAGE

if TYPE_CHECKING:
    import openvino

INTEGERS = {'i8', 'u8'}
CONV_OPERATORS = {
    'Convolution',
    'GroupConvolution',
    'ConvolutionBackpropData',
    'GroupConvolutionBackpropData',
}  # of a model
CONV_LAYERS = {'Convolution', 'Deconvolution'}  # of layers, as all kinds below
MOVE_LAYERS = {'Concatenation', 'Interpolate', 'Pooling', 'Reshape', 'Split', 'StridedSlice', 'Transpose'}
# these compute as well, if one has more than Q inside
REENCODINGS = {'Convert', 'FakeQuantize', 'Reorder', 'Subgraph'}
NOT_RUN = {'Input', 'Output'}
QUANTIZES = 'QuantizeLinear'  # in the name of a Q in our exports


@dataclass(eq=False)
class CompiledLayer:
    """A layer of a compiled model."""

    id: str  # its name in the compiled model
    kind: str  # OpenVINO's word, such as Convolution
    precision: str  # of its computation, such as i8
    returns: str  # type of its first output
    kernel: str  # such as brgconv_avx512_I8
    operators: list[str]  # names in the file of all its operators
    takes: list[CompiledLayer] = field(default_factory=list, repr=False)  # layers that it reads
    readers: list[CompiledLayer] = field(default_factory=list, repr=False)  # layers that read it
    ms: float | None = None  # of one run, if it was measured

    @property
    def name(self) -> str:
        """Its name in the file, or else in the compiled model."""
        return self.id.removesuffix('/WithoutBiases')

    @property
    def integer(self) -> bool:
        """Whether it computes in INT8."""
        return self.precision in INTEGERS


def layers_of(compiled: openvino.CompiledModel, ms: dict[str, float] | None = None) -> list[CompiledLayer]:
    """Return the layers of a compiled model that depend on its inputs, in the order in which they run. ms: name of a layer → its time."""
    by_name: dict[str, CompiledLayer] = {}
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        text = {
            key: info[key].astype(str)
            for key in ('layerType', 'runtimePrecision', 'outputPrecisions', 'primitiveType', 'originalLayersNames')
        }
        name = op.get_friendly_name()
        sources = dict.fromkeys(value.get_node().get_friendly_name() for value in op.input_values())
        if text['layerType'] != 'Input' and not by_name.keys() & sources:
            continue  # a constant, or computed from constants
        layer = by_name[name] = CompiledLayer(
            name,
            text['layerType'],
            text['runtimePrecision'],
            text['outputPrecisions'].split(',')[0],
            text['primitiveType'],
            [part for part in text['originalLayersNames'].split(',') if part],
            ms=(ms or {}).get(name),
        )
        layer.takes = [by_name[source] for source in sources if source in by_name]
        for source in layer.takes:
            source.readers.append(layer)
    return list(by_name.values())


def _stored(node: openvino.Node) -> openvino.Node:
    """Return the constant that a weight is made of, or the FakeQuantize before it."""
    while node.get_input_size() and node.get_type_name() != 'FakeQuantize':
        node = node.input_value(0).get_node()
    return node


def quantized_convs(model: openvino.Model) -> dict[str, bool]:
    """Tell whether the weight of each convolution of a model, by name, is quantized."""

    def quantized(weight: openvino.Node) -> bool:
        return weight.get_type_name() == 'FakeQuantize' or weight.get_element_type().get_type_name() in INTEGERS

    return {
        op.get_friendly_name(): quantized(_stored(op.input_value(1).get_node()))
        for op in model.get_ordered_ops()
        if op.get_type_name() in CONV_OPERATORS
    }


def sums_fit(model: openvino.Model) -> bool:
    """Tell whether no sum of two products of INT8 leaves 16 bits, whatever the activations: see `_fits`."""
    kinds = {*CONV_OPERATORS, 'MatMul'}
    weighted = [op for op in model.get_ordered_ops() if op.get_type_name() in kinds]
    return all(_fits(op.get_type_name(), _stored(op.input_value(1).get_node())) for op in weighted)


def _fits(kind: str, weight: openvino.Node) -> bool:
    """Tell whether the two largest weights of an output make at most 128, because 255 * 128 < 2^15; float weights have no such sums."""
    if weight.get_type_name() != 'Constant':
        return kind == 'MatMul'  # of two activations; a FakeQuantize stores no integers
    if weight.get_element_type().get_type_name() != 'i8':
        return True
    sizes = np.abs(weight.data.astype(np.int16))
    outputs = {'Convolution': 1, 'GroupConvolution': 2}.get(kind, 0)  # axes of the weight; 0: all count as one
    return bool((np.sort(sizes.reshape(*sizes.shape[:outputs], -1))[..., -2:].sum(-1) <= 128).all())


class Int8Layers:
    """The layers of a compiled model, sorted by what runs in INT8.

    Attributes:
        convs: the convolutions, without those that are average poolings.
        by_design: of these, in float because their weights are float in the file.
        lost: of these, in float although their weights are quantized.
        moves: operators that only move values, in float before a layer that quantizes them.
        reencoded: re-encodings of what an INT8 layer returned.
        int8: number of convolutions in INT8.
    """

    def __init__(self, layers: list[CompiledLayer], quantized: dict[str, bool]) -> None:
        """Sort the layers, given the convolutions with quantized weights, see `quantized_convs`."""
        self.layers, convs = layers, [layer for layer in layers if layer.kind in CONV_LAYERS]
        self.convs = [layer for layer in convs if not (layer.integer and layer.name.endswith(AVERAGE))]
        floats = [layer for layer in self.convs if not layer.integer]
        self.int8 = len(self.convs) - len(floats)
        self.lost = [layer for layer in floats if any(quantized.get(name) for name in (layer.name, *layer.operators))]
        self.by_design = [layer for layer in floats if layer not in self.lost]
        self.moves = [
            layer for layer in layers if layer.kind in MOVE_LAYERS and not layer.integer and _is_quantized(layer)
        ]
        self.reencoded = [layer for layer in layers if _reencodes(layer)]

    def __str__(self) -> str:
        if len(self.by_design) == len(self.convs):
            return f'INT8: none of {len(self.convs)} convolutions, for no weight is quantized in the file'
        parts = [f'{len(self.by_design)} float by design'] * bool(self.by_design)
        if self.lost:
            shown = ', '.join(layer.name for layer in self.lost[:3]) + ', ...' * (len(self.lost) > 3)
            parts.append(f'{len(self.lost)} that should not be float: {shown}')
        return f'INT8: {self.int8} of {len(self.convs)} convolutions' + (f' ({"; ".join(parts)})' if parts else '')


def _is_quantized(layer: CompiledLayer) -> bool:
    """Whether a reader of a layer, through layers that only move values, converts float to integers."""
    return any(
        _is_quantized(reader) if reader.kind in MOVE_LAYERS and not reader.integer else reader.returns in INTEGERS
        for reader in layer.readers
    )


def _reencodes(layer: CompiledLayer) -> bool:
    """Whether a layer only writes what an INT8 layer returned in another type or order."""
    only = layer.kind in REENCODINGS and all(QUANTIZES in name for name in layer.operators)
    return only and layer.returns in INTEGERS and any(s.integer or s.returns in INTEGERS for s in layer.takes)


def plain_layers(layers: Int8Layers, reasons: dict[str, str]) -> dict:
    """Return an Int8Layers as dicts and lists. reasons: name of a convolution → why it is in float in the file."""

    def described(layer: CompiledLayer) -> dict:
        return {
            'name': layer.name,
            'operator': layer.kind,
            'computes in': layer.precision,
            'takes': [source.returns for source in layer.takes],
            'returns': layer.returns,
            'ms': layer.ms,
        }

    return {
        'convolutions': {'int8': layers.int8, 'all': len(layers.convs)},
        'float by design': {layer.name: _why(layer, reasons) for layer in layers.by_design},
        'float, should be INT8': [described(layer) for layer in (*layers.lost, *layers.moves)],
        're-encoded': [described(layer) for layer in layers.reencoded],
        'layers': [described(layer) for layer in run_layers(layers.layers)],
    }


def _why(layer: CompiledLayer, reasons: dict[str, str]) -> str:
    """Why a convolution is in float in the file."""
    return next((reasons[name] for name in (layer.name, *layer.operators) if name in reasons), 'its weight is float')


def layers_text(layers: Int8Layers, reasons: dict[str, str], limit: int | None = None) -> str:
    """Format an Int8Layers as text: a table of the time, then each list with its first `limit` places (None = all)."""
    ran = run_layers(layers.layers)
    whole = sum(layer.ms or 0 for layer in ran) or 1
    groups: dict[tuple[str, str], list[CompiledLayer]] = {}
    for layer in ran:
        groups.setdefault((layer.kind, layer.precision), []).append(layer)
    times = {key: sum(layer.ms or 0 for layer in group) for key, group in groups.items()}
    rows = [
        (*key, len(groups[key]), f'{ms:.3f}', f'{ms / whole:.1%}')
        for key, ms in sorted(times.items(), key=lambda item: -item[1])
    ]

    def changed(layer: CompiledLayer) -> str:
        return f'{layer.name}: {layer.kind} of {", ".join(source.returns for source in layer.takes)} to {layer.returns}, {layer.ms or 0:.3f} ms'

    lists = {
        'In float, as the file has it': [f'{layer.name}: {_why(layer, reasons)}' for layer in layers.by_design],
        'In float, though quantized in the file': [
            f'{layer.name}: {layer.kind} in {layer.precision} by {layer.kernel}, {layer.ms or 0:.3f} ms'
            for layer in (*layers.lost, *layers.moves)
        ],
        'Re-encoded between INT8 layers': [changed(layer) for layer in layers.reencoded],
    }
    lines = [str(layers), '', markdown_table(('layer', 'computes in', 'number', 'ms', 'share'), rows)]
    for title, of_kind in lists.items():
        lines += listed(title, of_kind, limit)
    return '\n'.join(lines)


def run_layers(layers: list[CompiledLayer]) -> list[CompiledLayer]:
    """Return the layers that take time."""
    return [layer for layer in layers if layer.kind not in NOT_RUN]
