"""A run of `quantize`: what it works on, which `sensitive` shares, its state, and its files.

Every file but the log is complete at any moment. All processes of a torchrun call the same methods; only the first writes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from utils.general import init_seeds

from models.quantize.checkpoint import CheckpointFile, save_model
from models.quantize.kept import Kept, kept_of
from models.quantize.network import require_known_head
from models.quantize.plan import resolve
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import DECIDERS, LEARNT, CalibrationConfig, QuantizeConfig, SensitiveConfig
from utils.qat.config.settings import flag_of, plain
from utils.qat.config.tasks import Task
from utils.qat.core.distributed import from_first, is_first, join, on_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic, delete_unfinished, write_torch
from utils.qat.core.log import LOGGER, log_to, quiet_upstream
from utils.qat.core.machine import describe, machine, select_device, versions
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.upstream import Network
from utils.qat.data.dataset import MILD, VARIED, is_numbered, load_hyp
from utils.qat.data.loaders import Images, Loader, Loaders, TrainingImages
from utils.qat.evaluation.detection_scores import require_annotations
from utils.qat.evaluation.metrics import Metrics
from utils.qat.run.report import write_report
from utils.qat.run.state import FORMAT, STATE, State

UNSCORED = 'weights/.unscored.pt'  # a model before its name is known


@dataclass
class Inputs:
    """A float model, its data, and the resolved settings."""

    config: Any  # CalibrationConfig
    device: torch.device
    model: Network  # float, fused, on `device`
    sha256: str  # of the file of `model`, hex digits
    task: Task
    images: Loaders


def open_inputs(config: CalibrationConfig) -> Inputs:
    """Load the float model and check its data."""
    device = select_device(config.device)
    join(device)
    with quiet_upstream():
        file = CheckpointFile(config.weights)
        network = file.load_float(device)
        model = TorchModel(network)
    config = config.for_model(model)
    data = model.task.load_data(config.data, model, names_from=config.names_from)
    if config.names_from == 'data' or is_numbered(model.names):
        network.names = data.names
    config = resolve(config, network, device.type, data)
    if isinstance(config, QuantizeConfig):
        data = replace(data, val_split=config.val_split)
    images = Loaders(data, config, model.stride, device, (rank(), world_size()))
    return Inputs(config, device, network, file.sha256, model.task, images)


def begin(inputs: Inputs, folder: Path) -> None:
    """Start the log in `folder`, and set seeds and rounding."""
    init_seeds(inputs.config.seed)
    torch.backends.cudnn.deterministic = True
    on_first(log_to)(folder / 'log.txt')
    seen = inputs.task.seen_as(inputs.config.imgsz, isinstance(inputs.config, SensitiveConfig))
    LOGGER.info(f'device {describe(inputs.device)}, images scored {seen}, results in {folder}')
    for name in inputs.config.decided:
        LOGGER.debug(f'{flag_of(name)} {plain(getattr(inputs.config, name))}: decided by {DECIDERS[name]}')


@dataclass
class Work:
    """The work of a run of `quantize`: it holds the images of each stage that is left, and the parts of the model that stay as they are."""

    scored: dict[str, Loader] = field(default_factory=dict)  # 'val', and 'held out' if images are held out
    float_blocks: Kept = Kept([])
    float_functions: Kept = Kept([])  # activation functions that are not exchanged
    calibration: Images | None = None  # None in a run that goes on after the calibration
    adaptation: TrainingImages | None = None  # None if no activation function has to be learnt
    training: TrainingImages | None = None  # None without fine-tuning


class Run:
    """The float model of a run of `quantize`, the images that score models, the state, and the files in `folder`, PROJECT/NAME."""

    def __init__(self, inputs: Inputs, work: Work, folder: Path) -> None:
        """Open the folder. With config.resume the state is that of the interrupted run; a new run deletes unfinished files.

        Raises QatError if the run cannot be resumed, or if the float model has the name that the run gives its best model.
        """
        self.folder, self.device, self.model = folder, inputs.device, inputs.model
        self.sha256, self.task, self.data, self.scored = inputs.sha256, inputs.task, inputs.images.data, work.scored
        learnt = work.training or work.adaptation
        loaders = {**work.scored, **({'train': learnt.loader} if learnt else {})}
        images = {name: len(loader.dataset) for name, loader in loaders.items()}
        if inputs.config.resume:
            from utils.qat.run.resume import read_state  # here, because few runs need it

            self.state = read_state(folder)  # read again, because now no other process writes it
            self._require_images(images)
            self._note_changes()
            return
        weights = inputs.config.weights
        if (folder / DELIVERED).resolve() == weights.resolve():
            raise QatError(f'--weights {weights}: the run would write its best model there; choose another --name')
        settings = inputs.config.plain()
        del settings['resume']  # no setting of the run
        self.state = State(
            settings=settings,
            versions=versions(),
            device=describe(self.device),
            machine=machine(self.device),
            classes={str(i): name for i, name in self.data.names.items()},
            images=images,
            resampled={name: {} for name in self.scored},
        )
        on_first((folder / 'weights').mkdir)(exist_ok=True)
        self.clear_up()
        self._forget()
        self.report()

    def _require_images(self, now: dict[str, int]) -> None:
        """Raise QatError unless there are as many images as when the run was started."""
        before = self.state.images
        if now != before:
            raise QatError(
                f'--resume {self.folder}: {self.data.file} had {before} images when the run was started, and has {now}; '
                'put the old ones back, or start a new run'
            )

    def _note_changes(self) -> None:
        """Warn of other library versions or another device, which change figures slightly, and report them."""
        state = self.state
        now, before = {**versions(), 'device': describe(self.device)}, {**state.versions, 'device': state.device}
        changed = {k: v for k, v in now.items() if v != before[k]}
        if changed:
            LOGGER.warning(
                'not what the run was started with, so figures may differ a little from those of a run that was not '
                'interrupted: ' + ', '.join(f'{k} {before[k]}, now {v}' for k, v in changed.items())
            )
            epoch = state.training['number'] if state.training else 0
            state.changed[f'after epoch {epoch}'] = changed

    @contextmanager
    def saved(self, model: Network) -> Iterator[None]:
        """Save a model, quantized or in float, as UNSCORED, to score it and to give the file its name; else the file is deleted."""
        try:
            recipe = {**self.state.settings, 'kept_float': self.state.kept_float}
            on_first(save_model)(self.folder / UNSCORED, model, recipe, self.sha256)
            yield
        finally:
            on_first((self.folder / UNSCORED).unlink)(missing_ok=True)

    def named(self, start: str, metrics: Metrics | None) -> str:
        """Rename the saved file; its name has the score, after `start`. Returns the path in the folder."""
        key, _ = self.task.metrics.choosing()
        score = f'{getattr(metrics, key):.4f}' if metrics else 'unknown'
        file = f'weights/{start}_{key}_{score}_{Path(self.state.settings["weights"]).stem}.pt'
        on_first(os.replace)(self.folder / UNSCORED, self.folder / file)
        return file

    def load(self, file: str) -> Network:
        """Load a model that `saved` wrote. Raises QatError if it was made from another float checkpoint."""
        from_first()  # the others wait for the file
        checkpoint = CheckpointFile(self.folder / file)
        if checkpoint.kind == 'float':
            made, model = checkpoint.load_dual_or_float(self.device)
        else:
            model, made = checkpoint.load_quantized(self.device)
        if made.get('source_sha256') != self.sha256:
            raise QatError(
                f'--resume {self.folder}: {self.state.settings["weights"]} is another file than the run was started with (its SHA-256 '
                'differs); put the old one back, or start a new run'
            )
        return model

    def keep(self) -> None:
        """Write the state, from which a resumed run continues."""
        on_first(write_torch)(self.folder / STATE, {'format': FORMAT, **self.state.to_json()})

    def report(self, finished: bool = False) -> None:
        """Write the report; `finished`: draw the pictures too, which takes a while."""
        on_first(write_report)(self.folder, self.state, self.task, finished)

    def copy(self, file: str, *copies: str) -> None:
        """Give a file in the folder further names, or copy it where the disk has no hard links."""
        for copy in copies if is_first() else ():
            with atomic(self.folder / copy) as tmp:
                tmp.unlink(missing_ok=True)  # of a killed process
                try:
                    os.link(self.folder / file, tmp)
                except OSError:
                    shutil.copyfile(self.folder / file, tmp)

    def finish(self) -> None:
        """Write the last report, and delete the state."""
        self.report(finished=True)
        self._forget()

    def _forget(self) -> None:
        on_first((self.folder / STATE).unlink)(missing_ok=True)

    def clear_up(self) -> None:
        """Delete the unfinished files of a killed process; links and folders stay."""
        if not is_first():
            return
        for folder in (self.folder, self.folder / 'weights'):
            delete_unfinished(folder)
        unscored = self.folder / UNSCORED
        if unscored.is_file() and not unscored.is_symlink():
            unscored.unlink()


def open_work(inputs: Inputs) -> Work:
    """Open the images of a run of `quantize`, and choose what stays as it is; nothing is written."""
    config, images, task, model = inputs.config, inputs.images, inputs.task, inputs.model
    if config.hyp and not task.augments:
        raise QatError(f'--hyp {config.hyp}: images of {task.title} are not augmented, leave it out')
    if config.epochs and config.task_loss:
        require_known_head(model, f'--task-loss {config.task_loss}', 'give --task-loss 0')
    work = Work()
    if config.exchanges or not config.resume:  # a resumed run with --activation may lack the calibration
        work.float_blocks, work.float_functions = kept_of(model, config, inputs.sha256)
    is_scored = bool(config.epochs or config.eval_origin or config.eval_ptq or config.max_drop is not None)
    work.scored['val'] = images.scored(need_labels=is_scored)
    if is_scored:
        require_annotations(images.data, work.scored['val'].dataset.im_files)
    if config.val_split:
        work.scored['held out'] = images.scored(split='held out')
    hyp, learns = load_hyp(config.hyp) if config.hyp else None, config.activation in LEARNT
    augments = learns and task.augments and len(set(config.imgsz)) == 1
    varied, mild = (VARIED, MILD) if augments else (None, None)
    if config.exchanges or not config.resume:
        if learns:
            work.adaptation = images.training(hyp or varied)
            work.adaptation.fill(config.iters)
        work.calibration = images.calibration()
    if config.epochs:
        work.training = images.training(hyp or mild, labels=config.task_loss > 0)
        if learns:
            work.training.fill(config.iters)
    return work
