"""The code of each target that works on ONNX graphs, by the target's name. This file depends on the graph.py of all rooms."""

from importlib import import_module
from types import ModuleType

from utils.qat.config.tables import TARGETS


def graph_of(target: str) -> ModuleType:
    """Import the graph.py of a target: its `finish` and RULES. target: a key of TARGETS."""
    return import_module(TARGETS[target].graph)
