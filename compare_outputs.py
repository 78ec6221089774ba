"""Compare two models of any kind: their outputs, rank by rank, and their AP, or top-1 and top-5 accuracy.

    python compare_outputs.py yolov9-c-converted.pt yolov9-c-qat.engine --data data/coco.yaml
    python compare_outputs.py resnet50.onnx resnet50-int8.onnx --random 100

A model is a checkpoint (.pt), an ONNX file in ONNX Runtime, or an engine. The second is compared with the first.
"""

import sys
from pathlib import Path

from utils.qat.config.backends import ENGINES
from utils.qat.config.compare import CompareConfig
from utils.qat.core.command import Parser, explain_out_of_memory, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish
from utils.qat.core.next_command import after_scoring
from utils.qat.core.run_folder import run_folder


def parse_args(argv):
    """Read the command line into a CompareConfig."""
    c, p = CompareConfig, Parser(description=__doc__.splitlines()[0])
    for name, which in (('reference', 'A'), ('other', 'B')):
        p.add_argument(name, type=Path, metavar=which, help='checkpoint (.pt), .onnx or .engine')
    p.add_argument(
        '--data',
        type=Path,
        help='data YAML; its val images are used. For classifiers: a folder with one folder of images for each class',
    )
    p.add_argument('--random', type=int, metavar='N', help='use N images of noise instead of --data')
    p.add_argument(
        '--images', type=int, default=c.images, help='number of images of the data, at most, evenly spread; 0 = all'
    )
    p.add_argument(
        '--imgsz', '--img', '--img-size', type=int, help='image size in pixels; default: the size of the files, or 640'
    )
    p.add_argument('--batch-size', type=int, default=c.batch_size, help='images at once')
    p.add_argument('--rtol', type=float, default=c.rtol, help='relative tolerance, as in numpy.isclose')
    p.add_argument('--atol', type=float, default=c.atol, help='absolute tolerance; for boxes in pixels')
    p.add_argument('--top', type=int, default=c.top, help='ranks to compare')
    p.add_argument(
        '--mean',
        type=float,
        nargs='+',
        default=c.mean,
        help="mean of a classifier's images, in 0..1, such as 0.485 0.456 0.406",
    )
    p.add_argument(
        '--std', type=float, nargs='+', default=c.std, help='their standard deviation, such as 0.229 0.224 0.225'
    )
    p.add_argument('--device', default=c.device, help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
    p.add_argument(
        '--backend', choices=ENGINES, default=c.backend, help='library for engines: TensorRT or TensorRT-RTX'
    )
    p.add_argument('--workers', type=int, default=c.workers, help='data loading processes')
    p.add_argument('--seed', type=int, default=c.seed, help='seed of --random')
    p.add_argument('--project', type=Path, default=c.project, help='results go to PROJECT/NAME')
    p.add_argument('--name', default=c.name, help='results go to PROJECT/NAME')
    p.add_argument('--exist-ok', action='store_true', help='write into PROJECT/NAME even if it exists')
    return CompareConfig(**vars(p.parse_args(argv)))


def image_size(config, models):
    """Return the side of the square images that both models take. Raises QatError if there is none."""
    from utils.qat.prediction.file_model import FileModel

    sizes = {tuple(m.imgsz) for m in models if isinstance(m, FileModel)} or {(config.imgsz or 640,) * 2}
    if len(sizes) > 1 or len(set(*sizes)) > 1:
        raise QatError(
            f'{config.reference}, {config.other}: they take images of {" and ".join(f"{h} x {w}" for h, w in sizes)}; one square '
            'size is needed, export with the same --imgsz'
        )
    size = next(iter(sizes))[0]
    if config.imgsz not in (None, size):
        raise QatError(f'--imgsz {config.imgsz}: the files take {size}; leave the flag out, or export again')
    return size


def compare_detectors(config, models, device, size):
    """(plain Comparison, its tables)."""
    from utils.qat.config.qat import EvalConfig
    from utils.qat.data.dataset import load_data
    from utils.qat.data.loaders import random_images, val_loader
    from utils.qat.evaluation.compare import compare
    from utils.qat.evaluation.compare_report import comparison_tables

    if config.data:
        data = load_data(
            require_file(config.data, '--data', ('.yaml', '.yml')), models[0].nc, segments=models[0].segments
        )
        settings = EvalConfig(config.reference, config.data, config.batch_size, size, workers=config.workers)
        loader, names = (
            val_loader(data, settings, max(m.stride for m in models), square=True, limit=config.images),
            data.names,
        )
    else:
        loader, names = random_images(config.random, config.batch_size, size, config.seed), None
    found = compare(
        *models, loader, device, names, config.rtol, config.atol, config.top, lambda it: bar(it, 'comparing')
    ).plain()
    return found, comparison_tables(found, (config.reference.name, config.other.name))


def compare_classifiers(config, models, device, size):
    """(plain ClassComparison, its tables)."""
    from utils.qat.data.loaders import class_images, random_images
    from utils.qat.evaluation.compare_classes import compare_classes
    from utils.qat.evaluation.compare_report import class_comparison_tables

    if config.data:
        batches = class_images(config, size)
    else:
        batches = [
            (images.float() / 255, None)
            for images, *_ in random_images(config.random, config.batch_size, size, config.seed)
        ]
    found = compare_classes(*models, bar(batches, 'comparing'), device, config.rtol, config.atol, config.top).plain()
    return found, class_comparison_tables(found, (config.reference.name, config.other.name))


def main(argv=None):
    config = parse_args(argv)

    import torch

    from models.deploy.load import SUFFIXES, load_model
    from utils.qat.core.device import select_device
    from utils.qat.evaluation.compare_report import write_comparison

    files = [require_file(file, which, SUFFIXES) for file, which in ((config.reference, 'A'), (config.other, 'B'))]
    device = select_device(config.device)
    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
        models = [load_model(file, device, config.backend) for file in files]
        classify = [getattr(m, 'classifies', False) for m in models]
        if any(classify) != all(classify):
            raise QatError(f'{config.reference}, {config.other}: one is a detector and the other a classifier')
        if not all(classify) and models[0].segments != models[1].segments:
            raise QatError(f'{config.reference}, {config.other}: one gives masks and the other boxes only')
        size = image_size(config, models)
        found, tables = (compare_classifiers if all(classify) else compare_detectors)(config, models, device, size)
        following = after_scoring(config.other, size, config.backend)
        write_comparison(folder, config, found, tables, size, following)
    LOGGER.log(
        RESULT,
        f'{config.other} compared with {config.reference}, {found["images"]} images of {size} x {size}\n\n{tables}\n',
    )
    finish(following, results=folder / 'compare.json', report=folder / 'report.md')


if __name__ == '__main__':
    sys.exit(run_command(main))
