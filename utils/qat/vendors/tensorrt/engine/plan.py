"""ONNX file and settings → the plan of a build, for the Python builder and for trtexec; see build.py.

A file with Q/DQ is INT8. A file with FP16 inside is strongly typed, and is built in its own types. TensorRT 11 and
TensorRT-RTX build every file in its own types.
"""

from collections.abc import Sequence
from pathlib import Path

from utils.qat.config.deploy import BuildConfig
from utils.qat.config.settings import Sides
from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.graph.audit_rules import convs_with_groups
from utils.qat.graph.onnx_file import load
from utils.qat.graph.onnx_graph import Graph, count_qdq, is_half, name_of, required_inputs
from utils.qat.vendors.tensorrt.engine.api import Capability


def closed(file: Path, name: str, shape: Sequence[int | None], batch: int, imgsz: Sides | None) -> tuple[int, ...]:
    """Fill in the open axes (None) of the input `name`: the first is the batch, axes 2 and 3 of images [B, C, H, W] are `imgsz`.

    Raises:
        QatError: another axis is open, or the file does not take images of this size.
    """
    first, rest, images = shape[:1], shape[1:], len(shape) == 4
    if images and imgsz and any(own and own != side for own, side in zip(rest[1:], imgsz)):
        raise QatError(
            f'--imgsz {" ".join(map(str, imgsz))}: {file} takes {rest[1]} x {rest[2]}; leave the flag out, or export with that --imgsz'
        )
    if images and None in rest and not imgsz:
        raise QatError(f'--imgsz: {file} leaves the image size of {name} open; say which to take')
    wanted = (None, *imgsz) if images and imgsz else rest
    sizes = tuple(size for own, side in zip(rest, wanted) if (size := own or side) is not None)
    if len(sizes) < len(rest):
        raise QatError(
            f'{file}: input {name} {list(shape)} has an open axis that is neither batch nor image size; export it with '
            'that size fixed'
        )
    return (*(own or batch for own in first), *sizes)


class Plan:
    """The plan of a build of `config.onnx` by the TensorRT `product` with the capabilities `can`.

    Attributes:
        shapes: input name → (smallest, best, largest shape).
        dynamic: an axis of an input is open.
        network: names of NetworkDefinitionCreationFlag.
        builder: names of BuilderFlag.
        precision: the engine's computation types, in words, such as 'INT8 and FP16'.
    """

    def __init__(self, config: BuildConfig, can: set[Capability], product: str) -> None:
        self.product = product
        self.config, model = config, load(config.onnx)
        inputs = {
            i.name: tuple(d.dim_value or None for d in i.type.tensor_type.shape.dim) for i in required_inputs(model)
        }
        if not all(inputs.values()):
            raise QatError(
                f'{config.onnx}: input {min(inputs, key=lambda name: len(inputs[name]))} is a single number; inputs are [B, ...]'
            )
        self.shapes = {
            name: tuple(closed(config.onnx, name, shape, n, config.imgsz) for n in self._batch(shape[0]))
            for name, shape in inputs.items()
        }
        self.dynamic = any(None in shape for shape in inputs.values())
        self.metadata = {p.key: p.value for p in model.metadata_props}
        self.nodes = [name_of(n) for n in model.graph.node]
        stored = {i.name for i in model.graph.initializer}
        integers = any(n.op_type == 'DequantizeLinear' and n.input[0] in stored for n in model.graph.node)
        if integers and Capability.TYPED not in can:
            raise QatError(
                f'{config.onnx}: stores weights as integers, which {product} cannot take; {self._export()} --trt 8'
            )
        int8 = any(count_qdq(model))
        if int8 and (groups := len(list(convs_with_groups(Graph(model))))):
            LOGGER.warning(
                f'{config.onnx} has INT8 convolutions with groups ({groups}), which TensorRT 10.6 can compute wrongly, so that AP '
                f'falls far. Export it again, from a checkpoint quantized with --target tensorrt: {self._export()}'
            )
        self._choose_flags(can, int8, is_half(model))

    def _export(self) -> str:
        """Return the command that exports the file again, without its --trt."""
        return command('export_qat.py', '--weights', self.config.onnx.with_suffix('.pt').name)

    def _batch(self, own: int | None) -> tuple[int, ...]:
        """Choose the smallest, best and largest batch; `own` is the batch of the file, None if it is open."""
        wanted = self.config.batch
        if own is None:
            return wanted or (1, 1, 1)
        if wanted and set(wanted) != {own}:
            raise QatError(
                f'--batch {",".join(map(str, wanted))}: {self.config.onnx} has a fixed batch of {own}; leave the flag out, or '
                'export with --dynamic'
            )
        return own, own, own

    def _choose_flags(self, can: set[Capability], int8: bool, half: bool) -> None:
        """Choose the flags of a file that has Q/DQ (`int8`) and FP16 (`half`) inside, and name the precision."""
        file, wanted, product = self.config.onnx, self.config.precision, self.product
        export = self._export()
        if int8 and wanted in ('fp32', 'fp16'):
            raise QatError(
                f'--precision {wanted}: {file} has Q/DQ, which are INT8; leave the flag out, or give the export of the float checkpoint'
            )
        if not int8 and wanted == 'int8':
            raise QatError(
                f'--precision int8: {file} has no Q/DQ, so nothing in it can be INT8; export the quantized checkpoint '
                '(qat.py quantize, then export_qat.py)'
            )
        explicit = ['EXPLICIT_BATCH'] * (Capability.EXPLICIT_BATCH in can)
        parts = ['INT8'] * int8 + (['FP16'] if half else ['FP32'])
        if half or Capability.PRECISION_FLAGS not in can:
            if Capability.TYPED not in can:
                raise QatError(f'{file}: FP16 outside Q/DQ, which {product} cannot take; {export} --trt 8')
            if (wanted == 'fp16' and not half) or (wanted == 'fp32' and half):
                raise QatError(
                    f'--precision {wanted}: {product} computes in the types of the file, and {file} is {" and ".join(parts)}; '
                    f'{export} --trt 11{" --half" * (wanted == "fp16")}'
                )
            if int8 and not half:
                LOGGER.warning(
                    f'{file} is FP32 outside Q/DQ, and {product} computes it so: slower than FP16. {export} --trt 11'
                )
            self.network, self.builder = ['STRONGLY_TYPED', *explicit], []
        else:
            self.network, self.builder = explicit, ['FP16'] * (wanted != 'fp32') + ['INT8'] * int8
            parts = self.builder[::-1] or ['FP32']
        self.precision = ' and '.join(parts)
