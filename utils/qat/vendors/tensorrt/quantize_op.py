"""Model → exported program in the form that Torch-TensorRT takes: `torch.ops.tensorrt.quantize_op` in place of Q and DQ.

ModelOpt defines the operator, and Torch-TensorRT converts it to Q/DQ with scale = amax / 127 in FP32. Sources: torch-tensorrt 2.14.0
(dynamo/conversion/impl/quantize.py) and nvidia-modelopt 0.47.0 (torch/quantization/tensor_quant.py):

- amax of an activation is one number; amax of a weight has the shape of its axis 0, [K, 1, 1, 1]. Other axes are refused.
- An amax must be a constant. Ours is a buffer, and the view of it is folded by the compiler.
- DQ has the type of the operator's input. So the types of the program are the types of the engine.
- ModelOpt's `export_torch_mode` affects only its own quantizers. `QuantizeOps` switches ours.
"""

import operator
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from models.deploy.agreement import traceable_copy
from models.quantize.blocks import without_groups
from models.quantize.network import require_known_head
from models.quantize.quantizers import FixedScales, Quantizer, _along, named_quantizers
from utils.qat.core.upstream import Network
from utils.qat.graph import moves

DECODED = 'cv2', 'cv3', 'cv4'  # branches of a head, whose last convolutions the decoding reads


class QuantizeOps(FixedScales):
    """Context in which the quantizers of a model call `quantize_op`. model: quantized, calibrated."""

    def _quantize(self, quantizer: Quantizer, inputs: torch.Tensor) -> torch.Tensor:
        axis, amax = quantizer._axis, quantizer._amax
        if axis is not None:
            amax = _along(axis, amax, inputs)
        # 8 bits, of which 0 are an exponent; not unsigned; -128 belongs to the range
        return torch.ops.tensorrt.quantize_op(inputs, amax, 8, 0, False, False)


class Detector(nn.Module):
    """A model with the name of the ONNX file's input: Torch-TensorRT names the inputs of an engine after those of forward.

    `model` is in the form of `traceable_copy`. half: FP16 up to the convolutions whose outputs are decoded; inputs, decoding and
    outputs stay FP32.
    """

    def __init__(self, model: Network, half: bool) -> None:
        super().__init__()
        self.model, self.half_inside = model, half
        if not half:
            return
        require_known_head(model, '--dtype fp16', 'give --dtype fp32')
        head = model.half().model[-1]
        head.dfl.float()
        last = [branch[-1] for name in DECODED for branch in getattr(head, name, ())]
        for layer in (*last, *([head.proto] if hasattr(head, 'proto') else ())):
            layer.register_forward_hook(lambda _module, _inputs, output: output.float())

    def forward(self, images: torch.Tensor) -> object:
        """Predict: images FP32 [B, 3, H, W] in 0..1 → what the ONNX file returns, FP32."""
        return self.model(images.half() if self.half_inside else images)


def quantize_op_program(
    model: Network, imgsz: Sequence[int], batch: int = 1, dynamic: bool = False, half: bool = False
) -> ExportedProgram:
    """Export a fused model, float or quantized, with `quantize_op` where the ONNX file has Q/DQ.

    batch: with `dynamic`, which leaves the axis open, the largest. half: see `Detector`. Raises QatError if the head of the model has
    no FP16 form.
    """
    detector = Detector(without_groups(traceable_copy(model)), half)
    images = torch.zeros(batch, 3, *imgsz, device=next(detector.parameters()).device)
    shapes = {'images': {0: Dim('batch', min=1, max=batch)}} if dynamic else None
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        QuantizeOps(detector) if named_quantizers(detector) else nullcontext(),
    ):
        warnings.filterwarnings('ignore', message='The tensor attributes .* were assigned during export')  # its anchors
        program = torch.export.export(detector, (images,), dynamic_shapes=shapes, strict=False)
    program = program.run_decompositions({})  # without in-place operators
    merge_concats(program)
    merge_duplicates(program)
    quantize_moves(program)
    merge_duplicates(program)
    program.graph.lint()
    program.graph_module.recompile()
    return program


def amax_of(program: ExportedProgram, node: Node) -> torch.Tensor:
    """Return the amax of a `quantize_op` node as the quantizer keeps it, [] or [K]."""
    source = node.all_input_nodes[1]
    while source.op != 'placeholder':  # the view of a weight's amax
        source = source.all_input_nodes[0]
    return program.state_dict[program.graph_signature.inputs_to_buffers[source.name]]


def merge_concats(program: ExportedProgram) -> None:
    """Merge a Concat into the Concat that alone reads it, as the ONNX exporter does: no Q/DQ goes between the two."""
    concat = torch.ops.aten.cat.default
    for node in list(program.graph.nodes):
        if node.target is not concat:
            continue
        parts = [
            given.args[0]
            if given.target is concat and len(given.users) == 1 and given.args[1:] == node.args[1:]
            else [given]
            for given in node.args[0]
        ]
        node.args = ([part for group in parts for part in group], *node.args[1:])
    program.graph.eliminate_dead_code()


def quantize_moves(program: ExportedProgram) -> None:
    """Put `quantize_op` on the inputs of moves whose outputs are quantized with one amax; see moves.quantize_moves."""
    graph = program.graph

    def readers(node: Node) -> list[Node]:
        return [
            reader for user in node.users for reader in (readers(user) if user.target is operator.getitem else [user])
        ]

    def given(move: Node) -> dict[Node, bytes | None]:
        return {node: _grid(program, node) for node in move.all_input_nodes if node.op != 'placeholder'}

    def put(move: Node, source: Node, like: Node) -> None:
        with graph.inserting_before(move):
            new = graph.call_function(like.target, (source, *like.args[1:]))
        new.meta = {'val': source.meta['val']}
        move.replace_input_with(source, new)

    in_order = [node for node in reversed(graph.nodes) if _is_move(node)]
    moves.quantize_moves(in_order, lambda move: {_grid(program, r): r for r in readers(move)}, given, put)


def _is_move(node: Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == 'aten' and op.overloadpacket.__name__ in moves.IN_PYTORCH


def merge_duplicates(program: ExportedProgram) -> None:
    """Merge operators that compute the same. All readers of a tensor that quantize it with one amax then share one `quantize_op`."""
    first: dict[object, Node] = {}
    for node in list(program.graph.nodes):
        if node.op != 'call_function':
            continue
        arguments = (str(node.args[0]), grid) if (grid := _grid(program, node)) else (str(node.args), str(node.kwargs))
        kept = first.setdefault((node.target, *arguments), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)


def _grid(program: ExportedProgram, node: Node) -> bytes | None:
    """Return the amax of a `quantize_op` node, to compare; None of another node."""
    if node.op != 'call_function' or not str(node.target).startswith('tensorrt.quantize_op'):
        return None
    return amax_of(program, node).cpu().numpy().tobytes()
