"""A target is an engine, as far as the placement of Q/DQ depends on it.

It says which activation functions have Q/DQ, which form the file has, and which faults the audit looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import onnx

from utils.qat.config.targets import DEFAULT_TARGET, TARGETS
from utils.qat.core.errors import QatError
from utils.qat.graph.audit_rules import CHECKS, Finding
from utils.qat.graph.onnx_graph import Graph


@dataclass(frozen=True)
class Target:
    """An engine.

    Attributes:
        name: a key of TARGETS.
        activations: names of activation functions that have Q/DQ on both sides, because the engine does not fuse them into a
            convolution.
        finish: last pass over an exported graph; it changes no value.
        checks: rules of the audit.
        only_here: why TensorRT cannot read the file, and what other engines lose by it, a clause; '' if every engine takes it.
    """

    name: str
    activations: frozenset[str] = frozenset()
    finish: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda model: model
    checks: tuple[Callable[[Graph], Iterator[Finding]], ...] = CHECKS
    only_here: str = ''

    @property
    def title(self) -> str:
        """The name of the engine in texts."""
        return TARGETS[self.name]

    def require_tensorrt(self, what: str) -> None:
        """Raise QatError if TensorRT cannot read the files of this target. what: the file or flag that is for TensorRT."""
        if self.only_here:
            raise QatError(
                f'{what}: the checkpoint was quantized for {self.title}, and {self.only_here}; quantize with --target tensorrt'
            )


def load_target(name: Any) -> Target:
    """Load the file of a target and return its TARGET.

    Args:
        name: a key of TARGETS, if the file or checkpoint that it comes from is sound.

    Raises:
        QatError: there is no such target.
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise QatError(f'its target is {str(name)[:50]!r}, not {", ".join(TARGETS)}; quantize or export the model anew')
    return import_module(f'{__package__}.{name}').TARGET


def target_of_recipe(recipe: Mapping[str, Any] | None) -> Target:
    """Return the target of a checkpoint. recipe: settings of its quantization; None for a float model.

    Raises:
        QatError: see `load_target`.
    """
    return load_target((recipe or {}).get('target', DEFAULT_TARGET))


def target_of(model: onnx.ModelProto) -> Target:
    """Return the target that the metadata of a graph names.

    Raises:
        QatError: there is no such target.
    """
    return load_target(next((p.value for p in model.metadata_props if p.key == 'target'), DEFAULT_TARGET))
