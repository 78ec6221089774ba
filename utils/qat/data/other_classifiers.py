"""Images for third-party classifiers: a folder for each class, and the assignment of outputs to folders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image

from utils.qat.config.common import LabelledConfig, LoaderConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.core.text import visible
from utils.qat.data.dataset import require_images, unreadable
from utils.qat.data.loaders import Loader, spread, unshuffled
from utils.qat.untrusted.names import class_names

LARGEST_LIST = 1_000_000  # bytes of --classes


def outputs_of(
    folders: Sequence[str], nc: int, names: Mapping[int, str], listed: Path | None, data: object
) -> list[int]:
    """Find the output (0..nc - 1) of a classifier for each folder of images, given the sorted names of the folders.

    The first rule that applies decides: line i of `listed`, the file of --classes, starts with the folder of output i; all
    folder names are indices; all are in `names`, from the model's metadata; there are as many folders as outputs.
    """
    if listed:
        known = _listed(listed, nc)
        unknown = [f for f in folders if f not in known]
        if unknown:
            raise QatError(f'--classes {listed}: no line begins with {visible(unknown[0])}, a folder of {data}')
        return [known[f] for f in folders]
    if all(f.isascii() and f.isdigit() and int(f) < nc for f in folders):
        return [int(f) for f in folders]
    called = Counter(map(_plain, names.values()))  # ImageNet has two classes "crane"
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
    return name.replace('_', ' ').strip().casefold()


def _listed(file: Path, nc: int) -> dict[str, int]:
    """Read the file of --classes: name of a folder → output."""
    with open(require_file(file, '--classes'), 'rb') as f:
        text = f.read(LARGEST_LIST + 1)
    lines = text.decode(errors='replace').splitlines()
    if len(text) > LARGEST_LIST or len(lines) != nc or not all(line.split() for line in lines):
        raise QatError(f'--classes {file}: has {len(lines)} lines; expected {nc}, one for each output of the model')
    return {part: i for i, line in enumerate(lines) for part in (line.strip(), line.split()[0].rstrip(','))}


def read_rgb(file: str) -> Image.Image:
    """Read an image by Pillow, in RGB. Raises QatError if it cannot be read."""
    try:
        with open(file, 'rb') as content:
            return Image.open(content).convert('RGB')
    except Exception as e:  # Pillow's readers of a format raise whatever they meet in a damaged file
        raise unreadable(file, e) from e


def class_images(
    config: LabelledConfig, imgsz: Sides, nc: int, names: Mapping[int, str], device: torch.device
) -> Loader:
    """Make batches for a third-party classifier from a folder with a folder of images for each class.

    The shorter side of an image is resized to the longer side of imgsz / 0.875, the usual evaluation of classifiers, then
    the centre is cropped.

    Returns:
        Batches (images FP32 [B, 3, height, width], outputs of their classes [B], paths of the images).
    """
    from torchvision import datasets, transforms  # here, because nothing else needs more of it than NMS

    class WithPaths(datasets.ImageFolder):
        def __getitem__(self, index: int) -> tuple[object, ...]:
            return *super().__getitem__(index), self.samples[index][0]

    steps = transforms.Compose(
        [
            transforms.Resize(round(max(imgsz) / 0.875)),
            transforms.CenterCrop(imgsz),
            transforms.ToTensor(),
            transforms.Normalize(config.mean, config.std),
        ]
    )
    try:
        dataset = WithPaths(config.data, steps, loader=read_rgb)
    except OSError as e:
        raise QatError(
            f'--data {config.data}: for classifiers a folder with one folder of images for each class, such as val/cat/1.jpg'
        ) from e
    require_images((path for path, _ in dataset.samples), '--data', Path(config.data or ''))
    class_names(dataset.classes, f'--data {config.data}')
    outputs = outputs_of(dataset.classes, nc, names, config.classes, config.data)
    dataset.target_transform = outputs.__getitem__
    settings = LoaderConfig(batch_size=config.batch_size, workers=config.workers, device=device.type)
    return unshuffled(spread(dataset, config.images) if config.images else dataset, settings)
