"""Graphs for ONNX Runtime: the last pass over a file, and the audit's rules."""

from functools import partial

from onnx import ModelProto

from utils.qat.graph.audit_rules import SHARED, adds, numbers, open_ends
from utils.qat.graph.passes import absorb_relus, drop_repeated_qdq, unsigned_activations

RULES = (*SHARED, partial(adds, one_scale=False), open_ends, partial(numbers, zero_points='any'))


def finish(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, into the form that ONNX Runtime computes in integers; changes no value."""
    return unsigned_activations(absorb_relus(drop_repeated_qdq(model, behind_moves=False)))
