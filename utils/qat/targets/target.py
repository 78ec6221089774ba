"""A target: the properties of an engine that determine the placement of Q/DQ.

graph.passes.LAST has the last pass over its graphs, and graph.audit_rules.rules_of the rules of its audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from utils.qat.config.tables import BACKENDS, DEFAULT_TARGET, TARGETS
from utils.qat.core.errors import QatError


@dataclass(frozen=True)
class Target:
    """An engine."""

    name: str  # a key of TARGETS
    # whether activation functions have Q/DQ too, because the engine does not fuse them into a convolution
    activations: bool = False
    # of activations. 'none': 0. 'unsigned': the smallest integer for values that are never negative, such as those of a ReLU, so
    # that they use all 256 integers; else 0. 'any': computed from the values
    zero_points: Literal['none', 'unsigned', 'any'] = 'none'
    # default policy of a residual Add → policy of this engine, see models/quantize/blocks.py, QuantResidual
    add_policies: Mapping[str, str] = field(default_factory=dict)
    # outputs of the head (box, class, mask) that INT8 convolutions compute. Their results are float, without Q/DQ
    int8_outputs: frozenset[str] = frozenset()
    activation: str = 'keep'  # what --activation auto is for a network of YOLOv9
    gains_by: tuple[str, ...] = ('relu',)  # keys of --activation that are faster than SiLU in it, the fastest last
    only_here: str = ''  # a clause: why TensorRT cannot read a file with zero points, and its drawback in other engines
    in_openvino: str = ''  # a clause: the drawback of a detector's file in OpenVINO; '' for none
    in_openvino_classes: str = ''  # likewise for a classifier's file
    simulated_in: tuple[str, ...] = ()  # backends that compute INT8 convolutions of its files in float
    multiple: int = 1  # its INT8 kernels want widths that are a multiple of this, see graph/padding.py

    @property
    def title(self) -> str:
        """The name of the engine in texts."""
        return TARGETS[self.name].title

    def places_as(self, other: Target) -> bool:
        """Tell whether places and ranges of Q/DQ are the same as for `other`."""
        mine, theirs = ((t.activations, t.zero_points, t.add_policies, t.int8_outputs) for t in (self, other))
        return mine == theirs

    def require_tensorrt(self, what: str, zero_points: bool) -> None:
        """Raise QatError, which names the file or flag `what`, if TensorRT cannot read the file of a checkpoint.

        `zero_points`: whether the checkpoint has zero points other than 0.
        """
        if zero_points:
            raise QatError(
                f'{what}: the checkpoint was quantized for {self.title}, and {self.only_here}; quantize with --target tensorrt'
            )


def simulated_note(metadata: Mapping[str, str], backend: str) -> list[str]:
    """Return a line if `backend` only simulates the INT8 of an exported file, by the file's metadata; else nothing.

    Raises QatError if the metadata name no target.
    """
    if backend not in metadata.get('simulated_in', '').split(','):
        return []
    title, made_for = BACKENDS[backend].title, load_target(metadata.get('target', DEFAULT_TARGET)).title
    return [
        f'{title} computes INT8 convolutions of this file in float: it was quantized for {made_for}; '
        f'for speed in {title}: qat.py quantize --target {backend}'
    ]


def padded_note(metadata: Mapping[str, str], backend: str) -> list[str]:
    """Return a line if the widths of an exported file are padded for another engine, by the file's metadata; else nothing."""
    if 'padded' not in metadata:
        return []
    title, other = BACKENDS[backend].title, '--include openvino' if backend == 'openvino' else '--no-pad'
    return [
        f'widths of this file are padded for {TARGETS[DEFAULT_TARGET].title}, which costs {title} time; a file without: export_qat.py {other}'
    ]


def load_target(name: Any) -> Target:
    """Import the module of a target and return its TARGET. Raises QatError if `name`, which may come from a file, is no key of TARGETS."""
    if not isinstance(name, str) or name not in TARGETS:
        raise QatError(f'its target is {str(name)[:50]!r}, not {", ".join(TARGETS)}; quantize or export the model anew')
    return import_module(f'{__package__}.{name}').TARGET


def target_of_recipe(recipe: Mapping[str, Any] | None) -> Target:
    """Return the target of a checkpoint by the settings of its quantization (None for a float model); see `load_target`."""
    return load_target((recipe or {}).get('target', DEFAULT_TARGET))
