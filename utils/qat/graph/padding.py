"""Pad the channels of an exported graph to the widths that an engine's INT8 kernels need; changes no output.

New channels have weights and biases of zero, and all weights that read them are zero: whatever an activation function makes of
them reaches no output. Two facts of each tensor decide where its new channels go:

- cuts: places between channels where padding goes. A Concat has cuts between its parts, a tensor that is split has cuts
  where it is split, the input and output of a convolution with groups have cuts between the groups.
- fixed channels, which stay without padding: those of graph inputs and outputs, and of operators that this pass does not know.

Both go along channels that are the same, forward and backward, up to convolutions: a convolution may have any layout of its
input, and any of its output. A layout then follows: each run of channels between two cuts, rounded up unless it is fixed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import ACTIVATIONS, CONVS, QDQ, Graph, attribute, name_of, replace_nodes
from utils.qat.graph.passes import drop_unread
from utils.qat.graph.tensor_types import flops, infer

CHANNELS = 1  # axis of the channels
BY_VALUE = set('Abs Add Div Exp Max Min Mul Neg Pow Sqrt Sub Sum'.split()) | ACTIVATIONS
BY_CHANNEL = set('AveragePool Cast GlobalAveragePool GlobalMaxPool Identity MaxPool Resize'.split()) | QDQ
STORED = {'Cast', 'Identity', *QDQ}  # operators between a stored weight and its convolution
NEW = -1  # the channel of the unpadded tensor from which a new channel comes

Groups = Literal['pad', 'dense', 'keep']
Layout = np.ndarray  # int [padded channels]: the channel of the unpadded tensor, or NEW


@dataclass(frozen=True)
class Same:
    """Channels of two tensors that are the same: `length` of each, from `start` and from `other_start` on."""

    tensor: str
    start: int
    other: str
    other_start: int
    length: int


@dataclass
class Padding:
    """A padded graph, and what was added.

    Attributes:
        channels: number of channels of convolutions that are new.
        operations: multiply-adds of the padded graph, times as many as of the unpadded one.
        left: names of convolutions with an input or output that is no multiple.
    """

    model: ModelProto
    channels: int
    operations: float
    left: list[str] = field(default_factory=list)


class Channels:
    """Cuts and fixed channels of the tensors of a graph.

    Attributes:
        number: tensor → number of channels; of tensors that have channels and depend on the image.
    """

    def __init__(self, graph: Graph, number: dict[str, int]) -> None:
        self.graph, self.number = graph, number
        self.cuts = {name: np.zeros(n + 1, bool) for name, n in number.items()}
        self.fixed = {name: np.zeros(n, bool) for name, n in number.items()}
        for cuts in self.cuts.values():
            cuts[[0, -1]] = True

    def fix(self, names: Sequence[str]) -> None:
        """Let no channel of these tensors be padded."""
        for name in names:
            if name in self.fixed:
                self.fixed[name][:] = True

    def settle(self, same: Sequence[Same]) -> None:
        """Give the same cuts and the same fixed channels to all channels that are the same."""
        changed = True
        while changed:
            changed = False
            for pair in reversed(same):
                changed |= self._equalize(pair)

    def _equalize(self, pair: Same) -> bool:
        changed = False
        for facts, more in ((self.cuts, 1), (self.fixed, 0)):
            one = facts[pair.tensor][pair.start : pair.start + pair.length + more]
            other = facts[pair.other][pair.other_start : pair.other_start + pair.length + more]
            both = one | other
            if more:
                both[[0, -1]] = True
            if (both != one).any() or (both != other).any():
                one[:] = other[:] = both
                changed = True
        return changed

    def layout(self, name: str, width: Callable[[int], int]) -> Layout:
        """Return the padded layout of a tensor. width: length of a run of channels → its padded length."""
        fixed, cuts = self.fixed[name], self.cuts[name].copy()
        cuts[1:-1] |= fixed[1:] != fixed[:-1]
        runs = []
        for start, end in pairwise(np.flatnonzero(cuts)):
            new = 0 if fixed[start] else width(end - start) - (end - start)
            runs += [np.arange(start, end), np.full(new, NEW)]
        return np.concatenate(runs)


def _rounded(multiple: int) -> Callable[[int], int]:
    return lambda channels: -(-channels // multiple) * multiple


def spread(values: np.ndarray, layout: Layout, axis: int, fill: float | None = 0) -> np.ndarray:
    """Arrange values along an axis by a layout; new ones are `fill`, or without it the first value."""
    found = values.take(np.maximum(layout, 0), axis)
    if fill is not None:
        found[(slice(None),) * axis + (layout == NEW,)] = fill
    return found


def dense(weight: np.ndarray, group: int) -> np.ndarray:
    """Write a weight of a convolution with groups as that of one without: zeros between channels of different groups."""
    blocks = np.split(weight, group)
    return np.concatenate(
        [np.concatenate([block * (i == j) for j in range(group)], axis=1) for i, block in enumerate(blocks)]
    ).astype(weight.dtype)


class Padder:
    """The pass over one graph; see `pad`."""

    def __init__(self, model: ModelProto, width: Callable[[int], int], groups: Groups, keep: Callable[[str], bool]):
        self.model, self.width, self.groups, self.keep = model, width, groups, keep
        self.graph = Graph(model)
        self.types, small = infer(model)
        self.small = {name: numpy_helper.to_array(t) for name, t in small.items()} | {
            name: value for name, value in self.graph.values.items() if value.size < 100
        }
        number = {
            name: shape[CHANNELS]
            for name, (_, shape) in self.types.items()
            if len(shape) > 1 and name not in self.graph.fixed and shape[CHANNELS]
        }
        self.channels = Channels(self.graph, number)
        self.made: dict[tuple, str] = {}
        self.before: list[NodeProto] = []  # nodes that the next node reads
        self._relate()

    # ---- which channels are the same ------------------------------------------------------------------------------------

    def _relate(self) -> None:
        channels, same = self.channels, []
        channels.fix([*self.graph.inputs, *self.graph.outputs])
        for node in self.graph.nodes:
            if all(name in self.graph.fixed for name in node.output) or node.op_type == 'Shape':
                continue
            found = self._same(node)
            if found is None:
                channels.fix([*node.input, *node.output])
            else:
                same += found
            if node.op_type in CONVS and self.keep(name_of(node)):
                channels.fix(node.output)
        channels.settle(same)

    def _data(self, node: NodeProto) -> list[str]:
        return [name for name in node.input if name not in self.graph.fixed]

    def _same(self, node: NodeProto) -> list[Same] | None:
        """Return the channels that are the same in inputs and outputs of a node; None if its channels must stay."""
        number = self.channels.number
        if any(name not in number for name in (*self._data(node), *filter(None, node.output))):
            return None
        op, result = node.op_type, node.output[0]
        if op in CONVS:
            return self._same_in_conv(node)
        if op == 'Concat' and self._axis(node) == CHANNELS:
            return self._same_in_concat(node)
        if op in ('Split', 'Slice'):
            return self._same_in_parts(node)
        ranks = {len(self.types[name][1]) for name in (*self._data(node), result)}
        whole = [Same(name, 0, result, 0, number[result]) for name in self._data(node)]
        if len(ranks) > 1 or any(number[name] != number[result] for name in self._data(node)):
            return None
        if op in BY_VALUE and all(map(self._is_stored, node.input)):
            return whole
        if op in QDQ:
            return whole if self.graph.values[node.input[1]].ndim == 0 else None
        return whole if op in BY_CHANNEL or op == 'Concat' else None

    def _axis(self, node: NodeProto) -> int:
        axis = attribute(node, 'axis', 0)
        return axis % len(self.types[node.output[0]][1])

    def _same_in_concat(self, node: NodeProto) -> list[Same] | None:
        found, start = [], 0
        for name in node.input:
            if name in self.graph.fixed:
                return None
            length = self.channels.number[name]
            found.append(Same(name, 0, node.output[0], start, length))
            start += length
        return found

    def _same_in_parts(self, node: NodeProto) -> list[Same] | None:
        """Split and Slice; along another axis than that of the channels all of these stay."""
        number, source = self.channels.number, node.input[0]
        start = 0
        if node.op_type == 'Slice':
            found = self._slice(node)
            if found is None or found[2] != 1:
                return None
            start = found[0]
        along = node.op_type == 'Split' and self._axis(node) == CHANNELS
        result = []
        for name in node.output:
            result.append(Same(name, 0, source, start, number[name]))
            start += number[name] * along
        return result

    def _slice(self, node: NodeProto) -> tuple[int, int, int] | None:
        """Return start, end and step of a Slice along the channels; None if they do not follow from the graph."""
        parts = [self.small.get(name) for name in node.input[1:]]
        if len(node.input) < 3 or any(part is None for part in parts):
            return None
        starts, ends = parts[:2]
        axes = parts[2] if len(parts) > 2 else np.arange(len(starts))
        steps = parts[3] if len(parts) > 3 else np.ones(len(starts), int)
        number = self.channels.number[node.input[0]]
        rank = len(self.types[node.input[0]][1])
        for start, end, axis, step in zip(starts, ends, axes, steps):
            if axis % rank == CHANNELS:
                return slice(int(start), int(end), int(step)).indices(number)
        return 0, number, 1

    def _same_in_conv(self, node: NodeProto) -> list[Same] | None:
        if not all(map(self._is_stored, node.input[1:])) or node.input[0] in self.graph.fixed:
            return None
        group, number = attribute(node, 'group', 1), self.channels.number
        given, result = node.input[0], node.output[0]
        if group == 1:
            return []
        if group == number[given] == number[result]:
            return [Same(given, 0, result, 0, number[given])]
        if self.groups == 'keep' or number[given] == group:
            return None
        if self.groups == 'dense':
            return []
        return [
            Same(name, 0, name, i * (number[name] // group), number[name] // group)
            for name in (given, result)
            for i in range(1, group)
        ]

    def _is_stored(self, name: str) -> bool:
        """Tell whether a tensor depends on the image, or is a stored weight, perhaps behind Q and DQ."""
        if name not in self.graph.fixed or not name or name in self.graph.values:
            return True
        node = self.graph.producer[name]
        return node.op_type in STORED and all(map(self._is_stored, node.input))

    # ---- the padded graph -----------------------------------------------------------------------------------------------

    def layout(self, name: str) -> Layout:
        if name not in self._layouts:
            self._layouts[name] = self.channels.layout(name, self.width)
        return self._layouts[name]

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {}

    def padded(self) -> ModelProto:
        """Rewrite the graph."""
        nodes = []
        for node in self.graph.nodes:
            new = NodeProto()
            new.CopyFrom(node)
            if any(name in self.channels.number for name in node.output):
                self._pad(node, new)
            nodes += [*self.before, new]
            self.before = []
        model = ModelProto()
        model.CopyFrom(self.model)
        model.graph.initializer.extend(
            numpy_helper.from_array(value, name) for name, value in self._constants.items()
        )
        del model.graph.value_info[:]
        replace_nodes(model, list(_read(nodes, self.graph.outputs)))
        drop_unread(model)
        self._check(model)
        return model

    @cached_property
    def _constants(self) -> dict[str, np.ndarray]:
        return {}

    def _is_new(self, *names: str) -> bool:
        return any((self.layout(name) == NEW).any() for name in names if name in self.channels.number)

    def _pad(self, node: NodeProto, new: NodeProto) -> None:
        op = node.op_type
        if op in CONVS:
            self._pad_conv(node, new)
        elif not self._is_new(*node.input, *node.output):
            return
        elif op == 'Split' and self._axis(node) == CHANNELS:
            self._pad_split(node, new)
        elif op == 'Slice':
            self._pad_slice(node, new)
        elif op == 'Resize' and len(node.input) > 3 and node.input[3] in self.graph.values:
            sizes = self.graph.values[node.input[3]].copy()
            sizes[CHANNELS] = len(self.layout(node.output[0]))
            new.input[3] = self._constant(f'{node.output[0]}_sizes', sizes)
        elif op in BY_VALUE:
            self._pad_factors(node, new)

    def _pad_factors(self, node: NodeProto, new: NodeProto) -> None:
        """Arrange the constants of an elementwise operation that have a value for each channel."""
        result = node.output[0]
        rank, number = len(self.types[result][1]), self.channels.number[result]
        for i, name in enumerate(node.input):
            if name and name in self.graph.fixed:
                shape = self.types[name][1]
                axis = len(shape) - rank + CHANNELS
                if axis >= 0 and shape[axis] == number > 1:
                    new.input[i] = self._stored(name, {axis: self.layout(result)}, None)

    def _pad_conv(self, node: NodeProto, new: NodeProto) -> None:
        given, result = (self.layout(name) for name in (node.input[0], node.output[0]))
        group, number = attribute(node, 'group', 1), len(self.types[node.input[0]][1])
        c, k = self.channels.number[node.input[0]], self.channels.number[node.output[0]]
        if not self._is_new(node.input[0], node.output[0]) and not (
            self.groups == 'dense' and group > 1 and not group == c == k and group != c
        ):
            return
        of_input, of_output = (1, 0) if node.op_type == 'Conv' else (0, 1)
        layouts = {of_output: result, of_input: given}
        if group > 1 and group == c == k:
            layouts = {0: result}
            _set(new, 'group', len(result))
        elif group > 1 and self.groups == 'dense':
            new.input[1] = self._stored(node.input[1], layouts, group=group)
            layouts = {}
            _set(new, 'group', 1)
        elif group > 1:
            # ONNX stores the channels of one group along axis 1, and all along axis 0
            own, full = (given, result) if node.op_type == 'Conv' else (result, given)
            layouts = {0: full, 1: own[: len(own) // group]}
        if layouts:
            new.input[1] = self._stored(node.input[1], layouts)
        if len(node.input) > 2 and node.input[2]:
            new.input[2] = self._stored(node.input[2], {0: result})

    def _pad_split(self, node: NodeProto, new: NodeProto) -> None:
        sizes = np.array([len(self.layout(name)) for name in node.output], np.int64)
        del new.input[1:]
        new.input.append(self._constant(f'{node.output[0]}_sizes', sizes))
        for a in [a for a in new.attribute if a.name == 'num_outputs']:
            new.attribute.remove(a)

    def _pad_slice(self, node: NodeProto, new: NodeProto) -> None:
        begin, end, _ = self._slice(node)
        starts, ends, *rest = (self.small[name].copy() for name in node.input[1:])
        axes = rest[0] if rest else np.arange(len(starts))
        layout = self.layout(node.input[0])
        for i, axis in enumerate(axes):
            if axis % len(self.types[node.input[0]][1]) == CHANNELS:
                # the padding behind a run belongs to the run
                starts[i] = 0 if begin == 0 else np.flatnonzero(layout == begin)[0]
                ends[i] = starts[i] + len(self.layout(node.output[0]))
        new.input[1] = self._constant(f'{node.output[0]}_starts', starts)
        new.input[2] = self._constant(f'{node.output[0]}_ends', ends)

    def _constant(self, name: str, value: np.ndarray) -> str:
        self._constants[name] = value
        return name

    def _stored(self, name: str, layouts: dict[int, Layout], fill: float | None = 0, group: int = 1) -> str:
        """Return the name of a stored tensor, arranged by the layouts of its axes; new values are `fill`, see `spread`."""
        key = (name, fill, group, *((axis, layout.tobytes()) for axis, layout in layouts.items()))
        if group == 1 and not any((layout == NEW).any() for layout in layouts.values()):
            return name
        if key in self.made:
            return self.made[key]
        made = self.made[key] = f'{name}_padded' + (f'_{n}' if (n := sum(k[0] == name for k in self.made)) else '')
        if name in self.graph.values:
            value = self.graph.values[name]
            value = dense(value, group) if group > 1 else value
            for axis, layout in layouts.items():
                value = spread(value, layout, axis, fill)
            return self._constant(made, value)
        node, new = self.graph.producer[name], NodeProto()
        new.CopyFrom(node)
        new.name, new.output[0] = f'{node.name}_padded', made
        new.input[0] = self._stored(node.input[0], layouts, fill, group)
        for i, each in enumerate(node.input[1:], 1):
            if self.graph.values[each].ndim:
                axis = attribute(node, 'axis', 1)
                of_axis = {0: layouts[axis]} if axis in layouts else {}
                new.input[i] = self._stored(each, of_axis, None if i == 1 else 0)
        self.before.append(new)
        return made

    def _check(self, model: ModelProto) -> None:
        """Raise QatError unless the shapes of the padded graph are those of the layouts."""
        types, _ = infer(model)
        for name, number in self.channels.number.items():
            if name in types:
                shape = list(self.types[name][1])
                shape[CHANNELS] = len(self.layout(name))
                if tuple(shape) != types[name][1]:
                    raise QatError(f'{name}: padded to {types[name][1]}, not {tuple(shape)}; please report this model, and export with --no-pad')


def _set(node: NodeProto, name: str, value: int) -> None:
    for a in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(a)
    node.attribute.append(helper.make_attribute(name, value))


def _read(nodes: Sequence[NodeProto], outputs: set[str]) -> Iterator[NodeProto]:
    """Return the nodes that contribute to the outputs."""
    read, found = set(outputs), []
    for node in reversed(nodes):
        if read.intersection(node.output):
            read.update(node.input)
            found.append(node)
    return reversed(found)


def pad(
    model: ModelProto,
    multiple: int = 32,
    groups: Groups = 'pad',
    keep: Callable[[str], bool] = lambda name: False,
) -> Padding:
    """Round the channels of a graph up to a multiple, in a copy."""
    padder = Padder(model, _rounded(multiple), groups, keep)
    made = padder.padded()
    return Padding(made, *_added(model, made, multiple))


def _added(model: ModelProto, made: ModelProto, multiple: int) -> tuple[int, float, list[str]]:
    counts = []
    for each in (model, made):
        graph, (types, _) = Graph(each), infer(each)
        convs = [n for n in graph.nodes if n.op_type in CONVS]
        widths = {name_of(n): (types[n.input[0]][1][1], types[n.output[0]][1][1]) for n in convs}
        counts.append((sum(k for _, k in widths.values()), sum(flops(graph, types, n) for n in convs)))
    left = [name for name, found in widths.items() if any(n % multiple for n in found)]
    return counts[1][0] - counts[0][0], counts[1][1] / counts[0][1], left
