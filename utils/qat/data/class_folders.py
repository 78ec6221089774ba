"""Images of a classifier: a folder for each class, and which output of the classifier is which folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Subset

from utils.qat.config.common import LabelledConfig, LoaderConfig
from utils.qat.config.settings import Sides
from utils.qat.core.command import require_file
from utils.qat.core.errors import QatError
from utils.qat.core.printable import visible
from utils.qat.data.dataset import load_any, open_dataset
from utils.qat.data.image_folders import ClassImages
from utils.qat.data.loaders import batches_of, spread

LARGEST_LIST = 1_000_000  # bytes of --classes


def outputs_of(
    folders: Sequence[str], nc: int, names: Mapping[int, str], listed: Path | None, data: object
) -> list[int]:
    """Find the output of a classifier for each folder of images.

    In this order: the file of --classes; folders that are named by index; by the names in the metadata of the model; as many
    folders as outputs, in the order of their names.

    Args:
        folders: names of the folders, such as '3', 'cat' or the WordNet id 'n01440764'; sorted.
        nc: number of outputs.
        names: output → name, by the metadata of the model; only indices where it has none.
        listed: file of --classes: line i begins with the name of the folder of output i.
        data: folder of the folders, for the message.

    Returns:
        An output, in 0..nc - 1, for each folder.

    Raises:
        QatError: a folder belongs to no output, or nothing tells.
    """
    if listed:
        known = _listed(listed, nc)
        unknown = [f for f in folders if f not in known]
        if unknown:
            raise QatError(f'--classes {listed}: no line begins with {visible(unknown[0])}, a folder of {data}')
        return [known[f] for f in folders]
    if all(f.isascii() and f.isdigit() and int(f) < nc for f in folders):
        return [int(f) for f in folders]
    called = Counter(map(_plain, names.values()))  # ImageNet has two cranes
    by_name = {_plain(name): i for i, name in names.items() if i < nc and called[_plain(name)] == 1}
    if all(_plain(f) in by_name for f in folders):
        return [by_name[_plain(f)] for f in folders]
    if len(folders) == nc:
        return list(range(nc))
    raise QatError(
        f'--data {data}: {len(folders)} folders ({visible(folders[0])}, ...), and the model has {nc} outputs; name each folder by '
        'the index of its output, or give --classes FILE: a line for each output that begins with the name of its folder, such '
        'as a WordNet id'
    )


def _plain(name: str) -> str:
    """Return a name without case, and with spaces for underscores."""
    return name.replace('_', ' ').strip().casefold()


def _listed(file: Path, nc: int) -> dict[str, int]:
    """Read the file of --classes: name of a folder → output."""
    with open(require_file(file, '--classes'), 'rb') as f:
        text = f.read(LARGEST_LIST + 1)
    lines = text.decode(errors='replace').splitlines()
    if len(text) > LARGEST_LIST or len(lines) != nc or not all(line.split() for line in lines):
        raise QatError(f'--classes {file}: has {len(lines)} lines; expected {nc}, one for each output of the model')
    return {part: i for i, line in enumerate(lines) for part in (line.strip(), line.split()[0].rstrip(','))}


def paths_of(dataset: Any) -> list[str]:
    """Return the path of each image of a dataset that `class_images` reads, in its order."""
    if isinstance(dataset, Subset):
        paths = paths_of(dataset.dataset)
        return [paths[i] for i in dataset.indices]
    return dataset.im_files if isinstance(dataset, ClassImages) else [path for path, _ in dataset.samples]


def class_images(config: LabelledConfig, imgsz: Sides, model: Any) -> DataLoader:
    """Make batches of a folder that has a folder of images for each class.

    For a checkpoint, and a file that was exported of one, the folder has train/ and val/, and images are prepared as
    `qat.py eval` does (see image_folders.py). For the classifiers of others the shorter side of an image becomes the longer of imgsz / 0.875, as classifiers are evaluated, and its centre is cut out.

    Args:
        config: gives data, the folder; mean and std, which normalise values in 0..1; images, the most of them;
            batch_size and workers; classes.
        imgsz: height and width, in pixels.
        model: the classifier, with nc and names (a FileModel, see prediction/file_model.py).

    Returns:
        Batches (images FP32 [B, 3, height, width], outputs of their classes [B]).

    Raises:
        QatError: there is no such folder, or its folders fit no outputs.
    """
    if getattr(model, 'task', None) == 'classify':
        data = load_any(Path(config.data or ''), model)
        images = open_dataset(data, 'val', LoaderConfig(imgsz=imgsz), model.stride)
        return batches_of(spread(images, config.images) if config.images else images, config)
    from torchvision import datasets, transforms  # here, because nothing else needs more of it than NMS

    steps = transforms.Compose(
        [
            transforms.Resize(round(max(imgsz) / 0.875)),
            transforms.CenterCrop(imgsz),
            transforms.ToTensor(),
            transforms.Normalize(config.mean, config.std),
        ]
    )
    try:
        dataset = datasets.ImageFolder(config.data, steps)
    except OSError as e:
        raise QatError(
            f'--data {config.data}: for classifiers a folder with one folder of images for each class, such as val/cat/1.jpg'
        ) from e
    dataset.target_transform = outputs_of(
        dataset.classes, model.nc, model.names, config.classes, config.data
    ).__getitem__
    return batches_of(spread(dataset, config.images) if config.images else dataset, config)
