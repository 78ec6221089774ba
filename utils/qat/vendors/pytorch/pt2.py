"""torch.export: .pt2 files with an exported program, which PyTorch runs operator by operator."""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.core.errors import QatError, one_line, reporting
from utils.qat.untrusted.program_archive import archive_of, is_package, read_program
from utils.qat.vendors.measured import Measured, ModelFile
from utils.qat.vendors.session import IMAGES, OUTPUTS, Session, Signature


def require_pt2(who: str) -> None:
    """Raise QatError if this PyTorch lacks the present form of .pt2 archives. who: the file or the flag that needs them."""
    try:
        from torch.export.pt2_archive._package import PT2ArchiveWriter  # noqa: F401
    except ImportError as e:
        raise QatError(f'{who}: .pt2 files need PyTorch 2.8 or newer, and this is {torch.__version__}') from e


def image_shape(metadata: Mapping[str, str], file: Path) -> tuple[int | None, int, int, int]:
    """Read the image shape of a .pt2 file from its metadata.

    Returns:
        Batch (None = any), 3, height and width in pixels.

    Raises:
        QatError: the metadata have no valid shape.
    """
    try:
        height, width = (int(side) for side in metadata['imgsz'].split(','))
        batch = None if metadata['batch'] == 'dynamic' else int(metadata['batch'])
        if not (0 < height <= 2**16 and 0 < width <= 2**16 and (batch is None or 0 < batch <= 2**16)):
            raise ValueError
    except (KeyError, ValueError) as e:
        raise QatError(
            f'--weights {file}: its metadata do not tell batch and image size; export it with export_qat.py'
        ) from e
    return batch, 3, height, width


class Pt2(Session):
    """A .pt2 file of export_qat.py. Its images are FP32 [B, 3, H, W], and so are its outputs.

    Attributes:
        metadata: of the export, by key.
        shape: of the images; None for an open batch.
    """

    metadata: Mapping[str, str]
    shape: tuple[int | None, int, int, int]

    def __init__(self, file: Path, device: torch.device) -> None:
        super().__init__(file, device)
        require_pt2(str(file))

    @abstractmethod
    def call(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Compute the outputs for images of a valid shape on the session's device."""

    @override
    def signature(self) -> Signature:
        blank = torch.zeros(self.shape[0] or 1, *self.shape[1:])
        outputs = {name: [self.shape[0], *out.shape[1:]] for name, out in self.run({IMAGES: blank}).items()}
        return Signature({IMAGES: self.shape}, outputs, dict(self.metadata))

    @override
    @torch.no_grad()
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (images,) = tensors.values()
        if images.dim() != 4 or any(a is not None and a != b for a, b in zip(self.shape, images.shape)):
            batch, _, height, width = self.shape
            raise QatError(
                f'{self.file}: takes images [{batch or "any"}, 3, {height}, {width}], not {list(images.shape)}; give --imgsz '
                f'{height} {width}, or export it with another --imgsz'
            )
        named = torch.cuda.nvtx.range('run {}', self.file.name) if self.device.type == 'cuda' else nullcontext()
        with named, reporting(f'{self.file}: cannot be run', RuntimeError):  # the range: docs/cpp.md
            return dict(zip(OUTPUTS, self.call(images.to(self.device))))


class ExportedProgram(Pt2):
    """An exported program, checked and then loaded by torch.export."""

    def __init__(self, file: Path, device: torch.device) -> None:
        super().__init__(file, device)
        if is_package(file):
            raise QatError(f'{file}: is a package of AOTInductor; give --backend aoti')
        members, self.metadata = read_program(file)
        self.shape = image_shape(self.metadata, file)
        import torch.ao.quantization.fx._decomposed  # registers the operators

        reader = logging.getLogger('torch.export')  # it would log the tracebacks of its errors
        level = reader.level
        reader.setLevel(logging.ERROR)
        try:
            program = torch.export.load(archive_of(members, (self.shape[0] or 2, *self.shape[1:])))
            if device.type != 'cpu':
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
            self.program = program.module()
        except Exception as e:  # torch raises whatever its reader met; what could run code was checked before
            raise QatError(
                f'{file}: PyTorch {torch.__version__} cannot load it (written by '
                f'{self.metadata.get("torch", "another one")[:20]}): {one_line(e.__context__ or e)}; '
                'export it with export_qat.py --include pt2'
            ) from e
        finally:
            reader.setLevel(level)

    @staticmethod
    @override
    def takes(file: Path) -> bool:
        return not is_package(file)

    @override
    def call(self, images: torch.Tensor) -> list[torch.Tensor]:
        return list(self.program(images))


def described(file: Path, backend: str, metadata: Mapping[str, str]) -> ModelFile:
    """Describe a .pt2 file of `backend` from its metadata."""
    images = torch.float32, image_shape(metadata, file)
    return ModelFile(
        file, {IMAGES: images}, metadata.get('precision', ''), backend=backend, task=metadata.get('task', '')
    )


class MeasuredProgram(Measured):
    """An exported program, as an evaluation has it."""

    opens = ExportedProgram

    @staticmethod
    @override
    def describe(file: Path) -> ModelFile:
        return described(file, 'pt2', read_program(file, 'MODEL')[1])


MEASURED = MeasuredProgram
