"""AOTInductor: .pt2 packages with compiled code for one device, one version of PyTorch and one kind of CPU or GPU.

A package is a program: loading it runs it. Its metadata are read first, without running it, and only a package for this device, this
PyTorch and this CPU's instructions is loaded. This finds mistakes, not malice, so no command loads a package unless --backend names
aoti (session.require_named).
"""

import re
import zipfile
from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.core.errors import QatError, reporting
from utils.qat.core.machine import instruction_flags
from utils.qat.untrusted.program_archive import is_package, read_metadata
from utils.qat.untrusted.torch_archive import DAMAGED, plain_archive
from utils.qat.vendors.measured import Measured, ModelFile
from utils.qat.vendors.pytorch.pt2 import Pt2, described, image_shape

AGAIN = 'export it here with export_qat.py --include aoti'
MEMBERS = re.compile(r'[^/]+/.+')
PART = re.compile(r'data/aotinductor/model/[^/]+_metadata\.json')
WRAPPER = re.compile(r'[^/]+/data/aotinductor/model/[^/]+\.wrapper\.cpp')
WEIGHTED = re.compile(rb'\baoti_torch_\w*(?:conv|linear)\w*(?=\()')  # a call of a kernel, in C++


def package_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of a package without running it.

    Raises:
        QatError: the file is no such package, or is damaged.
    """
    with reporting(f'--weights {file}: no package of AOTInductor, or cut short', *DAMAGED, remedy=AGAIN):
        parts = plain_archive(file, MEMBERS, 'archive_format')  # not compressed, so its stated sizes are true
        texts = [part for name, part in parts.items() if PART.fullmatch(name)]
        if not texts:
            raise zipfile.BadZipFile('no metadata inside')
        return read_metadata(bytes(texts[0]))


def compiled_layers(file: Path) -> tuple[int, int]:
    """Count the convolutions and linear layers that the code in a package calls: those in integers, and all."""
    with zipfile.ZipFile(file) as archive:
        code = b''.join(archive.read(name) for name in archive.namelist() if WRAPPER.fullmatch(name))
    calls = WEIGHTED.findall(code)
    return sum(b'qconv' in call or b'qlinear' in call for call in calls), len(calls)


def require_match(file: Path, metadata: dict[str, str], device: torch.device) -> None:
    """Raise QatError if a package was compiled for another device, PyTorch or processor."""

    def release(version: str) -> str:
        return version.split('+')[0][:40]

    made_for, made_by = metadata.get('device', 'no device')[:20], metadata.get('torch', '')
    if made_for != device.type:
        raise QatError(f'{file}: was compiled for {made_for}, and this is --device {device}; {AGAIN}')
    if release(made_by) != release(torch.__version__):
        raise QatError(
            f'{file}: was compiled by PyTorch {release(made_by) or "of no version"}, and this is {release(torch.__version__)}; {AGAIN}'
        )
    if device.type == 'cuda':
        here = '.'.join(map(str, torch.cuda.get_device_capability(device)))
        if metadata.get('gpu') != here:
            raise QatError(
                f'{file}: was compiled for compute capability {metadata.get("gpu", "none")[:20]}, and this GPU has {here}; {AGAIN}'
            )
        return
    lacking = sorted(set(metadata.get('cpu', '').split()) - set(instruction_flags()))
    if lacking or not metadata.get('cpu'):
        raise QatError(
            f'{file}: was compiled for another CPU, with {" ".join(lacking)[:100] or "instructions that it does not name"}; {AGAIN}'
        )


class AotPackage(Pt2):
    """A package of AOTInductor."""

    def __init__(self, file: Path, device: torch.device) -> None:
        super().__init__(file, device)
        if not is_package(file):
            raise QatError(f'--weights {file}: no package of AOTInductor (or cut short); {AGAIN}')
        self.metadata = package_metadata(file)
        require_match(file, self.metadata, device)
        self.shape = image_shape(self.metadata, file)
        with reporting(f'{file}: PyTorch cannot load it', RuntimeError, remedy=AGAIN):
            # Not torch._inductor.aoti_load_package, which compiles a test program. Single-threaded, so that a CUDA graph can capture it.
            self.loader = torch._C._aoti.AOTIModelPackageLoader(
                str(file), 'model', True, 1, device.index or 0 if device.type == 'cuda' else -1
            )

    @property
    @override
    def notes(self) -> list[str]:
        """Return how much of a quantized model runs in INT8."""
        return [self.metadata['int8']] if 'int8' in self.metadata else []

    @staticmethod
    @override
    def takes(file: Path) -> bool:
        return is_package(file)

    @override
    def call(self, images: torch.Tensor) -> list[torch.Tensor]:
        return self.loader.run([images])


class MeasuredPackage(Measured):
    """A package, as an evaluation has it."""

    opens = AotPackage

    @staticmethod
    @override
    def describe(file: Path) -> ModelFile:
        return described(file, 'aoti', package_metadata(file))


MEASURED = MeasuredPackage
