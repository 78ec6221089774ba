"""Models for the tests: real upstream models with weights of a useful size, and the trained demo.

conftest.py puts the patched tree on sys.path, and then imports this file. The processes of a run share what `once` makes.
"""

import fcntl
import math
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from conftest import REPO, TREE
from models.common import Conv, RepConvN
from models.yolo import DetectionModel, SegmentationModel
from utils.loss_tal_dual import ComputeLoss

from helpers.commands import SIZE, command, image, program, python, same, settings, tensors  # noqa: F401  tests have them from here too
from models.deploy.agreement import output_differences
from models.deploy.formats.format import Export
from models.deploy.formats.onnx import export_onnx
from models.deploy.load import load_format
from models.quantize import checkpoint
from models.quantize.blocks import is_quantized
from models.quantize.calibration.calibrate import fit_ranges
from models.quantize.convert import TENSORRT, quantize_model
from models.quantize.reparameterize import reparameterize
from models.quantize.run.stages import fine_tuning
from models.quantize.scales import tie_scales
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig
from utils.qat.config.qat import EvalConfig
from utils.qat.core.files import sha256
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.interval import boxes_and_masks, difference

torch.set_num_threads(1)  # one worker, one core; and sums come in the same order in every process


def full(*names):
    """Pytest parameters for configs that only the full upstream tree has."""
    return [pytest.param(name, marks=pytest.mark.full_tree) for name in names]


SINGLE = full(*(f'gelan-{size}' for size in 'tsmce'))
SEGMENT = ['demo-seg', *full('gelan-c-seg', 'gelan-c-dseg', 'yolov9-c-dseg')]  # one head of each kind
DUAL = ['demo', *full(*(f'yolov9-{size}' for size in ('t', 's', 'm', 'c', 'e', 'cf')))]


def config_file(name):
    """YAML of a config: 'demo', 'demo-seg', or a name in models/detect or models/segment of the tree."""
    if name.startswith('demo'):
        return REPO / 'demo' / f'yolov9-{name}.yaml'
    return TREE / 'models' / ('segment' if name.endswith('seg') else 'detect') / f'{name}.yaml'


def config(name, **changes):
    """A config as a dict, with keys such as nc= or width_multiple= replaced."""
    return {**yaml.safe_load(config_file(name).read_text(encoding='ascii', errors='ignore')), **changes}


def _take_statistics(norm, inputs):
    """Forward pre-hook: give a batch norm the statistics of its input."""
    norm.running_mean.copy_(inputs[0].mean((0, 2, 3)))
    norm.running_var.copy_(inputs[0].var((0, 2, 3)).clamp(min=0.01))


def build(name, seed=0, **changes):
    """An upstream model in eval mode, FP32, not fused, with random weights and batch norms that are far from identity.

    Their statistics are those of `image(batch=4)`, so that activations keep their size through all layers.
    """
    torch.manual_seed(seed)
    # Upstream keeps the activation of the last config. The small tree reads it for Conv alone; of ReLU6 all have to be.
    relu6 = changes.get('activation') == 'nn.ReLU6()'
    Conv.default_act = RepConvN.default_act = torch.nn.ReLU6() if relu6 else torch.nn.SiLU()
    with quiet_upstream():
        model = (SegmentationModel if name.endswith('seg') else DetectionModel)(config(name, **changes)).eval()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(norm.bias, 0, 0.2)
    hooks = [norm.register_forward_pre_hook(_take_statistics) for norm in norms]
    output(model, image(batch=4))
    for hook in hooks:
        hook.remove()
    model.names = {i: f'class {i}' for i in range(model.yaml['nc'])}
    model.nc = model.yaml['nc']
    return model


def fuse(model):
    """Fuse as `load_float` does it, in place."""
    with quiet_upstream():
        return checkpoint.fuse(model)


def single(name, **changes):
    """A fused model of one branch with random weights: of a network with more branches what reparameterization makes of it."""
    model = build(name, **changes)
    several = type(model.model[-1]).__name__.startswith(('Dual', 'Triple'))
    return fuse(reparameterize(model) if several else model)


def loader(name):
    """The method `name` of CheckpointFile as a function of the file."""
    return lambda file: getattr(checkpoint.CheckpointFile(file), name)()


LOADERS = load_float, load_quantized, load_dual_or_float, load_any = tuple(
    loader(f'load_{what}') for what in ('float', 'quantized', 'dual_or_float', 'any')
)


@torch.no_grad()
def output(model, images):
    """The output of `model` as a list of tensors; the head's cached anchors do not leak into the next call."""
    return tensors(model(images))


# The largest share_of_float of one INT8 model in two engines: halfway to the float model, which has 1. PyTorch against PyTorch with
# `other_last_bits` had at most 0.06, in 50 runs of each network of test_int8_is_not_float. It is for networks of few layers and images of SIZE:
# others round otherwise somewhere in every image, and had up to 0.7 (demo_seg, 160 pixels) and 1 (demo, 128 pixels).
# With it, ONNX files read parts of tensors, as the model does
reading_parts = patch('models.deploy.formats.onnx.read_whole')

FLIPS = 0.5


def share_of_float(found, wanted, floating):
    """How far `found` is from `wanted`, outputs of INT8 models for the same images, as a share of how far the float model's `floating` are.

    A value between two steps rounds either way, by last bits that are others on each CPU, and one such flip can move an image as far as
    quantization does. So no limit holds for one image: this is the median over the images, of the part (boxes, scores, ...) where it is
    largest.
    """

    def distances(outputs):
        """For each image, the relative error of each part."""
        images, right = (zip(*(part.split(1) for part in tensors(each)), strict=True) for each in (outputs, wanted))
        errors = [output_differences(ours, theirs) for ours, theirs in zip(images, right, strict=True)]
        return torch.tensor([list(of_image.values()) for of_image in errors])

    return (distances(found) / distances(floating)).median(0).values.max().item()


def assert_within_interval(found):
    """Chance explains a `difference` of AP, of masks too, or of a classifier's top-1.

    Twice the 95 % interval are four standard deviations: one would fail on every twentieth CPU, each of which rounds otherwise.
    """
    for part in boxes_and_masks(found):
        assert abs(part['difference']) <= 2 * part['chance'], found


def assert_same_ap(first, second):
    """Chance explains the difference of two Metrics of the same images (`resample=True`)."""
    assert_within_interval(difference(first.resampled, second.resampled))


def assert_verdicts(said, *verified):
    """A file is kept or not by its figures in .verify.json, `verified`, and export_qat.py says so.

    INT8 in two engines is two samples of one noise. On a few images it may exceed limits that are for many, so the exit code is 0 or 1.
    """
    beyond = [bool(content['above_limits']) for content in verified]
    assert [said.count(f': {word}\n') for word in ('kept', 'exceeded')] == [beyond.count(False), beyond.count(True)], (
        said
    )
    assert said.count('The file stays') == beyond.count(True)


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def deployed(name, model, path, **options):
    """Write a model as `export_qat.py --include NAME` does; returns what it tells of it. options: of ExportConfig, or of the recipe."""
    recipe = {key: options.pop(key) for key in ('target', 'kept_float') if key in options}
    predict = TorchModel(model, {'recipe': recipe} if is_quantized(model) else None)
    made = load_format(name)
    export = Export(ExportConfig(path.with_suffix('.pt'), (name,), **options), predict, [made])
    made.require(export)
    return made.write(export, path)


@dataclass
class Demo:
    """Files of a demo: data set, dual-branch checkpoint, reparameterized, calibrated. Do not write to them."""

    data: Path  # data.yaml
    dual: Path  # not for segmentation, whose model has one branch
    single: Path
    quantized: Path

    @classmethod
    def in_folder(cls, folder):
        """These names in `folder`; nothing is written yet."""
        return cls(folder / 'data' / 'data.yaml', *(folder / f'{name}.pt' for name in ('dual', 'single', 'quantized')))

    def float_model(self):
        with quiet_upstream():
            return checkpoint.CheckpointFile(self.single).load_float()

    def quantized_model(self):
        return checkpoint.CheckpointFile(self.quantized).load_quantized()[0]


def calibrated(model, batches, target=TENSORRT, keep_float=(), tie=True, sums=math.inf, **changes):
    """Quantize a fused float model in place, `tie` its scales, and set its ranges on batches of images; returns the Conversion.

    sums: see scales.tie_scales; changes: of `settings`.
    """
    done = quantize_model(model, keep_float, target)
    if tie:
        tie_scales(model, sums)
    fit_ranges(model, batches, settings(**changes))
    return done


def calibrated_demo(demo):
    """Write demo.quantized, calibrated on a few images, and upstream's caches of labels; returns `demo`."""
    model, options, data = demo.float_model(), settings(), load_data(demo.data)
    calibrated(model, Loaders(data, options, 32, torch.device('cpu')).calibration())
    checkpoint.save_model(demo.quantized, model, {'imgsz': list(options.imgsz)}, sha256(demo.single))
    Loaders(data, EvalConfig(demo.single, demo.data, imgsz=128, workers=0), 32).scored()
    return demo


def reparameterized_demo(demo):
    """Write demo.single, the main branch of demo.dual; returns `demo`."""
    with quiet_upstream():
        _, dual = checkpoint.CheckpointFile(demo.dual).load_dual_or_float()
        torch.save({'model': reparameterize(dual).half(), 'ema': None}, demo.single)
    return demo


def packed(name, file):
    """Write the checkpoint of trained weights in demo/."""
    with quiet_upstream():
        program('demo/weights.py').build(REPO / 'demo' / f'{name}-weights.pt', file)


def once(factory, make):
    """The files that make(demo) writes: in the first process of this run that asks for them, and it returns them in all."""
    root = factory.getbasetemp()
    root = root.parent if 'PYTEST_XDIST_WORKER' in os.environ else root
    demo = Demo.in_folder(root / make.__name__)
    with open(root / f'.{make.__name__}', 'a+') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lock.seek(0, os.SEEK_END):
            demo.data.parent.parent.mkdir()
            make(demo)
            lock.write('made')
    return demo


def make_demo(demo):
    """The demo with its trained weights, on a few images."""
    program('demo/make_data.py').make_data(demo.data.parent, train=12, val=12)
    packed('demo', demo.dual)
    calibrated_demo(reparameterized_demo(demo))


def make_demo_seg(demo):
    program('demo/make_data.py').make_data(demo.data.parent, train=12, val=12, task='segment')
    packed('demo-seg', demo.single)
    calibrated_demo(demo)


SMALL = {  # a quarter of the demo's convolutions: every idea of placement once, three strides
    'backbone': [
        [-1, 1, 'Conv', [16, 3, 2]],
        [-1, 1, 'Conv', [16, 3, 2]],
        [-1, 1, 'RepNCSPELAN4', [16, 16, 8, 1]],
        [-1, 1, 'ADown', [16]],  # 3: P3
        [-1, 1, 'AConv', [16]],  # 4: P4
        [-1, 1, 'ADown', [32]],
        [-1, 1, 'SPPELAN', [32, 16]],  # 6: P5
        [-1, 1, 'nn.Upsample', [None, 2, 'nearest']],
        [[-1, 4], 1, 'Concat', [1]],
        [-1, 1, 'Conv', [16, 1, 1]],  # 9: P4 again
    ],
    'head': [[[3, 4, 6, 3, 9, 6], 1, 'DualDDetect', ['nc']]],
}


def learn(dual, data, steps=50):
    """Train `dual` in place on the validation images of `data`, at 64 and 128 pixels by turns."""
    content, options = load_data(data), {'weights': None, 'data': data, 'batch_size': 12, 'workers': 0}
    batches = [next(iter(Loaders(content, EvalConfig(**options, imgsz=size), 32).scored()))[:2] for size in (64, 128)]
    dual.hyp = yaml.safe_load((REPO / 'demo' / 'hyp.yaml').read_text())
    dual.model[-1].bias_init()
    dual.requires_grad_(True).train()
    loss, optimizer = ComputeLoss(dual), torch.optim.AdamW(dual.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
    for step in range(steps):
        images, targets = batches[step % 2]
        optimizer.zero_grad()
        loss(dual(images.float() / 255), targets)[0].backward()
        optimizer.step()
        schedule.step()
    del dual.hyp
    dual.eval()


def make_small(demo):
    """A small network, trained on its validation images for seconds: AP is 0.04 to 0.1."""
    program('demo/make_data.py').make_data(demo.data.parent, train=12, val=12)
    dual = build('demo', **SMALL)
    learn(dual, demo.data)
    dual.names = {i: str(i) for i in range(dual.nc)}  # the data's
    torch.save({'model': dual.half(), 'ema': None}, demo.dual)
    calibrated_demo(reparameterized_demo(demo))


@pytest.fixture(scope='session')
def demo(tmp_path_factory):
    return once(tmp_path_factory, make_demo)


@pytest.fixture(scope='session')
def demo_seg(tmp_path_factory):
    return once(tmp_path_factory, make_demo_seg)


@pytest.fixture(scope='session')
def small(tmp_path_factory):
    return once(tmp_path_factory, make_small)


@pytest.fixture(scope='session')
def exports(small, tmp_path_factory):
    """A folder with float.{pt,onnx} and int8.{pt,onnx} of `small`, of open batch, and half.onnx, INT8 and FP16 of batch 1. Do not write to it."""
    folder = tmp_path_factory.mktemp('exports')
    for name, model, options in (
        ('float', small.float_model(), {'dynamic': True}),
        ('int8', small.quantized_model(), {'dynamic': True}),
        ('half', small.quantized_model(), {'half': True, 'opset': 19}),
    ):
        export_onnx(model, folder / f'{name}.onnx', (SIZE, SIZE), **options)
    shutil.copy(small.single, folder / 'float.pt')
    shutil.copy(small.quantized, folder / 'int8.pt')
    return folder


def recipe(**changes):
    """How a calibrated model learns (loop.Learning), by the names of options."""
    config = settings(**changes)
    given = {'task_loss': 0.0, 'lr': 1e-5, 'compile': False, 'amp': 'off'}
    return fine_tuning(replace(config, **{k: v for k, v in given.items() if getattr(config, k) is None}))


def interrupt(at, number, *words):
    """Press Ctrl-C at element `number` of the progress bar `at` of a command of `words`; returns what it says."""

    def bar(iterable, text, total=None, unit='batches'):
        for i, item in enumerate(iterable):
            if text == at and i == number:
                # a shell's background job, and so a CI job, may ignore it
                before = signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    signal.raise_signal(signal.SIGINT)
                finally:
                    signal.signal(signal.SIGINT, before)
            yield item

    from models.quantize.run import scorer, stages

    with pytest.MonkeyPatch.context() as patch:
        for module in (stages, scorer):
            patch.setattr(module, 'bar', bar)
        return command(*words, code=130)


def rows_of(text, title):
    """Rows of the Markdown table in `text` that begins with `title`: first cell → the other cells."""
    lines = text[text.index(f'| {title} ') :].split('\n\n')[0].splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    return {row[0]: row[1:] for row in cells if not row[0].startswith('-')}


def holds(before, after, points, columns=4):
    """Whether `points` is `after` less `before` in points, as far as their four digits tell."""
    return all(
        float(p.split(' ±')[0]) == pytest.approx(100 * (float(b) - float(a)), abs=0.0151)
        for a, b, p in zip(before[:columns], after[:columns], points[:columns])
    )
