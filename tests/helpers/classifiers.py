"""Small classifiers with random weights: torchvision's networks, and upstream's ClassificationModel cut from a detector."""

import cv2
import numpy as np
import torch
import torchvision
from models.yolo import ClassificationModel
from utils.dataloaders import ClassificationDataset

from helpers import zoo
from models.quantize import checkpoint
from models.quantize.calibration.calibrate import fit_ranges
from models.quantize.calibration.ptq import prepare

CLASSES = 7
SIZE = 64
# one of each kind of network; the larger ones of a kind have the same blocks
NETWORKS = """
    resnet18 resnet50 mobilenet_v2 mobilenet_v3_small efficientnet_b0 regnet_x_400mf regnet_y_400mf
    convnext_tiny yolo
""".split()


@torch.no_grad()
def build(name, classes=CLASSES):
    """A classifier as classify/train.py saves it, in eval mode; its batch norms have statistics of their own."""
    torch.manual_seed(0)
    if name == 'yolo':
        model = ClassificationModel(model=zoo.build('demo'), nc=classes, cutoff=6)
    else:
        model = getattr(torchvision.models, name)(num_classes=classes)
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.uniform_(norm.weight, 0.8, 1.2)
        torch.nn.init.normal_(norm.bias, 0, 0.1)
        torch.nn.init.uniform_(norm.running_mean, -0.1, 0.1)
    model.names = [f'class {i}' for i in range(classes)]
    model.transforms = torchvision.transforms.Compose([torchvision.transforms.ToTensor()])  # as upstream leaves it
    return model.eval()


def save(model, path):
    torch.save({'epoch': 0, 'model': model, 'ema': None, 'optimizer': None}, path)
    return path


def loaded(name, folder):
    return checkpoint.CheckpointFile(save(build(name), folder / f'{name}.pt')).load_float()


def images(batch=2, seed=0):
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def quantized(model, **changes):
    config = zoo.settings(imgsz=SIZE, **changes)
    prepare(model, config)
    fit_ranges(model, [images(4)], config)
    return model


def write_images(folder, classes=CLASSES, train=12, val=6, size=40):
    """Write an image folder as classify/train.py takes it: coloured squares on noise, a colour for each class."""
    random = np.random.default_rng(0)
    for part, number in (('train', train), ('val', val)):
        for c in range(classes):
            place = folder / part / f'class {c}'
            place.mkdir(parents=True)
            for i in range(number):
                picture = random.integers(0, 90, (size + 9 * (i % 2), size, 3), dtype=np.uint8)
                y, x = random.integers(0, size // 2, 2)
                picture[y : y + size // 2, x : x + size // 2] = np.array([c & 1, c >> 1 & 1, c >> 2 & 1]) * 150 + 50
                cv2.imwrite(str(place / f'{i}.png'), picture)
    return folder


@torch.no_grad()
def learnt(model, folder):
    """Fit the last Linear of a network to the training images of a folder, by least squares, in place, and return the network."""
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
    seen = []
    hook = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    data = ClassificationDataset(folder / 'train', augment=False, imgsz=SIZE)
    images, labels = zip(*data)
    model(torch.stack(images))
    hook.remove()
    features = torch.cat((seen[0], torch.ones(len(seen[0]), 1)), 1)
    wanted = 8 * torch.nn.functional.one_hot(torch.tensor(labels), len(data.classes)).float()
    found = torch.linalg.solve(features.T @ features + torch.eye(features.shape[1]), features.T @ wanted)
    linear.weight.copy_(found[:-1].T)
    linear.bias.copy_(found[-1])
    model.names = data.classes
    return model
