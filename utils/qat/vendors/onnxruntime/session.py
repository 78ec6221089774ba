"""ONNX Runtime: .onnx files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import torch
from typing_extensions import override  # torch requires this package; typing has it from Python 3.12

from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError, one_line, reporting
from utils.qat.core.machine import onnx_options
from utils.qat.graph.onnx_file import require_bounded
from utils.qat.vendors.measured import Conditions, Measured, Measurement
from utils.qat.vendors.onnxruntime.graph import rounding
from utils.qat.vendors.session import Session, Signature, padded_note, simulated_note
from utils.qat.vendors.vendor import SIMULATED

if TYPE_CHECKING:
    import onnxruntime

# Compute Q and DQ as written: ONNX Runtime's fused kernels round differently, and its fused Concat does not load with FP16
# scales (1.31).
AS_WRITTEN = {'session.disable_quant_qdq': '1'}


def cuda_missing() -> bool:
    """Tell whether the installed ONNX Runtime lacks CUDA."""
    import onnxruntime as ort

    return 'CUDAExecutionProvider' not in ort.get_available_providers()


def onnx_session(
    source: str | bytes,
    device: torch.device = torch.device('cpu'),
    entries: dict[str, str] = AS_WRITTEN,
    threads: int = 0,
    **settings: str,
) -> onnxruntime.InferenceSession:
    """Load a file by its name, or a serialized model; on the CPU if ONNX Runtime has no CUDA.

    `entries` are those of the session's configuration: by default Q and DQ are computed as written. `threads` are on a CPU, 0 =
    ONNX Runtime's choice; `settings` are of its CUDA provider. Raises what ONNX Runtime raises: its exceptions share no public base.
    """
    import onnxruntime as ort

    options, cuda = onnx_options(entries), []
    if threads:
        options.intra_op_num_threads = threads
    if device.type == 'cuda' and not cuda_missing():
        cuda = [('CUDAExecutionProvider', {'device_id': device.index or 0, **settings})]
    source = rounding(source) if entries is AS_WRITTEN else source
    return ort.InferenceSession(source, options, providers=[*cuda, 'CPUExecutionProvider'])


def run_graph(model: onnx.ModelProto, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a new graph on the CPU, Q and DQ as written. values: name of an input → tensor. Raises QatError if ONNX Runtime cannot."""
    # its errors share no public base
    with reporting('ONNX Runtime cannot run the exported graph', Exception, most=300):
        session = onnx_session(model.SerializeToString())
        results = session.run(None, {name: value.cpu().numpy() for name, value in values.items()})
        return list(map(torch.from_numpy, results))


class OnnxRuntime(Session):
    """An .onnx file in ONNX Runtime."""

    def __init__(
        self, file: Path, device: torch.device, entries: dict[str, str] = AS_WRITTEN, threads: int = 0, **settings: str
    ) -> None:
        """Load the file. entries, threads, settings: see `onnx_session`."""
        super().__init__(file, device)
        require_bounded(file)
        try:
            self.session = onnx_session(str(file), device, entries, threads, **settings)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise self.refused(e, 'load') from e

    def refused(self, error: Exception, verb: str) -> QatError:
        """Make the QatError for a file that ONNX Runtime failed to load or run. verb: 'load' or 'run'."""
        if PLUGIN in str(error):
            return QatError(
                f'{self.file}: its NMS is {PLUGIN}, which TensorRT alone has; build an engine of it, or export with '
                '--include onnx_end2end --nms standard'
            )
        said = one_line(error, 300)
        if verb == 'run' or 'MLFloat16' in said:  # some versions notice it when they load a file
            return QatError(f'{self.file}: ONNX Runtime cannot run it: {said}')
        return QatError(f'{self.file}: ONNX Runtime cannot load it: {said}')

    @property
    @override
    def notes(self) -> Sequence[str]:
        """Tell that INT8 is simulated, or that widths are padded, if they are."""
        metadata = self.signature().metadata
        return [*simulated_note(metadata, 'onnxruntime'), *padded_note(metadata, 'onnxruntime')]

    @override
    def signature(self) -> Signature:
        problem = f'{self.file}: its metadata, or names of its inputs and outputs, are not UTF-8'
        with reporting(problem, UnicodeDecodeError, remedy='export it with export_qat.py'):
            inputs, outputs = (
                {v.name: v.shape for v in values} for values in (self.session.get_inputs(), self.session.get_outputs())
            )
            return Signature(inputs, outputs, self.session.get_modelmeta().custom_metadata_map)

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            outputs = self.session.run(None, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})
        except Exception as e:  # as above; such as of a file with FP32 scales beside FP16 values
            raise self.refused(e, 'run') from e
        return {o.name: torch.from_numpy(out).to(self.device) for o, out in zip(self.session.get_outputs(), outputs)}


class MeasuredOnnxRuntime(Measured):
    """ONNX Runtime with its own optimizations, such as Q/DQ fused into INT8 kernels, where it can load them."""

    opens = OnnxRuntime
    session: OnnxRuntime

    @override
    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> OnnxRuntime:
        threads = torch.get_num_threads()  # as many as PyTorch has
        settings = {'user_compute_stream': str(self.stream.cuda_stream)} if self.stream else {}
        try:
            session = OnnxRuntime(file, self.device, {}, threads, **settings)
            self.types = SIMULATED if session.notes else self.types
            return session
        except QatError:
            if 'INT8' not in self.types:
                raise
        # FP16 scales: its fused Concat does not load (1.31)
        self.types = f'{self.types}, Q/DQ not fused'
        return OnnxRuntime(file, self.device, AS_WRITTEN, threads, **settings)

    @classmethod
    @override
    def missing(cls, backend: str, device: torch.device) -> str:
        if device.type == 'cuda' and cuda_missing():
            return (
                'ONNX Runtime: the one installed has no CUDA (onnxruntime-gpu has); --device cpu measures it on the CPU'
            )
        return ''

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        where, index = self.device.type, self.device.index or 0
        bound, self.binding = super().bind(host), self.session.session.io_binding()
        for name, tensor in bound.items():
            kind = host[name].numpy().dtype.type
            self.binding.bind_input(name, where, index, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self.session.session.get_outputs():
            self.binding.bind_output(output.name, where, index)
        return bound

    @override
    def compute(self) -> None:
        try:
            self.session.session.run_with_iobinding(self.binding)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise self.session.refused(e, 'run') from e

    @override
    def download(self) -> None:
        if self.stream:
            self.binding.copy_outputs_to_cpu()


MEASURED = MeasuredOnnxRuntime
