"""Laws of masks: figures equal upstream's, are equal for both forms of masks, and are right in cases by hand."""

import ast
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from faults import sampled
from fresh import fresh
from torchvision.ops import roi_align
from zoo import build, fuse, image, program, settings

from models.quantize.calibration.divergence import mask_logits, strongest_places, typical_divergence
from models.quantize.calibration.fisher import backward_from_probe, probe_masks
from models.quantize.finetuning.training_step import head_emits_raw_maps
from models.quantize.head_outputs import Raw, output_parts
from utils.qat.backends.detections import Detections
from utils.qat.backends.pytorch import task_of
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import training_images, val_loader
from utils.qat.data.masks import BoxMasks, PrototypeMasks, same_place_iou, true_masks
from utils.qat.evaluation.chance import points_lost
from utils.qat.evaluation.detection_scores import IOUS, _correct
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.score_tables import merit

CPU = torch.device('cpu')
SIZE, CLASSES, PERFECT = 128, 10, 0.995  # pixels; upstream's interpolation makes 0.995 of a perfect result
FIGURES = 'ap', 'ap50', 'precision', 'recall'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """data.yaml of pictures with outlines."""
    folder = tmp_path_factory.mktemp('outlines') / 'data'
    program('demo/make_data.py').make_data(folder, train=8, val=8, size=SIZE, task='segment')
    return folder / 'data.yaml'


@pytest.fixture(scope='module')
def model():
    return fuse(build('demo-seg'))


def loader_of(data, square=False, **options):
    config = EvalConfig(Path('w.pt'), data, batch_size=4, imgsz=SIZE, workers=0, **options)
    return val_loader(load_data(data, masks=True), config, 32, square=square)


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
    for masks in (
        BoxMasks(torch.ones(2, 8, 8), torch.tensor([[10.0, 20, 50, 70], [0, 0, 128, 128]]), (SIZE, SIZE)),
        PrototypeMasks(
            torch.ones(2, 1),
            torch.full((1, 32, 32), 9.0),
            torch.tensor([[10.0, 20, 50, 70], [0, 0, 128, 128]]),
            (SIZE, SIZE),
        ),
    ):
        first, second = masks.fine()
        assert first.sum() == 40 * 50 and first[20:70, 10:50].all() and second.all()


def test_truth_in_both_forms_of_upstream(data):
    """Objects of the demo hide each other little, so the index map loses little."""
    one_by_one, as_map = (
        [(batch[1], batch[4]) for batch in loader_of(data, square=True, overlap=o)] for o in (False, True)
    )
    for (targets, masks), (sorted_targets, maps) in zip(one_by_one, as_map):
        for i, (mask, index) in enumerate(zip(masks, maps)):
            number = int((targets[:, 0] == i).sum())
            theirs = true_masks(index, number)
            order = [
                next(k for k, t in enumerate(targets[targets[:, 0] == i]) if torch.equal(t, s))
                for s in sorted_targets[sorted_targets[:, 0] == i]
            ]
            ours = true_masks(mask, number)[order]
            assert ours.shape == theirs.shape and ours.sum() > 0 and same_place_iou(ours, theirs).mean() > 0.95


# ---- scores -------------------------------------------------------------------------------------------------------------


def test_matching_is_upstreams():
    """That of val.py, on random boxes with many near misses."""
    from utils.metrics import box_iou
    from val import process_batch

    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        corner = torch.rand(6, 2, generator=generator) * 60
        labels = torch.cat(
            (
                torch.randint(3, (6, 1), generator=generator),
                corner,
                corner + 10 + torch.rand(6, 2, generator=generator) * 40,
            ),
            1,
        )
        which = torch.randint(6, (40,), generator=generator)
        boxes = labels[which, 1:] + torch.randn(40, 4, generator=generator) * 4
        classes = torch.where(torch.rand(40, generator=generator) < 0.8, labels[which, 0], 1.0)
        rows = torch.cat(
            (boxes, torch.rand(40, 1, generator=generator).sort(0, descending=True).values, classes[:, None]), 1
        )
        ours = _correct(Detections(rows), labels, box_iou(labels[:, 1:], boxes))
        assert torch.equal(ours, process_batch(rows, labels, IOUS)) and ours.any()


class Oracle:
    """Finds the labels of the images it is asked about, with masks changed by `change`."""

    def __init__(self, loader, change):
        self.batches, self.change = list(loader), change

    def __call__(self, images):
        batch = next(b for b in self.batches if b[0].shape == images.shape and torch.equal(b[0].float() / 255, images))
        shape, found = images.shape[2:], []
        for i in range(len(images)):
            mine = batch[1][batch[1][:, 0] == i]
            boxes = mine[:, 2:] * torch.tensor((shape[1], shape[0]) * 2)
            boxes = torch.cat((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), 1)
            masks = (
                F.interpolate(
                    true_masks(batch[4][i], len(mine))[None], (shape[0] // 4, shape[1] // 4), mode='bilinear'
                )[0]
                .gt(0.5)
                .float()
            )
            masks = self.change(masks)
            rows = torch.cat((boxes, torch.full((len(mine), 1), 0.9), mine[:, 1:2]), 1)
            found.append(Detections(rows, PrototypeMasks(torch.eye(len(mine)), 20 * masks - 10, boxes, shape)))
        return found


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
    loader = loader_of(data, square)
    metrics = evaluate(Oracle(loader, change), loader, load_data(data).names, CPU)
    assert metrics.ap == pytest.approx(PERFECT, abs=2e-3) and low - 2e-3 <= metrics.mask['ap'] <= high + 2e-3
    assert all((row['mask'] or {}).get('ap', 0) <= row['ap'] for row in metrics.per_class)


def test_masks_are_written_as_coco_has_them(data, tmp_path):
    """Run lengths in the size of the original: those of perfect detections are the outlines of the labels, and COCO's scorer agrees."""
    import cv2
    from pycocotools import mask as coco

    loader = loader_of(data)
    names = load_data(data).names
    evaluate(Oracle(loader, lambda m: m), loader, names, CPU, predictions_file=tmp_path / 'predictions.json')
    rows = json.loads((tmp_path / 'predictions.json').read_text())
    truth, sizes = [], []
    for file in sorted((data.parent / 'labels' / 'val').iterdir()):
        height, width = cv2.imread(str(data.parent / 'images' / 'val' / f'{file.stem}.jpg')).shape[:2]
        sizes.append((int(file.stem), height, width))
        for line in file.read_text().splitlines():
            c, *points = map(float, line.split())
            outline = np.array(points).reshape(-1, 2) * (width, height)
            x, y = outline.min(0)
            truth.append(
                {
                    'id': len(truth) + 1,
                    'image_id': int(file.stem),
                    'category_id': int(c),
                    'iscrowd': 0,
                    'bbox': [x, y, *np.ptp(outline, 0)],
                    'segmentation': coco.merge(coco.frPyObjects([outline.flatten().tolist()], height, width)),
                }
            )
    ious = [
        max(
            coco.iou([row['segmentation']], [t['segmentation']], [0]).item()
            for t in truth
            if (t['image_id'], t['category_id']) == (row['image_id'], row['category_id'])
        )
        for row in rows
    ]
    assert len(rows) == len(truth) and min(ious) > 0.6 and np.mean(ious) > 0.85
    for t in truth:
        t['area'] = float(coco.area(t['segmentation']))
        t['segmentation'] = {**t['segmentation'], 'counts': t['segmentation']['counts'].decode()}
        t['category_id'] += 1  # COCO's number of the first classes
    (tmp_path / 'instances.json').write_text(
        json.dumps(
            {
                'images': [{'id': i, 'height': h, 'width': w} for i, h, w in sizes],
                'annotations': truth,
                'categories': [{'id': i, 'name': str(i)} for i in range(1, 12)],
            }
        )
    )
    metrics = evaluate(Oracle(loader, lambda m: m), loader, names, CPU, annotations=tmp_path / 'instances.json')
    assert metrics.coco['ap50'] > 0.99 and metrics.mask['coco']['ap50'] > 0.99
    empty = evaluate(Oracle(loader, torch.zeros_like), loader, names, CPU, annotations=tmp_path / 'instances.json')
    assert empty.coco['ap50'] > 0.99 and empty.mask['coco']['ap'] == 0


# ---- what a calibration is chosen by ------------------------------------------------------------------------------------


def tame(raw):
    """`raw` with mask logits that are neither huge nor all alike, which random weights do not give."""
    return Raw(
        raw.maps, raw.boxes, raw.coefficients / raw.coefficients.std(), raw.prototypes / raw.prototypes.std() / 8
    )


def moved(raw, amount, seed=0):
    """`raw` with noise on what masks are made of."""
    generator = torch.Generator().manual_seed(seed)
    return Raw(
        raw.maps,
        raw.boxes,
        *(x + amount * torch.randn(x.shape, generator=generator) for x in (raw.coefficients, raw.prototypes)),
    )


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
    raw = tame(Raw.of(model(images)))
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
    assert typical_divergence(model, [images], [Raw.of(model(images))]) == pytest.approx(0, abs=1e-9)


@torch.no_grad()
def test_probes_of_masks_measure_the_divergence(model):
    """As those of boxes and classes, see test_fisher.py: half the mean square of a projection of a small change."""
    images, generator = image(64, 1, 3), torch.Generator().manual_seed(0)
    raw = tame(Raw.of(deepcopy(model).double()(images.double())))
    changed = moved(raw, 1e-4)
    wanted = typical_divergence(Fixed(model.model[-1], changed), [images], [raw])
    places, _ = strongest_places(raw, 16)
    change, squares = mask_logits(changed, places) - mask_logits(raw, places), []
    weight = sum(m[:, 64:].sigmoid().amax(1).sum() for m in raw.maps)
    for _ in range(4000):
        _, v = probe_masks(raw, 16, lambda shape: torch.rand(shape, generator=generator).double())
        squares.append((v * change).sum().square() / 2 / weight)
    assert torch.stack(squares).mean().item() == pytest.approx(wanted, rel=0.1)


def test_the_backward_pass_reaches_what_masks_are_made_of(model):
    seen = {}
    convs = {
        'prototypes': model.model[-1].proto.cv3.conv,
        'coefficients': model.model[-1].cv4[0][2],
        'boxes': model.model[-1].cv2[0][2],
    }

    def watch(name):
        return lambda conv, inputs, output: (
            output.register_hook(lambda gradient: seen.__setitem__(name, gradient.norm().item())) and None
        )

    hooks = [conv.register_forward_hook(watch(name)) for name, conv in convs.items()]
    backward_from_probe(model, image(64, 2), torch.Generator().manual_seed(0))
    for hook in hooks:
        hook.remove()
    assert seen.keys() == convs.keys() and min(seen.values()) > 0


# ---- fine-tuning --------------------------------------------------------------------------------------------------------


def test_the_loss_on_labels_is_upstreams(data):
    """Boxes, classes and masks with upstream's gains, per image; the masks as its training loads them."""
    from types import SimpleNamespace

    from utils.segment.loss_tal import ComputeLoss

    model, config = fuse(build('demo-seg')), settings(imgsz=SIZE, task_loss=1.0, batch_size=4)
    batches = list(training_images(load_data(data, masks=True), config, 32, CPU))
    head_emits_raw_maps(model)
    for images, labels, masks in batches:
        assert masks[0].shape[1:] == (SIZE // 4, SIZE // 4)
        outputs = model(images)
        theirs, parts = ComputeLoss(
            SimpleNamespace(model=model.model, parameters=model.parameters, hyp={'cls_pw': 1.0, 'fl_gamma': 0.0})
        )(outputs, labels, torch.cat(masks).float())
        assert (
            task_of(model).label_loss(model, 2.0)(outputs, labels, masks).item()
            == pytest.approx(2 * theirs.item() / len(images))
            and (parts > 0).all()
        )


def test_all_parts_of_the_head_count_alike(model):
    """Prototypes are many and large; maps and coefficients still have equal weight."""
    head_emits_raw_maps(model)
    with torch.no_grad():
        maps, coefficients, prototypes = output = model(image(64, 2))
    model.eval()
    groups = output_parts(output)
    assert (
        [len(g) for g in groups] == [3, 1, 1]
        and groups[1][0] is coefficients
        and groups[2][0] is prototypes
        and groups[0][0] is maps[0]
    )
    assert [len(g) for g in output_parts([coefficients, [prototypes]])] == [2] and [
        len(g) for g in output_parts((coefficients, prototypes))
    ] == [2]


# ---- bad input ----------------------------------------------------------------------------------------------------------


def command(name, *arguments):
    return run_command(program(name).main, [str(a) for a in arguments])


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    file = tmp_path_factory.mktemp('random') / 'seg.pt'
    torch.save({'model': build('demo-seg'), 'ema': None}, file)
    return file


def test_labels_without_outlines_are_named(demo, checkpoint, tmp_path, capfd):
    assert (
        command(
            'qat.py',
            'quantize',
            '--weights',
            checkpoint,
            '--data',
            demo.data,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'runs',
        )
        == 2
    )
    said = capfd.readouterr().err.strip().splitlines()[-1]  # behind upstream's progress bar
    assert 'error: label ' in said and '.txt: has boxes, and the model gives masks' in said and 'use data with' in said
    assert not (tmp_path / 'runs').exists()


def test_a_line_without_outline_among_others_is_named(data, tmp_path):
    import shutil

    shutil.copytree(data.parent, tmp_path / 'data')
    file = next((tmp_path / 'data' / 'labels' / 'val').glob('*.txt'))
    file.write_text(file.read_text() + '3 0.5 0.5 0.1 0.1\n')
    (tmp_path / 'data' / 'data.yaml').write_text(data.read_text().replace(str(data.parent), str(tmp_path / 'data')))
    with pytest.raises(QatError, match=f'{file.name}: has boxes'):
        loader_of(tmp_path / 'data' / 'data.yaml')


def test_boxes_and_masks_count_alike():
    """This holds for the choice of the best epoch and for the budget of lost points."""
    assert merit({'ap': 0.5, 'mask': {'ap': 0.3}}) == 0.4 and merit({'ap': 0.5}) == 0.5
    less, lesser = {'difference': -0.05, 'chance': 0.01}, {'difference': -0.1, 'chance': 0.01}
    assert points_lost({**less, 'mask': lesser}) == points_lost({**lesser, 'mask': less}) == pytest.approx(10)


@pytest.mark.parametrize('verb', sampled(['quantize', 'sensitive', 'eval', 'dry run'], 4, 2))
def test_the_entry_point_for_segmentation_refuses_detectors(demo, verb, tmp_path):
    verb, *extra = ('quantize', '--dry-run') if verb == 'dry run' else (verb,)
    said = (
        fresh(
            'segment/qat_seg.py',
            verb,
            '--weights',
            demo.quantized if verb == 'eval' else demo.single,
            '--data',
            demo.data,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'runs',
            *extra,
            code=2,
        )
        .strip()
        .splitlines()[-1]
    )
    assert (
        said.startswith('qat_seg.py: error: --weights ')
        and 'a detector (its head is DDetect)' in said
        and 'use: python qat.py' in said
    )
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('option', [['--overlap'], ['--mask-ratio', 4], ['--mask-downsample-ratio', 2]])
def test_options_of_masks_are_refused_without_masks(demo, option, tmp_path, capfd):
    assert (
        command(
            'qat.py',
            'eval',
            '--weights',
            demo.quantized,
            '--data',
            demo.data,
            '--device',
            'cpu',
            *option,
            '--project',
            tmp_path / 'runs',
        )
        == 2
    )
    assert (
        f'{option[0].replace("-downsample", "")}' in (said := capfd.readouterr().err)
        and 'only for a segmentation model' in said
    )


def test_the_entry_point_holds_no_logic():
    tree = ast.parse((REPO / 'segment' / 'qat_seg.py').read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.For, ast.While))]
    assert "only_task='segment'" in (REPO / 'segment' / 'qat_seg.py').read_text()
