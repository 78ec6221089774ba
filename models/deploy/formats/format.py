"""The interface of an export format, and --verify of a written file. config/tables.py lists the formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from models.quantize.quantizers import has_zero_points
from utils.qat.backends.file_model import open_file
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig
from utils.qat.config.tables import BACKENDS, FORMATS
from utils.qat.core.files import sha256, write_json
from utils.qat.core.log import LOGGER, RESULT, bar
from utils.qat.core.machine import versions
from utils.qat.engine.next_step import after_scoring
from utils.qat.evaluation.compare import compare_models
from utils.qat.targets.target import Target, target_of_recipe


@dataclass
class Written:
    """The written files of one format, and what to report about them.

    Attributes:
        files: kind → file, as the end of the command lists them; the first is the format's own.
        lines: report of the files, and of their agreement with PyTorch.
        warnings: for the user of the files.
        about: description of the graph, logged once for all files that are made from it.
    """

    files: dict[str, Path]
    lines: Sequence[str]
    warnings: Sequence[str] = ()
    about: str = ''

    @property
    def path(self) -> Path:
        """The format's own file."""
        return next(iter(self.files.values()))


@dataclass
class Export:
    """A loaded checkpoint and its exported files.

    Attributes:
        config: with the image size of the model.
        predict: the model.
        written: format → its files, including formats that are only sources of others.
    """

    config: ExportConfig
    predict: TorchModel
    written: dict[str, Written] = field(default_factory=dict)

    @property
    def formats(self) -> list[Format]:
        """The formats of --include."""
        return [load_format(name) for name in self.config.files]

    @property
    def int8(self) -> bool:
        """Whether the checkpoint is quantized."""
        return self.predict.recipe is not None

    @property
    def target(self) -> Target:
        """The engine that the checkpoint was quantized for."""
        return target_of_recipe(self.predict.recipe)

    @property
    def zero_points(self) -> bool:
        """Whether a zero point of the checkpoint is not 0."""
        return has_zero_points(self.predict.model)

    @property
    def kept_float(self) -> Sequence[str]:
        """The blocks of a quantized checkpoint that its user left in float."""
        return (self.predict.recipe or {}).get('kept_float', ())

    def write(self) -> list[Written]:
        """Write the files of --include. Formats that are only sources of others go to a scratch folder."""
        with TemporaryDirectory() as scratch:
            self.scratch = Path(scratch)
            return [self.made(name) for name in self.config.files]

    def made(self, name: str) -> Written:
        """Return the files of a format; write them at the first call."""
        if name not in self.written:
            path = self.config.files.get(name) or self.scratch / f'model{FORMATS[name].suffix}'
            self.written[name] = load_format(name).write(self, path)
        return self.written[name]


class Format(ABC):
    """A kind of file.

    Attributes:
        name: a key of FORMATS.
        source: the format that its files are made from; None = the model itself.
    """

    name: str
    source: str | None = None

    def require(self, config: ExportConfig, device: torch.device) -> None:
        """Raise QatError if the options, the device or the installed libraries do not allow this format."""

    def require_model(self, export: Export) -> None:
        """Raise QatError if this checkpoint cannot be exported to this format."""

    @abstractmethod
    def write(self, export: Export, path: Path) -> Written:
        """Write the files, and compare them with PyTorch.

        Raises:
            QatError: they differ from PyTorch, or a library refuses. No file is left.
        """

    def backend(self, export: Export) -> str | None:
        """Return the backend that runs the file for --verify; None if no backend can."""
        return None

    def reference(self, export: Export) -> Callable[[torch.Tensor], Any]:
        """Return the PyTorch function that the file reproduces: images → predictions."""
        return load_format(self.source).reference(export) if self.source else export.predict

    def keeps_low_scores(self, export: Export) -> bool:
        """Tell whether the file returns low-scored detections; without them its AP is not comparable with others."""
        return load_format(self.source).keeps_low_scores(export) if self.source else True

    def next_commands(self, export: Export, written: Written, data: str) -> list[str]:
        """Return the commands to type after a good score. data: the user's data, or a placeholder."""
        return [after_scoring(written.path, export.config.imgsz, self.typed_backend(export))]

    def typed_backend(self, export: Export) -> str | None:
        """Return the backend that a command must name because it runs native code; None for any other."""
        backend = self.backend(export)
        return backend if backend and BACKENDS[backend].native else None


def load_format(name: str) -> Format:
    """Import the module of a format and return its FORMAT. name: a key of FORMATS."""
    return import_module(f'{__package__}.{FORMATS[name].file}').FORMAT


def with_sources(names: Mapping[str, object] | Sequence[str]) -> list[Format]:
    """List formats and their sources, each after its source."""
    found: dict[str, Format] = {}
    for name in names:
        made = load_format(name)
        before = with_sources([made.source]) if made.source else []
        found |= {each.name: each for each in (*before, made)}
    return list(found.values())


def size_of(*files: Path) -> str:
    """Format the total size of files in MB."""
    return f'{sum(file.stat().st_size for file in files) / 1e6:.1f} MB'


def verify(export: Export, file_format: Format, backend: str, data: Any, loader: Any) -> bool:
    """Compare a written file with PyTorch: log the verdict, write a .verify.json beside it, and tell whether the limits are kept.

    backend: runs the file. data: of --verify. loader: its images.
    """
    config, path, task = export.config, export.written[file_format.name].path, export.predict.task
    device, limits, title = export.predict.device, config.limits(export.int8), BACKENDS[backend].title
    model = open_file(path, device, backend)
    [comparison] = compare_models(
        file_format.reference(export),
        [model],
        loader,
        device,
        data.names,
        progress=lambda it: bar(it, 'verifying'),
        task=task,
    )
    beyond = task.comparing().beyond_limits(comparison, limits)
    # MODEL.verify.json, but MODEL.xml.verify.json: both files may be verified
    file = path.with_name(f'{path.stem if path.suffix == ".onnx" else path.name}.verify.json')
    library = find_spec(backend) and import_module(backend)  # PyTorch runs the other files
    write_json(
        file,
        {
            'settings': {**config.plain(), 'opset': config.onnx_opset},
            'versions': {**versions(), **({backend: library.__version__} if library else {})},
            'onnx': {'file': path, 'sha256': sha256(path)},
            'limits': asdict(limits),
            'above_limits': beyond,
            **comparison,
        },
    )
    how, names = task.comparing(), ('PyTorch', title)
    seen = f'{comparison["images"]} images of {config.verify}, {task.seen_as(config.imgsz, True)}'
    lines = [
        f'\n{title} ({path.name}) against PyTorch on {seen}: {how.in_a_clause(comparison)}.',
        f'limits: {how.limits_text(limits, comparison)}: {"exceeded" if beyond else "kept"}',
        *model.notes,
    ]
    scores = how.scores_table([comparison], names)
    LOGGER.log(RESULT, '\n'.join(lines) + f'\n\n{scores}' * bool(scores) + f'\nresults {file}\n')
    if beyond:
        LOGGER.error(
            f'{path}: above the limits of --verify: {"; ".join(beyond)}. The file stays. AP is uncertain on few images: '
            'use more (--verify-images 0 takes all), or set its limit with --max-ap-diff'
        )
    return not beyond
