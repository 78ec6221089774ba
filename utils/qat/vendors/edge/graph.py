"""ONNX graphs of checkpoints for edge chips: the last pass over a file, and the audit's rules."""

from functools import partial

from onnx import ModelProto

from utils.qat.graph.audit_rules import SHARED, adds, moves
from utils.qat.graph.passes import absorb_relus, drop_repeated_qdq

# Not `moves`: the head's arithmetic, which no chip computes, joins boxes and classes of two scales
RULES = (*(rule for rule in SHARED if rule is not moves), partial(adds, one_scale=False))


def finish(model: ModelProto) -> ModelProto:
    """Drop what changes no value, in place; integers stay signed, as compilers for these chips want them."""
    return absorb_relus(drop_repeated_qdq(model, behind_moves=False))
