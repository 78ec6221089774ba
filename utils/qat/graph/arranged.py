"""Arrange the channels of stored tensors, such as weights behind Q and DQ, for convolutions that read or write others."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from utils.qat.graph.onnx_graph import Graph, attribute

NEW = -1  # in a layout, in place of the number of a channel
# int [C of the new tensor]: the channel of the old tensor that stands here, or NEW. None is left out
Layout: TypeAlias = np.ndarray


def spread(values: np.ndarray, layout: Layout, axis: int, fill: float | None = 0) -> np.ndarray:
    """Arrange values along an axis by a layout. New ones are `fill`, None for the first value."""
    wide = values.take(np.where(layout == NEW, 0, layout), axis)
    if fill is not None:
        wide[(slice(None),) * axis + (layout == NEW,)] = fill
    return wide


class Arranged:
    """Stored tensors of a graph in new layouts, each made once.

    Attributes:
        nodes: the nodes of the new graph so far, to which the Q, DQ and Casts of new tensors are added.
    """

    def __init__(self, model: ModelProto, graph: Graph, suffix: str) -> None:
        """suffix: of the names of new tensors."""
        self.model, self.graph, self.suffix = model, graph, suffix
        self.nodes: list[NodeProto] = []
        self._made: dict[tuple, str] = {}  # a stored tensor and its layouts → its new name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Store a value, and return its name."""
        self.model.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def stored(self, name: str, layouts: Mapping[int, Layout], fill: float | None = 0) -> str:
        """Arrange a stored tensor, perhaps behind Q and DQ, by layouts of its axes, and return the name of the new one.

        fill: see `spread`.
        """
        if all(np.array_equal(layout, range(len(layout))) for layout in layouts.values()):
            return name
        key = name, fill, *((axis, layout.tobytes()) for axis, layout in layouts.items())
        if key not in self._made:
            number = sum(made[0] == name for made in self._made)
            self._made[key] = f'{name}/{self.suffix}{number or ""}'
            if name in self.graph.values:
                value = self.graph.values[name]
                for axis, layout in layouts.items():
                    value = spread(value, layout, axis, fill)
                self.constant(self._made[key], value)
            else:
                self._copy(self.graph.producer[name], self._made[key], layouts, fill)
        return self._made[key]

    def _copy(self, node: NodeProto, name: str, layouts: Mapping[int, Layout], fill: float | None) -> None:
        """Add a copy of a Q, DQ or Cast of a stored tensor that makes the new tensor `name`."""
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name, copy.output[0] = name, name
        copy.input[0] = self.stored(node.input[0], layouts, fill)
        axis = attribute(node, 'axis', 1)
        for i, each in enumerate(node.input[1:], 1):  # scale, and zero point; a new channel has those of the first
            if self.graph.values[each].ndim and axis in layouts:
                copy.input[i] = self.stored(each, {0: layouts[axis]}, None)
        self.nodes.append(copy)
