"""The state of a `quantize` run and its files: write the results of the stages, and read them for a resumed run.

Every file but the log is complete at any moment. All processes of a torchrun call the same methods; only the first writes.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.nn as nn

from models.quantize.blocks import is_quantized
from models.quantize.checkpoint import CheckpointFile, save_float, save_quantized
from models.quantize.run.inputs import Inputs
from models.quantize.run.scorer import StageScorer
from utils.qat.backends.pytorch import task_of
from utils.qat.core.distributed import from_first, is_first, on_first
from utils.qat.core.errors import QatError
from utils.qat.core.files import TEMPORARY, atomic, write_torch
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import describe, machine, versions
from utils.qat.core.run_folder import DELIVERED
from utils.qat.evaluation.score_tables import score_cells
from utils.qat.run.report import write_report
from utils.qat.run.state import FORMAT, STATE, State

UNSCORED = 'weights/.unscored.pt'  # a model before its name is known


class Keeper:
    """Keeps the `state` of a run and the models of its stages in `folder`, PROJECT/NAME.

    `images` has the numbers of images of 'val', 'held out' and 'train'. With config.resume the state is that of the interrupted
    run; a new run deletes the unfinished files of an earlier one.

    Raises:
        QatError: the run cannot be resumed; or the float model has the name that the run gives its best model.
    """

    def __init__(self, folder: Path, inputs: Inputs, images: dict[str, int]) -> None:
        self.folder, self.weights = folder, inputs.config.weights
        self.sha256, self.device = inputs.sha256, inputs.device
        if inputs.config.resume:
            from utils.qat.run.resume import read_state  # here, because few runs need it

            self.state = read_state(folder)  # read again, because now no other process writes it
            self._require_images(images, inputs.images.data.file)
            self._note_changes()
            return
        if (folder / DELIVERED).resolve() == self.weights.resolve():
            raise QatError(f'--weights {self.weights}: the run would write its best model there; choose another --name')
        settings = inputs.config.plain()
        del settings['resume']  # no setting of the run
        self.state = State(
            settings=settings,
            versions=versions(),
            device=describe(self.device),
            machine=machine(self.device),
            classes={str(i): name for i, name in inputs.images.data.names.items()},
            images=images,
            resampled={name: {} for name in images if name != 'train'},
        )
        on_first((folder / 'weights').mkdir)(exist_ok=True)
        self.clear_up()
        self._forget()
        self.report()

    def _require_images(self, images: dict[str, int], data: Path) -> None:
        """Raise QatError unless there are as many images as when the run was started."""
        if images != self.state.images:
            raise QatError(
                f'--resume {self.folder}: {data} had {self.state.images} images when the run was started, and has {images}; '
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

    def save(self, model: nn.Module, stage: str, name: str, scorer: StageScorer | None) -> dict[str, Any]:
        """Save the model of a stage, quantized or in float, and score the model of the file.

        The name of the file has the score, so the file is hidden until the score is known.

        Args:
            model: calibrated, or with other activation functions than the float model of the run.
            stage: start of the file's name.
            name: of the model among the scored ones.
            scorer: None = it is not scored.

        Returns:
            The metrics, and 'file', the path in the folder.
        """
        unscored = self.folder / UNSCORED
        try:
            if is_quantized(model):
                recipe = {**self.state.settings, 'kept_float': self.state.kept_float}
                on_first(save_quantized)(unscored, model, recipe, self.sha256)
            else:
                on_first(save_float)(unscored, model, self.sha256)
            metrics = scorer.of_quantized(self._load(unscored)[0], name) if scorer else {}
            key = task_of(model).keys[0]
            value = score_cells(metrics)[0] if metrics else 'unknown'
            file = f'weights/{stage}_{key}_{value}_{self.weights.stem}.pt'
            on_first(os.replace)(unscored, self.folder / file)
        finally:
            on_first(unscored.unlink)(missing_ok=True)
        return {**metrics, 'file': file}

    def load(self, stage: dict[str, Any]) -> nn.Module:
        """Load the model of a stage. Raises QatError if it was made from another float checkpoint."""
        model, source = self._load(self.folder / stage['file'])
        if source != self.sha256:
            raise QatError(
                f'--resume {self.folder}: {self.weights} is another file than the run was started with (its SHA-256 '
                'differs); put the old one back, or start a new run'
            )
        return model

    def _load(self, file: Path) -> tuple[nn.Module, Any]:
        """Load a model that `save` wrote, and the SHA-256 of the float model that it was made from."""
        from_first()  # the others wait for the file
        checkpoint = CheckpointFile(file)
        if checkpoint.kind == 'float':
            ckpt, model = checkpoint.load_dual_or_float(self.device)
            return model, ckpt.get('source_sha256')
        model, quant = checkpoint.load_quantized(self.device)
        return model, quant['source_sha256']

    def keep(self) -> None:
        """Write the state, from which a resumed run continues."""
        on_first(write_torch)(self.folder / STATE, {'format': FORMAT, **vars(self.state)})

    def report(self, finished: bool = False) -> None:
        """Write the report; `finished`: draw the pictures too, which takes a while."""
        on_first(write_report)(self.folder, self.state.report(), finished)

    def copy(self, file: str, copy: str) -> None:
        """Copy a file in the folder."""
        if is_first():
            with atomic(self.folder / copy) as tmp:
                shutil.copyfile(self.folder / file, tmp)

    def finish(self) -> None:
        """Write the last report, and delete the state."""
        self.report(finished=True)
        self._forget()

    def _forget(self) -> None:
        on_first((self.folder / STATE).unlink)(missing_ok=True)

    def clear_up(self) -> None:
        """Delete the unfinished files of a killed process; links and folders stay."""
        for path in (*self.folder.iterdir(), *(self.folder / 'weights').iterdir()) if is_first() else ():
            unfinished = path == self.folder / UNSCORED or TEMPORARY.fullmatch(path.name)
            if unfinished and path.is_file() and not path.is_symlink():
                path.unlink()
