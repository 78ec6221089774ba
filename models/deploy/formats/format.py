"""A checkpoint that is opened for export, and the interface of an export format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from models.quantize.checkpoint import CheckpointFile
from models.quantize.quantizers import has_zero_points
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig, Nms, Pooling
from utils.qat.config.settings import image_size
from utils.qat.config.tables import BACKENDS, FORMATS
from utils.qat.core.files import require_ours
from utils.qat.core.machine import select_device
from utils.qat.core.text import pixels
from utils.qat.untrusted.json_schema import anything, read_json
from utils.qat.untrusted.torchvision_weights import fetch
from utils.qat.vendors.next_step import after_scoring

VERDICT = {'onnx': {'file': str, 'sha256': str}, str: anything}  # kind of a .verify.json of ours


@dataclass
class Written:
    """The written files of one format, and what to report about them.

    Attributes:
        files: kind → file, as the end of the command lists them; the first is the format's own.
        lines: report of the files, and of their agreement with PyTorch.
        warnings: for the user of the files.
        about: description of the graph, logged once for all files that are made from it.
        low_scores: whether the file returns low-scored detections; without them its AP is not comparable with others.
        backend: see Format.backend; set by Export.write.
    """

    files: dict[str, Path]
    lines: Sequence[str]
    warnings: Sequence[str] = ()
    about: str = ''
    low_scores: bool = True
    backend: str | None = None

    @property
    def path(self) -> Path:
        """The format's own file."""
        return next(iter(self.files.values()))

    @property
    def verdict(self) -> Path:
        """The results of --verify: MODEL.verify.json, but MODEL.xml.verify.json, because both files may be verified."""
        return self.path.with_name(f'{self.path.stem if self.path.suffix == ".onnx" else self.path.name}.verify.json')

    @property
    def named_backend(self) -> str | None:
        """The backend that a command must name because it runs native code; None for any other."""
        return self.backend if self.backend and BACKENDS[self.backend].native else None


@dataclass
class Export:
    """A loaded checkpoint, what the formats need to know of it, and its exported files.

    Attributes:
        config: with the image size of the model.
        predict: the model.
        formats: those of --include.
        written: format → its files, including formats that are only sources of others.
        int8: whether the checkpoint is quantized.
        target: the engine that it was quantized for.
        zero_points: whether a zero point of it is not 0.
        kept_float: the blocks of a quantized checkpoint that its user left in float.
        reshapes: whether files may have the channels that its target wants: padded widths, and no groups.
    """

    config: ExportConfig
    predict: TorchModel
    formats: Sequence[Format]
    written: dict[str, Written] = field(default_factory=dict)
    reshapes: bool = True

    def __post_init__(self) -> None:
        recipe = self.predict.recipe
        self.int8, self.target = recipe is not None, self.predict.target
        self.zero_points, self.kept_float = has_zero_points(self.predict.model), (recipe or {}).get('kept_float', ())

    @cached_property
    def nms(self) -> tuple[Nms, Pooling]:
        """The NMS and mask settings of its files; see `ExportConfig.nms_inside`."""
        return self.config.nms_inside(self.predict.task.masks)

    @property
    def widths(self) -> int:
        """The multiple to which widths of its ONNX files are padded; 1 for no padding."""
        wanted = self.reshapes and self.int8 and self.predict.task.boxes and not self.config.no_pad
        return self.target.multiple if wanted else 1

    def require_ours(self, made: Format, path: Path) -> None:
        """Raise QatError if a file of a format is there, and no export made it."""
        if not self.config.overwrite:
            require_ours(made.paths(self, path), f'rename it or {self.config.weights}, or give --overwrite')

    def write(self) -> list[Written]:
        """Write the files of --include. Formats that are only sources of others go to a scratch folder."""
        for each in self.formats:
            if each.name in self.config.files:  # others go to the scratch folder
                self.require_ours(each, self.config.files[each.name])
        if self.config.project:
            self.config.project.mkdir(parents=True, exist_ok=True)
        formats = self.formats
        for_openvino = [each for each in formats if each.runs_in == 'openvino']
        if self.int8 and self.reshapes and not self.target.groups and for_openvino:
            as_trained = replace(self, formats=for_openvino, written={}, reshapes=False)
            as_trained.write()
            self.written |= as_trained.written
            formats = [each for each in formats if each not in for_openvino]
        own = self.config.files if self.reshapes else {each.name: self.config.files[each.name] for each in formats}
        with TemporaryDirectory() as scratch:
            for each in with_sources(formats):
                path = own.get(each.name) or Path(scratch) / f'model{FORMATS[each.name].suffix}'
                made = self.written[each.name] = replace(each.write(self, path), backend=each.backend(self))
                with suppress(OSError, ValueError):  # there is none, or it is not ours
                    read_json(made.verdict, VERDICT)  # of an earlier file
                    made.verdict.unlink()
        return [self.written[each.name] for each in self.formats]


class Format(ABC):
    """A kind of file.

    Attributes:
        name: a key of FORMATS.
        source: the format that its files are made from; None = the model itself.
        runs_in: the backend that runs its files, if it is always the same one.
    """

    name: str
    source: Format | None = None
    runs_in: str | None = None

    def require(self, export: Export) -> None:
        """Raise QatError if the checkpoint, the options, the device or the installed libraries do not allow this format."""

    def paths(self, export: Export, path: Path) -> list[Path]:
        """List all files that `write` writes."""
        return [path]

    @abstractmethod
    def write(self, export: Export, path: Path) -> Written:
        """Write the files, and compare them with PyTorch.

        Raises:
            QatError: they differ from PyTorch, or a library refuses. No file is left.
        """

    def report(self, export: Export, path: Path, kind: str, agreement: object, *more: str) -> Written:
        """Report a file that runs in one backend. kind: what it is, in words; more: lines about it."""
        takes = 'any batch' if export.config.dynamic else f'batch {export.config.batch_size}'
        return Written(
            {self.name: path},
            [
                f'-> {path}, {size_of(path)}: {kind}, {takes}, images of {pixels(export.config.imgsz)}',
                *more,
                f'{BACKENDS[self.runs_in or self.name].title} against PyTorch: {agreement}',
            ],
        )

    def backend(self, export: Export) -> str | None:
        """Return the backend that runs the file for --verify; None if no backend can."""
        return self.runs_in

    def reference(self, export: Export) -> Callable[[torch.Tensor], object]:
        """Return the PyTorch function that the file reproduces: images → predictions."""
        return self.source.reference(export) if self.source else export.predict

    def next_commands(self, export: Export, written: Written, data: str) -> list[str]:
        """Return the commands to type after a good score. data: the user's data, or a placeholder."""
        return [after_scoring(written.path, export.config.imgsz, export.target, written.named_backend)]


def with_sources(formats: Sequence[Format]) -> list[Format]:
    """List formats and their sources, each after its source."""
    by_name: dict[str, Format] = {}
    for wanted in formats:
        before = with_sources([wanted.source]) if wanted.source else []
        by_name |= {each.name: each for each in (*before, wanted)}
    return list(by_name.values())


def size_of(*files: Path) -> str:
    """Format the total size of files in MB."""
    return f'{sum(file.stat().st_size for file in files) / 1e6:.1f} MB'


def open_export(config: ExportConfig, formats: Sequence[Format], flag: str = '--imgsz') -> Export:
    """Load a checkpoint for `formats`; see `export_of`. flag: the name of the option of the size."""
    predict = TorchModel(*CheckpointFile(fetch(config.weights)).load_any(select_device(config.device)))
    return export_of(predict, config, formats, flag)


def export_of(predict: TorchModel, config: ExportConfig, formats: Sequence[Format], flag: str = '--imgsz') -> Export:
    """Open a model for `formats`, and raise QatError for anything that one of them refuses."""
    export = Export(replace(config, imgsz=image_size(config.imgsz, predict, flag=flag)), predict, formats)
    for each in with_sources(formats):
        each.require(export)
    return export
