"""From a checkpoint to the file of each vendor, by the commands: quantized, exported, verified, scored, compared, measured."""

import importlib.util
import json
import re
import shutil

import onnx
import pytest
from helpers.faults import answer
from helpers.zoo import assert_verdicts, assert_within_interval, command

from utils.qat.core.machine import int8_sums_overflow
from utils.qat.graph.onnx_graph import metadata_value
from utils.qat.run.sensitivity_summary import FILE

SIDE = 64
FILES = {  # --include → target, file of best.pt, what the benchmark and the score call it, packages, whether --verify takes it
    'onnx': ('onnxruntime', 'best.onnx', 'ONNX Runtime', ['onnx'], True),
    'openvino': ('openvino', 'best.xml', 'OpenVINO', ['openvino'], True),
    'litert': ('litert', 'best.tflite', 'LiteRT', ['ai_edge_litert', 'litert_torch'], True),
    'pt2': ('tensorrt', 'best.pt2', 'torch.export', ['torch'], True),
    'aoti': ('tensorrt', 'best-aoti.pt2', 'AOTInductor', ['torchao'], True),
}
SLOW = {'aoti'}  # it compiles for half a minute


@pytest.mark.parametrize('include', [pytest.param(i, marks=[pytest.mark.faults] * (i in SLOW)) for i in FILES])
def test_from_checkpoint_to_file(small, tmp_path, include):
    target, name, title, packages, verified = FILES[include]
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    if missing or (include == 'aoti' and not shutil.which('g++')):
        pytest.skip(f'no {missing or "g++"}')
    if include == 'aoti' and int8_sums_overflow():
        pytest.skip('AOTInductor has no INT8 on a CPU without VNNI')
    data = '--data', small.data, '--device', 'cpu', '--workers', 0, '--project', tmp_path
    quick = '--epochs 0 --calib-images 4 --calib-method mse --no-bias-correction --name run'.split()
    said = command('qat.py', 'quantize', '--weights', small.single, *data, '--imgsz', SIDE, '--target', target, *quick)
    best, by = tmp_path / 'run/weights/best.pt', ['--backend', 'aoti'] * (include == 'aoti')
    following = {'openvino': 'openvino', 'litert': 'litert'}.get(target)
    assert (f'best.pt --include {following} --imgsz {SIDE}' in said) == bool(following), 'the next command writes it'
    simplified = ['--simplify'] * (include == 'onnx')  # as the audit with --strict wants it
    exported = 'export_qat.py', '--weights', best, '--include', include, '--imgsz', SIDE, *simplified
    said = command(*exported, *['--verify', small.data] * verified, code=(0, 1))
    [verify] = best.parent.glob('*.verify.json')
    result = json.loads(verify.read_text())
    assert_verdicts(said, result)
    assert_within_interval(result['against_reference'])
    if include == 'onnx':
        foreign = best.with_name('other.verify.json')
        foreign.write_text('{}')
        shutil.copy(best, best.with_name('other.pt'))
        command('export_qat.py', '--weights', best, best.with_name('other.pt'), *exported[3:])
        assert [*best.parent.glob('*.verify.json')] == [foreign], 'the verdict on the file before goes, but only ours'
    file = best.with_name(name)
    said = command('val_trt.py', '--weights', file, *data, '--name', 'val', *by)
    assert 'AP' in said and ('INT8: ' in said or include not in ('openvino', 'litert'))
    assert re.search(f'next: python .*benchmark_trt.py {file}', said)
    assert file.name in command('compare_outputs.py', best, file, *data, '--name', 'compare', *by)
    short = '--device', 'cpu', '--duration', 0.05, '--warmup', 0, '--project', tmp_path, '--name', 'speed', *by
    assert title in command('benchmark_trt.py', file, *short)
    if include == 'onnx':
        assert metadata_value(onnx.load(file), 'target') == 'onnxruntime'
        assert 'for ONNX Runtime' in command('scripts/audit_onnx.py', file, '--strict')
        for words in (
            ('export_qat.py', '--weights', best, '--imgsz', SIDE, '--trt', 11),
            ('export_yoloV9.py', '--weights', best, '--size', SIDE),
        ):
            assert '--target tensorrt' in command(*words, code=2), 'for TensorRT alone'
    if include == 'openvino':
        command('export_yoloV9.py', '--weights', best, '--size', SIDE, '--project', tmp_path / 'deepstream')
        graph = tmp_path / 'deepstream/best.pt.onnx'
        assert metadata_value(onnx.load(graph), 'target') == 'openvino', 'it has no zero points: TensorRT reads it'
        assert 'for OpenVINO' in command('scripts/audit_onnx.py', graph, '--strict')


def test_a_checkpoint_of_another_target_is_refused(small, capfd, tmp_path):
    pytest.importorskip('ai_edge_litert')
    code, line = answer('export_qat.py', ('--weights', small.quantized, '--include', 'litert'), capfd, tmp_path)
    assert code == 2 and line.endswith('quantize with --target litert')


def test_a_summary_belongs_to_a_target(small, tmp_path):
    given = '--weights', small.single, '--data', small.data, '--imgsz', SIDE, '--device', 'cpu', '--project', tmp_path
    few = '--target onnxruntime --calib-images 6 --metric distortion --num-image 2 --workers 0 --name costs'
    said = command('qat.py', 'sensitive', *given, *few.split())
    [following] = re.findall(r'next: (.*)', said)
    assert '--target onnxruntime' in following and '--calib-images 6' in following, 'for it, calibrated alike'
    plan = 'qat.py', 'quantize', '--dry-run', '--weights', small.single, '--keep-float', 1, '--sensitive'
    said = command(*plan, tmp_path / 'costs' / FILE, '--target', 'openvino', code=2).rstrip()
    assert 'made for ONNX Runtime' in said and said.endswith('with: python qat.py sensitive --target openvino')
    command(*plan, tmp_path / 'costs' / FILE, '--target', 'onnxruntime')
