"""Laws of masks: figures equal upstream's, are equal for both forms of masks, and are right in cases by hand."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.faults import sampled
from helpers.fresh import fresh
from helpers.labelled import CPU, PERFECT, copied, labels_of, val_images, words
from helpers.zoo import build, command, fuse, image, program, settings
from pycocotools import mask as coco
from torchvision.ops import roi_align
from utils.loss_tal import ComputeLoss
from utils.metrics import box_iou

from models.quantize.calibration.divergence import (
    HeadOutputs,
    backward_from_probe,
    mask_logits,
    strongest_places,
    typical_divergence,
)
from models.quantize.finetuning.training_step import head_emits_raw_maps, output_parts
from utils.qat.backends.detections import Detections
from utils.qat.backends.pytorch import task_of
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.data.masks import BoxMasks, PrototypeMasks, same_place_iou, true_masks
from utils.qat.evaluation.detection_scores import IOUS, _correct
from utils.qat.evaluation.evaluate import evaluate

SIZE = 128  # pixels


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """data.yaml of pictures with outlines."""
    folder = tmp_path_factory.mktemp('outlines') / 'data'
    program('demo/make_data.py').make_data(folder, train=8, val=8, size=SIZE, task='segment')
    return folder / 'data.yaml'


@pytest.fixture(scope='module')
def model():
    return fuse(build('demo-seg'))


def blobs(number, size=SIZE, seed=0):
    """Boxes FP32 [number, 4] (xyxy) and FP32 [number, size, size] in 0..1: ellipses in them, soft at the edge."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(number, 2, generator=generator) * size / 2
    boxes = torch.cat((corner, corner + size / 5 + torch.rand(number, 2, generator=generator) * size / 4), 1)
    y, x = torch.meshgrid(*[torch.arange(size) + 0.5] * 2, indexing='ij')
    (x1, y1, x2, y2) = boxes.t()[..., None, None]
    r = ((2 * x - x1 - x2) / (x2 - x1)) ** 2 + ((2 * y - y1 - y2) / (y2 - y1)) ** 2
    return boxes, (4 * (1 - r)).sigmoid()


# ---- the two forms of masks ---------------------------------------------------------------------------------------------


def test_masks_cut_out_and_pasted_are_the_masks_there_were():
    """A model with NMS inside gives each mask as a grid over its box: pasting undoes RoiAlign."""
    boxes, soft = blobs(12)
    crops = roi_align(soft[:, None], torch.cat((torch.arange(12.0)[:, None], boxes), 1), 64, aligned=True)[:, 0]
    pasted = BoxMasks(crops, boxes, (SIZE, SIZE))
    inside = PrototypeMasks(torch.eye(12), F.avg_pool2d(soft, 4).logit(1e-6), boxes, (SIZE, SIZE))
    for ours, theirs in ((pasted.coarse(), inside.coarse()), (pasted.fine(), inside.fine())):
        assert ours.shape == theirs.shape and same_place_iou(ours, theirs).min() > 0.9
        assert same_place_iou(ours, theirs).mean() > 0.97
    for ours, theirs in (
        (pasted[[3, 1]].coarse(), pasted.coarse()[[3, 1]]),
        (inside[2:4].fine(), inside.fine()[2:4]),  # a product of other rows has other last bits
    ):
        assert ours.shape == theirs.shape and same_place_iou(ours, theirs).min() > 0.999


def test_masks_are_cut_at_their_box():
    boxes, shape = torch.tensor([[10.0, 20, 50, 70], [0, 0, 128, 128]]), (SIZE, SIZE)
    everywhere = torch.full((1, 32, 32), 9.0)
    for masks in (
        BoxMasks(torch.ones(2, 8, 8), boxes, shape),
        PrototypeMasks(torch.ones(2, 1), everywhere, boxes, shape),
    ):
        first, second = masks.fine()
        assert first.sum() == 40 * 50 and first[20:70, 10:50].all() and second.all()


def test_truth_in_both_forms_of_upstream(data):
    """Objects of the demo hide each other little, so the index map loses little."""
    loaders = [val_images(data, square=True, masks=True, overlap=overlap) for overlap in (False, True)]
    for (_, targets, *_, masks), (_, sorted_targets, *_, maps) in zip(*loaders):
        for i, (mask, index) in enumerate(zip(masks, maps)):
            mine, theirs = (rows[rows[:, 0] == i] for rows in (targets, sorted_targets))
            order = [(mine == row).all(1).nonzero()[0, 0].item() for row in theirs]
            separate, of_map = true_masks(mask, len(mine))[order], true_masks(index, len(mine))
            assert separate.shape == of_map.shape and separate.sum() > 0
            assert same_place_iou(separate, of_map).mean() > 0.95


# ---- scores -------------------------------------------------------------------------------------------------------------


def test_matching_is_upstreams():
    """That of val.py, on random boxes with many near misses."""
    from val import process_batch

    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(*shape, generator=generator)

    for _ in range(50):
        corner = random(6, 2) * 60
        true = torch.cat((corner, corner + 10 + random(6, 2) * 40), 1)
        labels = torch.cat(((random(6, 1) * 3).floor(), true), 1)
        which = (random(40) * 6).long()
        boxes = true[which] + torch.randn(40, 4, generator=generator) * 4
        classes = torch.where(random(40) < 0.8, labels[which, 0], 1.0)
        scores = random(40).sort(descending=True).values
        rows = torch.cat((boxes, scores[:, None], classes[:, None]), 1)
        ours = _correct(Detections(rows), labels, box_iou(true, boxes))
        assert torch.equal(ours, process_batch(rows, labels, IOUS)) and ours.any()


class Oracle:
    """Finds the labels of the images it is asked about, with masks changed by `change`."""

    def __init__(self, loader, change):
        self.batches, self.change = list(loader), change

    def __call__(self, images):
        (height, width), found = images.shape[2:], []
        for labels, truth in labels_of(self.batches, images):
            centre, half = labels[:, 2:4], labels[:, 4:] / 2
            boxes = torch.cat((centre - half, centre + half), 1) * torch.tensor((width, height) * 2)
            small = F.interpolate(true_masks(truth, len(labels))[None], (height // 4, width // 4), mode='bilinear')
            masks = self.change((small[0] > 0.5).float())
            rows = torch.cat((boxes, torch.full((len(labels), 1), 0.9), labels[:, 1:2]), 1)
            found.append(
                Detections(rows, PrototypeMasks(torch.eye(len(labels)), 20 * masks - 10, boxes, (height, width)))
            )
        return found


class Blind(Oracle):
    """Finds nothing."""

    def __call__(self, images):
        return [Detections(found.rows[:0], found.masks[:0]) for found in super().__call__(images)]


def halved(masks):
    """Every second row of the masks is lost: their IoU is about a half."""
    return masks * (torch.arange(masks.shape[1]) % 2)[:, None]


@pytest.mark.parametrize(
    'change, low, high',
    [(lambda m: m, 0.85, PERFECT), (torch.zeros_like, 0, 0), (lambda m: m.roll(1, 0), 0, 0.2), (halved, 0.0, 0.2)],
    ids=['perfect', 'empty', 'swapped', 'half'],
)
@pytest.mark.parametrize('square', [True, False])
def test_figures_by_hand(data, change, low, high, square):
    """Whatever becomes of the masks, the boxes are perfect. Perfect masks are cut at these, and lose some points at the edge."""
    loader = val_images(data, square=square, masks=True)
    metrics = evaluate(Oracle(loader, change), loader, load_data(data).names, CPU)
    assert metrics.ap == pytest.approx(PERFECT, abs=2e-3) and low - 2e-3 <= metrics.mask['ap'] <= high + 2e-3
    assert all((row['mask'] or {}).get('ap', 0) <= row['ap'] for row in metrics.per_class)


def coco_truth(data):
    """The val labels of a data YAML as COCO has them: sizes of the images by id, and the objects."""
    sizes, objects = {}, []
    for file in sorted((data.parent / 'labels/val').iterdir()):
        height, width = sizes[int(file.stem)] = cv2.imread(str(data.parent / f'images/val/{file.stem}.jpg')).shape[:2]
        for line in file.read_text().splitlines():
            c, *points = map(float, line.split())
            outline = np.array(points).reshape(-1, 2) * (width, height)
            runs = coco.merge(coco.frPyObjects([outline.flatten().tolist()], height, width))
            objects.append(
                {
                    'id': len(objects) + 1,
                    'image_id': int(file.stem),
                    'category_id': int(c) + 1,  # COCO's number of the first classes
                    'iscrowd': 0,
                    'bbox': [*outline.min(0), *np.ptp(outline, 0)],
                    'area': float(coco.area(runs)),
                    'segmentation': {**runs, 'counts': runs['counts'].decode()},
                }
            )
    return sizes, objects


def test_masks_are_written_as_coco_has_them(data, tmp_path):
    """Run lengths in the size of the original: those of perfect detections are the outlines of the labels, and COCO's scorer agrees."""
    loader, names, annotations = val_images(data, masks=True), load_data(data).names, tmp_path / 'instances.json'
    perfect = Oracle(loader, lambda masks: masks)
    evaluate(perfect, loader, names, CPU, predictions_file=tmp_path / 'predictions.json')
    rows = json.loads((tmp_path / 'predictions.json').read_text())
    sizes, objects = coco_truth(data)
    ious = []
    for row in rows:
        same = [
            t['segmentation']
            for t in objects
            if (t['image_id'], t['category_id']) == (row['image_id'], row['category_id'] + 1)
        ]
        ious.append(coco.iou([row['segmentation']], same, [0] * len(same)).max())
    assert len(rows) == len(objects) and min(ious) > 0.6 and np.mean(ious) > 0.85
    content = {
        'images': [{'id': i, 'height': h, 'width': w} for i, (h, w) in sizes.items()],
        'annotations': objects,
        'categories': [{'id': i, 'name': str(i)} for i in range(1, 12)],
    }
    annotations.write_text(json.dumps(content))
    blind = Blind(loader, torch.zeros_like)
    for predict, boxes, masks in ((perfect, 1, 1), (Oracle(loader, torch.zeros_like), 1, 0), (blind, 0, 0)):
        metrics = evaluate(predict, loader, names, CPU, annotations=annotations)
        assert (metrics.coco['ap'], metrics.coco['ap50']) == pytest.approx((boxes, boxes), abs=0.01)
        assert metrics.mask['coco']['ap50'] == pytest.approx(masks, abs=0.01)


# ---- what a calibration is chosen by ------------------------------------------------------------------------------------


def tame(raw):
    """`raw` with mask logits that are neither huge nor all alike, which random weights do not give."""
    coefficients, prototypes = raw.coefficients / raw.coefficients.std(), raw.prototypes / raw.prototypes.std() / 8
    return HeadOutputs(raw.maps, raw.boxes, coefficients, prototypes)


def moved(raw, amount):
    """`raw` with noise on what masks are made of."""
    generator = torch.Generator().manual_seed(0)
    noise = [amount * torch.randn(x.shape, generator=generator) for x in (raw.coefficients, raw.prototypes)]
    return HeadOutputs(raw.maps, raw.boxes, raw.coefficients + noise[0], raw.prototypes + noise[1])


class Fixed(torch.nn.Module):
    """A model with a constant output."""

    def __init__(self, head, raw):
        super().__init__()
        self.model, self.raw = torch.nn.ModuleList([head]), raw

    def forward(self, images):
        raw = self.raw
        return torch.cat((raw.boxes, raw.boxes), 1), (raw.maps, raw.coefficients, raw.prototypes)


@torch.no_grad()
def test_divergence_of_masks_by_hand(model):
    """Only the masks differ; point by point for the strongest place, and their mean over the box."""
    images = image(SIZE, 1)
    raw = tame(HeadOutputs.of(model(images)))
    changed = moved(raw, 0.1)
    places, weights = strongest_places(raw, 16)
    scores = torch.cat([m[:, 64:].flatten(2) for m in raw.maps], 2).sigmoid().amax(1)[0]
    total = 0.0
    for place, weight in zip(places[0].tolist(), weights[0]):
        x, y, w, h = (raw.boxes[0, :, place] / 4).tolist()
        t, m = (
            (r.coefficients[0, :, place] @ r.prototypes[0].flatten(1)).view(SIZE // 4, SIZE // 4).double()
            for r in (raw, changed)
        )
        kl = t.sigmoid() * (F.logsigmoid(t) - F.logsigmoid(m)) + (-t).sigmoid() * (F.logsigmoid(-t) - F.logsigmoid(-m))
        inside = [
            kl[j, i].item()
            for j in range(SIZE // 4)
            for i in range(SIZE // 4)
            if x - w / 2 <= i < x + w / 2 and y - h / 2 <= j < y + h / 2
        ]
        assert weight.sum().item() == pytest.approx(scores[place].item() * bool(inside), rel=1e-4)
        total += scores[place].item() * sum(inside) / max(len(inside), 1)
    assert total > 0 and typical_divergence(Fixed(model.model[-1], changed), [images], [raw]) == pytest.approx(
        total / scores.sum().item(), rel=1e-3
    )
    assert typical_divergence(model, [images], [HeadOutputs.of(model(images))]) == pytest.approx(0, abs=1e-9)


@torch.no_grad()
def test_probes_of_masks_measure_the_divergence(model):
    """As those of boxes and classes, see test_fisher.py: half the mean square of a projection of a small change."""
    images, generator = image(64, 1, 3), torch.Generator().manual_seed(0)
    raw = tame(HeadOutputs.of(deepcopy(model).double()(images.double())))
    changed = moved(raw, 1e-4)
    wanted = typical_divergence(Fixed(model.model[-1], changed), [images], [raw])
    places, _ = strongest_places(raw, 16)
    change, squares = mask_logits(changed, places) - mask_logits(raw, places), []
    weight = sum(m[:, 64:].sigmoid().amax(1).sum() for m in raw.maps)
    for _ in range(4000):
        _, (*_, v), _ = raw.probe(16, lambda shape: torch.rand(shape, generator=generator).double())
        squares.append((v * change).sum().square() / 2 / weight)
    assert torch.stack(squares).mean().item() == pytest.approx(wanted, rel=0.1)


def test_the_backward_pass_reaches_what_masks_are_made_of(model):
    head, norms = model.model[-1], {}
    convs = {'prototypes': head.proto.cv3.conv, 'coefficients': head.cv4[0][2], 'boxes': head.cv2[0][2]}

    def watch(name):
        def hook(conv, inputs, output):
            output.register_hook(lambda gradient: norms.update({name: gradient.norm().item()}))

        return hook

    hooks = [conv.register_forward_hook(watch(name)) for name, conv in convs.items()]
    backward_from_probe(model, image(64, 2), torch.Generator().manual_seed(0))
    for hook in hooks:
        hook.remove()
    assert norms.keys() == convs.keys() and min(norms.values()) > 0


# ---- fine-tuning --------------------------------------------------------------------------------------------------------


def test_labels_teach_boxes_alone(data):
    """Upstream's loss of boxes and classes, per image; coefficients and prototypes have no gradient."""
    model, config = fuse(build('demo-seg')), settings(imgsz=SIZE, task_loss=1.0, batch_size=4)
    hyp = {'cls_pw': 1.0, 'fl_gamma': 0.0}
    upstream = ComputeLoss(SimpleNamespace(model=model.model, parameters=model.parameters, hyp=hyp))
    ours = task_of(model).label_loss(model, 2.0)
    batches = list(Loaders(load_data(data, masks=True), config, 32, CPU).training(labels=True))
    head_emits_raw_maps(model)
    for images, labels in batches:
        maps, *of_masks = model(images)
        of_masks = [x.detach().requires_grad_() for x in of_masks]
        theirs, parts = upstream(maps, labels)
        loss = ours((maps, *of_masks), labels)
        assert loss.item() == pytest.approx(2 * theirs.item() / len(images)) and (parts > 0).all()
        assert torch.autograd.grad(loss, of_masks, allow_unused=True) == (None, None)


def test_all_parts_of_the_head_count_alike(model):
    """Prototypes are many and large; maps and coefficients still have equal weight."""
    head_emits_raw_maps(model)
    with torch.no_grad():
        maps, coefficients, prototypes = output = model(image(64, 2))
    model.eval()
    groups = output_parts(output)
    assert [len(group) for group in groups] == [3, 1, 1]
    assert groups[0][0] is maps[0] and groups[1][0] is coefficients and groups[2][0] is prototypes
    for pair in ([coefficients, [prototypes]], (coefficients, prototypes)):
        assert [len(group) for group in output_parts(pair)] == [2]


# ---- bad input ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    file = tmp_path_factory.mktemp('random') / 'seg.pt'
    torch.save({'model': build('demo-seg'), 'ema': None}, file)
    return file


def test_labels_without_outlines_are_named(small, checkpoint, tmp_path):
    line = '--weights {w} --data {data} --device cpu --project {f}/runs'
    said = command('qat.py', 'quantize', *words(line, w=checkpoint, data=small.data, f=tmp_path), code=2)
    last = said.strip().splitlines()[-1]  # behind upstream's progress bar
    assert 'error: label ' in last and '.txt: has boxes, and the model gives masks' in last and 'use data with' in last
    assert not (tmp_path / 'runs').exists()


def test_a_line_without_outline_among_others_is_named(data, tmp_path):
    copy = copied(data, tmp_path / 'data')
    file = next((copy.parent / 'labels/val').glob('*.txt'))
    file.write_text(file.read_text() + '3 0.5 0.5 0.1 0.1\n')
    with pytest.raises(QatError, match=f'{file.name}: has boxes'):
        val_images(copy, masks=True)


OF_SEGMENTS = [('segment/qat_seg.py', verb) for verb in ('quantize', 'sensitive', 'eval', 'quantize --dry-run')]


@pytest.mark.parametrize('script, verb', [*sampled(OF_SEGMENTS, 4, 2), ('classify/qat_cls.py', 'quantize')])
def test_the_entry_point_of_a_task_refuses_detectors(small, script, verb, tmp_path):
    weights = small.quantized if verb == 'eval' else small.single
    line = f'{verb} --weights {{w}} --data {{data}} --device cpu --project {{f}}/runs'
    said = fresh(script, *words(line, w=weights, data=small.data, f=tmp_path), code=2)
    last = said.strip().splitlines()[-1]
    assert last.startswith(f'{Path(script).name}: error: --weights ')
    assert 'a detector (its head is DDetect)' in last and 'use: python qat.py' in last
    assert not (tmp_path / 'runs').exists()
