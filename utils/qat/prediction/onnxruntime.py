"""ONNX Runtime: .onnx files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import (
    override,
)  # torch requires this package, so it is installed; typing has it from Python 3.12

from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError
from utils.qat.core.threads import onnx_options
from utils.qat.graph.ort_rounding import rounding
from utils.qat.prediction.session import Load, MeasuredCase, Session, Signature

if TYPE_CHECKING:
    import onnxruntime

# The graph as it is, Q and DQ as written: what ONNX Runtime would fuse them into rounds otherwise, and its fused Concat does not
# load with FP16 scales (1.31).
AS_WRITTEN = {'session.disable_quant_qdq': '1'}


def _cuda_missing() -> bool:
    """Whether the ONNX Runtime that is installed is the one without CUDA."""
    import onnxruntime as ort

    return 'CUDAExecutionProvider' not in ort.get_available_providers()


def onnx_session(
    source: str | bytes,
    device: torch.device = torch.device('cpu'),
    entries: dict[str, str] = AS_WRITTEN,
    threads: int | None = None,
    **settings: str,
) -> onnxruntime.InferenceSession:
    """Load a file or a serialized model.

    Args:
        source: name of the file, or the model's bytes.
        device: where it runs; the CPU if ONNX Runtime has no CUDA.
        entries: of the session's configuration. Unless told otherwise, Q and DQ are computed as they are written.
        threads: on a CPU; None = ONNX Runtime's choice.
        settings: of its CUDA provider.

    Raises:
        Exception: ONNX Runtime cannot load the model; its exceptions share no public base class.
    """
    import onnxruntime as ort

    options, cuda = onnx_options(entries), []
    if threads:
        options.intra_op_num_threads = threads
    if device.type == 'cuda' and not _cuda_missing():
        cuda = [('CUDAExecutionProvider', {'device_id': device.index or 0, **settings})]
    source = rounding(source) if entries is AS_WRITTEN else source
    return ort.InferenceSession(source, options, providers=[*cuda, 'CPUExecutionProvider'])


class OnnxRuntime(Session):
    """An .onnx file in ONNX Runtime.

    It is evaluated with Q and DQ computed as they are written, and measured with ONNX Runtime's own optimizations: Q/DQ fused into INT8
    kernels, where it can load that.
    """

    def __init__(self, file: Path, device: torch.device, types: str = '', fused: bool = False) -> None:
        super().__init__(file, device, types)
        if not fused:
            self.session = self._load(AS_WRITTEN)
            return
        options: dict[str, Any] = {'threads': torch.get_num_threads()}  # as many as PyTorch has
        if device.type == 'cuda':
            self.stream = torch.cuda.Stream(device)
            options['user_compute_stream'] = str(self.stream.cuda_stream)
        try:
            self.session = self._load({}, **options)
        except QatError:
            if 'INT8' not in types:
                raise
            self.session = self._load(AS_WRITTEN, **options)  # FP16 scales: its fused Concat does not load (1.31)
            self.types = f'{types}, Q/DQ not fused'

    @classmethod
    @override
    def to_measure(
        cls, case: MeasuredCase, file: Path, device: torch.device, config: BenchmarkConfig, load: Load
    ) -> OnnxRuntime:
        return cls(file, device, case.network.types, fused=True)

    @staticmethod
    @override
    def missing(backend: str, device: torch.device) -> str:
        if device.type == 'cuda' and _cuda_missing():
            return (
                'ONNX Runtime: the one installed has no CUDA (onnxruntime-gpu has); --device cpu measures it on the CPU'
            )
        return ''

    def _load(self, entries: dict[str, str], **options: Any) -> onnxruntime.InferenceSession:
        try:
            return onnx_session(str(self.file), self.device, entries, **options)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise self._refused(e, 'load') from e

    def _refused(self, error: Exception, verb: str) -> QatError:
        """Make the QatError for a file that ONNX Runtime did not load, or not run. verb: 'load' or 'run'."""
        if PLUGIN in str(error):
            return QatError(
                f'{self.file}: its NMS is {PLUGIN}, which TensorRT alone has; build an engine of it, or export with '
                '--include onnx_end2end --nms standard'
            )
        said = ' '.join(str(error).split())[:300]
        if verb == 'run' or 'MLFloat16' in said:  # some versions find this out while they load a file
            return QatError(
                f'{self.file}: ONNX Runtime cannot run it (a file with --fp32-scales is for TensorRT only): {said}'
            )
        return QatError(f'{self.file}: ONNX Runtime cannot load it: {said}')

    @override
    def signature(self) -> Signature:
        try:
            inputs, outputs = (
                {v.name: v.shape for v in values} for values in (self.session.get_inputs(), self.session.get_outputs())
            )
            return Signature(inputs, outputs, self.session.get_modelmeta().custom_metadata_map)
        except UnicodeDecodeError as e:
            raise QatError(
                f'{self.file}: its metadata, or names of its inputs and outputs, are not UTF-8 ({e}); export it with export_qat.py'
            ) from e

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            outputs = self.session.run(None, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})
        except Exception as e:  # as above; such as of a file with FP32 scales beside FP16 values
            raise self._refused(e, 'run') from e
        return {o.name: torch.from_numpy(out).to(self.device) for o, out in zip(self.session.get_outputs(), outputs)}

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        where, index = self.device.type, self.device.index or 0
        bound, self.binding = super().bind(host), self.session.io_binding()
        for name, tensor in bound.items():
            kind = host[name].numpy().dtype.type
            self.binding.bind_input(name, where, index, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self.session.get_outputs():
            self.binding.bind_output(output.name, where, index)
        return bound

    @override
    def compute(self) -> None:
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as e:  # as above
            raise self._refused(e, 'run') from e

    @override
    def download(self) -> None:
        if self.stream:
            self.binding.copy_outputs_to_cpu()


SESSION = OnnxRuntime  # see registry.py
