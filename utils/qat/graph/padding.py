"""Pad the channels of an exported graph to widths that INT8 kernels are made for; no output changes.

New channels have weights and biases of 0, and all weights that read them are 0. So it does not matter what an activation function
makes of them. channels.py finds where they go.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper

from utils.qat.core.errors import QatError
from utils.qat.graph.arranged import Arranged
from utils.qat.graph.channels import CHANNELS, ELEMENTWISE, Channels
from utils.qat.graph.onnx_graph import CONVS, Graph, attribute, name_of, replace_nodes
from utils.qat.graph.passes import drop_unneeded, set_metadata
from utils.qat.graph.tensor_types import flops, infer

PADDED = 'padded'  # key of the file's metadata; its value is the multiple


class Conv(NamedTuple):
    """Widths and work of a convolution."""

    inputs: int
    outputs: int
    flops: int


@dataclass
class Padding:
    """The additions of a padded graph.

    Attributes:
        channels: new output channels of convolutions.
        operations: share of the multiply-adds that are new, 0.5 for half as many again.
        left: convolutions with a width that is no multiple → their widths.
    """

    multiple: int
    channels: int
    operations: float
    left: dict[str, Conv]

    def __str__(self) -> str:
        left = ', '.join(f'{name} ({conv.inputs} to {conv.outputs})' for name, conv in self.left.items())
        return (
            f'widths padded to multiples of {self.multiple}: {self.channels} channels more, '
            f'{self.operations:.1%} more multiply-adds; left with other widths: {left or "none"}'
        )


def pad(model: ModelProto, multiple: int) -> Padding | None:
    """Round the widths of a graph up to a multiple, in place; None if nothing changes.

    Its constants must be initializers, and no node has a graph inside. Raises QatError if a tensor of the padded graph has not the
    shape of its layout.
    """
    before, channels = _convs(model), Channels(model, multiple)
    if not channels.grow(*channels.number):
        return None
    _Padder(model, channels).pad()
    _require_shapes(model, channels)
    set_metadata(model, **{PADDED: multiple})
    after = _convs(model)
    outputs, work = ([sum(c[i] for c in convs.values()) for convs in (before, after)] for i in (1, 2))
    return Padding(
        multiple,
        outputs[1] - outputs[0],
        work[1] / work[0] - 1,
        {name: conv for name, conv in after.items() if any(n % multiple for n in conv[:2])},
    )


def _convs(model: ModelProto) -> dict[str, Conv]:
    graph, (types, _) = Graph(model), infer(model)
    return {
        name_of(node): Conv(
            types[node.input[0]][1][CHANNELS], types[node.output[0]][1][CHANNELS], flops(graph, types, node) or 0
        )
        for node in graph.nodes
        if node.op_type in CONVS and node.input[0] in types and node.output[0] in types
    }


def _require_shapes(model: ModelProto, channels: Channels) -> None:
    """Raise QatError unless the tensors of a padded graph have the shapes of their layouts."""
    report = 'please report this model, and export with --no-pad'
    try:
        types, _ = infer(model)
    except QatError as e:
        raise QatError(f'padded widths do not fit, {e}; {report}') from e
    for name in channels.number:
        wanted = list(channels.types[name][1])
        wanted[CHANNELS] = len(channels.layout(name))
        if name in types and list(types[name][1]) != wanted:
            raise QatError(f'padded widths do not fit, {name}: {list(types[name][1])}, not {wanted}; {report}')


class _Padder:
    """Rewrites the nodes and constants of a graph by the layouts of its tensors."""

    def __init__(self, model: ModelProto, channels: Channels) -> None:
        self.model, self.channels, self.graph = model, channels, channels.graph
        self.arranged = Arranged(model, channels.graph, 'padded')

    def pad(self) -> None:
        """Pad the graph, in place."""
        for node in self.graph.nodes:
            if any(name in self.channels.number for name in node.output):
                self._pad_node(node)
            self.arranged.nodes.append(node)
        del self.model.graph.value_info[:]
        # Weights and shape arithmetic of before have no reader
        drop_unneeded(replace_nodes(self.model, self.arranged.nodes))

    def _pad_node(self, node: NodeProto) -> None:
        channels, op = self.channels, node.op_type
        if op in CONVS:
            self._pad_conv(node)
        elif not channels.grow(*node.input, *node.output):
            return
        elif op == 'Split' and channels.along(node):
            sizes = [len(channels.layout(name)) for name in node.output]
            _set(node, num_outputs=None)
            del node.input[1:]
            node.input.append(self.arranged.constant(f'{node.output[0]}/sizes', np.array(sizes, np.int64)))
        elif op == 'Slice':
            self._pad_slice(node)
        elif op == 'Resize':
            self._pad_resize(node)
        elif op in {'Div', *ELEMENTWISE}:
            self._pad_constants(node)

    def _pad_slice(self, node: NodeProto) -> None:
        channels, result = self.channels, node.output[0]
        starts, ends, *rest = (channels.small[name].copy() for name in node.input[1:])
        axes = list((rest[0] if rest else np.arange(len(starts))) % channels.rank(node.input[0]))
        if CHANNELS in axes:
            at = axes.index(CHANNELS)
            # New channels stand behind those of their run, so a part begins with an old one
            starts[at] = np.flatnonzero(channels.layout(node.input[0]) == channels.start(node))[0]
            ends[at] = starts[at] + len(channels.layout(result))
            node.input[1] = self.arranged.constant(f'{result}/starts', starts)
            node.input[2] = self.arranged.constant(f'{result}/ends', ends)

    def _pad_resize(self, node: NodeProto) -> None:
        """Set the sizes of a Resize that has constant ones."""
        axes = list(attribute(node, 'axes', range(self.channels.rank(node.output[0]))))
        if len(node.input) > 3 and node.input[3] in self.graph.values and CHANNELS in axes:
            sizes = self.graph.values[node.input[3]].copy()
            sizes[axes.index(CHANNELS)] = len(self.channels.layout(node.output[0]))
            node.input[3] = self.arranged.constant(f'{node.output[0]}/sizes', sizes)

    def _pad_constants(self, node: NodeProto) -> None:
        """Arrange those constants of an elementwise operator that have a value for each channel."""
        result = node.output[0]
        for i, name in enumerate(node.input):
            if name and name in self.graph.fixed:
                shape = self.channels.types[name][1]
                axis = len(shape) - self.channels.rank(result) + CHANNELS
                if axis >= 0 and shape[axis] > 1:
                    node.input[i] = self.arranged.stored(name, {axis: self.channels.layout(result)}, None)

    def _pad_conv(self, node: NodeProto) -> None:
        channels, given, result = self.channels, node.input[0], node.output[0]
        if not channels.grow(given, result):
            return
        outputs, inputs = (0, 1) if node.op_type == 'Conv' else (1, 0)  # axes of a weight
        layouts = {outputs: channels.layout(result), inputs: channels.layout(given)}
        if channels.is_depthwise(node):
            _set(node, group=len(channels.layout(result)))
            del layouts[1]
        node.input[1] = self.arranged.stored(node.input[1], layouts)
        if len(node.input) > 2 and node.input[2]:
            node.input[2] = self.arranged.stored(node.input[2], {0: channels.layout(result)})


def _set(node: NodeProto, **attributes: int | None) -> None:
    """Set attributes of a node; None removes one."""
    for name, value in attributes.items():
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))
