"""Segmentation end to end on the trained demo: each command, its files, and equal figures from all."""

import json
import re
from dataclasses import replace

import onnx
import pytest
import torch
from helpers.faults import sampled
from helpers.fresh import fresh
from helpers.zoo import assert_by_chance, assert_same_ap, assert_verdicts, command

from models.deploy.formats.onnx import export_onnx
from models.quantize.calibration.ptq import CANDIDATES, CORRECTED
from models.quantize.quantizers import named_quantizers
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.graph.onnx_graph import constants
from utils.qat.vendors.load import open_file

CPU = torch.device('cpu')
SIZE, BATCH = 160, 4
QUICK = '--imgsz 160 --device cpu --workers 0'.split()  # of the commands
FIGURES = 'precision', 'recall', 'ap50', 'ap'


def loader_of(demo, square=False, data=None, **options):
    config = EvalConfig(demo.single, demo.data, batch_size=BATCH, imgsz=SIZE, workers=0, **options)
    return Loaders(data or load_data(demo.data, masks=True), config, 32).scored(square=square)


def metrics_of(demo, predict, loader=None, **options):
    return evaluate(predict, loader or loader_of(demo), load_data(demo.data).names, CPU, **options)


def read(file):
    return json.loads(file.read_text())


# ---- figures ------------------------------------------------------------------------------------------------------------

UPSTREAM = """
import json, sys
sys.path.insert(0, 'segment')
import val
from pathlib import Path
kwargs = json.loads(sys.argv[6])
(*figures, _, _, _, _), _, _ = val.run(sys.argv[1], sys.argv[2], batch_size=int(sys.argv[3]), imgsz=int(sys.argv[4]), device='cpu', workers=0,
                                       half=False, plots=False, iou_thres=0.7, project=sys.argv[5], name='val', **kwargs)
json.dump([float(f) for f in figures], open(Path(sys.argv[5]) / 'theirs.json', 'w'))
"""


@pytest.mark.full_tree
@pytest.mark.parametrize(
    'options', sampled([{}, {'overlap': True, 'mask_ratio': 4}], 2, 1), ids=['defaults', 'as segment/train.py']
)
def test_figures_are_those_of_upstreams_val(demo_seg, options, tmp_path):
    theirs = {'overlap': options.get('overlap', False), 'mask_downsample_ratio': options.get('mask_ratio', 1)}
    fresh('-c', UPSTREAM, demo_seg.data, demo_seg.single, BATCH, SIZE, tmp_path, json.dumps(theirs))
    ours = metrics_of(demo_seg, TorchModel(demo_seg.float_model()), loader_of(demo_seg, **options))
    found = [*(getattr(ours, name) for name in FIGURES), *(ours.mask[name] for name in FIGURES)]
    assert found == pytest.approx(read(tmp_path / 'theirs.json')[:8], abs=1e-3)
    assert ours.ap > 0.8 and ours.mask['ap'] > 0.7 and ours.images == 12
    for name in FIGURES:  # over all classes
        of_classes = [row['mask'][name] for row in ours.per_class]
        assert sum(of_classes) / len(of_classes) == pytest.approx(ours.mask[name], abs=1e-9)


# ---- laws of DESIGN.md --------------------------------------------------------------------------------------------------


def test_int8_in_onnx_runtime_is_int8_in_pytorch(demo_seg, tmp_path):
    """AP and scales. AP of 24 images alone would not tell INT8 from float; for outputs see tests/upstream/graph."""
    model, data = demo_seg.quantized_model(), load_data(demo_seg.data, masks=True)
    loader = loader_of(demo_seg, square=True, data=replace(data, val=[*data.val, *data.train]))
    file = tmp_path / 'model.onnx'
    export_onnx(model, file, (SIZE, SIZE), dynamic=True, simplify=True)
    predict = open_file(file)
    assert (predict.task.name, predict.nc, predict.names) == ('segment', 10, model.names)
    assert_same_ap(*(metrics_of(demo_seg, each, loader, resample=True) for each in (predict, TorchModel(model))))
    numbers = (v for v in constants(onnx.load(file)).values() if v.size == 1 and v.dtype.kind == 'f')
    scales = {q.scale.item() for _, q in named_quantizers(model) if q._axis is None}
    assert scales <= set(map(float, numbers)), 'bit for bit'


# ---- commands -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def run(demo_seg, tmp_path_factory):
    """Folder of a short `qat_seg.py quantize`."""
    project = tmp_path_factory.mktemp('runs')
    given = '--weights', demo_seg.single, '--data', demo_seg.data, '--project', project, '--name', 'q'
    short = '--batch-size 6 --epochs 1 --iters 2 --calib-images 6 --task-loss 0.1 --val-split 0.2'
    fresh('segment/qat_seg.py', 'quantize', *given, *QUICK, *short.split())
    return project / 'q'


def test_quantize_reports_masks_at_every_stage(run):
    report, text = read(run / 'report.json'), (run / 'report.md').read_text()
    stages = [report['origin'], report['ptq'], *report['epochs'], report['best'], *report['val'].values()]
    assert all(set(FIGURES) <= stage['mask'].keys() for stage in stages)
    sqnr = report['ptq']['sqnr']
    assert sqnr.keys() == {'boxes', 'classes', 'coefficients', 'prototypes'} and min(sqnr.values()) > 5
    assert 'mask AP' in text and 'prototypes dB' in text and (run / 'ap.png').stat().st_size > 5000
    assert len(report['epochs']) == 1 and report['calibration']['method'] in CANDIDATES
    assert {*report['calibration']['divergence']} == {*CANDIDATES, *(name + CORRECTED for name in CANDIDATES)}


def test_eval_of_checkpoint_and_file_and_val_trt(run, demo_seg, tmp_path):
    """After an export, qat.py eval, val_trt.py and the checkpoint give the same figures."""
    best = run / 'weights' / 'qat_best_single.pt'
    file = best.with_suffix('.onnx')
    exported = '--weights', best, '--imgsz', 160, '--dynamic', '--simplify', '--verify', demo_seg.data
    said = command('export_qat.py', *exported, code=(0, 1))
    verified = read(best.with_suffix('.verify.json'))
    assert_verdicts(said, verified)
    assert_by_chance(verified['against_reference'])
    assert all(verified[key] is not None for key in ('matched_mask', 'coefficients', 'prototypes'))

    def scored(name, *words):
        command(*words, '--data', demo_seg.data, *QUICK, '--project', tmp_path, '--name', name)
        return read(tmp_path / name / 'metrics.json')

    by_eval = scored('onnx', 'qat.py', 'eval', '--weights', file, '--baseline', best)
    by_val = scored('trt', 'val_trt.py', '--weights', file)
    for name in FIGURES:
        assert by_val[name] == by_eval[name] and by_val['mask'][name] == by_eval['mask'][name]
    assert_by_chance(by_eval['against_baseline'])
    assert by_eval['mask']['ap'] > 0.1
    assert read(tmp_path / 'onnx' / 'predictions.json')[0]['segmentation']['size']


def test_a_segmentation_model_beside_a_detector(demo_seg, small, tmp_path):
    files = demo_seg.single, demo_seg.quantized, small.quantized
    said = command('qat.py', 'eval', '--weights', *files, '--data', demo_seg.data, *QUICK, '--project', tmp_path)
    report, (first, *others) = (tmp_path / 'exp/report.md').read_text(), read(tmp_path / 'exp/metrics.json')['models']
    rows = re.findall(r'(?m)^\| .*\.pt - .*$', said)
    assert len(rows) == 2 and all(row in report for row in rows) and 'mask AP50' in report
    assert [len(re.findall(r' - (?=\|)', row)) for row in rows] == [0, 4], 'a detector has no mask AP'
    masks = [other['against_first'].get('mask') for other in others]
    assert masks[0]['difference'] == pytest.approx(others[0]['mask']['ap'] - first['mask']['ap']) and masks[1] is None


def test_sensitive_and_what_quantize_chooses_by_it(demo_seg, tmp_path):
    given = '--weights', demo_seg.single, '--data', demo_seg.data, '--project', tmp_path
    quick = *QUICK, *'--batch-size 6 --calib-images 6 --calib-method mse'.split()
    command('qat.py', 'sensitive', *given, *quick, *'--num-image 6 --granularity layer --name s'.split())
    file = tmp_path / 's' / 'summary-sensitive-analysis.json'
    summary = read(file)
    assert summary['float']['mask']['ap'] > summary['int8']['mask']['ap'] * 0.9 > 0
    twins = {unit['unit']: unit['twins'] for unit in summary['units']}
    head = twins[f'model.{len(demo_seg.float_model().model) - 1}']
    assert any('proto' in twin for twin in head) and any('.cv4.' in twin for twin in head)
    measured = [unit['measured'] for unit in summary['units'] if unit['measured']]
    assert len(measured) == 10 and all('mask' in figures['without'] for figures in measured)
    chosen = '--epochs', 0, '--sensitive', file, '--max-drop', 50
    command('qat.py', 'quantize', *given, *quick, *chosen, '--name', 'q')
    assert read(tmp_path / 'q' / 'report.json')['kept_float'] == []


def test_compare_outputs_has_masks(demo_seg, tmp_path):
    given = demo_seg.single, demo_seg.quantized, '--data', demo_seg.data, '--project', tmp_path
    command('compare_outputs.py', *given, *QUICK)
    [found] = read(tmp_path / 'exp/compare.json')['comparisons']
    assert 0.5 < found['matched_mask'] < 1 and found['reference']['mask']['ap'] > 0.2
    assert found['prototypes']['mean'] > 0
