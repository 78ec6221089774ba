"""Rules that find layers of an engine that cost too much time: an `Engine` in, `LayerFinding`s out, one function per rule.

TensorRT chooses layers during the build, so the rules read the result: types of tensors, kinds of layers, names of
kernels. If a name gives no answer, it is `unknown`, never guessed. The profile is the only measurement.

Sources: NVIDIA's Engine Explorer (before it was removed from the TensorRT repository), and the section on Q/DQ
placement in the developer guide.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from utils.qat.vendors.tensorrt.engine.layers import FLOATS, Engine, Layer

COSTS = {  # kind of finding → meaning
    'float output': 'INT8 convolutions that return float',
    'type change': 'reformats that change the data type',
    'no tensor cores': 'convolutions that do not run on tensor cores',
    'unfused Q/DQ': 'Q/DQ that run as layers of their own',
}
# Words in names of kernels. Tensor cores: the shape of the instruction (tensor16x8x32, h1688, i8816, warpgroup), or its name. CUDA
# cores: fused multiply-add (ffma, hfma), dot products of four bytes (dp4a, int8x4), cuDNN's old scudnn and hcudnn. "xmma" says
# nothing: it is the name of a library that has kernels of both kinds.
TENSOR_CORES = re.compile(
    r'tensor\d+x\d+|tensorop|warpgroup|(?:[hiqg]|wg|utc)mma|[a-z](?:884|8816|1688|16816|16832)(?!\d)'
)
CUDA_CORES = re.compile(r'simt|[fh]fma|dp4a|int8x4|[sh]cudnn')
# Myelin, TensorRT's second compiler, names a kernel by its operations: __myl_MulMinMaxRounCast_myl0_0 is a Q.
MYELIN = re.compile(r'^__myl_((?:[A-Z][a-z]+)+)')
MOVES = {'Cast', 'Move', 'Resh', 'Tran'}
QUANTIZES = {*MOVES, 'Mul', 'Div', 'Min', 'Max', 'Clip', 'Roun'}


@dataclass
class LayerFinding:
    """A layer that breaks a rule."""

    kind: str  # a key of COSTS
    layer: Layer
    detail: str
    advice: str  # how to repair it


def is_convolution(layer: Layer) -> bool:
    """Tell whether `layer` is a convolution, or has one fused into it."""
    return re.search('conv|correlation', layer.kind + layer.operation, re.IGNORECASE) is not None


def _myelin(layer: Layer) -> set[str]:
    """Read the operations of a kernel of Myelin from its name; empty for other kernels."""
    match = MYELIN.match(layer.name)
    return set(re.findall('[A-Z][a-z]+', match[1])) if match else set()


def is_qdq(layer: Layer) -> bool:
    """Tell whether `layer` quantizes or dequantizes and does nothing else."""
    if layer.kind.lower() in ('quantize', 'dequantize') or layer.origin == 'QDQ':
        return True
    alone = layer.kind == 'Scale' or (_myelin(layer) and _myelin(layer) <= QUANTIZES and len(layer.inputs) == 1)
    return bool(alone) and '' not in layer.types and layer.types.count('INT8') == 1


def is_reformat(layer: Layer) -> bool:
    """Tell whether `layer` only copies a tensor into another type or memory layout."""
    return not is_qdq(layer) and (
        layer.kind.lower() in ('reformat', 'cast') or (bool(_myelin(layer)) and _myelin(layer) <= MOVES)
    )


def tensor_cores(layer: Layer) -> str:
    """Tell from the name of a layer's kernel whether it runs on tensor cores: 'yes', 'no' or 'unknown'."""
    tactic = layer.tactic.lower()
    return 'no' if CUDA_CORES.search(tactic) else 'yes' if TENSOR_CORES.search(tactic) else 'unknown'


def _readers(engine: Engine) -> list[list[Layer | None]]:
    """List the readers of each layer; None stands for an output of the engine."""
    reading: list[list[Layer | None]] = [[] for _ in engine.layers]
    for source, reader, _ in engine.edges():
        if source is not None:
            reading[source].append(None if reader is None else engine.layers[reader])
    return reading


def _at_the_edge(engine: Engine, layer: Layer, readers: list[Layer | None]) -> str:
    """Return 'input' or 'output' if `layer` stands between the engine and its caller, else ''."""
    given = {t.name for t in engine.inputs}
    return 'input' if any(t.name in given for t in layer.inputs) else 'output' if None in readers else ''


def float_outputs(engine: Engine) -> Iterator[LayerFinding]:
    """Find INT8 convolutions that return float."""
    for layer, readers in zip(engine.layers, _readers(engine)):
        if not is_convolution(layer) or layer.types[0] != 'INT8' or layer.types[1] not in FLOATS:
            continue
        inside = [r for r in readers if r is not None]
        if any(is_qdq(r) or is_reformat(r) for r in inside):
            advice = (
                'its output is quantized by a layer of its own: put the Q right behind the convolution and its activation, one scale '
                'for all readers; where an Add is fused into it, quantize the other input of that too'
            )
        elif any(is_convolution(r) and r.types[0] in FLOATS for r in inside):
            advice = 'a float convolution reads it: quantize that one too, unless it is one of the last of the head'
        elif None in readers:
            advice = 'it is an output of the engine: nothing to do'
        else:
            advice = 'an operator that runs in float reads it: put Q/DQ on its output, so that it can be fused with the convolution'
        yield LayerFinding('float output', layer, ' → '.join(layer.types), advice)


def type_changes(engine: Engine) -> Iterator[LayerFinding]:
    """Find reformats that change the data type."""
    for layer, readers in zip(engine.layers, _readers(engine)):
        before, after = layer.types
        if not is_reformat(layer) or before == after or not {before, after} <= {'INT8', *FLOATS}:
            continue
        edge = _at_the_edge(engine, layer, readers)
        if edge:
            advice = f'at the {edge} of the engine: build with --{edge}IOFormats=fp16:chw (trtexec) if the caller can use that type'
        elif 'INT8' in layer.types:
            advice = 'float and INT8 layers alternate: quantize what runs in float between them, or leave both in float'
        else:
            advice = (
                'float layers of two types: right in front of the decoding, which is FP32; elsewhere export with --trt 11, or build '
                'with --fp16 --int8 (--trt 8 and 10)'
            )
        yield LayerFinding('type change', layer, f'{before} → {after}', advice)


def off_tensor_cores(engine: Engine) -> Iterator[LayerFinding]:
    """Find convolutions in INT8 or half precision that do not run on tensor cores."""
    for layer in engine.layers:
        if not is_convolution(layer) or layer.precision == 'FP32' or tensor_cores(layer) != 'no':
            continue
        shape = layer.inputs[0].shape if layer.inputs else None
        channels = shape[1] if shape and len(shape) == 4 else None
        if channels is not None and channels < 16:
            advice = 'it has too few input channels to fill a tensor core: nothing to do'
        else:
            advice = (
                'make its channels multiples of 16 (INT8) or 8 (FP16), and let the builder try more kernels: '
                '--builderOptimizationLevel=5'
            )
        yield LayerFinding(
            'no tensor cores', layer, f'{layer.precision}, {channels or "?"} input channels, {layer.tactic}', advice
        )


def unfused_qdq(engine: Engine) -> Iterator[LayerFinding]:
    """Find Q and DQ that run as layers of their own."""
    for layer, readers in zip(engine.layers, _readers(engine)):
        if not is_qdq(layer):
            continue
        if _at_the_edge(engine, layer, readers) == 'input':
            advice = 'the first Q has nothing to be fused with: nothing to do'
        else:
            advice = (
                'no kernel took it in: give all readers of the tensor one scale, and quantize the operator beside it '
                '(scripts/audit_onnx.py names it)'
            )
        yield LayerFinding('unfused Q/DQ', layer, ' → '.join(t or '?' for t in layer.types), advice)


CHECKS = (float_outputs, type_changes, off_tensor_cores, unfused_qdq)


def findings(engine: Engine) -> list[LayerFinding]:
    """Check `engine` by all rules; findings are in the order of the rules, of each rule the longest layer first."""
    return [f for check in CHECKS for f in sorted(check(engine), key=lambda f: -(f.layer.ms or 0))]
