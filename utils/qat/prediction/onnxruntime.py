"""ONNX Runtime: .onnx files."""

import torch

from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError
from utils.qat.core.threads import onnx_options
from utils.qat.graph.ort_rounding import rounding
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.runner import Runner

# The graph as it is, Q and DQ as written: what ONNX Runtime would fuse them into rounds otherwise, and its fused Concat does not
# load with FP16 scales (1.31).
AS_WRITTEN = {'session.disable_quant_qdq': '1'}


def _session(source, device, entries, threads=None, **settings):
    """entries: of the session's configuration. threads: None = ONNX Runtime's choice. settings: of the CUDA provider."""
    import onnxruntime as ort

    options = onnx_options(entries)
    if threads:
        options.intra_op_num_threads = threads
    cuda = [('CUDAExecutionProvider', {'device_id': device.index or 0, **settings})] if device.type == 'cuda' else []
    return ort.InferenceSession(source, options, providers=[*cuda, 'CPUExecutionProvider'])


def _cuda_missing():
    """Whether the ONNX Runtime that is installed is the one without CUDA."""
    import onnxruntime as ort

    return 'CUDAExecutionProvider' not in ort.get_available_providers()


def onnx_session(source, device=torch.device('cpu')):
    """ONNX Runtime's session of a file (its name), or of a serialized model (bytes): Q and DQ computed as they are written."""
    where = torch.device('cpu') if device.type == 'cuda' and _cuda_missing() else device
    return _session(rounding(source), where, AS_WRITTEN)


def cannot_run(path, error):
    """The QatError for a file that ONNX Runtime refuses to compute."""
    return QatError(
        f'--weights {path}: ONNX Runtime cannot run it (a file with --fp32-scales is for TensorRT only): '
        f'{" ".join(str(error).split())[:300]}'
    )


class OnnxModel(FileModel):
    """An ONNX file run by ONNX Runtime, its Q/DQ included."""

    def __init__(self, path, device=torch.device('cpu'), backend='onnxruntime'):
        try:
            self.session = onnx_session(str(path), device)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            if PLUGIN in str(e):
                raise QatError(
                    f'--weights {path}: its NMS is {PLUGIN}, which TensorRT alone has; build an engine of it, or export with '
                    '--include onnx_end2end --nms standard'
                ) from e
            if 'MLFloat16' in str(e):  # some versions find this out while they load a file, others while they run it
                raise cannot_run(path, e) from e
            raise QatError(f'--weights {path}: ONNX Runtime cannot load it: {" ".join(str(e).split())[:300]}') from e
        try:
            inputs, outputs = (
                {v.name: v.shape for v in values} for values in (self.session.get_inputs(), self.session.get_outputs())
            )
            metadata = self.session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError as e:
            raise QatError(
                f'--weights {path}: its metadata, or names of its inputs and outputs, are not UTF-8 ({e}); export it with export_qat.py'
            ) from e
        if len(inputs) != 1:
            raise QatError(f'--weights {path}: expected one input, the images, found {", ".join(inputs) or "none"}')
        (self.input_name, image), self.device = *inputs.items(), device
        batch = (image[0],) * 2 if image and isinstance(image[0], int) else None  # a static graph wants full batches
        super().__init__(path, image, outputs, batch, metadata)

    def run(self, images):
        try:
            outputs = self.session.run(None, {self.input_name: images.cpu().numpy()})
        except Exception as e:  # as above; such as of a file with FP32 scales beside FP16 values
            raise cannot_run(self.path, e) from e
        return {o.name: torch.from_numpy(out).to(self.device) for o, out in zip(self.session.get_outputs(), outputs)}


class OnnxRuntimeRunner(Runner):
    """An .onnx with ONNX Runtime's own optimizations, Q/DQ fused into INT8 kernels where it can load that."""

    def __init__(self, file, types, device):
        super().__init__(file, types, device)
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
        try:
            self.session = self._load({})
        except QatError:
            if 'INT8' not in types:
                raise
            self.session = self._load(AS_WRITTEN)  # FP16 scales: its fused Concat does not load (1.31)
            self.types = f'{types}, Q/DQ not fused'
        self.binding = self.session.io_binding()

    @staticmethod
    def missing(backend, device):
        if device.type == 'cuda' and _cuda_missing():
            return (
                'ONNX Runtime: the one installed has no CUDA (onnxruntime-gpu has); --device cpu measures it on the CPU'
            )
        return ''

    def _load(self, entries):
        stream = {'user_compute_stream': str(self.stream.cuda_stream)} if self.stream else {}
        try:
            return _session(
                str(self.file), self.device, entries, torch.get_num_threads(), **stream
            )  # as many threads as PyTorch has
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise QatError(f'{self.file}: ONNX Runtime cannot load it: {" ".join(str(e).split())[:300]}') from e

    def bind(self, host):
        where, index = self.device.type, self.device.index or 0
        bound = super().bind(host)
        for name, tensor in bound.items():
            kind = host[name].numpy().dtype.type
            self.binding.bind_input(name, where, index, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self.session.get_outputs():
            self.binding.bind_output(output.name, where, index)
        return bound

    def compute(self):
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as e:  # as above
            raise QatError(f'{self.file}: ONNX Runtime cannot run it: {" ".join(str(e).split())[:300]}') from e

    def download(self):
        if self.stream:
            self.binding.copy_outputs_to_cpu()


MODEL, RUNNER = OnnxModel, OnnxRuntimeRunner  # see registry.py
