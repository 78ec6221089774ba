"""Compare models of any kind with the first: their outputs, rank by rank, and their AP, or top-1 and top-5 accuracy.

    python compare_outputs.py yolov9-c-converted.pt yolov9-c-qat.engine --data data/coco.yaml
    python compare_outputs.py yolov9-c.onnx ptq.onnx qat.onnx --data data/coco.yaml --show 5
    python compare_outputs.py resnet50.onnx resnet50-int8.onnx --random 100

A model is a checkpoint (.pt), an ONNX file in ONNX Runtime or OpenVINO, an .xml of OpenVINO, or an engine. Each is compared with
the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from utils.qat.config.backends import CHECKPOINTS, EXPORTED, backends_for
from utils.qat.config.common import LoaderConfig, usual_size
from utils.qat.config.compare import CompareConfig
from utils.qat.config.options import read
from utils.qat.config.settings import Sides, require_multiples
from utils.qat.core.command import explain_out_of_memory, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish
from utils.qat.core.next_command import after_scoring, typed_sides
from utils.qat.core.run_folder import own_folder

if TYPE_CHECKING:
    import torch

    from utils.qat.evaluation.side_by_side import Example
    from utils.qat.prediction.file_model import FileModel
    from utils.qat.prediction.pytorch import TorchModel


def parse_args(argv: Sequence[str] | None) -> CompareConfig:
    """Turn the command line into settings."""
    return read(CompareConfig, argv, __doc__.splitlines()[0])


def image_size(config: CompareConfig, models: Sequence[FileModel | TorchModel]) -> Sides:
    """Find the height and width, in pixels, of the images that all models take. Raises QatError if they differ."""
    from utils.qat.prediction.file_model import FileModel

    given = [tuple(m.imgsz) for m in models if isinstance(m, FileModel)]
    # a file whose image size is open takes any, as a checkpoint does
    sizes = {size for size in given if all(isinstance(n, int) for n in size)} or {
        config.imgsz or _of_checkpoints(models) or usual_size(models[0].classifies)
    }
    if len(sizes) > 1:
        raise QatError(
            f'{listed(config)}: they take images of {" and ".join(f"{h} x {w}" for h, w in sorted(sizes))}; one '
            'size is needed, export with the same --imgsz'
        )
    (size,) = sizes
    if config.imgsz not in (None, size):
        raise QatError(
            f'--imgsz {" ".join(map(str, typed_sides(config.imgsz)))}: the files take {size[0]} x {size[1]}; leave the flag out, or '
            'export again'
        )
    for model in models:
        require_multiples(size, getattr(model, 'stride', 1))
    return size


def _of_checkpoints(models: Sequence[FileModel | TorchModel]) -> Sides | None:
    """Return the image size that the first quantized checkpoint was quantized for; None without one."""
    return next((size for m in models if (size := getattr(m, 'quantized_for', None))), None)


def listed(config: CompareConfig) -> str:
    """Write the models in a message."""
    return ', '.join(map(str, config.models))


def require_alike(config: CompareConfig, models: Sequence[FileModel | TorchModel]) -> bool:
    """Tell whether all models are classifiers. Raises QatError for a mixture of tasks."""
    classify = [m.classifies for m in models]
    if any(classify) != all(classify):
        raise QatError(f'{listed(config)}: one is a detector and the other a classifier')
    if not all(classify) and len({m.segments for m in models}) > 1:
        raise QatError(f'{listed(config)}: one gives masks and the other boxes only')
    return all(classify)


def compare_detectors(
    config: CompareConfig, models: Sequence[FileModel | TorchModel], device: torch.device, size: Sides
) -> tuple[list[dict[str, Any]], list[Example]]:
    """Compare detectors with the first. Returns the plain compare.Comparison of each other one, and examples."""
    from utils.qat.data.dataset import load_any
    from utils.qat.data.loaders import random_images, val_loader
    from utils.qat.evaluation.compare import compare_all
    from utils.qat.evaluation.side_by_side import Examples

    names, examples = None, None
    if config.data:
        data = load_any(config.data, models[0])
        settings = LoaderConfig(batch_size=config.batch_size, imgsz=size, workers=config.workers, device=config.device)
        stride, names = max(m.stride for m in models), data.names
        loader = val_loader(data, settings, stride, square=True, limit=config.images or None)
        examples = Examples(config.show, len(loader.dataset), names, config.top)
    elif config.random:
        loader = random_images(config.random, config.batch_size, size, config.seed)
    reference, *others = models
    found = compare_all(
        reference,
        others,
        loader,
        device,
        names,
        config.rtol,
        config.atol,
        config.top,
        lambda it: bar(it, 'comparing'),
        examples.look if examples else None,
    )
    return [c.plain() for c in found], examples.found if examples else []


def compare_classifiers(
    config: CompareConfig, models: Sequence[FileModel | TorchModel], device: torch.device, size: Sides
) -> tuple[list[dict[str, Any]], list[Example]]:
    """Compare classifiers with the first. Returns the plain compare_classes.ClassComparison of each other one, and examples."""
    from utils.qat.data.class_folders import class_images, paths_of
    from utils.qat.data.image_folders import MEAN, STD
    from utils.qat.data.loaders import random_images
    from utils.qat.evaluation.compare_classes import compare_classes
    from utils.qat.evaluation.side_by_side import Examples

    examples = None
    if config.data:
        batches = class_images(config, size, models[0])
        paths = paths_of(batches.dataset)
        colours = (MEAN, STD) if models[0].task == 'classify' else (config.mean, config.std)
        examples = Examples(config.show, len(paths), models[0].names or {}, config.top, paths, *colours)
    elif config.random:
        batches = [
            (images.float() / 255, None)
            for images, *_ in random_images(config.random, config.batch_size, size, config.seed)
        ]
    reference, *others = models
    settings = bar(batches, 'comparing'), device, config.rtol, config.atol, config.top
    found = compare_classes(reference, others, *settings, examples.look if examples else None)
    return [c.plain() for c in found], examples.found if examples else []


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)

    import torch

    from models.deploy.load import load_model
    from utils.qat.core.device import select_device
    from utils.qat.core.machine import machine
    from utils.qat.evaluation.compare_report import write_comparison

    for number, file in enumerate(config.models):
        require_file(file, 'B' if number else 'A', CHECKPOINTS + EXPORTED)
    device = select_device(config.device)
    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    with own_folder(config) as folder, explain_out_of_memory(config.batch_size):
        backends = backends_for(config.models, config.backend)
        models = [load_model(file, device, backend) for file, backend in zip(config.models, backends)]
        compare = compare_classifiers if require_alike(config, models) else compare_detectors
        size = image_size(config, models)
        comparisons, examples = compare(config, models, device, size)
        following = after_scoring(config.others[-1], size, backends[-1])
        tables = write_comparison(folder, config, comparisons, examples, size, machine(device), following)
    others = ', '.join(map(str, config.others))
    images = f'{comparisons[0]["images"]} images of {size[0]} x {size[1]}'
    LOGGER.log(RESULT, f'{others} compared with {config.reference}, {images}\n\n{tables}\n')
    finish(following, results=folder / 'compare.json', report=folder / 'report.md')


if __name__ == '__main__':
    sys.exit(run_command(main))
