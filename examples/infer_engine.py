"""Detect objects in images with a TensorRT engine, by cuda-python: a reference client for you to copy, without PyTorch.

    python examples/infer_engine.py MODEL.engine IMAGE|FOLDER [--save]

It needs TensorRT (8.6 to 11, the version that built the engine), cuda-python (12.8 or later: cuda.bindings), NumPy and OpenCV.
Everything around the engine is in scripts/infer_onnx.py: copy both files into one folder. Class names come from
MODEL.engine.json, if this file exists.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / 'scripts'))  # not needed if both files are in one folder
from infer_onnx import fail, missing, run

try:
    import numpy as np
    import tensorrt as trt
    from cuda.bindings import runtime as cudart
except ImportError as e:
    missing(e, 'NumPy, cuda-python (pip install "cuda-python>=12.8") and the TensorRT that built the engine')

# types of inputs and outputs; they are the same if the engine computes in FP16
TYPES = {'FLOAT': 'float32', 'INT32': 'int32', 'INT64': 'int64'}


def check(result: tuple[Any, ...]) -> Any:
    """Return the value, if any, of a call of the CUDA runtime; raise RuntimeError if the call failed."""
    error, *values = result
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f'CUDA: {cudart.cudaGetErrorString(error)[1].decode()}')
    return values[0] if values else None


class EngineModel:
    """An engine with one input; it keeps its memory until the process ends.

    Attributes:
        shape: [B, 3, H, W] of its input.
        names: class index → name.
    """

    def __init__(self, path: Path, device: str) -> None:
        """Load the engine and allocate its memory; end the program if TensorRT cannot load it."""
        check(cudart.cudaSetDevice(int(device)))
        self.log = trt.Logger(trt.Logger.WARNING)
        trt.init_libnvinfer_plugins(self.log, '')  # NMS inside the engine may be a plugin
        self.runtime = trt.Runtime(self.log)  # kept: the engine must not outlive it
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
        if -1 in self.shape:  # open axes: the smallest sizes of the engine
            self.shape = list(self.engine.get_tensor_profile_shape(self.input, 0)[0])
        self.context.set_input_shape(self.input, self.shape)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Any] = {}  # address of each array on the GPU
        for name in tensors:
            self.host[name] = np.empty(
                tuple(self.context.get_tensor_shape(name)), TYPES[self.engine.get_tensor_dtype(name).name]
            )
            self.device[name] = check(cudart.cudaMalloc(self.host[name].nbytes))
            self.context.set_tensor_address(name, int(self.device[name]))

        sidecar = path.with_name(f'{path.name}.json')  # written by scripts/build_engine.py
        metadata = json.loads(sidecar.read_text(encoding='utf-8'))['metadata'] if sidecar.exists() else {}
        self.names = ast.literal_eval(metadata.get('names', '{}'))

    def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Run the engine on an image, RGB FP32 [3, H, W] in 0..1; a larger batch is filled with this image.

        Returns:
            Output name → array with a batch axis, valid until the next call.
        """
        self.host[self.input][:] = image
        self.copy(self.input, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)
        if not self.context.execute_async_v3(int(self.stream)):
            raise RuntimeError('TensorRT: the engine did not run')
        outputs = {name: array for name, array in self.host.items() if name != self.input}
        for name in outputs:
            self.copy(name, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        check(cudart.cudaStreamSynchronize(self.stream))
        return outputs

    def copy(self, name: str, direction: Any) -> None:
        """Copy the input to the GPU, or an output from it; `direction` is a cudaMemcpyKind."""
        host, device = self.host[name].ctypes.data, self.device[name]
        target, source = (device, host) if name == self.input else (host, device)
        check(cudart.cudaMemcpyAsync(target, source, self.host[name].nbytes, direction, self.stream))


if __name__ == '__main__':
    sys.exit(run(EngineModel, '.engine', (__doc__ or '').partition('\n')[0]))
