"""LiteRT: .tflite files, on the CPU.

A file is data: its operators are LiteRT's own, and a file with custom operators is refused. LiteRT is native code, so a file first runs
in a process apart, whose crash is the file's fault.
"""

import contextlib
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from utils.qat.core.command import run_apart
from utils.qat.core.errors import QatError, reporting
from utils.qat.vendors.measured import Measured, ModelFile, OpenInputs
from utils.qat.vendors.session import IMAGES, OUTPUTS, Session, Signature

METADATA = 'metadata.json'  # member of the zip file that is appended to a .tflite file, where Ultralytics' package looks for it
LARGEST_METADATA = 4_000_000  # bytes
INSTALL = 'in the folder of this toolkit: pip install --no-deps -r requirements-litert.txt'
AGAIN = 'write it again with export_qat.py --include litert'
WEIGHTED = {'CONV_2D', 'DEPTHWISE_CONV_2D', 'TRANSPOSE_CONV', 'FULLY_CONNECTED'}
TRIAL_SECONDS = 300
TRIAL = """
import numpy, sys
from ai_edge_litert.interpreter import Interpreter
try:
    model = Interpreter(sys.argv[1], num_threads=1)
    model.allocate_tensors()
    for image in model.get_input_details():
        model.set_tensor(image['index'], numpy.zeros(image['shape'], image['dtype']))
    model.invoke()
except Exception as e:
    sys.exit(' '.join(str(e).split())[:200] or type(e).__name__)
"""


def load_litert(who: str) -> ModuleType:
    """Import LiteRT's interpreter; raise QatError if it is not installed. who: the file or flag that needs it."""
    with reporting(f'{who}: no package ai-edge-litert that can be loaded here', ImportError, remedy=INSTALL):
        from ai_edge_litert import interpreter
    return interpreter


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of an export as texts, by key; {} if there are none or they cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open(METADATA) as member:
            content = json.loads(member.read(LARGEST_METADATA))
    except (
        *(zipfile.BadZipFile, zlib.error, KeyError, ValueError),
        *(NotImplementedError, RuntimeError, EOFError, RecursionError),
    ):
        return {}

    def text(value: object) -> str:
        if isinstance(value, dict) and all(key.isdigit() for key in value):  # classes, whose numbers JSON made texts
            value = {int(key): name for key, name in value.items()}
        return str(value)

    return {key: text(value) for key, value in content.items()} if isinstance(content, dict) else {}


def _require_running(file: Path) -> None:
    """Raise QatError if LiteRT refuses a file, or crashes with it."""
    try:
        ended = run_apart(TRIAL, file, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise QatError(f'{file}: LiteRT does not end a run of it in {TRIAL_SECONDS} s; {AGAIN}') from e
    if ended.returncode:
        said = (
            ended.stderr.strip().splitlines() if ended.returncode > 0 else [f'it crashes (signal {-ended.returncode})']
        )
        raise QatError(f'{file}: LiteRT cannot run it: {said[-1] if said else "it ends the process"}; {AGAIN}')


@contextlib.contextmanager
def without_native_messages() -> Iterator[None]:
    """Drop what native code writes to the standard streams in the block."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, 'w') as nowhere:
        try:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, own in zip((1, 2), kept):
                os.dup2(own, stream)
                os.close(own)


class LiteRT(Session):
    """A .tflite file in LiteRT, which computes on the CPU.

    Whatever layout and type the file has, images are FP32 [B, 3, H, W] here, and boxes are in pixels: those of a file are relative to
    the image.

    Attributes:
        int8: number of convolutions and linear layers in INT8.
        weighted: number of all.
        size: width and height of the last images.
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        super().__init__(file, device)
        library = load_litert(str(file))
        _require_running(file)
        with without_native_messages():
            self.model = library.Interpreter(str(file), num_threads=torch.get_num_threads())  # as many as PyTorch has
            self.model.allocate_tensors()
        self.metadata = read_metadata(file)
        self.inputs = self.model.get_input_details()
        # prototypes last
        self.outputs = sorted(self.model.get_output_details(), key=lambda output: len(output['shape']))
        self.channels_last = len(self.inputs[0]['shape']) == 4 and self.inputs[0]['shape'][3] == 3
        types = {tensor['index']: tensor['dtype'].__name__ for tensor in self.model.get_tensor_details()}
        layers = [op for op in self.model._get_ops_details() if op['op_name'] in WEIGHTED]
        self.weighted = len(layers)
        self.int8 = sum({types[i] for i in (*op['inputs'][:2], *op['outputs'])} == {'int8'} for op in layers)

    @staticmethod
    @override
    def takes(file: Path) -> bool:
        return 'layout' not in read_metadata(file)  # the raw outputs of a head

    @property
    @override
    def notes(self) -> Sequence[str]:
        return [f'INT8: {self.int8} of {self.weighted} convolutions'] if self.int8 else []

    @override
    def signature(self) -> Signature:
        names = [IMAGES, *(f'{IMAGES}{i}' for i in range(1, len(self.inputs)))]
        return Signature(
            {name: self._channels_first(each['shape'].tolist()) for name, each in zip(names, self.inputs)},
            {name: self._channels_first(each['shape'].tolist()) for name, each in zip(OUTPUTS, self.outputs)},
            self.metadata,
        )

    def _channels_first(self, shape: list[int]) -> list[int]:
        return [shape[i] for i in (0, 3, 1, 2)] if self.channels_last and len(shape) == 4 else shape

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (images,) = tensors.values()
        self.give(images)
        return self.compute()

    def give(self, images: torch.Tensor) -> None:
        """Write images FP32 [B, 3, H, W] to the input."""
        self.size = images.shape[:1:-1]
        images = images.permute(0, 2, 3, 1) if self.channels_last else images
        with reporting(f'{self.file}: LiteRT cannot run it', ValueError):
            self.model.set_tensor(self.inputs[0]['index'], _stored(images.cpu(), self.inputs[0]))

    def invoke(self) -> None:
        """Run the file on the images of `give`."""
        with reporting(f'{self.file}: LiteRT cannot run it', RuntimeError):
            self.model.invoke()

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute the outputs for the images of `give`, see `run`."""
        self.invoke()
        results = {}
        for name, output in zip(OUTPUTS, self.outputs):
            values = values_of(self.model.get_tensor(output['index']), output)
            if values.dim() == 3:
                values[:, :4] *= torch.tensor(self.size * 2).view(4, 1)
            if values.dim() == 4 and self.channels_last:
                values = values.permute(0, 3, 1, 2)
            results[name] = values.to(self.device)
        return results


def _stored(values: torch.Tensor, tensor: dict[str, Any]) -> np.ndarray:
    """Convert FP32 values to the type of a file's tensor."""
    if tensor['dtype'] is np.float32:
        return values.contiguous().numpy()
    scale, zero_point = tensor['quantization']
    limits = np.iinfo(tensor['dtype'])
    return (values / scale).round().add(zero_point).clamp(limits.min, limits.max).numpy().astype(tensor['dtype'])


def values_of(stored: np.ndarray, tensor: dict[str, Any]) -> torch.Tensor:
    """Convert values of a file's tensor to FP32."""
    if tensor['dtype'] is np.float32:
        return torch.from_numpy(stored)
    scale, zero_point = tensor['quantization']
    return (torch.from_numpy(stored.astype(np.float32)) - zero_point) * scale


class MeasuredLiteRT(Measured):
    """LiteRT, whose input is written before the time is taken."""

    opens = LiteRT
    runs_on = ('cpu',)
    session: LiteRT

    @staticmethod
    @override
    def require(backend: str, title: str) -> None:
        load_litert(title)

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.session.give(*host.values())
        return host

    @override
    def compute(self) -> None:
        self.outputs = list(self.session.compute().values())

    @staticmethod
    @override
    def describe(file: Path) -> ModelFile:
        """Describe a .tflite file."""
        session = LiteRT(file, torch.device('cpu'))
        signature = session.signature()
        inputs: OpenInputs = {name: (torch.float32, tuple(shape)) for name, shape in signature.inputs.items()}
        floats = any(each['dtype'] is np.float32 for each in (*session.inputs, *session.outputs))
        types = ' and '.join(['INT8'] * bool(session.int8) + ['FP32'] * floats)
        return ModelFile(file, inputs, types, task=signature.metadata.get('task', ''))


MEASURED = MeasuredLiteRT
