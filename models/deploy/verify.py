"""--verify: written files against PyTorch, on labelled images."""

from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from models.deploy.formats.format import Export, Format, Written
from utils.qat.config.common import LoaderConfig
from utils.qat.config.tables import BACKENDS
from utils.qat.core.files import sha256, write_json
from utils.qat.core.log import LOGGER, RESULT, bar
from utils.qat.core.machine import versions
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.compare import compare_models
from utils.qat.vendors.load import open_file


class Verification:
    """The comparison of --verify: opened before the export, so that wrong data surface early; run after it."""

    def __init__(self, export: Export, data: Path) -> None:
        """Open the data and images. Raises QatError if they do not fit the model."""
        config, predict = export.config, export.predict
        self.export, self.data = export, predict.task.load_data(data, predict, '--verify', config.names_from)
        settings = LoaderConfig(batch_size=config.batch_size, imgsz=config.imgsz)
        self.loader = Loaders(self.data, settings, predict.stride).scored(square=True, limit=config.verify_images)

    def keeps_limits(self) -> bool:
        """Compare each file that runs here with PyTorch. Returns whether all keep the limits."""
        written = [(each, self.export.written[each.name]) for each in self.export.formats]
        kept = [self._compare(each, file, file.backend) for each, file in written if file.backend]
        return all(kept)

    def _compare(self, file_format: Format, written: Written, backend: str) -> bool:
        """Log the verdict on a file that `backend` runs, write a .verify.json beside it, and tell whether the limits are kept."""
        path, file = written.path, written.verdict
        export, config, task = self.export, self.export.config, self.export.predict.task
        title = BACKENDS[backend].title
        device, limits = export.predict.device, config.limits(export.int8)
        model = open_file(path, device, backend)
        [comparison] = compare_models(
            file_format.reference(export),
            [model],
            bar(self.loader, 'verifying'),
            device,
            self.data.names,
            task=task,
        )
        beyond = task.comparing().beyond_limits(comparison, limits)
        library = find_spec(backend) and import_module(backend)  # PyTorch runs the other files
        write_json(
            file,
            {
                'settings': config.plain(),
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
            more = '--verify-images 0' if comparison['images'] == config.verify_images else 'more in val'
            LOGGER.error(
                f'{path}: above the limits of --verify: {"; ".join(beyond)}. The file stays. AP is uncertain on few images: '
                f'compare more ({more}), or set its limit with --max-ap-diff'
            )
        return not beyond
