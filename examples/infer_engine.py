"""Detect objects in an image with a TensorRT engine, by cuda-python: a client for you to copy, without PyTorch and this toolkit.

    python examples/infer_engine.py MODEL.engine IMAGE

It needs TensorRT (8.6 to 11, the version that built the engine), cuda-python (12.8 or later: cuda.bindings), NumPy and OpenCV. The
engine is of a file of export_qat.py --include onnx or onnx_end2end, without masks. Class names come from MODEL.engine.json, if
this file exists. docs/client.md explains the steps around the engine.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any, NoReturn


def fail(message: object) -> NoReturn:
    """End the program with one line and exit code 2."""
    print(f'{Path(sys.argv[0]).name}: error: {message}', file=sys.stderr)
    sys.exit(2)


try:
    import cv2
    import numpy as np
    import tensorrt as trt
    from cuda.bindings import runtime as cudart
except ImportError as e:
    if not {'-h', '--help'} & set(sys.argv):
        needed = 'NumPy, OpenCV, cuda-python (pip install "cuda-python>=12.8") and the TensorRT that built the engine'
        fail(f'{e}; it needs {needed}')

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

    def __init__(self, path: Path, device: int = 0) -> None:
        """Load the engine and allocate its memory on a GPU; end the program if TensorRT cannot load it."""
        check(cudart.cudaSetDevice(device))
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


def letterbox(image: np.ndarray, height: int, width: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Fit a BGR uint8 image [h, w, 3] into height x width, with its sides in proportion and grey borders.

    Returns:
        RGB FP32 [3, height, width] in 0..1, the gain, and the border (left, top, left, top).
    """
    h, w = image.shape[:2]
    gain = min(height / h, width / w)
    way = cv2.INTER_AREA if gain < 1 else cv2.INTER_LINEAR
    fit = cv2.resize(image, (max(1, int(w * gain)), max(1, int(h * gain))), interpolation=way)
    top, left = (height - fit.shape[0]) / 2, (width - fit.shape[1]) / 2
    canvas = np.full((height, width, 3), 114, np.uint8)
    canvas[int(top) : int(top) + fit.shape[0], int(left) : int(left) + fit.shape[1]] = fit
    pixels = canvas[..., ::-1].transpose(2, 0, 1).astype(np.float32) / 255
    return pixels, fit.shape[0] / h, np.array([left, top, left, top], np.float32)


def read_outputs(outputs: dict[str, np.ndarray], conf_thres: float = 0.25, iou_thres: float = 0.45) -> np.ndarray:
    """Read the detections in the first image from an engine's outputs: [n, 6], x1, y1, x2, y2, score, class."""
    if 'num_dets' in outputs:  # NMS is inside
        n = int(outputs['num_dets'][0, 0])
        return np.column_stack([outputs[name][0, :n] for name in ('det_boxes', 'det_scores', 'det_classes')])
    (output,) = outputs.values()
    rows = output[0].T  # [N, 4 + classes]: centre, width, height, scores
    which, classes = np.nonzero(rows[:, 4:] > conf_thres)
    corner, size, scores = rows[which, :2] - rows[which, 2:4] / 2, rows[which, 2:4], rows[which, 4 + classes]
    boxes = np.column_stack((corner, size)).tolist()
    kept = list(cv2.dnn.NMSBoxesBatched(boxes, scores.tolist(), classes.tolist(), conf_thres, iou_thres))
    return np.column_stack((corner, corner + size, scores, classes))[kept]


def main() -> None:
    """Print the detections in an image: class, score, x1 y1 x2 y2 in pixels of the image."""
    words = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    words.add_argument('engine', type=Path, metavar='MODEL.engine')
    words.add_argument('image', type=Path, metavar='IMAGE')
    args = words.parse_args()
    image = cv2.imread(str(args.image))
    if image is None or not args.engine.is_file():
        fail(f'{args.image if image is None else args.engine}: no such file, or OpenCV cannot read it')
    model = EngineModel(args.engine)
    pixels, gain, border = letterbox(image, *model.shape[2:])
    h, w = image.shape[:2]
    for *box, score, number in read_outputs(model(pixels)):
        x1, y1, x2, y2 = ((np.float32(box) - border) / gain).clip(0, [w, h, w, h])
        print(f'{model.names.get(int(number), int(number))} {score:.3f}  {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}')


if __name__ == '__main__':
    main()
