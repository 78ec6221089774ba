"""Read an untrusted ONNX file, and define which files are accepted."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from utils.qat.core.errors import QatError, reporting
from utils.qat.core.text import is_printable
from utils.qat.graph.moves import MOVES
from utils.qat.graph.onnx_graph import ELEMENTWISE, IN_THE_WAY, QDQ, QUANTIZABLE, WEIGHTED, required_inputs

DEEPEST, MOST_NODES = 20, 1_000_000  # depth of nested function calls; nodes after all calls are inlined
READS = {  # operator → its least number of inputs
    **dict.fromkeys((*ELEMENTWISE, *MOVES, *QUANTIZABLE, *IN_THE_WAY), 1),
    **dict.fromkeys((*QDQ, *WEIGHTED), 2),
}

INVALID = DecodeError, onnx.checker.ValidationError, OSError, RuntimeError, ValueError, TypeError, ArithmeticError


def load(path: str | Path) -> onnx.ModelProto:
    """Read an ONNX file that ONNX accepts and that computes something."""
    with _reading(path):
        model = onnx.load(path)
        _require_bounded(model, path)
        onnx.checker.check_model(model)
    if not (
        model.graph.node
        and required_inputs(model)
        and model.graph.output
        and any(o.domain in ('', 'ai.onnx') for o in model.opset_import)
    ):
        raise QatError(
            f'{path}: no valid ONNX file (without inputs, nodes, outputs or an operator set); write it with export_qat.py'
        )
    if any(not node.output or len(node.input) < READS.get(node.op_type, 0) for node in model.graph.node):
        raise QatError(f'{path}: no valid ONNX file (a node lacks its inputs or outputs); write it with export_qat.py')
    names = [text for node in model.graph.node for text in (node.name, node.op_type, *node.input, *node.output)]
    if not all(
        isinstance(text, str) and is_printable(text)
        for text in (*names, *(v.name for v in (*model.graph.input, *model.graph.output)))
    ):
        raise QatError(
            f'{path}: no valid ONNX file (names of nodes are no text, or have control characters); write it with export_qat.py'
        )
    return model


def require_bounded(path: str | Path) -> None:
    """Raise QatError if a file is too large for other libraries, which all inline function calls.

    Functions that call others twice, 40 levels deep, take 3 kB and become 2^40 nodes, and long chains overflow a stack.
    """
    with _reading(path):
        _require_bounded(onnx.load(path, load_external_data=False), path)


def _require_bounded(model: onnx.ModelProto, path: str | Path) -> None:
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        """Count nodes, those of functions and inner graphs included."""
        if depth > DEEPEST:
            raise QatError(f'{path}: its functions call each other more than {DEEPEST} deep; no network is like that')
        total = 0
        for node in nodes:
            key = node.domain, node.op_type
            if key in functions and key not in sizes:
                sizes[key] = size(functions[key].node, depth + 1)
            inner = [graph for a in node.attribute for graph in (a.g, *a.graphs)]
            total += 1 + sizes.get(key, 0) + sum(size(graph.node, depth + 1) for graph in inner if graph.node)
        if total > MOST_NODES:
            raise QatError(f'{path}: its functions make more than {MOST_NODES} nodes; no network is like that')
        return total

    if functions:
        size(model.graph.node, 0)


def _reading(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Convert ONNX's errors for an invalid file to a QatError."""
    # ValueError and TypeError: the weights are in another file, which is incomplete; RuntimeError: its name is too long
    return reporting(
        f'{path}: no valid ONNX file', *INVALID, MemoryError, remedy='write it with export_qat.py', most=300
    )
