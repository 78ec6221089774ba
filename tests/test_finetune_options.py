"""Laws of what the fine-tuning does only when asked: labels that count."""
import math
from dataclasses import replace

import pytest
import torch
from conftest import REPO
from models.quantize.finetune import finetune, supervised_layers
from models.quantize.losses import LabelLoss, relative_error, require_detector
from models.quantize.step import NotFinite, Step, head_emits_raw_maps
from utils.qat.data import load_data, load_hyp
from utils.qat.errors import QatError, run_command
from utils.qat.loaders import training_images
from zoo import build, full, image, program, settings

LOADER = [image(64, 2, seed) for seed in range(3)]
EACH_AMP = pytest.mark.parametrize('amp', ['off', 'bf16'])
CPU = torch.device('cpu')


def run(demo, loader=LOADER, **changes):
    """(student, its last Epoch) after fine-tuning the calibrated demo model."""
    student = demo.quantized_model()
    options = settings(**{'epochs': 1, 'iters': 3, 'lr': 1e-4, **changes})
    return student, list(finetune(student, demo.float_model(), loader, options))[-1]


def new_step(demo, amp='off', **options):
    student = demo.quantized_model()
    return Step(student, demo.float_model(), supervised_layers(student, 1), relative_error, 1e-4, amp, **options)


# ---- the labels ---------------------------------------------------------------------------------------------------------

def labelled(demo, task_loss=1.0):
    """Batches as `quantize` trains on them."""
    return list(training_images(load_data(demo.data), settings(task_loss=task_loss), 32, CPU, load_hyp(REPO / 'demo/hyp.yaml')))


def raw_maps(model, images):
    """What the head gives while training; leaves the model in that state."""
    head_emits_raw_maps(model)
    return model(images)


def test_the_loader_gives_the_labels_of_its_images(demo):
    batches, images_alone = labelled(demo), labelled(demo, 0.0)
    assert len(batches) == 3
    for (images, labels), alone in zip(batches, images_alone, strict=True):
        assert torch.equal(images, alone) and images.shape == (4, 3, 128, 128) and 0 <= images.min() and images.max() <= 1
        assert labels.shape[1] == 6 and len(labels) > 4 and set(labels[:, 0].tolist()) <= {0, 1, 2, 3}
        assert labels[:, 2:].min() >= 0 and labels[:, 2:].max() <= 1


def test_the_loss_on_the_labels_knows_right_from_wrong(demo):
    """Per image: a batch twice is the same loss. The trained model is far better on its labels than on those of another image."""
    model = demo.float_model()
    loss = LabelLoss(model)
    images, labels = labelled(demo)[0]
    maps = raw_maps(model, images)
    value = loss(maps, labels).item()
    second = labels + torch.tensor([len(images), 0, 0, 0, 0, 0])
    assert loss([m.repeat(2, 1, 1, 1) for m in maps], torch.cat((labels, second))).item() == pytest.approx(value, rel=1e-3)
    assert LabelLoss(model, 3.0)(maps, labels).item() == pytest.approx(3 * value)
    wrong = torch.cat(((labels[:, :1] + 1) % len(images), labels[:, 1:]), 1)
    assert loss(maps, wrong).item() > 1.5 * value
    assert 0 < loss(maps, labels[:0]).item() < math.inf, 'images without an object'


@EACH_AMP
def test_the_labels_add_to_the_loss(demo, amp):
    batches = labelled(demo)
    step = new_step(demo, amp, label_loss=LabelLoss(demo.quantized_model()))
    terms = step._compare(*batches[0])
    assert list(terms) == [*step.layers, 'labels'] and terms['labels'].dtype == torch.float32
    total = step(*batches[0]).item()
    assert total == pytest.approx(sum(terms[i].item() for i in step.layers) / len(step.layers) + terms['labels'].item())


def test_the_labels_are_learnt(demo):
    batches = labelled(demo)

    def on_labels(task_loss):
        model, _ = run(demo, batches if task_loss else [images for images, _ in batches], epochs=2, task_loss=task_loss)
        with torch.no_grad():
            return sum(LabelLoss(model)(raw_maps(model, images), labels).item() for images, labels in batches)

    assert on_labels(1.0) < on_labels(0.0)


def test_labels_that_cannot_be_learnt_are_named(demo):
    step = new_step(demo, label_loss=lambda maps, labels: maps[0].sum() * math.inf)
    with pytest.raises(NotFinite, match='the loss is not finite on the labels'):
        step(LOADER[0])


@pytest.mark.parametrize('name', full('gelan-c-seg'))
def test_only_a_detector_has_such_a_loss(demo, name, tmp_path, capsys):
    """And it is said before anything is calibrated, or a folder is made."""
    require_detector(demo.float_model())
    torch.save({'model': build(name, width_multiple=0.25), 'ema': None}, tmp_path / 'seg.pt')
    argv = ['quantize', '--weights', tmp_path / 'seg.pt', '--data', demo.data, '--hyp', REPO / 'demo/hyp.yaml', '--device', 'cpu',
            '--project', tmp_path / 'runs', '--task-loss', 1]
    assert run_command(program('qat.py').main, [str(a) for a in argv]) == 2
    assert "--task-loss: only for a plain detector (Detect, DDetect), and the model's head is " in capsys.readouterr().err
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('changes, says', [
    ({'task_loss': 1.0, 'compile': True}, r'--task-loss 1\.0: not with --compile.*leave one of the two out'),
    ({'task_loss': -1.0}, r'--task-loss -1\.0: must be 0 \(labels do not count\) or more'), ({'task_loss': math.nan}, '--task-loss nan')])
def test_what_cannot_be_is_refused(changes, says):
    with pytest.raises(QatError, match=says):
        replace(settings(), **changes)
