"""The whole job of each task, as a user types it: quantize, export, score, compare. One table of tasks × laws: its files, and equal figures."""

import filecmp
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.fresh import fresh
from helpers.labelled import coco_labels
from helpers.zoo import (
    assert_same_ap,
    assert_verdicts,
    assert_within_interval,
    command,
    holds,
    interrupt,
    load_any,
    load_float,
    load_quantized,
    program,
    rows_of,
    same,
    settings,
)
from utils.general import coco80_to_coco91_class

from models.quantize.calibration.divergence import ClassScores
from models.quantize.calibration.ptq import CANDIDATES, CORRECTED
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.classes import distance
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import open_file

CPU = torch.device('cpu')
ON_CPU = ('--workers', 0, '--device', 'cpu')
FIGURES = 'precision', 'recall', 'ap50', 'ap'
OF_DETECTORS = re.compile(
    r'.*\b(?:detections?|m?AP|AP50|box(?:es)?|masks?|letterbox(?:ed)?|rectangles?|squares?|NMS)\b.*', re.I
)


@dataclass
class Job:
    """A folder with single.pt, data, and runs/exp, a finished run of quantize whose best file was exported and verified."""

    task: str
    folder: Path
    data: Path
    size: int
    command: str  # that quantizes
    quick: str  # its options
    figure: str  # that chooses models
    images: dict  # how many, of each set
    pictures: tuple

    @property
    def single(self):
        return self.folder / 'single.pt'

    @property
    def run(self):
        return self.folder / 'runs/exp'

    @property
    def best(self):
        return self.run / 'weights/qat_best_single.pt'

    def words(self, verb, *more, weights=None):
        of = '--weights', *(weights or [self.single]), '--data', self.data, *ON_CPU, '--project', self.folder / 'runs'
        size = ('--imgsz', self.size) if verb in ('quantize', 'sensitive') else ()
        return verb, *of, *size, *(self.quick.split() if verb == 'quantize' else ()), *more

    def report(self, name='exp'):
        report = read(self.folder / 'runs' / name / 'report.json')
        report.pop('times')
        return report

    def eval(self, name, *files, by=('qat.py', 'eval'), more=()):
        """Score files; returns what was said, and metrics.json."""
        _, *words = self.words('eval', '--name', name, *more, weights=files)
        said = command(*by, *words)
        return said, read(self.folder / 'runs' / name / 'metrics.json')

    def score(self, predict, square=False, data=None, **options):
        """Metrics of a model on the validation images, in the batches of the commands: other shapes may take other kernels."""
        data = data or (
            predict.task.load_data(self.data, predict)
            if self.task == 'classify'
            else load_data(self.data, masks=self.task == 'segment')
        )
        loader = Loaders(data, settings(imgsz=self.size, batch_size=8, **options), 32).scored(square=square)
        return evaluate(predict, loader, predict.names, CPU, resample=True)


def read(file):
    return json.loads(file.read_text())


def same_files(*files):
    return filecmp.cmp(*files, shallow=False)


def detect(folder):
    with quiet_upstream():
        program('demo/weights.py').build(REPO / 'demo/demo-weights.pt', folder / 'dual.pt')
    command('reparameterization.py', '--weights', folder / 'dual.pt', '--save', folder / 'single.pt')
    program('demo/make_data.py').make_data(folder / 'data', train=16, val=8)
    quick = f'--batch-size 4 --iters 2 --epochs 2 --hyp {REPO}/demo/hyp.yaml'
    return folder / 'data/data.yaml', 128, 'qat.py', quick, 'ap', {'val': 8, 'train': 16}, ('ap.png', 'classes.png')


def segment(folder):
    with quiet_upstream():
        program('demo/weights.py').build(REPO / 'demo/demo-seg-weights.pt', folder / 'single.pt')
    program('demo/make_data.py').make_data(folder / 'data', train=12, val=12, task='segment')
    quick = '--batch-size 6 --epochs 1 --iters 2 --calib-images 6 --task-loss 0.1 --val-split 0.2'
    images, pictures = {'val': 12, 'held out': 2, 'train': 10}, ('ap.png', 'classes.png')
    return folder / 'data/data.yaml', 160, 'segment/qat_seg.py', quick, 'ap', images, pictures


def classify(folder):
    data = classifiers.write_images(folder / 'data', train=8, val=5)
    classifiers.save(classifiers.learnt(classifiers.build('resnet18'), data), folder / 'single.pt')
    quick = '--epochs 2 --iters 2 --batch-size 8 --task-loss 0.1 --calib-images 24 --calib-method mse'
    images, pictures = {'val': 35, 'train': 56}, ('top1.png', 'classes.png')
    return data, classifiers.SIZE, 'classify/qat_cls.py', quick, 'top1', images, pictures


TASKS = detect, segment, classify


@pytest.fixture(scope='module')
def jobs(tmp_path_factory):
    """Function: a task → its Job, done once."""
    done = {}

    def job(make):
        if make not in done:
            folder = tmp_path_factory.mktemp(make.__name__)
            job = done[make] = Job(make.__name__, folder, *make(folder))
            fresh(job.command, *job.words('quantize'))
            kinds = ['onnx', 'onnx_end2end'] if make is classify else ['onnx']
            open_batch = (
                ['--dynamic', '--simplify'] if make is segment else ['--batch-size', 3] if make is detect else []
            )
            words = '--imgsz', job.size, *open_batch, '--include', *kinds, '--verify', job.data
            said = command('export_qat.py', '--weights', job.best, *words, code=(0, 1))
            (folder / 'export.txt').write_text(said)
        return done[make]

    return job


@pytest.fixture(params=TASKS, ids=lambda f: f.__name__)
def job(jobs, request):
    return jobs(request.param)


of_detect, of_segment, of_classify = (
    pytest.mark.parametrize('job', [make], indirect=True, ids=[make.__name__]) for make in TASKS
)


# ---- what a run leaves --------------------------------------------------------------------------------------------------


def test_files_of_a_run(job):
    report, text = job.report(), (job.run / 'report.md').read_text()
    figure = job.figure
    epochs = [f'qat_ep_{e["epoch"]}_{figure}_{e[figure]:.4f}_single.pt' for e in report['epochs']]
    assert len(epochs) == report['settings']['epochs']
    models = 'best.pt', f'ptq_{figure}_{report["ptq"][figure]:.4f}_single.pt', *epochs, 'qat_best_single.pt'
    exports = {file.name for file in (job.run / 'weights').glob('*best_single*') if file.suffix != '.pt'}
    assert {file.name for file in (job.run / 'weights').iterdir()} == {*models, *exports}
    assert same_files(job.run / 'weights/best.pt', job.best)
    assert (job.run / 'weights/best.pt').stat().st_ino == job.best.stat().st_ino, 'stored once'
    files = {'.lock', *job.pictures, 'log.txt', 'report.json', 'report.md', 'weights'}
    assert {file.name for file in job.run.iterdir()} == files and (job.run / job.pictures[0]).stat().st_size > 5000
    assert report['images'] == job.images and report['settings']['seed'] == 57
    assert torch.__version__.startswith(report['versions']['torch']) and report['origin'][figure] > 0.2
    log = (job.run / 'log.txt').read_text()
    assert 'QAT epoch 1' in text and 'PTQ' in log
    assert (
        log.index(f'--epochs {len(epochs)} will take about') < log.index('calibration took') and '--epochs 0, ' in log
    )
    if job.task != 'segment':  # which chooses by boxes and masks, on images held out
        assert report['chosen_on'] == 'val' and report['val'] is None
        assert report['best'][figure] == max(e[figure] for e in (report['ptq'], *report['epochs']))


@of_detect
def test_the_table_of_a_run_is_of_its_figures(job):
    rows = {name: cells[1:] for name, cells in rows_of((job.run / 'report.md').read_text(), 'model').items()}
    best = next(name for name in rows if name.startswith('best ('))  # the cells are those without loss
    assert holds(rows['float'], rows['PTQ'], rows['PTQ - float, points'])
    assert holds(rows['float'], rows[best], rows['best - float, points'])


@of_segment
def test_masks_are_reported_at_every_stage(job):
    report, text = job.report(), (job.run / 'report.md').read_text()
    stages = [report['origin'], report['ptq'], *report['epochs'], report['best'], *report['val'].values()]
    assert all(set(FIGURES) <= stage['mask'].keys() for stage in stages)
    sqnr = report['ptq']['sqnr']
    assert sqnr.keys() == {'boxes', 'classes', 'coefficients', 'prototypes'} and min(sqnr.values()) > 5
    assert 'mask AP' in text and 'prototypes dB' in text and report['calibration']['method'] in CANDIDATES
    assert {*report['calibration']['divergence']} == {*CANDIDATES, *(name + CORRECTED for name in CANDIDATES)}


@of_classify
def test_a_run_of_a_classifier_reports_the_figures_of_its_files(job):
    report = job.report()
    models = TorchModel(*load_quantized(job.run / report['ptq']['file'])), TorchModel(load_float(job.single))
    found, floating = (job.score(model) for model in models)
    assert found.to_json() == {k: v for k, v in report['ptq'].items() if k in found.to_json()}
    apart = distance(found.scores, floating.scores)
    assert {key: report['ptq'][key] for key in apart} == pytest.approx(apart)
    assert found.top1 > 0.5, 'by chance half of 35 images are right once in ten million'
    assert found.mean_class == pytest.approx(np.mean([row['top1'] for row in found.per_class]))


def test_same_seed_same_run_interrupted_or_not(job):
    """All but times and names, and the models bit for bit."""
    epochs = job.report()['settings']['epochs']
    interrupt(f'epoch {epochs}/{epochs}', 0, 'qat.py', *job.words('quantize', '--name', 'again'))
    command('qat.py', 'quantize', '--resume', job.folder / 'runs/again')
    first, second = job.report(), job.report('again')
    assert [report['settings'].pop('name') for report in (first, second)] == ['exp', 'again']
    for report in (first, second):
        report['settings'].pop('only_task')  # of the command that was typed
    assert first == second
    assert same(*(load_any(job.folder / 'runs' / n / first['best']['file'])[0].state_dict() for n in ('exp', 'again')))


@of_detect
def test_fine_tuning_that_harms_is_not_what_is_delivered(job):
    harmful = '--epochs', 1, '--lr', 0.01, '--calib-method', 'mse', '--name', 'harmed'
    said = command('qat.py', *job.words('quantize', *harmful))
    folder, report = job.folder / 'runs/harmed', job.report('harmed')
    assert report['epochs'][0]['ap'] < report['ptq']['ap'] - 0.01, 'the rate is meant to harm'
    assert report['best'] == {**report['ptq'], 'epoch': 0, 'file': 'weights/qat_best_single.pt'}
    for file in (report['best']['file'], 'weights/best.pt'):
        assert same_files(folder / report['ptq']['file'], folder / file)
    assert 'best (PTQ)' in said and 'Fine-tuning did not help: no epoch' in said


@of_detect
def test_calibration_only(job):
    only = '--epochs', 0, '--no-eval-origin', '--name', 'ptq', '--calib-method', 'percentile'
    command('qat.py', *job.words('quantize', *only))
    report = job.report('ptq')
    assert report['origin'] is None and report['epochs'] == [] and report['best'] is None and report['ptq']['ap'] > 0.2
    weights = job.folder / 'runs/ptq/weights'
    assert {f.name for f in weights.iterdir()} == {'best.pt', f'ptq_ap_{report["ptq"]["ap"]:.4f}_single.pt'}
    assert same_files(*weights.iterdir())


@of_detect
def test_the_best_model_is_never_written_over_the_float_one(job):
    weights = job.folder / 'runs/taken/weights'
    weights.mkdir(parents=True)
    (weights.parent / '.lock').touch()
    (weights / 'best.pt').write_bytes(job.single.read_bytes())
    taken = job.words('quantize', '--name', 'taken', '--exist-ok', weights=[weights / 'best.pt'])
    assert 'choose another --name' in command('qat.py', *taken, code=2)
    assert same_files(job.single, weights / 'best.pt')


# ---- the figures of files -----------------------------------------------------------------------------------------------

UPSTREAM = {  # prints the figures of upstream's own val.py
    'segment': """
import json, sys; sys.path.insert(0, 'segment'); import val
(*found, _, _, _, _), _, _ = val.run(sys.argv[1], sys.argv[2], batch_size=8, imgsz=160, device='cpu', workers=0, half=False, plots=False,
                                     iou_thres=0.7, project=sys.argv[3], name='val', **json.loads(sys.argv[4]))
print('FOUND', *map(float, found))
""",
    'classify': """
import sys, utils.qat; sys.path.insert(0, 'classify'); import val
found = val.run(sys.argv[1], sys.argv[2], batch_size=8, imgsz=64, device='cpu', workers=0, verbose=False, project=sys.argv[3], name='val')
print('FOUND', *map(float, found[:2]))
""",
}


AS_TRAINED = {'overlap': True, 'mask_ratio': 4}  # as segment/train.py scores


@pytest.mark.full_tree
@pytest.mark.parametrize(
    'job, options',
    [(segment, {}), (classify, {}), pytest.param(segment, AS_TRAINED, marks=pytest.mark.faults)],
    indirect=['job'],
    ids=['segment', 'classify', 'segment, as trained'],
)
def test_figures_of_float_models_are_those_of_upstream(job, options):
    theirs = {'overlap': options.get('overlap', False), 'mask_downsample_ratio': options.get('mask_ratio', 1)}
    said = fresh('-c', UPSTREAM[job.task], job.data, job.single, job.folder / 'val', json.dumps(theirs))
    theirs = [float(word) for word in re.search('FOUND (.*)', said)[1].split()]
    found = job.score(TorchModel(load_float(job.single)), **options)
    if job.task == 'classify':
        assert (found.top1, found.top5) == pytest.approx(theirs, abs=1e-3) and 0.5 < found.top1 < found.top5
        return
    ours = [*(getattr(found, name) for name in FIGURES), *(found.mask[name] for name in FIGURES)]
    assert ours == pytest.approx(theirs[:8], abs=1e-3) and found.ap > 0.8 and found.mask['ap'] > 0.7
    for name in FIGURES:  # over all classes
        of_classes = [row['mask'][name] for row in found.per_class]
        assert np.mean(of_classes) == pytest.approx(found.mask[name], abs=1e-9)


class AsUpstream(TorchModel):
    """Takes images as they lie in val.py. Channels last, the sums have another order, and a value between two steps of INT8 is rounded otherwise."""

    def outputs(self, images):
        return self.model(images.contiguous())


@of_detect
def test_upstream_val_and_detect_run_the_quantized_checkpoint(job):
    given = '--weights', job.best, '--img', job.size, '--device', 'cpu'
    said = fresh('val.py', *given, '--data', job.data, '--batch', 8, '--workers', 0, '--project', job.folder / 'val')
    theirs = list(map(float, re.search(r'all +\d+ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)', said).groups()))
    ours, of_run = (job.score(kind(*load_quantized(job.best))) for kind in (AsUpstream, TorchModel))
    assert theirs == pytest.approx([ours.precision, ours.recall, ours.ap50, ours.ap], abs=1e-3)
    assert_same_ap(of_run, ours)
    fresh('detect.py', *given, '--source', job.data.parent / 'images/val', '--project', job.folder / 'detect')
    assert len(list((job.folder / 'detect/exp').glob('*.jpg'))) == 8


def test_each_way_of_scoring_finds_the_same(job):
    """eval repeats the report's figures; a file scores as its checkpoint within the confidence interval, and in val_trt.py as in eval, detection for detection."""
    report, onnx_file = job.report(), job.best.with_suffix('.onnx')
    wanted = report['best'] if report['val'] is None else report['val']['best']
    said, of_checkpoint = job.eval('pt', job.best, more=['--batch-size', job.report()['settings']['batch_size']])
    for name in (job.figure, *(('ap50', 'precision', 'recall') if job.figure == 'ap' else ('top5',))):
        assert of_checkpoint[name] == wanted[name]
    assert f'{wanted[job.figure]:.4f}' in said
    _, against = job.eval('against', onnx_file, more=['--baseline', job.best])
    assert_within_interval(against['against_baseline'])
    _, by_eval = job.eval('onnx', onnx_file)
    assert against[job.figure] == by_eval[job.figure] > 0.1
    said, by_val = job.eval('trt', onnx_file, by=['val_trt.py'], more=['--save-json'] * (job.task != 'classify'))
    ours, theirs = ({k: v for k, v in m.items() if k not in ('settings', 'times')} for m in (by_val, by_eval))
    assert ours == theirs
    assert f'{by_val[job.figure]:.4f}' in said and 'inference' in by_val['times']['ms_per_image']
    if job.task != 'classify':
        found = [(job.folder / 'runs' / name / 'predictions.json').read_text() for name in ('trt', 'onnx')]
        assert found[0] == found[1] and {'image_id', 'category_id', 'bbox', 'score'} <= {*json.loads(found[0])[0]}
        assert job.task == 'detect' or json.loads(found[0])[0]['segmentation']['size']


def test_verify_writes_the_comparison_beside_the_file(job):
    said = (job.folder / 'export.txt').read_text()
    results = [read(file) for file in sorted(job.best.parent.glob('*.verify.json'), key=lambda file: len(file.name))]
    assert len(results) == (2 if job.task == 'classify' else 1)
    assert_verdicts(said, *results)
    result = results[0]
    assert_within_interval(result['against_reference'])
    assert result['images'] == job.images['val'] and 'limits: ' in said
    assert result['onnx']['sha256'] == hashlib.sha256(job.best.with_suffix('.onnx').read_bytes()).hexdigest()
    assert f'{result["reference"][job.figure]:.4f}' in said
    if job.task == 'classify':
        assert said.count('the best class the same in at least 95%') == 2, 'with its ends inside too'
    else:
        assert f'{result["matched"]:.2%}' in said
    if job.task == 'segment':
        assert all(result[key] is not None for key in ('matched_mask', 'coefficients', 'prototypes'))


def test_several_files_are_scored_side_by_side(job, small):
    others = [small.quantized] if job.task == 'segment' else []  # a detector has no masks
    files = job.single, job.best, *(others or [job.best.with_suffix('.onnx')])
    said, together = job.eval('several', *files)
    first, *models = together['models']
    table = (job.folder / 'runs/several/report.md').read_text()
    rows = re.findall(r'(?m)^\| .* - .*, points +\|.*$', said)
    assert len(rows) == len(models) == 2 and all(row in table and '±' in row for row in rows)
    for model, row in zip(models, rows):
        found = model['against_first']
        assert found['difference'] == pytest.approx(model[job.figure] - first[job.figure])
        assert f' ± {100 * found["chance"]:.2f} ' in row
    if job.task == 'segment':
        assert [len(re.findall(r' - (?=\|)', row)) for row in rows] == [0, 4] and 'mask AP50' in table
        masks = [model['against_first'].get('mask') for model in models]
        assert masks[0]['difference'] == pytest.approx(models[0]['mask']['ap'] - first['mask']['ap'])
        assert masks[1] is None


def test_outputs_are_compared(job):
    onnx_file, words = job.best.with_suffix('.onnx'), ('--data', job.data, *ON_CPU, '--project', job.folder / 'runs')
    size = () if job.task == 'classify' else ('--imgsz', job.size)
    said = command('compare_outputs.py', job.single, job.best, onnx_file, *words, *size, '--name', 'compared')
    found = read(job.folder / 'runs/compared/compare.json')['comparisons'][0]
    assert found['reference'][job.figure] > 0.2
    if job.task == 'segment':
        assert 0.5 < found['matched_mask'] < 1 and found['prototypes']['mean'] > 0
    if job.task == 'classify':
        assert 'the best class is the same in' in said and 'top-1' in said


@pytest.mark.parametrize('job', [segment, classify], indirect=True, ids=['segment', 'classify'])
def test_sensitive_and_what_quantize_chooses_by_it(job):
    few = *'--batch-size 6 --calib-images 6 --calib-method mse --num-image 6 --name s'.split(), '--granularity'
    command('qat.py', *job.words('sensitive', *few, 'layer' if job.task == 'segment' else 'block'))
    file = job.folder / 'runs/s/summary-sensitive-analysis.json'
    summary = read(file)
    twins = {unit['unit']: unit['twins'] for unit in summary['units']}
    measured = [unit['measured'] for unit in summary['units'] if unit['measured']]
    assert summary['float'][job.figure] > summary['int8'][job.figure] * 0.9 > 0 < summary['int8']['divergence']
    if job.task == 'segment':
        head = twins[f'model.{len(load_float(job.single).model) - 1}']
        assert any('proto' in twin for twin in head) and any('.cv4.' in twin for twin in head)
        assert len(measured) == 10 and all('mask' in figures['without'] for figures in measured)
    else:
        assert {'conv1', 'layer1.0', 'avgpool', 'fc'} <= twins.keys()
    chosen = '--sensitive', file, '--max-drop', 50, '--epochs', 0, '--val-split', 0, '--name', 'kept'
    assert 'points may be lost' in command('qat.py', *job.words('quantize', *chosen))
    assert job.report('kept')['kept_float'] == []


@of_classify
def test_no_word_of_detectors_in_what_is_said_of_classifiers(job):
    """In reports and logs; eval tells the agreement with the float model."""
    said, metrics = job.eval('words', job.best.with_suffix('.onnx'), more=['--baseline', job.single])
    models = open_file(job.best.with_suffix('.onnx')), TorchModel(load_float(job.single))
    assert metrics['agreement'] == distance(*(job.score(model).scores for model in models))['agreement']
    assert '| agreement |' in said
    benchmark(job, 'benchmark', job.single, job.best, '--data', job.data)
    files = [f for pattern in ('*.md', 'log.txt') for f in (job.folder / 'runs').rglob(pattern)]
    texts = [said, (job.folder / 'export.txt').read_text().replace('NMS', ''), *(file.read_text() for file in files)]
    assert len(files) > 6 and not [line for t in texts for line in OF_DETECTORS.findall(t.replace('--square', ''))]


def benchmark(job, name, *words):
    short = '--batch', 1, '--duration', 0.05, '--warmup', 0, *ON_CPU, '--project', job.folder / 'runs'
    command('benchmark_trt.py', *words, *short, '--name', name)
    return read(job.folder / 'runs' / name / 'benchmark.json')['results']


@of_classify
def test_the_benchmark_shows_images_of_the_classifiers_size(job):
    """A quantized checkpoint has its size, a float one takes that of the other files; alone it has 224 pixels."""
    report, side = job.report(), [job.size, job.size]
    results = benchmark(job, 'both', job.single, job.run / report['ptq']['file'], '--data', job.data)
    assert [r['imgsz'] for r in results] == [side] * 2
    assert [r['accuracy']['top1'] for r in results] == [report[key]['top1'] for key in ('origin', 'ptq')]
    assert benchmark(job, 'alone', job.single)[0]['imgsz'] == [224, 224]
    results = benchmark(job, 'kinds', job.single, job.best.with_suffix('.onnx'), '--backend', 'pytorch,onnxruntime')
    assert {r['backend'] for r in results} == {'PyTorch', 'ONNX Runtime'} and results[0]['imgsz'] == side


# ---- more of one task ----------------------------------------------------------------------------------------------------


@of_detect
def test_coco_data_gets_pycocotools_figures(job):
    """val2017.txt marks the data as COCO. With the boxes as COCO annotations, AP is about the same."""
    data = job.data.parent
    right = coco_labels(sorted(data.glob('images/val/*.jpg')), coco80_to_coco91_class()[:10])
    annotations = data / 'annotations/instances_val2017.json'
    annotations.parent.mkdir()
    annotations.write_text(json.dumps(right))
    (data / 'val2017.txt').write_text(''.join(f'./images/val/{i["file_name"]}\n' for i in right['images']))
    (data / 'coco.yaml').write_text(job.data.read_text().replace('val: images/val', 'val: val2017.txt'))
    coco = replace(job, data=data / 'coco.yaml')
    said, metrics = coco.eval('coco', job.best)
    assert metrics['coco']['ap'] == pytest.approx(metrics['ap'], abs=0.03), 'they interpolate precision differently'
    assert 'pycocotools' in said
    for wrong, says in (
        ({'annotations': [{**right['annotations'][0], 'iscrowd': None}]}, 'annotations[0].iscrowd is missing'),
        ({'annotations': [], 'images': right['images'][1:]}, 'does not have 1 of the 8 images'),
        ({'annotations': [], 'categories': right['categories'][:3]}, "does not have COCO's categories"),
    ):
        annotations.write_text(json.dumps({**right, **wrong}))
        said = command('qat.py', *coco.words('eval', '--name', 'spoilt', weights=[job.best]), code=2)
        assert says in said and 'evaluating' not in said


@of_detect
def test_end2end_files(job):
    """One file is verified and evaluated; one is for TensorRT only, with a warning. No plain file stays."""
    folder = job.folder
    (folder / 'inside.pt').write_bytes(job.best.read_bytes())
    exported = 'export_qat.py', '--weights', folder / 'inside.pt', '--imgsz', job.size, '--include', 'onnx_end2end'
    as_eval = '--conf-thres 0.001 --iou-thres 0.7 --topk-all 300 --batch-size 3'.split()  # of the plain file
    said = command(*exported, *as_eval, '--verify', job.data, code=(0, 1))
    assert 'inside-end2end.onnx' in said and 'in ONNX Runtime as by torchvision' in said
    made = {f'inside-end2end.{suffix}' for suffix in ('onnx', 'verify.json', 'pbtxt')}
    assert {p.name for p in folder.glob('inside*')} == {'inside.pt', *made}
    served = (folder / 'inside-end2end.pbtxt').read_text()
    for name in ('inside-end2end', 'num_dets', 'det_boxes', 'det_scores', 'det_classes'):
        assert f'name: "{name}"' in served
    result = read(folder / 'inside-end2end.verify.json')
    assert_verdicts(said, result)
    assert_within_interval(result['against_reference'])
    assert result['boxes'] is None and result['settings']['topk_all'] == 300
    _, inside = job.eval('inside', folder / 'inside-end2end.onnx', by=['val_trt.py'])
    _, plain = job.eval('outside', job.best.with_suffix('.onnx'), by=['val_trt.py'])
    assert abs(inside['ap'] - plain['ap']) < 1e-3 and inside['ap'] == result['other']['ap']
    assert not (folder / 'runs/inside/predictions.json').exists(), 'val_trt.py writes them with --save-json only'

    said = command(*exported, 'onnx', '--nms', 'plugin', '--trt', 11)
    assert 'warning: EfficientNMS_TRT is deprecated since TensorRT 10.12' in said and '--nms standard' in said
    assert (folder / 'inside.onnx').exists() and f'eval --weights {folder / "inside.onnx"}' in said
    assert said.count('next:') == 1


@of_detect
def test_verify_above_a_limit_is_exit_code_1_and_the_file_stays(job):
    """The model detects nothing, so there is nothing to verify."""
    checkpoint = torch.load(job.single, weights_only=False)
    for branch in checkpoint['model'].model[-1].cv3:
        branch[-1].bias.data.fill_(-30)
    torch.save(checkpoint, job.folder / 'blind.pt')
    verify = '--verify', job.data, '--verify-images', 2
    said = command('export_qat.py', '--weights', job.folder / 'blind.pt', '--imgsz', job.size, *verify, code=1)
    assert 'neither model detects anything' in said and 'The file stays' in said and 'Traceback' not in said
    result = read(job.folder / 'blind.verify.json')
    assert (job.folder / 'blind.onnx').exists()
    assert result['images'] == 2 and result['above_limits'] and result['matched'] is None


@of_detect
def test_dry_run_tells_the_plan_and_writes_nothing(job, tmp_path):
    dry = 'qat.py', 'quantize', '--dry-run', '--weights', job.single
    said = command(*dry, '--verbose', '--data', 'none.yaml', '--project', tmp_path / 'runs')
    stored = load_quantized(job.best)[1]
    shared = [line.split(': ', 1)[1].split() for line in said.splitlines() if line.startswith('  scale ')]
    assert shared == [group for group in stored['scale_groups'] if len(group) > 1] and len(shared) > 20
    assert stored['recipe']['scale_policy'] == 'tied'
    assert re.search(r'(?m)^\| model\.\d+\.dfl\.conv +\| +integral over the box distribution \|$', said)
    assert 'nothing was written' in said and not list(tmp_path.iterdir())
    assert f'share {len(shared)} scales' in said
    assert 'warning: --data none.yaml: no such file' in said and '--data DATA.yaml' in said
    free, tied = command(*dry, '--scale-policy', 'free'), command(*dry)
    assert '0 quantizers share 0 scales' in free and f'share {len(shared)} scales' in tied
    assert '  scale ' not in free + tied, 'only --verbose lists them'


@of_classify
def test_what_openvino_loses_is_said_of_a_classifier(job):
    pytest.importorskip('openvino')
    said = command('export_qat.py', '--weights', job.best, '--include', 'openvino', '--imgsz', job.size)
    assert 'INT8: 20 of 20 convolutions' in said, 'the outputs too'
    [loses] = re.findall(r'(?m)^quantized for TensorRT: (.*) \(--target openvino\)$', said)
    assert 'ReLU' in loses and 'head' not in loses


def test_the_square_of_a_projection_is_twice_the_divergence():
    """The squared projection of a small change of class scores is, in the mean of many probes, twice its divergence, as for detectors."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    change = 0.02 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    moved, _ = ClassScores(logits + change).divergence_sums(ClassScores(logits))
    squares = []
    for _ in range(4000):
        _, [vector], weight = ClassScores(logits).probe(0, lambda x: torch.rand(x, generator=generator).double())
        squares.append((vector * change).sum(1).square() / 2)
    assert weight == 3
    torch.testing.assert_close(torch.stack(squares).mean(0), moved, rtol=0.1, atol=0)
