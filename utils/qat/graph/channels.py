"""Find where new channels may go in the tensors of a graph, so that no output changes.

Two facts of a tensor decide:

- cuts, places between channels where new ones go: between the parts of a Concat, and where a tensor is split;
- fixed channels, which get none: those of graph inputs and outputs, of convolutions with several groups (only those that
  are left in float have any), and of operators that this file does not know.

Both hold for all tensors that have these channels, before and behind. A convolution ends them: it reads any layout of its input,
and writes any layout of its output.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from onnx import ModelProto, NodeProto

from utils.qat.graph.arranged import NEW, Layout
from utils.qat.graph.onnx_graph import ACTIVATIONS, CONVS, QDQ, Graph, attribute
from utils.qat.graph.tensor_types import infer

CHANNELS = 1  # their axis
# From finite values they compute finite ones; of 0 / 0 in a new channel a weight of 0 would make NaN
ELEMENTWISE = ACTIVATIONS | {'Abs', 'Add', 'Erf', 'Max', 'Min', 'Mul', 'Neg', 'Sub', 'Sum'}
MAPS = {'AveragePool', 'Cast', 'Concat', 'GlobalAveragePool', 'Identity', 'MaxPool', 'Resize'}  # each channel by itself


@dataclass(frozen=True)
class _Same:
    """Channels that two tensors have in common: `length` of each, from `start` and `other_start` on."""

    tensor: str
    start: int
    other: str
    other_start: int
    length: int


class Tensors:
    """The tensors of a graph, and which channels of them its operators read.

    Attributes:
        types: see `infer`.
        number: tensor → its number of channels, for tensors that depend on the image.
        small: tensor → value, for small constants and shape arithmetic.
    """

    def __init__(self, model: ModelProto) -> None:
        self.graph = Graph(model)
        self.types, self.small = infer(model)
        self.number = {
            name: shape[CHANNELS]
            for name, (_, shape) in self.types.items()
            if len(shape) > CHANNELS and name not in self.graph.fixed and shape[CHANNELS]
        }

    def along(self, node: NodeProto) -> bool:
        """Tell whether a Concat or Split works along the channels."""
        return attribute(node, 'axis', 0) % self.rank(node.output[0]) == CHANNELS

    def rank(self, name: str) -> int:
        """Return the number of axes of a tensor."""
        return len(self.types[name][1])

    def axes(self, node: NodeProto) -> list[int]:
        """Return the axes along which a Slice cuts; none if they do not follow from the graph."""
        if not all(name in self.small for name in node.input[1:]):
            return []
        given = self.small[node.input[3]] if len(node.input) > 3 else range(len(self.small[node.input[1]]))
        return [int(axis) % self.rank(node.input[0]) for axis in given]

    def start(self, node: NodeProto) -> int | None:
        """Return the channel with which a Slice begins; None if it skips some, or if that does not follow from the graph."""
        axes = self.axes(node)
        if not axes:
            return None
        if CHANNELS not in axes:
            return 0
        starts, ends, *rest = (self.small[name] for name in node.input[1:])
        at = axes.index(CHANNELS)
        if len(rest) > 1 and rest[1][at] != 1:
            return None
        return slice(int(starts[at]), int(ends[at])).indices(self.number[node.input[0]])[0]


class Channels(Tensors):
    """The layouts of a graph's tensors in the padded graph."""

    def __init__(self, model: ModelProto, multiple: int) -> None:
        """Find them. multiple: widths are rounded up to one."""
        super().__init__(model)
        self.multiple = multiple
        self._cuts = {name: np.zeros(n + 1, bool) for name, n in self.number.items()}
        self._fixed = {name: np.zeros(n, bool) for name, n in self.number.items()}
        self._layouts: dict[str, Layout] = {}
        same = [pair for node in self.graph.nodes for pair in self._relate(node)]
        while sum(map(self._equalize, reversed(same))):  # until nothing changes
            pass

    def layout(self, name: str) -> Layout:
        """Return the padded layout of a tensor: each run of channels between two cuts, rounded up unless it is fixed."""
        if name not in self._layouts:
            fixed, cuts, parts = self._fixed[name], self._cuts[name].copy(), []
            cuts[[0, -1]] = True
            cuts[1:-1] |= fixed[1:] != fixed[:-1]
            for start, end in pairwise(np.flatnonzero(cuts)):
                new = 0 if fixed[start] else -(end - start) % self.multiple
                parts += [np.arange(start, end), np.full(new, NEW)]
            self._layouts[name] = np.concatenate(parts)
        return self._layouts[name]

    def grow(self, *names: str) -> bool:
        """Tell whether one of these tensors has new channels."""
        return any((self.layout(name) == NEW).any() for name in names if name in self.number)

    # The rest finds the cuts and the fixed channels.

    def _equalize(self, pair: _Same) -> bool:
        """Give the same cuts and fixed channels to both tensors; return whether one of them changed."""
        changed = False
        for facts, ends in ((self._cuts, 1), (self._fixed, 0)):
            one = facts[pair.tensor][pair.start : pair.start + pair.length + ends]
            other = facts[pair.other][pair.other_start : pair.other_start + pair.length + ends]
            both = np.logical_or(one, other)
            if ends:
                both[[0, -1]] = True
            changed |= bool((both != one).any() or (both != other).any())
            one[:] = other[:] = both
        return changed

    def _fix(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.number:
                self._fixed[name][:] = True

    def _relate(self, node: NodeProto) -> list[_Same]:
        """Return the common channels of the tensors of a node, after fixing those that cannot grow."""
        ends = {*self.graph.inputs, *self.graph.outputs}
        self._fix(ends.intersection((*node.input, *node.output)))
        if node.op_type == 'Size' or (node.op_type == 'Shape' and self._counted(node.output[0], not node.attribute)):
            self._fix(node.input)
        if all(name in self.graph.fixed for name in node.output):
            return []
        common = self._common(node)
        if common is None:
            self._fix((*node.input, *node.output))
        return common or []

    def _counted(self, shape: str, whole: bool) -> bool:
        """Tell whether the number of channels in a shape counts for more than sizes that the padded graph has anew.

        whole: it has all axes, in order.
        """
        for node, _ in self.graph.readers.get(shape, ()):
            index = self.small.get(node.input[1]) if whole and node.op_type == 'Gather' else None
            if index is not None and CHANNELS not in np.ravel(index) % self.types[shape][1][0]:
                continue
            computes = all(name in self.graph.fixed for name in node.output)
            if computes and any(self._counted(name, False) for name in node.output):
                return True
            if not computes and node.op_type not in ('Resize', 'Slice', 'Split'):
                return True
        return shape in self.graph.outputs

    def _common(self, node: NodeProto) -> list[_Same] | None:
        """Return the common channels of inputs and outputs; None if they cannot grow here."""
        data, results = [n for n in node.input if n not in self.graph.fixed], list(filter(None, node.output))
        if node.domain not in ('', 'ai.onnx') or not all(name in self.number for name in (*data, *results)):
            return None
        if node.op_type in CONVS:
            return self._of_conv(node)
        if node.op_type in ('Slice', 'Split'):
            return self._of_parts(node)
        if node.op_type == 'Concat' and len(data) < len(node.input):
            return None
        [result, *others], start, common = results, 0, []
        for name in data:
            common.append(_Same(name, 0, result, start, self.number[name]))
            start += self.number[name] * (node.op_type == 'Concat' and self.along(node))
        alike = all(self.rank(name) == self.rank(result) for name in data)
        fits = start == self.number[result] or (start == 0 and all(s.length == self.number[result] for s in common))
        return common if alike and fits and not others and self._is_known(node) else None

    def _is_known(self, node: NodeProto) -> bool:
        """Tell whether an operator computes each channel by itself, from stored constants if it has any."""
        if node.op_type in QDQ:
            return node.input[1] in self.graph.values and self.graph.values[node.input[1]].ndim == 0
        if node.op_type in ELEMENTWISE or (node.op_type == 'Div' and node.input[1] in self.graph.fixed):
            return all(map(self._is_stored, node.input))
        return node.op_type in MAPS

    def _is_stored(self, name: str) -> bool:
        """Tell whether a tensor depends on the image, or is a stored constant, perhaps behind Q and DQ."""
        if name not in self.graph.fixed or not name or name in self.graph.values:
            return True
        node = self.graph.producer[name]
        blocks = any(self.graph.values[n].ndim > 1 for n in node.input[1:] if n in self.graph.values)
        return node.op_type in {'Cast', *QDQ} and not blocks and all(map(self._is_stored, node.input))

    def _of_parts(self, node: NodeProto) -> list[_Same] | None:
        """Slice and Split; along other axes all channels stay together."""
        source, start, parts = node.input[0], 0, []
        if node.op_type == 'Slice':
            begin = self.start(node)
            if begin is None:
                return None
            start = begin
        for name in node.output:
            parts.append(_Same(name, 0, source, start, self.number[name]))
            start += self.number[name] * (node.op_type == 'Split' and self.along(node))
        return parts

    def _of_conv(self, node: NodeProto) -> list[_Same] | None:
        given, result = node.input[0], node.output[0]
        if given in self.graph.fixed or not all(map(self._is_stored, node.input[1:])):
            return None
        if self.is_depthwise(node):
            return [_Same(given, 0, result, 0, self.number[given])]
        return [] if attribute(node, 'group', 1) == 1 else None

    def is_depthwise(self, node: NodeProto) -> bool:
        """Tell whether each output channel of a convolution has an input channel of its own."""
        return attribute(node, 'group', 1) == self.number[node.input[0]] == self.number[node.output[0]] > 1
