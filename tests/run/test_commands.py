"""The commands as a user types them: the whole job, its files on disk, and the answers to bad input."""

import filecmp
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
from PIL import Image
from utils.general import coco80_to_coco91_class
from zoo import command, holds, program, rows_of

from models.deploy.formats.onnx_end2end import export_end2end
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import Nms
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import explain_out_of_memory, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.evaluate import evaluate

SIZE = '128'
ON_CPU = ('--imgsz', SIZE, '--workers', 0, '--device', 'cpu')
BEST, BEST_ONNX = (f'runs/exp/weights/qat_best_single.{suffix}' for suffix in ('pt', 'onnx'))


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """The folder of a whole job: data/, dual.pt, single.pt, runs/exp, with the ONNX file beside its best checkpoint."""
    folder = tmp_path_factory.mktemp('job')
    data = folder / 'data/data.yaml'
    program('demo/make_data.py').make_data(folder / 'data', train=16, val=8)
    with quiet_upstream():
        import models.yolo as upstream

        program('demo/weights.py').build(REPO / 'demo/demo-weights.pt', folder / 'dual.pt', upstream)
    command('reparameterization.py', '--weights', folder / 'dual.pt', '--save', folder / 'single.pt')
    fresh(*quantize(folder, '--epochs', 2))
    # 8 images: one box that changes sides moves AP; on a real set the figures agree to 0.1 points (README)
    verify = '--batch-size', 3, '--verify', data, '--max-ap-diff', 0.03
    said = fresh('export_qat.py', '--weights', folder / BEST, '--imgsz', SIZE, *verify)
    (folder / 'export.txt').write_text(said)
    return folder


def quantize(folder, *more):
    given = '--weights', folder / 'single.pt', '--data', folder / 'data/data.yaml', '--hyp', REPO / 'demo/hyp.yaml'
    return 'qat.py', 'quantize', *given, *ON_CPU, '--batch-size', 4, '--iters', 2, '--project', folder / 'runs', *more


def score(job, file, name, *more, by=('qat.py', 'eval'), data='data.yaml', code=0):
    """Score a file of the job; returns the command's output, and the metrics that it writes to eval/NAME."""
    given = '--weights', job / file, '--data', job / 'data' / data, '--project', job / 'eval', '--name', name
    said = command(*by, *given, *ON_CPU, *more, code=code)
    return said, None if code else json.loads((job / 'eval' / name / 'metrics.json').read_text())


@pytest.fixture(scope='module')
def scored(job):
    """Name → (what was said, metrics) of the job's best model, by each way of scoring it."""
    return {
        'pt': score(job, BEST, 'pt', '--batch-size', 4),
        'square': score(job, BEST, 'square', '--square'),
        'onnx': score(job, BEST_ONNX, 'onnx'),
        'trt': score(job, BEST_ONNX, 'trt', '--save-json', by=['val_trt.py']),
    }


def report_of(folder):
    report = json.loads((folder / 'report.json').read_text())
    report.pop('times')
    return report


def same_files(one, other):
    return filecmp.cmp(one, other, shallow=False)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- what the job leaves ------------------------------------------------------------------------------------------------


def test_files_of_quantize(job):
    exp = job / 'runs/exp'
    report, text = report_of(exp), (exp / 'report.md').read_text()
    epochs = [f'qat_ep_{e["epoch"]}_ap_{e["ap"]:.4f}_single.pt' for e in report['epochs']]
    assert len(epochs) == 2
    models = ['best.pt', 'ptq_ap_{ap:.4f}_single.pt'.format(**report['ptq']), *epochs, 'qat_best_single.pt']
    assert same_files(exp / 'weights/best.pt', exp / 'weights/qat_best_single.pt')
    assert names_in(exp / 'weights') == sorted([*models, 'qat_best_single.onnx', 'qat_best_single.verify.json'])
    assert names_in(exp) == ['.lock', 'ap.png', 'classes.png', 'log.txt', 'report.json', 'report.md', 'weights']
    assert report['origin']['ap'] > 0.2, 'the demo weights work even at this size'
    assert report['chosen_on'] == 'val' and report['val'] is None and report['images'] == {'val': 8, 'train': 16}
    assert report['best']['ap'] == max(e['ap'] for e in (report['ptq'], *report['epochs']))
    assert report['settings']['seed'] == 57 and torch.__version__.startswith(report['versions']['torch'])
    assert 'QAT epoch 2' in text and 'PTQ' in (exp / 'log.txt').read_text()
    rows = {name: cells[1:] for name, cells in rows_of(text, 'model').items()}  # without loss
    best = next(name for name in rows if name.startswith('best ('))
    assert holds(rows['float'], rows['PTQ'], rows['PTQ - float, points'])
    assert holds(rows['float'], rows[best], rows['best - float, points'])


def test_fine_tuning_that_harms_is_not_what_is_delivered(job):
    said = command(*quantize(job, '--epochs', 1, '--lr', 0.01, '--calib-method', 'mse', '--name', 'harmed'))
    folder, report = job / 'runs/harmed', report_of(job / 'runs/harmed')
    assert report['epochs'][0]['ap'] < report['ptq']['ap'] - 0.01, 'the rate is meant to harm'
    assert report['best'] == {**report['ptq'], 'epoch': 0, 'file': 'weights/qat_best_single.pt'}
    assert same_files(folder / report['ptq']['file'], folder / report['best']['file'])
    assert same_files(folder / report['ptq']['file'], folder / 'weights/best.pt')
    assert 'best (PTQ)' in said and 'Fine-tuning did not help: no epoch' in said


def test_same_seed_same_report(job):
    command(*quantize(job, '--epochs', 2, '--name', 'again'))
    first, second = report_of(job / 'runs/exp'), report_of(job / 'runs/again')
    assert [report['settings'].pop('name') for report in (first, second)] == ['exp', 'again']
    assert first == second


def test_calibration_only(job):
    command(*quantize(job, '--epochs', 0, '--no-eval-origin', '--name', 'ptq', '--calib-method', 'percentile'))
    report = report_of(job / 'runs/ptq')
    assert report['origin'] is None and report['epochs'] == [] and report['best'] is None and report['ptq']['ap'] > 0.2
    weights = job / 'runs/ptq/weights'
    assert names_in(weights) == ['best.pt', f'ptq_ap_{report["ptq"]["ap"]:.4f}_single.pt']
    assert same_files(*weights.iterdir())


def test_the_best_model_is_never_written_over_the_float_one(job):
    weights = job / 'runs/taken/weights'
    weights.mkdir(parents=True)
    (weights.parent / '.lock').touch()
    shutil.copy(job / 'single.pt', weights / 'best.pt')
    words = ['qat.py', 'quantize', '--weights', weights / 'best.pt', '--data', job / 'data/data.yaml', '--epochs', 0]
    said = command(*words, *('--project', job / 'runs', '--name', 'taken', '--exist-ok', *ON_CPU), code=2)
    assert 'choose another --name' in said and same_files(job / 'single.pt', weights / 'best.pt')


def test_eval_repeats_the_reported_figures(job, scored):
    best, (said, metrics) = report_of(job / 'runs/exp')['best'], scored['pt']
    for name in ('ap', 'ap50', 'precision', 'recall'):
        assert metrics[name] == best[name]
    assert f'{best["ap"]:.4f}' in said
    detections = json.loads((job / 'eval/pt/predictions.json').read_text())
    assert {'image_id', 'category_id', 'bbox', 'score'} == set(detections[0])


def test_val_trt_gives_the_figures_of_eval_on_the_same_file(job, scored):
    (_, by_eval), (said, by_val) = scored['onnx'], scored['trt']
    same = by_eval.keys() - {'settings', 'times'}
    assert by_val.keys() == by_eval.keys() and all(by_val[key] == by_eval[key] for key in same)
    assert f'{by_val["ap"]:.4f}' in said and set(by_val['times']['ms_per_image']) == {'pre', 'inference', 'nms'}
    assert (job / 'eval/trt/predictions.json').read_text() == (job / 'eval/onnx/predictions.json').read_text()


def test_onnx_scores_like_pytorch(scored):
    in_onnx, in_pytorch = scored['onnx'][1], scored['square'][1]
    assert abs(in_onnx['ap'] - in_pytorch['ap']) < 0.03
    assert in_onnx['instances'] == in_pytorch['instances'] > 20


def test_verify_writes_the_comparison_beside_the_file(job, scored):
    said, result = (job / 'export.txt').read_text(), json.loads((job / BEST).with_suffix('.verify.json').read_text())
    assert result['images'] == 8 and result['above_limits'] == [] and result['limits']['ap'] == 0.03
    assert result['onnx']['sha256'] == hashlib.sha256((job / BEST_ONNX).read_bytes()).hexdigest()
    for text in (f'{result["reference"]["ap"]:.4f}', f'{result["matched"]:.2%}', 'limits: '):
        assert text in said
    alone = scored['onnx'][1]
    assert {k: alone[k] for k in result['other']} == result['other'], 'the figures of the file, as eval finds them'


def coco_annotations(data):
    """The boxes of the validation images as COCO annotations."""
    categories, images, boxes = coco80_to_coco91_class(), [], []
    for file in sorted((data / 'images/val').glob('*.jpg')):
        width, height = Image.open(file).size
        images.append({'id': int(file.stem), 'width': width, 'height': height})
        for line in (data / f'labels/val/{file.stem}.txt').read_text().splitlines():
            c, x, y, w, h = map(float, line.split())
            box = {'id': len(boxes) + 1, 'image_id': int(file.stem), 'category_id': categories[int(c)], 'iscrowd': 0}
            of_pixels = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            boxes.append({**box, 'bbox': of_pixels, 'area': of_pixels[2] * of_pixels[3]})
    named = [{'id': i, 'name': str(i)} for i in categories[:10]]
    return {'info': {}, 'images': images, 'annotations': boxes, 'categories': named}


def test_coco_data_gets_pycocotools_figures(job):
    """val2017.txt marks the data as COCO. With the boxes as COCO annotations, AP is about the same."""
    data, right = job / 'data', coco_annotations(job / 'data')
    annotations = data / 'annotations/instances_val2017.json'
    annotations.parent.mkdir()
    annotations.write_text(json.dumps(right))
    (data / 'val2017.txt').write_text(''.join(f'./images/val/{i["id"]:05d}.jpg\n' for i in right['images']))
    (data / 'coco.yaml').write_text((data / 'data.yaml').read_text().replace('val: images/val', 'val: val2017.txt'))
    said, metrics = score(job, BEST, 'coco', data='coco.yaml')
    assert metrics['coco']['ap'] == pytest.approx(metrics['ap'], abs=0.03), 'they interpolate precision differently'
    assert 'pycocotools' in said
    for wrong, says in (
        ({'annotations': [{**right['annotations'][0], 'iscrowd': None}]}, 'annotations[0].iscrowd is missing'),
        ({'annotations': [], 'images': right['images'][1:]}, 'does not have 1 of the 8 images'),
        ({'annotations': [], 'categories': right['categories'][:3]}, "does not have COCO's categories"),
    ):
        annotations.write_text(json.dumps({**right, **wrong}))
        said, _ = score(job, BEST, 'spoilt', data='coco.yaml', code=2)
        assert says in said and 'evaluating' not in said


def test_end2end_files(job, scored):
    """One file is verified and evaluated; one is for TensorRT only, with a warning. No plain file stays."""
    shutil.copy(job / BEST, job / 'inside.pt')
    exported = 'export_qat.py', '--weights', job / 'inside.pt', '--imgsz', SIZE, '--include', 'onnx_end2end'
    as_eval = '--conf-thres 0.001 --iou-thres 0.7 --topk-all 300 --batch-size 4'.split()
    said = command(*exported, *as_eval, '--verify', job / 'data/data.yaml', '--max-ap-diff', 0.03)
    assert 'inside-end2end.onnx' in said and 'in ONNX Runtime as by torchvision' in said
    made = {f'inside-end2end.{suffix}' for suffix in ('onnx', 'verify.json', 'pbtxt')}
    assert {p.name for p in job.glob('inside*')} == {'inside.pt', *made}
    served = (job / 'inside-end2end.pbtxt').read_text()
    for name in ('inside-end2end', 'num_dets', 'det_boxes', 'det_scores', 'det_classes'):
        assert f'name: "{name}"' in served
    result = json.loads((job / 'inside-end2end.verify.json').read_text())
    assert result['above_limits'] == [] and result['boxes'] is None and result['settings']['topk_all'] == 300
    _, inside = score(job, 'inside-end2end.onnx', 'inside', by=['val_trt.py'])
    assert abs(inside['ap'] - scored['trt'][1]['ap']) < 1e-3 and inside['ap'] == result['other']['ap']
    assert not (job / 'eval/inside/predictions.json').exists(), 'val_trt.py writes them with --save-json only'

    said = command(*exported, 'onnx', '--nms', 'plugin', '--trt', 11)
    assert 'warning: EfficientNMS_TRT is deprecated since TensorRT 10.12' in said and '--nms standard' in said
    assert (job / 'inside.onnx').exists() and f'eval --weights {job / "inside.onnx"}' in said
    assert said.count('next:') == 1


def test_verify_above_a_limit_is_exit_code_1_and_the_file_stays(job):
    """The model detects nothing, so there is nothing to verify."""
    checkpoint = torch.load(job / 'single.pt', weights_only=False)
    for branch in checkpoint['model'].model[-1].cv3:
        branch[-1].bias.data.fill_(-30)
    torch.save(checkpoint, job / 'blind.pt')
    verify = '--verify', job / 'data/data.yaml', '--verify-images', 2
    said = command('export_qat.py', '--weights', job / 'blind.pt', '--imgsz', SIZE, *verify, code=1)
    assert 'neither model detects anything' in said and 'The file stays' in said and 'Traceback' not in said
    result = json.loads((job / 'blind.verify.json').read_text())
    assert (job / 'blind.onnx').exists()
    assert result['images'] == 2 and result['above_limits'] and result['matched'] is None


class AsUpstream(TorchModel):
    """Takes images as they lie in val.py. Channels last, the sums have another order, and a value between two steps of INT8 is rounded otherwise."""

    def outputs(self, images):
        return self.model(images.contiguous())


def test_upstream_val_and_detect_run_the_quantized_checkpoint(job):
    weights, data = job / BEST, load_data(job / 'data/data.yaml')
    given = '--weights', weights, '--img', SIZE, '--device', 'cpu'
    on_data = '--data', job / 'data/data.yaml', '--batch', 4, '--workers', 0, '--project', job / 'val'
    said = fresh('val.py', *given, *on_data)
    theirs = list(map(float, re.search(r'all +\d+ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)', said).groups()))
    config = EvalConfig(weights, job / 'data/data.yaml', imgsz=int(SIZE), batch_size=4, workers=0)
    model = AsUpstream(*CheckpointFile(weights).load_quantized())
    ours = evaluate(model, val_loader(data, config, 32), data.names, torch.device('cpu'))
    assert theirs == pytest.approx([ours.precision, ours.recall, ours.ap50, ours.ap], abs=1e-3)
    best = report_of(job / 'runs/exp')['best']
    assert theirs[3] == pytest.approx(best['ap'], abs=0.02), 'on 8 images, a few roundings move AP by 0.003'
    fresh('detect.py', *given, '--source', job / 'data/images/val', '--project', job / 'detect')
    assert len(list((job / 'detect/exp').glob('*.jpg'))) == 8


def test_dry_run_tells_the_plan_and_writes_nothing(job, tmp_path):
    dry = 'qat.py', 'quantize', '--dry-run', '--weights', job / 'single.pt'
    said = command(*dry, '--verbose', '--data', 'none.yaml', '--project', tmp_path / 'runs')
    stored = torch.load(job / BEST, weights_only=False)['quant']
    shared = [line.split(': ', 1)[1].split() for line in said.splitlines() if line.startswith('  scale ')]
    assert shared == [group for group in stored['scale_groups'] if len(group) > 1] and len(shared) > 20
    assert stored['recipe']['scale_policy'] == 'tied'
    assert re.search(r'(?m)^\| model\.\d+\.dfl\.conv +\| +integral over the box distribution \|$', said)
    assert 'nothing was written' in said and said.count('output of the head') == 6 and not list(tmp_path.iterdir())
    assert f'share {len(shared)} scales' in said
    assert 'warning: --data none.yaml: no such file' in said and '--data DATA.yaml' in said
    free = command(*dry, '--scale-policy', 'free')
    assert '0 quantizers share 0 scales' in free and '  scale ' not in free
    tied = command(*dry)
    assert f'share {len(shared)} scales' in tied and '  scale ' not in tied, 'only --verbose lists them'


# ---- bad input ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def wrong(job, tmp_path_factory):
    """A folder of wrong files."""
    folder = tmp_path_factory.mktemp('wrong')
    good = yaml.safe_load((job / 'data/data.yaml').read_text())
    (folder / 'empty').mkdir()
    changes = {
        'no_train': {'train': None},
        'no_names': {'names': None},
        'classes': {'names': ['a', 'b'], 'nc': 2},
        'nc': {'nc': 3},
        'missing': {'val': 'images/nowhere'},
        'empty': {'val': str(folder / 'empty')},
    }
    labels = {'coordinates': '1 0.5 0.5 1.5 0.1', 'class': '10 0.5 0.5 0.1 0.1', 'text': 'one 0.5 0.5 0.1 0.1'}
    for name, line in labels.items():
        shutil.copytree(job / 'data', folder / name, ignore=shutil.ignore_patterns('*.cache'))
        (folder / name / 'labels/val/00003.txt').write_text(line + '\n')
        changes[name] = {'path': str(folder / name)}
    for name, change in changes.items():
        content = {key: value for key, value in {**good, **change}.items() if value is not None}
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(content))
    texts = {'not_yaml.yaml': 'train: [\n', 'list.yaml': '- 1\n', 'hyp.yaml': 'mosaic: 1.0\n'}
    for name, text in {**texts, 'text.pt': 'none', 'broken.onnx': 'no graph', 'model.engine': 'no engine'}.items():
        (folder / name).write_text(text)
    whole = (job / 'single.pt').read_bytes()
    (folder / 'cut.pt').write_bytes(whole[: len(whole) // 2])
    torch.save({'a': 1}, folder / 'dict.pt')
    # what the pickle of the other tool's checkpoint refers to
    pickled('foreign', b'cpytorch_quantization.nn.modules.quant_conv\nQuantConv2d\n.', folder)
    export_end2end(job / BEST_ONNX, folder / 'plugin.onnx', Nms('plugin'))
    return folder


def pickled(name, content, folder):
    """Write NAME.pt, an archive as torch.save writes it, with this pickle; return its path."""
    with zipfile.ZipFile(folder / f'{name}.pt', 'w') as archive:
        archive.writestr(f'{name}/data.pkl', content)
    return folder / f'{name}.pt'


LOADED = f'--data {{job}}/data/data.yaml --imgsz {SIZE} --workers 0'
QUANTIZE = f'qat quantize --weights {{job}}/single.pt --hyp {{repo}}/demo/hyp.yaml {LOADED}'
EVAL = f'qat eval --weights {{job}}/{BEST} {LOADED}'
VAL = f'val_trt --weights {{job}}/{BEST_ONNX} --device cpu {LOADED}'
EXPORT = f'export_qat --weights {{job}}/{BEST} --imgsz {SIZE}'
REPARAMETERIZE = 'reparameterization --weights {job}/dual.pt --save {job}/other.pt'

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
    (
        QUANTIZE,
        '--hyp {wrong}/none.yaml --data {wrong}/list.yaml',
        ['--hyp', 'no such file'],
    ),  # before the content of any
    (QUANTIZE, '--hyp {wrong}/none.yaml', ['--hyp', 'no such file']),
    (QUANTIZE, '--hyp {wrong}/hyp.yaml', ['--hyp', 'hsv_h', 'missing']),
    (QUANTIZE, '--iters 0', ['--iters 0', '1 or more', '--epochs 0']),
    (QUANTIZE, '--iters -3 --batch-size 0', ['--iters -3', '--batch-size 0']),
    (QUANTIZE, '--iters many', ['--iters', "'many'"]),
    (QUANTIZE, '--calib-method best', ['--calib-method', 'mse', 'percentile']),
    (QUANTIZE, '--val-split 1', ['--val-split 1.0', '[0, 1)']),
    (QUANTIZE, '--val-split 0.01', ['--val-split 0.01', '16 images, of which 0']),
    (QUANTIZE, '--val-split 0.1 --epochs 0', ['--val-split 0.1', '--epochs 0']),
    ('qat quantize', '', ['required: --weights']),
    ('qat quantize', '--resume {job}/runs/exp', ['--resume', 'is finished']),
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
    (EXPORT, '--nms plugin --topk-all 10', ['--topk-all, --nms: only with --include onnx_end2end']),
    (EXPORT, '--nms fast --include onnx_end2end', ['--nms fast', 'plugin, standard']),
    (
        EXPORT,
        '--include onnx_end2end --conf-thres -0.1 --iou-thres 1.1',
        ['--conf-thres -0.1', '--iou-thres 1.1', '[0, 1]'],
    ),
    (EXPORT, '--include onnx_end2end --conf-thres nan', ['--conf-thres nan', '[0, 1]']),
    (
        EXPORT,
        '--include onnx_end2end --nms plugin --iou-thres 0',
        ['--iou-thres 0', 'EfficientNMS_TRT', '--nms standard'],
    ),
    (EXPORT, '--include onnx_end2end --nms plugin --topk-all 4097', ['--topk-all 4097', '1 to 4096', '--nms plugin']),
    (EXPORT, '--include onnx_end2end --topk-all 3841', ['--topk-all 3841', '1 to 3840', '--nms standard']),
    (EXPORT, '--include onnx_end2end --topk-all 0', ['--topk-all 0']),
    (
        EXPORT,
        '--include onnx_end2end --topk-all 500 --class-agnostic',
        ['--topk-all 500', 'only 336 candidates'],
    ),
    (
        EXPORT,
        '--include onnx_end2end --nms plugin --verify {job}/data/data.yaml',
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


def unchanged(folder):
    """Each file of a folder and when it was written; but for caches, which are ours."""
    files = [p for p in folder.rglob('*') if p.is_file() and p.suffix != '.cache' and p.name != '.lock']
    return {p: p.stat().st_mtime_ns for p in files}


@pytest.mark.parametrize('base, more, says', BAD, ids=[f'{base.split()[0]} {more}' for base, more, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(job, wrong, tmp_path, capsys, monkeypatch, base, more, says):
    monkeypatch.chdir(TREE)
    file, *words = [word.format(job=job, wrong=wrong, repo=REPO) for word in f'{base} {more}'.split()]
    if base in (QUANTIZE, EVAL, VAL) and '--project' not in more:
        words += ['--project', str(tmp_path / 'runs')]
    before = unchanged(job)
    assert run_command(program(f'{file}.py').main, words) == 2
    said = capsys.readouterr().err
    line = said.strip().splitlines()[-1]
    assert ': error: ' in line and all(text in line for text in says) and 'Traceback' not in said, said
    assert unchanged(job) == before
    assert not (tmp_path / 'runs').exists(), 'nothing is written before the input has been checked'


@pytest.mark.parametrize('batch_size, advice', [(10, '--batch-size 5'), (1, '--imgsz')])
def test_out_of_gpu_memory_says_what_to_try(batch_size, advice):
    with pytest.raises(QatError, match=advice), explain_out_of_memory(batch_size):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')


def test_a_wrong_checkpoint_is_judged_without_running_it(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / 'sprung'), 'w'))

    trap = pickled('trap', pickle.dumps({'model': Trap()}, protocol=2), tmp_path)
    assert CheckpointFile(trap).kind == 'other' and not (tmp_path / 'sprung').exists()
