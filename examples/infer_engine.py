"""Detect objects in images with a TensorRT engine, through cuda-python: a reference client, to copy from. No PyTorch.

    python examples/infer_engine.py MODEL.engine IMAGE|FOLDER [--save]

Needs TensorRT (8.6 to 11, the version that built the engine), cuda-python (12.8 or later: cuda.bindings), NumPy and OpenCV. Everything
around the engine is in scripts/infer_onnx.py: copy both files, into one folder. Class names come from MODEL.engine.json, if it is there.
"""

import ast
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / 'scripts'))  # not needed where both files are in one folder
from infer_onnx import fail, main, missing

try:
    import numpy as np
    import tensorrt as trt
    from cuda.bindings import runtime as cudart
except ImportError as e:
    missing(e, 'NumPy, cuda-python (pip install "cuda-python>=12.8") and the TensorRT that built the engine')

TYPES = {
    'FLOAT': 'float32',
    'INT32': 'int32',
    'INT64': 'int64',
}  # of inputs and outputs, also where the engine computes in FP16


def check(result):
    """What a call of the CUDA runtime returned besides its error code. Raises RuntimeError if it failed."""
    error, *values = result
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f'CUDA: {cudart.cudaGetErrorString(error)[1].decode()}')
    return values[0] if values else None


class EngineModel:
    """An engine with one input, and the memory it works on until the process ends. shape: [B, 3, H, W] of what it takes. names: class
    index → name."""

    def __init__(self, path, device):
        """device: number of the GPU."""
        check(cudart.cudaSetDevice(int(device)))
        self.log = trt.Logger(trt.Logger.WARNING)
        trt.init_libnvinfer_plugins(self.log, '')  # NMS inside the engine may be one
        self.runtime = trt.Runtime(self.log)  # kept: an engine must not outlive it
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            fail(
                f'{path}: TensorRT {trt.__version__} cannot load it; an engine runs only with the version that built it, on the same kind of GPU'
            )
        self.context = self.engine.create_execution_context()
        self.stream = check(cudart.cudaStreamCreate())

        tensors = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        (self.input,) = (name for name in tensors if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        self.shape = list(self.engine.get_tensor_shape(self.input))
        if -1 in self.shape:  # open axes: the smallest that the engine was built for
            self.shape = list(self.engine.get_tensor_profile_shape(self.input, 0)[0])
        self.context.set_input_shape(self.input, self.shape)
        self.host, self.device = {}, {}  # name → array, and its address on the GPU
        for name in tensors:
            self.host[name] = np.empty(
                tuple(self.context.get_tensor_shape(name)), TYPES[self.engine.get_tensor_dtype(name).name]
            )
            self.device[name] = check(cudart.cudaMalloc(self.host[name].nbytes))
            self.context.set_tensor_address(name, int(self.device[name]))

        sidecar = path.with_name(f'{path.name}.json')  # written by scripts/build_engine.py
        metadata = json.loads(sidecar.read_text(encoding='utf-8'))['metadata'] if sidecar.exists() else {}
        self.names = ast.literal_eval(metadata.get('names', '{}'))

    def __call__(self, image):
        """RGB FP32 [3, H, W] in 0..1 → {name: array}, valid until the next call; of a batch of several, all are this image."""
        self.host[self.input][:] = image
        self.copy(self.input, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)
        if not self.context.execute_async_v3(int(self.stream)):
            raise RuntimeError('TensorRT: the engine did not run')
        outputs = {name: array for name, array in self.host.items() if name != self.input}
        for name in outputs:
            self.copy(name, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        check(cudart.cudaStreamSynchronize(self.stream))
        return outputs

    def copy(self, name, direction):
        host, device = self.host[name].ctypes.data, self.device[name]
        target, source = (device, host) if name == self.input else (host, device)
        check(cudart.cudaMemcpyAsync(target, source, self.host[name].nbytes, direction, self.stream))


if __name__ == '__main__':
    sys.exit(main(EngineModel, '.engine', __doc__.splitlines()[0]))
