"""The code of each target that works on ONNX graphs, by the target's name. This file depends on the graph.py of all rooms."""

from importlib import import_module
from types import ModuleType

import onnx

from utils.qat.config.tables import DEFAULT_TARGET, TARGETS, load_target
from utils.qat.graph.audit import Audit, audit
from utils.qat.graph.onnx_graph import metadata_value
from utils.qat.vendors.vendor import Target


def graph_of(target: str) -> ModuleType:
    """Import the graph.py of a target: its `finish` and RULES. target: a key of TARGETS."""
    return import_module(TARGETS[target].graph)


def audit_for_target(model: onnx.ModelProto) -> tuple[Target, Audit]:
    """Audit an ONNX model by the rules of the target that its metadata name; see audit.audit."""
    target = load_target(metadata_value(model, 'target', DEFAULT_TARGET))
    return target, audit(model, graph_of(target.name).RULES)
