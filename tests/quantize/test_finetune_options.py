"""Laws of the option of the fine-tuning that takes labels."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import REPO
from faults import sampled
from zoo import image, settings

from models.quantize.finetuning.loop import finetune, supervised_layers
from models.quantize.finetuning.training_step import (
    NotFinite,
    TrainingStep,
    head_emits_raw_maps,
)
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data, load_hyp
from utils.qat.data.loaders import training_images
from utils.qat.tasks.label_losses import LabelLoss

LOADER = [image(64, 2, seed) for seed in range(3)]
EACH_AMP = pytest.mark.parametrize('amp', sampled(['off', 'bf16'], 2))
CPU = torch.device('cpu')


def run(small, loader=LOADER, **changes):
    """Fine-tune a calibrated model; returns (student, last Epoch)."""
    student = small.quantized_model()
    options = settings(**{'epochs': 1, 'iters': 3, 'lr': 1e-4, **changes})
    return student, list(finetune(student, small.float_model(), loader, options))[-1]


def new_step(small, amp='off', **options):
    student = small.quantized_model()
    return TrainingStep(student, small.float_model(), supervised_layers(student, 1), 1e-4, amp, **options)


# ---- the labels ---------------------------------------------------------------------------------------------------------


def labelled(small, task_loss=1.0):
    """Batches with labels, as `quantize` loads them."""
    return list(
        training_images(load_data(small.data), settings(task_loss=task_loss), 32, CPU, load_hyp(REPO / 'demo/hyp.yaml'))
    )


def raw_maps(model, images):
    """The raw maps that the head gives in training mode; the model stays in that mode."""
    head_emits_raw_maps(model)
    return model(images)


def test_the_loader_gives_the_labels_of_its_images(small):
    batches, images_alone = labelled(small), labelled(small, 0.0)
    assert len(batches) == 3
    for (images, labels), alone in zip(batches, images_alone, strict=True):
        assert (
            torch.equal(images, alone) and images.shape == (4, 3, 128, 128) and 0 <= images.min() and images.max() <= 1
        )
        assert labels.shape[1] == 6 and len(labels) > 4 and set(labels[:, 0].tolist()) <= {0, 1, 2, 3}
        assert labels[:, 2:].min() >= 0 and labels[:, 2:].max() <= 1


def test_the_loss_on_the_labels_knows_right_from_wrong(demo):
    """The loss is per image: a doubled batch has the same loss. The right labels have a lower loss."""
    model = demo.float_model()
    loss = LabelLoss(model)
    images, labels = labelled(demo)[0]
    maps = raw_maps(model, images)
    value = loss(maps, labels).item()
    second = labels + torch.tensor([len(images), 0, 0, 0, 0, 0])
    assert loss([m.repeat(2, 1, 1, 1) for m in maps], torch.cat((labels, second))).item() == pytest.approx(
        value, rel=1e-3
    )
    assert LabelLoss(model, 3.0)(maps, labels).item() == pytest.approx(3 * value)
    wrong = torch.cat(((labels[:, :1] + 1) % len(images), labels[:, 1:]), 1)
    assert loss(maps, wrong).item() > 1.5 * value
    assert 0 < loss(maps, labels[:0]).item() < math.inf, 'images without an object'


@EACH_AMP
def test_the_labels_add_to_the_loss(small, amp):
    batches = labelled(small)
    step = new_step(small, amp, label_loss=LabelLoss(small.quantized_model()))
    terms = step._compare(*batches[0])
    assert list(terms) == [*step.layers, 'labels'] and terms['labels'].dtype == torch.float32
    total = step(*batches[0]).item()
    assert total == pytest.approx(sum(terms[i].item() for i in step.layers) / len(step.layers) + terms['labels'].item())


def test_the_labels_are_learnt(small):
    batches = labelled(small)

    def on_labels(task_loss):
        model, _ = run(
            small, batches if task_loss else [images for images, _ in batches], epochs=2, task_loss=task_loss
        )
        with torch.no_grad():
            return sum(LabelLoss(model)(raw_maps(model, images), labels).item() for images, labels in batches)

    assert on_labels(1.0) < on_labels(0.0)


def test_labels_that_cannot_be_learnt_are_named(small):
    step = new_step(small, label_loss=lambda maps, labels: maps[0].sum() * math.inf)
    with pytest.raises(NotFinite, match='the loss is not finite on the labels'):
        step(LOADER[0], None)


@pytest.mark.parametrize(
    'changes, says',
    [
        ({'task_loss': 1.0, 'compile': True}, r'--task-loss 1\.0: not with --compile.*leave one of the two out'),
        ({'task_loss': -1.0}, r'--task-loss -1\.0: must be 0 \(labels do not count\) or more'),
        ({'task_loss': math.nan}, '--task-loss nan'),
    ],
)
def test_what_cannot_be_is_refused(changes, says):
    with pytest.raises(QatError, match=says):
        replace(settings(), **changes)
