"""The commands as a user types them: the whole job, its files on disk, and the answers to bad input."""

import filecmp
import hashlib
import json
import re
import shutil

import pytest
import torch
from conftest import REPO
from fresh import fresh
from utils.general import coco80_to_coco91_class
from zoo import assert_by_chance, assert_same_ap, assert_verdicts, command, holds, program, rows_of

from labelled import boxes_of
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import explain_out_of_memory
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
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
        program('demo/weights.py').build(REPO / 'demo/demo-weights.pt', folder / 'dual.pt')
    command('reparameterization.py', '--weights', folder / 'dual.pt', '--save', folder / 'single.pt')
    fresh(*quantize(folder, '--epochs', 2))
    verify = '--batch-size', 3, '--verify', data, '--max-ap-diff', 0.03
    said = command('export_qat.py', '--weights', folder / BEST, '--imgsz', SIZE, *verify, code=(0, 1))
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
    best = [exp / 'weights' / name for name in ('best.pt', 'qat_best_single.pt')]
    assert len({file.stat().st_ino for file in best}) == 1 and best[0].stat().st_nlink == 3, 'stored once'
    assert names_in(exp / 'weights') == sorted([*models, 'qat_best_single.onnx', 'qat_best_single.verify.json'])
    assert names_in(exp) == ['.lock', 'ap.png', 'classes.png', 'log.txt', 'report.json', 'report.md', 'weights']
    assert report['origin']['ap'] > 0.2, 'the demo weights work even at this size'
    assert report['chosen_on'] == 'val' and report['val'] is None and report['images'] == {'val': 8, 'train': 16}
    assert report['best']['ap'] == max(e['ap'] for e in (report['ptq'], *report['epochs']))
    assert report['settings']['seed'] == 57 and torch.__version__.startswith(report['versions']['torch'])
    log = (exp / 'log.txt').read_text()
    assert 'QAT epoch 2' in text and 'PTQ' in log
    assert log.index('--epochs 2 will take about') < log.index('calibration took') and '--epochs 0, calibration' in log
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


def test_onnx_scores_like_pytorch(job):
    _, found = score(job, BEST_ONNX, 'against', '--baseline', job / BEST)
    assert_by_chance(found['against_baseline'])
    assert found['instances'] == found['baseline']['instances'] > 20 and found['ap'] > 0.2


def test_verify_writes_the_comparison_beside_the_file(job, scored):
    said, result = (job / 'export.txt').read_text(), json.loads((job / BEST).with_suffix('.verify.json').read_text())
    assert result['images'] == 8 and result['limits']['ap'] == 0.03
    assert_verdicts(said, result)
    assert_by_chance(result['against_reference'])
    assert result['onnx']['sha256'] == hashlib.sha256((job / BEST_ONNX).read_bytes()).hexdigest()
    for text in (f'{result["reference"]["ap"]:.4f}', f'{result["matched"]:.2%}', 'limits: '):
        assert text in said
    alone, compared = scored['onnx'][1], result['other']
    for found in compared['per_class']:
        assert 0 <= found.pop('chance') <= 1, 'a comparison resamples the images'
    assert {k: alone[k] for k in compared} == compared, 'the figures of the file, as eval finds them'


def coco_annotations(data):
    """The boxes of the validation images as COCO annotations."""
    categories, images, boxes = coco80_to_coco91_class(), [], []
    for file in sorted((data / 'images/val').glob('*.jpg')):
        (height, width), found = boxes_of(file)
        images.append({'id': int(file.stem), 'width': width, 'height': height})
        for c, *box in found:
            of_image = {'image_id': int(file.stem), 'category_id': categories[c], 'iscrowd': 0}
            boxes.append({'id': len(boxes) + 1, **of_image, 'bbox': box, 'area': box[2] * box[3]})
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
    as_eval = (
        '--conf-thres 0.001 --iou-thres 0.7 --topk-all 300 --batch-size 3'.split()
    )  # the batches of the plain file
    said = command(*exported, *as_eval, '--verify', job / 'data/data.yaml', code=(0, 1))
    assert 'inside-end2end.onnx' in said and 'in ONNX Runtime as by torchvision' in said
    made = {f'inside-end2end.{suffix}' for suffix in ('onnx', 'verify.json', 'pbtxt')}
    assert {p.name for p in job.glob('inside*')} == {'inside.pt', *made}
    served = (job / 'inside-end2end.pbtxt').read_text()
    for name in ('inside-end2end', 'num_dets', 'det_boxes', 'det_scores', 'det_classes'):
        assert f'name: "{name}"' in served
    result = json.loads((job / 'inside-end2end.verify.json').read_text())
    assert_verdicts(said, result)
    assert_by_chance(result['against_reference'])
    assert result['boxes'] is None and result['settings']['topk_all'] == 300
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
    ours, of_run = (
        evaluate(
            kind(*CheckpointFile(weights).load_quantized()),
            Loaders(data, config, 32).scored(),
            data.names,
            torch.device('cpu'),
            resample=True,
        )
        for kind in (AsUpstream, TorchModel)
    )
    assert theirs == pytest.approx([ours.precision, ours.recall, ours.ap50, ours.ap], abs=1e-3)
    assert of_run.ap == report_of(job / 'runs/exp')['best']['ap']
    assert_same_ap(of_run, ours)
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


# ---- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('batch_size, advice', [(10, '--batch-size 5'), (1, '--imgsz')])
def test_out_of_gpu_memory_says_what_to_try(batch_size, advice):
    with pytest.raises(QatError, match=advice), explain_out_of_memory(batch_size):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')
