"""The commands as a user types them: the whole job, its files on disk, and the answers to bad input."""

import hashlib
import json
import pickle
import re
import shutil
import zipfile

import pytest
import torch
import yaml
from conftest import REPO, TREE
from fresh import fresh
from zoo import command, holds, program, rows_of

from models.deploy.formats.onnx_end2end import export_end2end
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import Nms
from utils.qat.config.qat import EvalConfig
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.evaluate import evaluate

SIZE = '128'


@pytest.fixture(scope='session')
def job(tmp_path_factory):
    """The folder of a whole job: data/, dual.pt, single.pt, runs/exp, qat_best_single.onnx."""
    folder = tmp_path_factory.mktemp('job')
    program('demo/make_data.py').make_data(folder / 'data', train=16, val=8)
    with quiet_upstream():
        import models.yolo as upstream

        program('demo/weights.py').build(REPO / 'demo/demo-weights.pt', folder / 'dual.pt', upstream)
    command('reparameterization.py', '--weights', folder / 'dual.pt', '--save', folder / 'single.pt')
    fresh(*quantize(folder, '--epochs', 2))
    fresh('export_qat.py', '--weights', folder / 'runs/exp/weights/qat_best_single.pt', '--imgsz', SIZE)
    return folder


def quantize(folder, *more):
    return (
        'qat.py',
        'quantize',
        '--weights',
        folder / 'single.pt',
        '--data',
        folder / 'data/data.yaml',
        '--hyp',
        REPO / 'demo/hyp.yaml',
        '--imgsz',
        SIZE,
        '--batch-size',
        4,
        '--iters',
        2,
        '--device',
        'cpu',
        '--workers',
        0,
        '--project',
        folder / 'runs',
        *more,
    )


def report_of(folder):
    report = json.loads((folder / 'report.json').read_text())
    report.pop('times')
    return report


# ---- what the job leaves ------------------------------------------------------------------------------------------------


def test_files_of_quantize(job):
    exp = job / 'runs/exp'
    report = report_of(exp)
    names = sorted(p.name for p in (exp / 'weights').iterdir() if p.suffix == '.pt')
    epochs = [f'qat_ep_{e["epoch"]}_ap_{e["ap"]:.4f}_single.pt' for e in report['epochs']]
    assert names == sorted([f'ptq_ap_{report["ptq"]["ap"]:.4f}_single.pt', 'qat_best_single.pt', *epochs])
    assert len(epochs) == 2
    assert {p.name for p in exp.iterdir()} == {
        'weights',
        'report.json',
        'report.md',
        'ap.png',
        'classes.png',
        'log.txt',
        '.lock',
    }
    assert report['origin']['ap'] > 0.2, 'the demo weights work even at this size'
    assert report['chosen_on'] == 'val' and report['val'] is None and report['images'] == {'val': 8, 'train': 16}
    assert report['best']['ap'] == max(e['ap'] for e in (report['ptq'], *report['epochs']))
    assert report['settings']['seed'] == 57 and torch.__version__.startswith(report['versions']['torch'])
    assert 'QAT epoch 2' in (exp / 'report.md').read_text() and 'PTQ' in (exp / 'log.txt').read_text()
    rows = {
        name: cells[1:] for name, cells in rows_of((exp / 'report.md').read_text(), 'model').items()
    }  # without loss
    best = next(name for name in rows if name.startswith('best ('))
    assert holds(rows['float'], rows['PTQ'], rows['PTQ - float, points'])
    assert holds(rows['float'], rows[best], rows['best - float, points'])


def test_fine_tuning_that_harms_is_not_what_is_delivered(job):
    out, folder = (
        command(*quantize(job, '--epochs', 1, '--lr', 0.01, '--calib-method', 'mse', '--name', 'harmed')),
        job / 'runs/harmed',
    )
    report = report_of(folder)
    assert report['epochs'][0]['ap'] < report['ptq']['ap'] - 0.01, 'the rate is meant to harm'
    assert report['best'] == {**report['ptq'], 'epoch': 0, 'file': 'weights/qat_best_single.pt'}
    assert (folder / report['ptq']['file']).read_bytes() == (folder / report['best']['file']).read_bytes()
    assert 'best (PTQ)' in out and 'Fine-tuning did not help: no epoch' in out


def test_same_seed_same_report(job):
    command(*quantize(job, '--epochs', 2, '--name', 'again', '--exist-ok'))
    first, second = report_of(job / 'runs/exp'), report_of(job / 'runs/again')
    for report in (first, second):
        report['settings'].pop('name'), report['settings'].pop('exist_ok')
    assert first == second


def test_calibration_only(job):
    command(
        *quantize(job, '--epochs', 0, '--no-eval-origin', '--name', 'ptq', '--exist-ok', '--calib-method', 'percentile')
    )
    report = report_of(job / 'runs/ptq')
    assert report['origin'] is None and report['epochs'] == [] and report['best'] is None and report['ptq']['ap'] > 0.2
    assert [p.name for p in (job / 'runs/ptq/weights').iterdir()] == [f'ptq_ap_{report["ptq"]["ap"]:.4f}_single.pt']


def test_eval_repeats_the_reported_figures(job):
    best = report_of(job / 'runs/exp')['best']
    out = command(
        'qat.py',
        'eval',
        '--weights',
        job / 'runs/exp' / best['file'],
        '--data',
        job / 'data/data.yaml',
        '--imgsz',
        SIZE,
        '--batch-size',
        4,
        '--workers',
        0,
        '--device',
        'cpu',
        '--project',
        job / 'eval',
        '--name',
        'pt',
        '--exist-ok',
    )
    metrics = json.loads((job / 'eval/pt/metrics.json').read_text())
    assert {k: metrics[k] for k in ('ap', 'ap50', 'precision', 'recall')} == {
        k: best[k] for k in ('ap', 'ap50', 'precision', 'recall')
    }
    assert f'{best["ap"]:.4f}' in out
    detections = json.loads((job / 'eval/pt/predictions.json').read_text())
    assert {'image_id', 'category_id', 'bbox', 'score'} == set(detections[0])


def test_val_trt_gives_the_figures_of_eval_on_the_same_file(job):
    options = (
        '--weights',
        job / 'runs/exp/weights/qat_best_single.onnx',
        '--data',
        job / 'data/data.yaml',
        '--imgsz',
        SIZE,
        '--batch-size',
        4,
        '--workers',
        0,
        '--device',
        'cpu',
        '--project',
        job / 'eval',
        '--exist-ok',
    )
    command('qat.py', 'eval', *options, '--name', 'onnx')
    out = command('val_trt.py', *options, '--name', 'trt')
    first, second = (json.loads((job / 'eval' / name / 'metrics.json').read_text()) for name in ('onnx', 'trt'))
    assert {k: v for k, v in first.items() if k not in ('settings', 'times')} == {
        k: v for k, v in second.items() if k not in ('settings', 'times')
    }
    assert f'{second["ap"]:.4f}' in out and set(second['times']['ms_per_image']) == {'pre', 'inference', 'nms'}
    assert not (job / 'eval/trt/predictions.json').exists()
    command('val_trt.py', *options, '--name', 'trt', '--save-json')
    assert (job / 'eval/trt/predictions.json').read_text() == (job / 'eval/onnx/predictions.json').read_text()


def test_coco_data_gets_pycocotools_figures(job):
    """val2017.txt marks the data as COCO. With the boxes as COCO annotations, AP is about the same."""
    from PIL import Image
    from utils.general import coco80_to_coco91_class

    data, categories = job / 'data', coco80_to_coco91_class()
    images, boxes = [], []
    for file in sorted((data / 'images/val').glob('*.jpg')):
        width, height = Image.open(file).size
        images.append({'id': int(file.stem), 'width': width, 'height': height})
        for line in (data / f'labels/val/{file.stem}.txt').read_text().splitlines():
            c, x, y, w, h = map(float, line.split())
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            boxes.append(
                {
                    'id': len(boxes) + 1,
                    'image_id': int(file.stem),
                    'category_id': categories[int(c)],
                    'bbox': box,
                    'area': box[2] * box[3],
                    'iscrowd': 0,
                }
            )
    (data / 'annotations').mkdir(exist_ok=True)
    (data / 'annotations/instances_val2017.json').write_text(
        json.dumps(
            {
                'info': {},
                'images': images,
                'annotations': boxes,
                'categories': [{'id': i, 'name': str(i)} for i in categories[:10]],
            }
        )
    )
    (data / 'val2017.txt').write_text(''.join(f'./images/val/{i["id"]:05d}.jpg\n' for i in images))
    (data / 'coco.yaml').write_text((data / 'data.yaml').read_text().replace('val: images/val', 'val: val2017.txt'))
    out = command(
        'qat.py',
        'eval',
        '--weights',
        job / 'runs/exp/weights/qat_best_single.pt',
        '--data',
        data / 'coco.yaml',
        '--imgsz',
        SIZE,
        '--workers',
        0,
        '--device',
        'cpu',
        '--project',
        job / 'eval',
        '--name',
        'coco',
        '--exist-ok',
    )
    metrics = json.loads((job / 'eval/coco/metrics.json').read_text())
    assert metrics['coco']['ap'] == pytest.approx(metrics['ap'], abs=0.03), (
        out
    )  # they interpolate precision differently
    assert 'pycocotools' in out
    content = json.loads((data / 'annotations/instances_val2017.json').read_text())
    for spoilt, says in (
        ({**content, 'annotations': [{**boxes[0], 'iscrowd': None}]}, 'annotations[0].iscrowd is missing'),
        ({**content, 'images': images[1:], 'annotations': []}, f'does not have 1 of the {len(images)} images'),
        ({**content, 'categories': content['categories'][:3], 'annotations': []}, "does not have COCO's categories"),
    ):
        (data / 'annotations/instances_val2017.json').write_text(json.dumps(spoilt))
        weights = (
            '--weights',
            job / 'runs/exp/weights/qat_best_single.pt',
            '--data',
            data / 'coco.yaml',
            '--imgsz',
            SIZE,
        )
        out = command('qat.py', 'eval', *weights, '--device', 'cpu', '--project', job / 'spoilt', code=2)
        assert says in out and 'evaluating' not in out


def test_onnx_scores_like_pytorch(job):
    weights = job / 'runs/exp/weights/qat_best_single'
    figures = {}
    for suffix, more in (('.onnx', ()), ('.pt', ('--square',))):
        command(
            'qat.py',
            'eval',
            '--weights',
            weights.with_suffix(suffix),
            '--data',
            job / 'data/data.yaml',
            '--imgsz',
            SIZE,
            '--workers',
            0,
            '--device',
            'cpu',
            '--project',
            job / 'eval',
            '--name',
            'sq' + suffix,
            '--exist-ok',
            *more,
        )
        figures[suffix] = json.loads((job / f'eval/sq{suffix}/metrics.json').read_text())
    # 8 images: one box that changes sides moves AP; on a real set the figures agree to 0.1 points (README)
    assert abs(figures['.onnx']['ap'] - figures['.pt']['ap']) < 0.03
    assert figures['.onnx']['instances'] == figures['.pt']['instances'] > 20


def test_verify_writes_the_comparison_beside_the_file(job):
    shutil.copy(job / 'runs/exp/weights/qat_best_single.pt', job / 'verified.pt')
    out = command(
        'export_qat.py',
        '--weights',
        job / 'verified.pt',
        '--imgsz',
        SIZE,
        '--batch-size',
        3,
        '--verify',
        job / 'data/data.yaml',
        '--max-ap-diff',
        0.03,
    )  # the limit: as in the test above
    result = json.loads((job / 'verified.verify.json').read_text())
    assert result['images'] == 8 and result['above_limits'] == [] and result['limits']['ap'] == 0.03
    assert result['onnx']['sha256'] == hashlib.sha256((job / 'verified.onnx').read_bytes()).hexdigest()
    assert (
        f'{result["reference"]["ap"]:.4f}' in out
        and f'{result["matched"]:.2%}' in out
        and 'within rtol 0.001, atol 0.001' in out
    )
    command(
        'qat.py',
        'eval',
        '--weights',
        job / 'verified.onnx',
        '--data',
        job / 'data/data.yaml',
        '--imgsz',
        SIZE,
        '--workers',
        0,
        '--device',
        'cpu',
        '--project',
        job / 'eval',
        '--name',
        'verified',
        '--exist-ok',
    )
    alone = json.loads((job / 'eval/verified/metrics.json').read_text())
    assert {k: alone[k] for k in result['other']} == result['other'], 'the figures of the file, as eval finds them'


def test_end2end_files(job):
    """One file is verified and evaluated; one is for TensorRT only, with a warning. No plain file stays."""
    shutil.copy(job / 'runs/exp/weights/qat_best_single.pt', job / 'inside.pt')
    data = job / 'data/data.yaml'
    out = command(
        'export_qat.py',
        '--weights',
        job / 'inside.pt',
        '--imgsz',
        SIZE,
        '--include',
        'onnx_end2end',
        '--nms',
        'standard',
        '--topk-all',
        300,
        '--conf-thres',
        0.001,
        '--iou-thres',
        0.7,
        '--batch-size',
        4,
        '--verify',
        data,
        '--max-ap-diff',
        0.03,
    )
    assert (
        'inside-end2end.onnx' in out and 'in ONNX Runtime as by torchvision' in out and '| all predictions' not in out
    )
    assert {p.name for p in job.glob('inside*')} == {
        'inside.pt',
        'inside-end2end.onnx',
        'inside-end2end.verify.json',
        'inside-end2end.pbtxt',
    }
    served = (job / 'inside-end2end.pbtxt').read_text()
    assert 'name: "inside-end2end"' in served and all(
        f'name: "{name}"' in served for name in ('num_dets', 'det_boxes', 'det_scores', 'det_classes')
    )
    result = json.loads((job / 'inside-end2end.verify.json').read_text())
    assert result['above_limits'] == [] and result['boxes'] is None and result['settings']['topk_all'] == 300
    for file in (job / 'inside-end2end.onnx', job / 'runs/exp/weights/qat_best_single.onnx'):
        command(
            'val_trt.py',
            '--weights',
            file,
            '--data',
            data,
            '--imgsz',
            SIZE,
            '--workers',
            0,
            '--device',
            'cpu',
            '--project',
            job / 'nms',
            '--name',
            file.stem,
        )
    inside, outside = (
        json.loads((job / 'nms' / name / 'metrics.json').read_text()) for name in ('inside-end2end', 'qat_best_single')
    )
    assert abs(inside['ap'] - outside['ap']) < 1e-3 and inside['ap'] == result['other']['ap']

    out = command(
        'export_qat.py',
        '--weights',
        job / 'inside.pt',
        '--imgsz',
        SIZE,
        '--include',
        'onnx_end2end',
        'onnx',
        '--nms',
        'plugin',
        '--trt',
        11,
    )
    assert 'warning: EfficientNMS_TRT is deprecated since TensorRT 10.12' in out and '--nms standard' in out
    assert (
        (job / 'inside.onnx').exists()
        and 'eval --weights ' + str(job / 'inside.onnx') in out
        and out.count('next:') == 1
    )


def test_verify_above_a_limit_is_exit_code_1_and_the_file_stays(job):
    """The model detects nothing, so there is nothing to verify."""
    checkpoint = torch.load(job / 'single.pt', weights_only=False)
    for branch in checkpoint['model'].model[-1].cv3:
        branch[-1].bias.data.fill_(-30)
    torch.save(checkpoint, job / 'blind.pt')
    out = command(
        'export_qat.py',
        '--weights',
        job / 'blind.pt',
        '--imgsz',
        SIZE,
        '--verify',
        job / 'data/data.yaml',
        '--verify-images',
        2,
        code=1,
    )
    assert 'neither model detects anything' in out and 'The file stays' in out and 'Traceback' not in out
    result = json.loads((job / 'blind.verify.json').read_text())
    assert (
        (job / 'blind.onnx').exists() and result['images'] == 2 and result['above_limits'] and result['matched'] is None
    )


class AsUpstream(TorchModel):
    """Takes images as they lie in val.py. Channels last, the sums have another order, and a value between two steps of INT8 is rounded otherwise."""

    def outputs(self, images):
        return self.model(images.contiguous())


def test_upstream_val_and_detect_run_the_quantized_checkpoint(job):
    best = report_of(job / 'runs/exp')['best']
    weights = job / 'runs/exp' / best['file']
    out = fresh(
        'val.py',
        '--weights',
        weights,
        '--data',
        job / 'data/data.yaml',
        '--img',
        SIZE,
        '--batch',
        4,
        '--device',
        'cpu',
        '--workers',
        0,
        '--project',
        job / 'val',
    )
    p, r, ap50, ap = map(float, re.search(r'all +\d+ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)', out).groups())
    config, data = (
        EvalConfig(weights, job / 'data/data.yaml', imgsz=int(SIZE), batch_size=4, workers=0),
        load_data(job / 'data/data.yaml'),
    )
    model = AsUpstream(*CheckpointFile(weights).load_quantized())
    ours = evaluate(model, val_loader(data, config, 32), data.names, torch.device('cpu'))
    assert [p, r, ap50, ap] == pytest.approx([ours.precision, ours.recall, ours.ap50, ours.ap], abs=1e-3)
    assert ap == pytest.approx(best['ap'], abs=0.02), 'on 8 images, a few roundings move AP by 0.003'
    fresh(
        'detect.py',
        '--weights',
        weights,
        '--source',
        job / 'data/images/val',
        '--img',
        SIZE,
        '--device',
        'cpu',
        '--project',
        job / 'detect',
    )
    assert len(list((job / 'detect/exp').glob('*.jpg'))) == 8


def test_dry_run_tells_the_plan_and_writes_nothing(job, tmp_path):
    out = command(
        'qat.py',
        'quantize',
        '--dry-run',
        '--verbose',
        '--weights',
        job / 'single.pt',
        '--data',
        'none.yaml',
        '--project',
        tmp_path / 'runs',
    )
    stored = torch.load(job / 'runs/exp' / report_of(job / 'runs/exp')['best']['file'], weights_only=False)['quant']
    shared = [line.split(': ', 1)[1].split() for line in out.splitlines() if line.startswith('  scale ')]
    assert shared == [group for group in stored['scale_groups'] if len(group) > 1] and len(shared) > 20
    assert stored['recipe']['scale_policy'] == 'tied'
    assert (
        re.search(r'(?m)^\| model\.\d+\.dfl\.conv +\| +integral over the box distribution \|$', out)
        and 'nothing was written' in out
    )
    assert out.count('output of the head') == 6 and not list(tmp_path.iterdir())
    free = command('qat.py', 'quantize', '--dry-run', '--weights', job / 'single.pt', '--scale-policy', 'free')
    assert '0 quantizers share 0 scales' in free and '  scale ' not in free
    brief = command('qat.py', 'quantize', '--dry-run', '--weights', job / 'single.pt', '--data', 'none.yaml')
    assert '  scale ' not in brief and f'share {len(shared)} scales' in brief
    assert 'warning: --data none.yaml: no such file' in brief and '--data DATA.yaml' in brief.splitlines()[-1]


# ---- bad input ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='session')
def wrong(job, tmp_path_factory):
    """A folder of wrong files."""
    folder = tmp_path_factory.mktemp('wrong')
    good = yaml.safe_load((job / 'data/data.yaml').read_text())
    (folder / 'empty').mkdir()
    for name, change in {
        'no_train': {'train': None},
        'no_names': {'names': None},
        'classes': {'names': ['a', 'b'], 'nc': 2},
        'nc': {'nc': 3},
        'missing': {'val': 'images/nowhere'},
        'empty': {'val': str(folder / 'empty')},
    }.items():
        (folder / f'{name}.yaml').write_text(
            yaml.safe_dump({k: v for k, v in {**good, **change}.items() if v is not None})
        )
    for name, line in (
        ('coordinates', '1 0.5 0.5 1.5 0.1'),
        ('class', '10 0.5 0.5 0.1 0.1'),
        ('text', 'one 0.5 0.5 0.1 0.1'),
    ):
        shutil.copytree(job / 'data', folder / name, ignore=shutil.ignore_patterns('*.cache'))
        (folder / name / 'labels/val/00003.txt').write_text(line + '\n')
        (folder / f'{name}.yaml').write_text(yaml.safe_dump({**good, 'path': str(folder / name)}))
    (folder / 'not_yaml.yaml').write_text('train: [\n')
    (folder / 'list.yaml').write_text('- 1\n')
    (folder / 'text.pt').write_text('no checkpoint')
    whole = (job / 'single.pt').read_bytes()
    (folder / 'cut.pt').write_bytes(whole[: len(whole) // 2])
    torch.save({'a': 1}, folder / 'dict.pt')
    with zipfile.ZipFile(
        folder / 'foreign.pt', 'w'
    ) as archive:  # what the pickle of the other tool's checkpoint refers to
        archive.writestr('foreign/data.pkl', b'cpytorch_quantization.nn.modules.quant_conv\nQuantConv2d\n.')
    (folder / 'broken.onnx').write_bytes(b'no graph')
    (folder / 'model.engine').write_bytes(b'no engine')
    export_end2end(job / 'runs/exp/weights/qat_best_single.onnx', folder / 'plugin.onnx', Nms('plugin'))
    (folder / 'hyp.yaml').write_text('mosaic: 1.0\n')
    return folder


QUANTIZE = (
    'qat',
    'quantize',
    '--weights',
    '{job}/single.pt',
    '--data',
    '{job}/data/data.yaml',
    '--hyp',
    '{repo}/demo/hyp.yaml',
    '--imgsz',
    SIZE,
    '--workers',
    '0',
)
EVAL = (
    'qat',
    'eval',
    '--weights',
    '{job}/runs/exp/weights/qat_best_single.pt',
    '--data',
    '{job}/data/data.yaml',
    '--imgsz',
    SIZE,
    '--workers',
    '0',
)
VAL = (
    'val_trt',
    '--weights',
    '{job}/runs/exp/weights/qat_best_single.onnx',
    '--data',
    '{job}/data/data.yaml',
    '--imgsz',
    SIZE,
    '--workers',
    '0',
    '--device',
    'cpu',
)
EXPORT = ('export_qat', '--weights', '{job}/runs/exp/weights/qat_best_single.pt', '--imgsz', SIZE)
REPARAMETERIZE = ('reparameterization', '--weights', '{job}/dual.pt', '--save', '{job}/other.pt')

BAD = [  # command, the arguments added to it, what the line must say
    (QUANTIZE, '--weights {wrong}/none.pt', ['--weights', 'no such file']),
    (QUANTIZE, '--weights {wrong}', ['--weights', 'not a file']),
    (QUANTIZE, '--weights {wrong}/text.pt', ['text.pt', 'not a PyTorch checkpoint']),
    (QUANTIZE, '--weights {wrong}/cut.pt', ['cut.pt', 'not a PyTorch checkpoint']),
    (QUANTIZE, '--weights {wrong}/dict.pt', ['dict.pt', 'no YOLOv9 model']),
    (QUANTIZE, '--weights {job}/runs/exp/weights/qat_best_single.pt', ['already quantized', 'qat.py eval']),
    (QUANTIZE, '--weights {wrong}/foreign.pt', ['another yolov9-qat tool', 'qat.py quantize']),
    (QUANTIZE, '--data {wrong}/none.yaml', ['--data', 'no such file']),
    (QUANTIZE, '--data {wrong}/not_yaml.yaml', ['not valid YAML']),
    (QUANTIZE, '--data {wrong}/list.yaml', ['train:', 'names:']),
    (QUANTIZE, '--data {wrong}/no_train.yaml', ['train: missing']),
    (QUANTIZE, '--data {wrong}/no_names.yaml', ['names: missing']),
    (QUANTIZE, '--data {wrong}/classes.yaml', ['2 classes', 'the model has 10']),
    (QUANTIZE, '--data {wrong}/nc.yaml', ['nc: 3', '10 names']),
    (QUANTIZE, '--data {wrong}/missing.yaml', ['val:', 'does not exist', 'correct it']),
    (QUANTIZE, '--data {wrong}/empty.yaml', ['val:', 'no images']),
    (QUANTIZE, '--data {wrong}/coordinates.yaml', ['00003.txt:1', 'coordinates in 0..1']),
    (QUANTIZE, '--data {wrong}/text.yaml', ['00003.txt:1', 'class x y width height']),
    (QUANTIZE, '--data {wrong}/class.yaml', ['00003.txt', 'class 10', '0..9']),
    (QUANTIZE, '--hyp {wrong}/none.yaml', ['--hyp', 'no such file']),
    (QUANTIZE, '--hyp {wrong}/hyp.yaml', ['--hyp', 'hsv_h', 'missing']),
    (QUANTIZE, '--iters 0', ['--iters 0', '1 or more', '--epochs 0']),
    (QUANTIZE, '--iters -3 --batch-size 0', ['--iters -3', '--batch-size 0']),
    (QUANTIZE, '--iters many', ['--iters', "'many'"]),
    (QUANTIZE, '--calib-method best', ['--calib-method', 'mse', 'percentile']),
    (QUANTIZE, '--val-split 1', ['--val-split 1.0', '[0, 1)']),
    (QUANTIZE, '--val-split 0.01', ['--val-split 0.01', '16 images, of which 0']),
    (QUANTIZE, '--val-split 0.1 --epochs 0', ['--val-split 0.1', '--epochs 0']),
    (('qat', 'quantize'), '', ['required: --weights']),
    (('qat', 'quantize'), '--resume {job}/runs/exp', ['--resume', 'is finished']),
    (QUANTIZE, '--device 7', ['--device 7', '--device cpu']),
    (QUANTIZE, '--device gpu', ['--device gpu', "'cpu'"]),
    (QUANTIZE, '--project {job}/single.pt', ['single.pt']),
    (EVAL, '--weights {job}/single.pt {job}/none.pt', ['none.pt', 'no such file']),
    (EVAL, '--weights {job}/single.pt {job}/single.pt --exist-ok', ['single.pt', 'leave --exist-ok out']),
    (EVAL, '--weights {wrong}/broken.onnx', ['broken.onnx', 'no valid ONNX file']),
    (
        EVAL,
        '--weights {wrong}/plugin.onnx',
        ['plugin.onnx', 'EfficientNMS_TRT', 'TensorRT alone', '--include onnx_end2end --nms standard'],
    ),
    (EVAL, '--weights {job}/runs/exp/weights/qat_best_single.onnx --imgsz 640', ['--imgsz 640', '128 x 128']),
    (EVAL, '--conf-thres 2', ['--conf-thres', '[0, 1]']),
    (EVAL, '--data {wrong}/classes.yaml', ['2 classes', 'the model has 10']),
    (VAL, '--weights {job}/single.pt', ['single.pt', '.engine or .onnx']),
    (VAL, '--weights {wrong}/broken.onnx', ['broken.onnx', 'no valid ONNX file']),
    (VAL, '--weights {wrong}/model.engine', ['model.engine', 'ONNX Runtime evaluates the .onnx']),
    (VAL, '--weights {wrong}/model.engine --backend rtx', ['model.engine']),
    (VAL, '--imgsz 640', ['--imgsz 640', '128 x 128']),
    (VAL, '--iou-thres 2', ['--iou-thres', '[0, 1]']),
    (EXPORT, '--opset 9', ['--opset 9', '13']),
    (EXPORT, '--include engine', ['--include engine', 'onnx, onnx_end2end']),
    (EXPORT, '--imgsz 100', ['--imgsz 100:', 'multiples of 32', '96 or 128']),
    (QUANTIZE, '--imgsz 641', ['--imgsz 641:', 'multiples of 32', '640 or 672']),
    (EVAL, '--imgsz 100 128', ['--imgsz 100 128:', '96 128 or 128']),
    (QUANTIZE, '--imgsz 128 96', ['--hyp', 'augmented images are squares', 'one number for --imgsz']),
    (EXPORT, '--imgsz 64 100', ['--imgsz 64 100', '64 96 or 64 128']),
    (EXPORT, '--nms standard --topk-all 10', ['--topk-all, --nms: only with --include onnx_end2end']),
    (EXPORT, '--nms fast --include onnx_end2end', ['--nms fast', 'plugin, standard']),
    (
        EXPORT,
        '--include onnx_end2end --conf-thres -0.1 --iou-thres 1.1',
        ['--conf-thres -0.1', '--iou-thres 1.1', '[0, 1]'],
    ),
    (EXPORT, '--include onnx_end2end --conf-thres nan', ['--conf-thres nan', '[0, 1]']),
    (EXPORT, '--include onnx_end2end --iou-thres 0', ['--iou-thres 0', 'EfficientNMS_TRT', '--nms standard']),
    (EXPORT, '--include onnx_end2end --topk-all 4097', ['--topk-all 4097', '1 to 4096', '--nms plugin']),
    (EXPORT, '--include onnx_end2end --topk-all 3841 --trt 11', ['--topk-all 3841', '1 to 3840', '--nms standard']),
    (EXPORT, '--include onnx_end2end --topk-all 0', ['--topk-all 0']),
    (
        EXPORT,
        '--include onnx_end2end --topk-all 500 --class-agnostic --nms standard',
        ['--topk-all 500', 'only 336 candidates'],
    ),
    (
        EXPORT,
        '--include onnx_end2end --verify {job}/data/data.yaml',
        ['--verify', 'EfficientNMS_TRT', '--include onnx onnx_end2end', '--nms standard'],
    ),
    (EXPORT, '--imgsz 8', ['--imgsz', '32 or more']),
    (EXPORT, '--verify {wrong}/none.yaml', ['--verify', 'no such file']),
    (EXPORT, '--verify {wrong}/classes.yaml', ['--verify', '2 classes', 'the model has 10']),
    (EXPORT, '--verify {wrong}/class.yaml', ['00003.txt', 'class 10', '0..9']),
    (
        EXPORT,
        '--verify {job}/data/data.yaml --verify-images -1 --max-ap-diff 2',
        ['--verify-images -1', '--max-ap-diff 2'],
    ),
    (REPARAMETERIZE, '--weights {job}/single.pt', ['has one branch', 'go on with: python qat.py quantize --weights']),
    (REPARAMETERIZE, '--classes_num 80', ['--classes_num 80', '10 classes']),
    (REPARAMETERIZE, '--save {job}/dual.pt', ['--save', 'choose another']),
    (REPARAMETERIZE, '--cfg {wrong}/none.yaml', ['--cfg', 'no such file']),
]


@pytest.mark.parametrize('base, more, says', BAD, ids=[f'{b[0]} {m}' for b, m, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(job, wrong, tmp_path, capsys, monkeypatch, base, more, says):
    from utils.qat.core.command import run_command

    monkeypatch.chdir(TREE)
    argv = [a.format(job=job, wrong=wrong, repo=REPO) for a in (*base[1:], *more.split())]
    if base in (QUANTIZE, EVAL, VAL) and '--project' not in more:
        argv += ['--project', str(tmp_path / 'runs')]
    before = {
        p: p.stat().st_mtime_ns for p in job.rglob('*') if p.is_file() and p.suffix != '.cache' and p.name != '.lock'
    }
    capsys.readouterr()
    assert run_command(program(f'{base[0]}.py').main, argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    line = lines[-1]
    assert ': error: ' in line and all(text in line for text in says), line
    assert not any('Traceback' in text for text in lines)
    assert {
        p: p.stat().st_mtime_ns for p in job.rglob('*') if p.is_file() and p.suffix != '.cache' and p.name != '.lock'
    } == before
    assert not (tmp_path / 'runs').exists(), 'nothing is written before the input has been checked'


def test_out_of_gpu_memory_says_what_to_try():
    from utils.qat.core.command import explain_out_of_memory
    from utils.qat.core.errors import QatError

    for batch_size, advice in ((10, '--batch-size 5'), (1, '--imgsz')):
        with pytest.raises(QatError, match=advice), explain_out_of_memory(batch_size):
            raise torch.cuda.OutOfMemoryError('CUDA out of memory')


def test_a_wrong_checkpoint_is_judged_without_running_it(tmp_path):
    from models.quantize.checkpoint import CheckpointFile

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / 'sprung'), 'w'))

    with zipfile.ZipFile(tmp_path / 'trap.pt', 'w') as archive:
        archive.writestr('trap/data.pkl', pickle.dumps({'model': Trap()}, protocol=2))
    assert CheckpointFile(tmp_path / 'trap.pt').kind == 'other'
    assert not (tmp_path / 'sprung').exists()
