"""The facts of a vendor: what help texts, settings and quantization need of it, before any code of its room is loaded.

A fact that is the dotted name of a module is loaded when it is asked for, by load.py or graphs.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from utils.qat.core.errors import QatError

SIMULATED = 'INT8 simulated'  # types of a computation in float that rounds to INT8: its time says nothing about INT8
# settings of an export: of an ONNX graph, and of the NMS in it
GRAPH = 'trt', 'opset', 'no_pad', 'simplify'
NMS = tuple('topk_all iou_thres conf_thres class_agnostic nms mask_resolution pooler_scale sampling_ratio'.split())


@dataclass(frozen=True)
class Target:
    """An engine that determines the placement of Q/DQ."""

    name: str  # --target
    title: str  # of the engine in texts
    placement: str = ''  # difference from the Q/DQ placement of the default target, for `-h`
    include: str = 'onnx'  # its kind of file
    # the target whose float files, and whose backend in the benchmark, stand in for those of a chip, which computes only integers
    stand_in: str = ''
    # has `finish`, its last pass over an ONNX graph, and RULES of its audit
    graph: str = 'utils.qat.vendors.tensorrt.graph'
    # whether activation functions have Q/DQ too, because the engine does not fuse them into a convolution
    activations: bool = False
    # of activations. 'none': 0. 'unsigned': the smallest integer for values that are never negative, such as those of a ReLU, so
    # that they use all 256 integers; else 0. 'any': computed from the values
    zero_points: Literal['none', 'unsigned', 'any'] = 'none'
    # default policy of a residual Add → policy of this engine, see models/quantize/blocks.py, QuantResidual
    add_policies: Mapping[str, str] = field(default_factory=dict)
    # outputs of the head (box, class, mask) that INT8 convolutions compute. Their results are float, without Q/DQ
    int8_outputs: frozenset[str] = frozenset()
    # whether its programs take images and return the head's outputs as integers, and its convolutions end with a ReLU6
    integers: bool = False
    activation: str = 'keep'  # what --activation auto is for a network of YOLOv9
    gains_by: tuple[str, ...] = ('relu',)  # keys of --activation that are faster than SiLU in it, the fastest last
    only_here: str = ''  # a clause: why TensorRT cannot read a file with zero points, and its drawback in other engines
    in_openvino: str = ''  # a clause: the drawback of a detector's file in OpenVINO; '' for none
    in_openvino_classes: str = ''  # likewise for a classifier's file
    simulated_in: tuple[str, ...] = ()  # backends that compute INT8 convolutions of its files in float
    engine: str = ''  # suffix of the engine that is built of its file where it runs; '' if it runs the file itself
    # another program, or its page → the command that runs a detector's {file}, made of {checkpoint}, of {height} and {width}, in it
    clients: Mapping[str, str] = field(default_factory=dict)
    frigate: str = ''  # the type of its detectors in Frigate's configuration
    # whether it takes INT8 convolutions with groups. If not, a file has dense ones in their place, see blocks.without_groups
    groups: bool = True
    # channels from which on the convolution behind a Concat reads the addends of a sum in place of it, see vendors/tensorrt/sums.py
    split_sums: float = math.inf
    multiple: int = 1  # its INT8 kernels want widths that are a multiple of this, see graph/padding.py

    def places_as(self, other: Target) -> bool:
        """Tell whether places and ranges of Q/DQ are the same as for `other`."""
        mine, wanted = (
            (t.activations, t.zero_points, t.add_policies, t.int8_outputs, t.integers) for t in (self, other)
        )
        return mine == wanted

    def require_tensorrt(self, what: str, zero_points: bool) -> None:
        """Raise QatError, which names the file or flag `what`, if TensorRT cannot read the file of a checkpoint.

        `zero_points`: whether the checkpoint has zero points other than 0.
        """
        if zero_points:
            raise QatError(
                f'{what}: the checkpoint was quantized for {self.title}, and {self.only_here}; quantize with --target tensorrt'
            )


@dataclass(frozen=True)
class Backend:
    """A library that runs files."""

    title: str  # in reports and messages
    module: str  # has MEASURED, a measured.Measured
    predicts: tuple[str, ...]  # suffixes of the exported files that it runs in an evaluation
    measures: tuple[str, ...]  # suffixes of the files that it runs in the benchmark
    builders: tuple[str, ...] = ()  # Python modules that build its engines; the first that is installed is taken
    native: bool = False  # its files are programs, and loading one runs it: --backend must name it


@dataclass(frozen=True)
class FileKind:
    """A kind of file that is written."""

    suffix: str  # of the file's name, after the stem of the weights
    module: str  # has FORMAT, a formats.format.Format; MODULE:NAME if that is not its name
    options: tuple[str, ...] = ()  # those settings of ExportConfig that it reads, and not all kinds do


@dataclass(frozen=True)
class Vendor:
    """A vendor, by the names of --target, --backend and --include."""

    target: Target | None = None
    backends: Mapping[str, Backend] = field(default_factory=dict)
    formats: Mapping[str, FileKind] = field(default_factory=dict)
