"""Compare models of any kind with the first: their outputs, rank by rank, and their AP, or top-1 and top-5 accuracy.

    python compare_outputs.py yolov9-c-converted.pt yolov9-c-qat.engine --data data/coco.yaml
    python compare_outputs.py yolov9-c.onnx ptq.onnx qat.onnx --data data/coco.yaml --show 5
    python compare_outputs.py resnet50.onnx resnet50-int8.onnx --random 100

A model is a checkpoint (.pt), an ONNX file in ONNX Runtime or OpenVINO, an .xml of OpenVINO, a .tflite of LiteRT, or an engine. Each is compared with
the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.deploy import CompareConfig
from utils.qat.config.settings import Sides, image_size, read
from utils.qat.config.tables import CHECKPOINTS, EXPORTED, backends_for
from utils.qat.config.tasks import TASKS, load_task
from utils.qat.core.command import explain_out_of_memory, run_command
from utils.qat.core.errors import QatError, naming
from utils.qat.core.files import require_file
from utils.qat.core.log import LOGGER, RESULT, bar, finish
from utils.qat.core.run_folder import own_folder
from utils.qat.vendors.next_step import after_scoring

if TYPE_CHECKING:
    import torch

    from utils.qat.backends.file_model import FileModel
    from utils.qat.backends.pytorch import TorchModel
    from utils.qat.config.tasks import Task
    from utils.qat.evaluation.side_by_side import Example


def parse_args(argv: Sequence[str] | None) -> CompareConfig:
    """Parse the command line into settings."""
    return read(CompareConfig, argv, __doc__.splitlines()[0])


def require_alike(config: CompareConfig, models: Sequence[FileModel | TorchModel]) -> Task:
    """Return the task of the models. Raises QatError for a mixture."""
    tasks = [task for task in map(load_task, TASKS) if task in {m.task for m in models}]
    if len(tasks) > 1:
        raise QatError(f'{", ".join(map(str, config.models))}: one is {tasks[0].title} and the other {tasks[1].title}')
    return tasks[0]


def compare_images(
    config: CompareConfig, models: Sequence[FileModel | TorchModel], task: Task, device: torch.device, size: Sides
) -> tuple[list[dict[str, Any]], list[Example]]:
    """Compare models with the first. Returns a plain comparison for each of the others, and examples."""
    from utils.qat.data.loaders import random_images
    from utils.qat.evaluation.compare import compare_models
    from utils.qat.evaluation.side_by_side import Examples

    names = examples = None
    if config.data:
        data = task.labelled(config, max(models, key=lambda m: m.stride), size)
        for file, model in zip(config.models, models):
            if task.boxes or model.by_toolkit:
                with naming(file):  # the classes of each are the data's
                    task.load_data(config.data, model, names_from=config.names_from)
        loader, names = data.loader, data.names
        examples = Examples(config.show, task, data, config.top)
    elif config.random:
        loader = random_images(config.random, config.batch_size, size, config.seed)
    reference, *others = models
    comparisons = compare_models(
        reference,
        others,
        bar(loader, 'comparing'),
        device,
        names,
        config.rtol,
        config.atol,
        config.top,
        examples.look if examples else None,
        task,
    )
    return comparisons, examples.kept if examples else []


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)

    from models.deploy.load import load_model
    from utils.qat.core.machine import machine, select_device
    from utils.qat.evaluation.compare_report import write_comparison
    from utils.qat.evaluation.score_file import FAIR_CONF, note_of_threshold

    for number, file in enumerate(config.models):
        require_file(file, 'B' if number else 'A', CHECKPOINTS + EXPORTED)
    device = select_device(config.device)
    with own_folder(config) as folder, explain_out_of_memory(config.batch_size):
        backends = backends_for(config.models, config.backend)
        models = [load_model(file, device, backend) for file, backend in zip(config.models, backends)]
        task = require_alike(config, models)
        size = image_size(config.imgsz, *models)
        scored = zip(models, config.models) if config.data else ()
        notes = [*filter(None, (note_of_threshold(model, file, FAIR_CONF) for model, file in scored))]
        for note in notes:
            LOGGER.warning(note)
        comparisons, examples = compare_images(config, models, task, device, size)
        following = after_scoring(config.others[-1], size, models[-1].target, backends[-1])
        verdict = write_comparison(folder, config, task, comparisons, examples, size, machine(device), following, notes)
    others = ', '.join(map(str, config.others))
    images = f'{comparisons[0]["images"]} images of {size[0]} x {size[1]}'
    LOGGER.log(RESULT, f'{others} compared with {config.reference}, {images}\n\n{verdict}\n')
    finish(following, results=folder / 'compare.json', report=folder / 'report.md')


if __name__ == '__main__':
    sys.exit(run_command(main))
