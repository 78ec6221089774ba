"""Laws of building engines (with TensorRT-RTX, which needs no GPU), of trtexec's options, and of fitting machines."""

import io
import json
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import REPO, TREE
from helpers.graphs import INT8_BLOCK, copy, graph_of, model_of, node, with_values
from helpers.zoo import command, python
from onnx import helper
from tqdm import tqdm

from utils.qat.config.deploy import BuildConfig, min_opt_max
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.graph.passes import store_int8_weights
from utils.qat.vendors.onnxruntime.session import OnnxRuntime
from utils.qat.vendors.tensorrt.engine.api import VERSIONS, version_in, version_of
from utils.qat.vendors.tensorrt.engine.build import (
    EngineFromOnnx,
    arguments,
    build_engines,
    build_with_trtexec,
    jobs_here,
)
from utils.qat.vendors.tensorrt.engine.plan import Plan
from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar, require_fit, sidecar_of, write_sidecar
from utils.qat.vendors.tensorrt.half import to_half
from utils.qat.vendors.tensorrt.session import require_within

FLOAT_CONV = graph_of(
    [node('Conv', 'x', 'w', 'y')],
    shape=(1, 4, 4, 4),
    returns=(1, 4, 4, 4),
    initializers={'w': np.ones((4, 4, 1, 1), np.float32)},
)
GPU = {'name': 'NVIDIA A', 'capability': '8.9'}


def opened(model, *axes):
    """A copy of `model` with open axes: these of `x`, and the first of each output."""
    model = copy(model)
    for axis in axes:
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f'axis {axis}'
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = 'axis 0'
    return model


def grouped(model):
    """A copy of `model` whose quantized convolution has two groups."""
    model = copy(model)
    (weight,) = (i for i in model.graph.initializer if i.name == 'w')
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight)[:, :2].copy(), 'w'))
    for conv in model.graph.node:
        if conv.op_type == 'Conv':
            conv.attribute.append(helper.make_attribute('group', 2))
    return model


FILES = {
    'float': FLOAT_CONV,
    'int8': INT8_BLOCK,
    'integers': store_int8_weights(copy(INT8_BLOCK)),
    'half': to_half(copy(FLOAT_CONV)),
    'typed int8': to_half(copy(INT8_BLOCK)),
    'open batch': opened(INT8_BLOCK, 0),
    'open size': opened(FLOAT_CONV, 2, 3),
}


def refused(made):
    """The message with which a function refuses."""
    with pytest.raises(QatError) as raised:
        made()
    return str(raised.value)


@pytest.fixture
def file(tmp_path):
    """Function: name in FILES, or a model → path of it on disk."""

    def write(model):
        onnx.save(FILES[model] if isinstance(model, str) else model, tmp_path / 'model.onnx')
        return tmp_path / 'model.onnx'

    return write


# ---- what is asked of which TensorRT ------------------------------------------------------------------------------------


def planned(path, major=10, **settings):
    return Plan(
        BuildConfig(path, **settings), VERSIONS[major], {10: 'TensorRT 10.13.3'}.get(major, f'TensorRT {major}')
    )


BATCH, TYPED = 'EXPLICIT_BATCH', 'STRONGLY_TYPED'
PLANS = [  # file, major version, --precision; flags of the network and of the builder, and what the engine computes in
    ('float', 8, 'auto', [BATCH], ['FP16'], 'FP16'),
    ('float', 10, 'fp32', [BATCH], [], 'FP32'),
    ('int8', 8, 'auto', [BATCH], ['FP16', 'INT8'], 'INT8 and FP16'),
    ('int8', 10, 'int8', [BATCH], ['FP16', 'INT8'], 'INT8 and FP16'),
    ('int8', 11, 'auto', [TYPED], [], 'INT8 and FP32'),
    ('typed int8', 10, 'auto', [TYPED, BATCH], [], 'INT8 and FP16'),
    ('typed int8', 11, 'int8', [TYPED], [], 'INT8 and FP16'),
    ('half', 11, 'fp16', [TYPED], [], 'FP16'),
    ('float', 11, 'auto', [TYPED], [], 'FP32'),
]
NO_PLANS = [  # file, major version, settings; what the message says
    ('float', 10, {'precision': 'int8'}, ['--precision int8', 'no Q/DQ', 'qat.py quantize']),
    ('int8', 10, {'precision': 'fp16'}, ['--precision fp16', 'has Q/DQ']),
    ('typed int8', 8, {}, ['TensorRT 8 cannot', '--trt 8']),
    ('half', 8, {}, ['FP16 outside Q/DQ', '--trt 8']),
    ('integers', 8, {}, ['stores weights as integers, which TensorRT 8 cannot take', '--trt 8']),
    (model_of('y = Relu(x)', {'x': []}, {'y': []}), 10, {}, ['input x is a single number']),
    (
        model_of('y = Relu(x)', {'x': ['n', 'm']}, {'y': ['n', 'm']}),
        10,
        {},
        ['input x [None, None] has an open axis that is neither'],
    ),
    ('float', 11, {'precision': 'fp16'}, ['--precision fp16', 'types of the file', '--trt 11 --half']),
    ('half', 10, {'precision': 'fp32'}, ['--precision fp32', 'FP16']),
    ('int8', 10, {'batch': (1, 4, 8)}, ['--batch 1,4,8', 'fixed batch of 1', '--dynamic']),
    ('int8', 10, {'imgsz': [640]}, ['--imgsz 640 640', 'takes 4 x 4']),
    ('open size', 10, {}, ['--imgsz', 'leaves the image size of']),
    ('float', 10, {'engine': Path('model.plan')}, ['--engine model.plan', '.engine']),
]


@pytest.mark.parametrize('kind, major, precision, network, builder, words', PLANS)
def test_flags_follow_from_the_file_and_the_version(file, kind, major, precision, network, builder, words):
    made = planned(file(kind), major, precision=precision)
    assert (made.network, made.builder, made.precision) == (network, builder, words)


@pytest.mark.parametrize('kind, major, settings, says', NO_PLANS)
def test_what_the_file_or_the_version_does_not_take_is_refused(file, kind, major, settings, says):
    message = refused(lambda: planned(file(kind), major, **settings))
    assert [text for text in says if text not in message] == [], message


def test_fp32_outside_qdq_is_warned_of_where_types_are_those_of_the_file(file, capsys):
    for major in VERSIONS:
        planned(file('int8'), major)
    (said,) = {line for line in capsys.readouterr().out.splitlines() if line}
    assert 'slower than FP16' in said and 'TensorRT 11' in said and '--trt 11' in said


def test_int8_convolutions_with_groups_are_warned_of(file, capsys):
    planned(file('int8'))
    assert capsys.readouterr().out == ''
    planned(file(grouped(INT8_BLOCK)))
    (said,) = capsys.readouterr().out.splitlines()
    assert 'INT8 convolutions with groups (1)' in said and '--target tensorrt' in said and 'export_qat.py' in said


@pytest.mark.parametrize(
    'kind, options, shapes',
    [
        ('int8', {}, ((1, 4, 4, 4),) * 3),
        ('int8', {'batch': (1, 1, 1), 'imgsz': [4]}, ((1, 4, 4, 4),) * 3),
        ('open batch', {}, ((1, 4, 4, 4),) * 3),
        ('open batch', {'batch': (1, 4, 8)}, ((1, 4, 4, 4), (4, 4, 4, 4), (8, 4, 4, 4))),
        ('open size', {'imgsz': [32, 64]}, ((1, 4, 32, 64),) * 3),
    ],
)
def test_shapes_of_the_profile(file, kind, options, shapes):
    plan = planned(file(kind), **options)
    assert plan.shapes == {'x': shapes} and plan.dynamic == kind.startswith('open')


@pytest.mark.parametrize('text', ['4,1,8', 'all', '1,8', '0', ''])
def test_a_batch_that_is_none_is_refused(text):
    with pytest.raises(QatError, match=f'^--batch {text}: .*1 <= MIN <= OPT <= MAX$'):
        min_opt_max(text)


# ---- builds -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rtx():
    pytest.importorskip(
        'tensorrt_rtx_bindings', reason='no TensorRT-RTX: ./install_dependencies.sh --tests (Linux x86_64 only)'
    )


@pytest.mark.parametrize(
    'kind, options, precision',
    [
        ('float', {}, 'FP32'),
        ('int8', {}, 'INT8 and FP32'),
        ('half', {}, 'FP16'),
        ('typed int8', {}, 'INT8 and FP16'),
        ('open batch', {'batch': (1, 2, 4)}, 'INT8 and FP32'),
        ('open size', {'imgsz': [32]}, 'FP32'),
    ],
)
def test_an_engine_and_its_sidecar(rtx, file, kind, options, precision):
    path = file(kind)
    content = EngineFromOnnx(BuildConfig(path, backend='rtx', **options)).build()
    engine = path.with_suffix('.engine')
    assert engine.stat().st_size == content['bytes'] > 1000
    assert json.loads(sidecar_of(engine).read_text()) == json.loads(json.dumps(content)) == read_sidecar(engine)
    assert content['onnx_sha256'] == sha256(path) and content['precision'] == precision and content['typed']
    assert content['built_by'].startswith('TensorRT-RTX 1.')
    made = {'model.onnx', 'model.engine', 'model.engine.json', 'model.timing.cache'}
    assert {p.name for p in path.parent.iterdir()} == made


def test_a_timing_cache_is_gone_on_from(rtx, file):
    config = BuildConfig(file('float'), backend='rtx')
    first, second = (EngineFromOnnx(config).build()['timing_cache_reused'] for _ in range(2))
    assert (first, second) == (False, True)
    config.timing_cache.write_bytes(b'no timings')
    assert EngineFromOnnx(config).build()['timing_cache_reused'] is False, 'what cannot be read is made anew'
    assert EngineFromOnnx(config).build()['timing_cache_reused'] is True


def test_progress_is_shown(rtx, file):
    bar = tqdm(file=io.StringIO())
    close, bar.close = bar.close, lambda: done.append((bar.n, bar.total)) or close()
    done = []
    EngineFromOnnx(BuildConfig(file('float'), backend='rtx'), lambda: bar).build()
    ((steps, total),) = done
    assert 0 < steps <= total


def test_ctrl_c_ends_the_build_and_leaves_nothing(rtx, file):
    class Interrupted(tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    path = file('float')
    with pytest.raises(KeyboardInterrupt):
        EngineFromOnnx(BuildConfig(path, backend='rtx'), lambda: Interrupted(file=io.StringIO())).build()
    assert [p.name for p in path.parent.iterdir()] == ['model.onnx']


UNKNOWN_OP = model_of(
    [helper.make_node('NoSuchOp', ['x'], ['y'], name='odd one', domain='mine')], {'x': [1, 4]}, {'y': [1, 4]}
)
UNKNOWN_OP.opset_import.append(helper.make_opsetid('mine', 1))


@pytest.mark.parametrize(
    'model, says',
    [
        (with_values(INT8_BLOCK, zero=3), ['Non-zero zero point', 'QuantizeLinear']),
        (UNKNOWN_OP, ['odd one', 'NoSuchOp']),
    ],
    ids=['zero point', 'unknown operator'],
)
def test_a_graph_that_is_refused_names_the_node(rtx, file, model, says):
    path = file(model)
    message = refused(EngineFromOnnx(BuildConfig(path, backend='rtx')).build)
    assert all(text in message for text in [str(path), 'node', *says])
    assert [p.name for p in path.parent.iterdir()] == ['model.onnx']


def test_engines_side_by_side(rtx, tmp_path):
    """A build that fails or crashes says why, and the others end."""
    configs = []
    for name, model in (('good', FILES['int8']), ('bad', UNKNOWN_OP), ('other', FILES['float'])):
        onnx.save(model, tmp_path / f'{name}.onnx')
        configs.append(BuildConfig(tmp_path / f'{name}.onnx', backend='rtx'))
    failed = build_engines(configs, 2, torch.device('cpu'))
    assert list(failed) == [configs[1].engine] and 'NoSuchOp' in failed[configs[1].engine]
    assert [config.engine.exists() for config in configs] == [True, False, True]


@pytest.mark.parametrize('cores, level, jobs', [(1, 0, 1), (6, 0, 3), (64, 0, 8), (64, None, 1), (64, 3, 1)])
def test_jobs_are_as_asked_and_several_only_where_no_kernel_is_timed(monkeypatch, cores, level, jobs):
    monkeypatch.setattr('utils.qat.vendors.tensorrt.engine.build.usable_cores', lambda: cores)
    assert (jobs_here(7, level), jobs_here(None, level)) == (7, jobs)


def test_the_command(rtx, file):
    path = file('open batch')
    words = path, '--backend', 'rtx', '--batch', '1,2,4', '--imgsz', 4
    assert 'took 2 to 6 minutes on an H100 or H200' in python(TREE / 'scripts/build_engine.py', *words)
    out = python(TREE / 'scripts/build_engine.py', *words)
    assert re.search(r'model.engine; the last build took [\d.]+ s', out)
    assert 'INT8 and FP32' in out and '[4, 4, 4, 4]' in out
    assert re.search(r'(?m)^next: python .*benchmark_trt.py ', out), 'val_trt.py scores YOLOv9 alone'
    assert path.with_suffix('.engine').exists()
    mine = path.with_suffix('.layer.json')
    mine.write_text('mine')
    assert f'{mine}: is there already' in command('scripts/build_engine.py', *words, '--generate-graph', code=2)
    assert mine.read_text() == 'mine'
    sidecar = path.with_suffix('.engine.json')
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), 'layers': mine.name}))
    command('scripts/build_engine.py', *words)
    assert json.loads(sidecar.read_text())['layers'] == mine.name, 'a later build without the option knows them too'


# ---- which engine fits where --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(file):
    """An engine file with its sidecar, as if built by TensorRT 10.13.3."""
    plan = planned(file('int8'))
    plan.config.engine.write_bytes(b'engine' * 100)
    write_sidecar(plan, gpu=GPU)
    return plan.config.engine


def test_an_engine_fits_where_it_was_built(engine):
    require_fit(engine, read_sidecar(engine), 'TensorRT 10.13.3', GPU)
    require_fit(engine, {**read_sidecar(engine), 'gpu': None}, 'TensorRT 10.13.3', GPU)


@pytest.mark.parametrize(
    'product, gpu, cut, says',
    [
        ('TensorRT 11.0.0', GPU, 0, ['built by TensorRT 10.13.3', 'this is TensorRT 11.0.0']),
        ('TensorRT-RTX 10.13.3', GPU, 0, ['TensorRT-RTX 10.13.3']),
        ('TensorRT 10.13.3', {**GPU, 'name': 'NVIDIA B'}, 0, ['built on NVIDIA A', 'this is NVIDIA B (8.9)']),
        ('TensorRT 10.13.3', None, 0, ['built on NVIDIA A', 'no GPU']),
        ('TensorRT 10.13.3', GPU, 1, ['599 bytes', 'tells of 600', 'not whole']),
    ],
)
def test_another_version_gpu_or_half_a_file_is_refused(engine, product, gpu, cut, says):
    engine.write_bytes(engine.read_bytes()[cut:])
    message = refused(lambda: require_fit(engine, read_sidecar(engine), product, gpu))
    assert all(text in message for text in [*says, 'scripts/generate_trt_engine.sh model.onnx'])


def test_a_sidecar_that_is_none_of_ours_is_refused(engine):
    for content in ('{', '[]', '{"sidecar": 99}'):
        sidecar_of(engine).write_text(content)
        with pytest.raises(QatError, match='engine.json'):
            read_sidecar(engine)
    sidecar_of(engine).unlink()
    assert read_sidecar(engine) is None


@pytest.mark.parametrize(
    'changed, place',
    [
        ({'built_by': 3}, 'built_by'),
        ({'gpu': {'name': 'NVIDIA A'}}, 'gpu.capability'),
        ({'inputs': {}}, 'inputs'),
        ({'inputs': {'images': {'min': [1], 'opt': [1], 'max': []}}}, 'inputs.images.max'),
        ({'onnx': None}, 'onnx'),
    ],
)
def test_a_sidecar_with_another_value_names_it(engine, changed, place):
    sidecar_of(engine).write_text(json.dumps({**json.loads(sidecar_of(engine).read_text()), **changed}))
    with pytest.raises(QatError, match=rf'engine\.json: damaged \({place} is missing, or not what it writes\)'):
        read_sidecar(engine)


def test_shapes_outside_the_profile_are_refused():
    profile = (1, 3, 320, 320), (4, 3, 320, 320), (8, 3, 640, 640)
    for shape in (profile[0], profile[2], (5, 3, 320, 640)):
        require_within('e.engine', 'images', shape, profile)
    for shape in ((9, 3, 320, 320), (1, 3, 288, 320), (1, 3, 320, 672), (3, 320, 320)):
        message = refused(lambda: require_within('e.engine', 'images', shape, profile))
        assert f'images of shape {list(shape)}' in message and '--batch MIN,OPT,MAX' in message
        assert '[1, 3, 320, 320] to [8, 3, 640, 640]' in message


# ---- trtexec ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'banner, version',
    [
        ('&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec', (8, 6, 1)),
        ('&&&& RUNNING TensorRT.trtexec [TensorRT v100900] [b34] # trtexec --help', (10, 9, 0)),
        ('&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9]', (10, 13, 3)),
        ('[I] nothing', None),
    ],
)
def test_the_version_of_trtexec(banner, version):
    assert version_in(banner) == version


MEASURED = '--exportLayerInfo=l.json --exportProfile=p.json'
ONCE = '--useCudaGraph --noDataTransfers --separateProfileRun'  # defaults of trtexec 11
ALONE = '--skipInference --profilingVerbosity=detailed --memPoolSize=workspace:4096'
FLAGS = [  # file, major version, settings, whether layers are measured; flags that are there; words that are not
    ('int8', 8, {}, False, f'{ALONE} --fp16 --int8', 'export Shapes --stronglyTyped'),
    ('int8', 10, {}, False, f'{ALONE} --fp16 --int8', 'export Shapes --stronglyTyped'),
    ('int8', 11, {}, False, ALONE, 'export Shapes --fp16 --int8 --stronglyTyped'),
    ('typed int8', 10, {}, False, '--stronglyTyped', '--fp16 --int8'),
    ('typed int8', 11, {}, False, '', '--fp16 --int8 --stronglyTyped'),
    ('float', 10, {}, False, '--fp16', '--int8'),
    ('float', 10, {'precision': 'fp32'}, False, '', '--fp16 --int8'),
    ('float', 10, {'level': 5}, False, '--builderOptimizationLevel=5', ''),
    ('float', 10, {'level': 0}, False, '--builderOptimizationLevel=0', ''),
    ('int8', 10, {}, True, f'{MEASURED} {ONCE}', '--skipInference'),
    ('int8', 11, {}, True, MEASURED, f'{ONCE} --skipInference'),
    (
        *('open batch', 10, {'batch': (1, 4, 8)}, False),
        *('--minShapes=x:1x4x4x4 --optShapes=x:4x4x4x4 --maxShapes=x:8x4x4x4', ''),
    ),
]


def words(row):
    """The words of a row of FLAGS that tell it from others."""
    kind, major, settings, measured, *_ = row
    return ' '.join([kind, f'TensorRT {major}', *settings, *['measured'] * measured])


@pytest.mark.parametrize('kind, major, settings, measured, there, absent', FLAGS, ids=map(words, FLAGS))
def test_flags_of_trtexec_by_version(file, kind, major, settings, measured, there, absent):
    files = ('l.json', 'p.json') if measured else ()
    flags = arguments(planned(file(kind), major, **settings), major, *files)
    assert set(there.split()) <= set(flags)
    other = ' '.join(flags[3:])  # the first are files, of any name
    assert not [word for word in absent.split() if word in other], flags


def program(folder, text):
    """An executable `trtexec` that runs a shell script."""
    path = folder / 'trtexec'
    path.write_text(f'#!/bin/sh\n{text}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WRITES = 'for a; do case $a in --saveEngine=*) printf engine > "${a#*=}";; esac; done; echo "[E] no memory"'


def test_an_engine_of_trtexec_gets_its_sidecar(file, tmp_path):
    """A shell script takes the place of trtexec, so only the handling of its process is tested."""
    plan = planned(file('int8'))
    content, engine = build_with_trtexec(program(tmp_path, WRITES), 10, plan), plan.config.engine
    assert engine.read_text() == 'engine' and content['bytes'] == 6 and content['built_by'] == 'TensorRT 10.13.3'
    assert read_sidecar(engine) == json.loads(json.dumps(content))


@pytest.mark.parametrize('text', ['echo "[E] no memory"; exit 1', 'echo "[E] no memory"', f'{WRITES}; exit 3'])
def test_a_trtexec_that_fails_leaves_no_engine(file, tmp_path, text):
    plan = planned(file('int8'))
    with pytest.raises(QatError, match='trtexec failed.*no memory'):
        build_with_trtexec(program(tmp_path, text), 10, plan)
    assert not plan.config.engine.exists()


@pytest.mark.parametrize(
    'text, says',
    [
        ('echo hello', 'does not tell its version.*--no-trtexec'),
        ('echo "&&&& RUNNING TensorRT.trtexec [TensorRT v7203] # trtexec"', 'of TensorRT 7.2.3'),
    ],
)
def test_a_trtexec_of_unknown_version_is_refused(tmp_path, text, says):
    with pytest.raises(QatError, match=says):
        version_of(program(tmp_path, text))


def tuner(folder, number, *lines):
    """A `trtexec` of version `number` that writes its arguments to `said`, and an engine."""
    banner = f'echo "&&&& RUNNING TensorRT.trtexec [TensorRT v{number}]"'
    program(folder, '\n'.join([banner, f'for a; do echo "$a"; done > {folder}/said', *lines, WRITES]))


@pytest.mark.parametrize('threshold', [None, 0.01])
def test_build_routes_are_tuned_against_onnx_runtime(file, tmp_path, monkeypatch, threshold):
    """A shell script takes the place of trtexec; the outputs that it gets are those of ONNX Runtime."""
    model, said = file('int8'), tmp_path / 'said'
    tuner(tmp_path, 110100, f'for a; do case $a in --load*) cp "${{a##*:}}" {tmp_path};; esac; done')
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    routes = '-copy_ppg=[on|off]'
    given = [f'--tune-build-routes={routes}', *(['--accuracy-threshold', threshold] if threshold else [])]
    command('scripts/build_engine.py', model, '--engine', tmp_path / 'm.engine', *given)
    flags = said.read_text().splitlines()
    assert f'--tuneBuildRoutes={routes}' in flags and '--skipInference' not in flags
    assert f'--tuningCacheFile={tmp_path}/m.tuning.jsonl' in flags and (tmp_path / 'm.engine').exists()
    assert ('--accuracyThreshold=0.01' in flags) == bool(threshold)
    if threshold:
        x, y = (np.fromfile(tmp_path / name, np.float32) for name in ('x', 'y'))
        [inputs] = onnx.load(model).graph.input
        x = x.reshape([d.dim_value for d in inputs.type.tensor_type.shape.dim])
        wanted = OnnxRuntime(model, torch.device('cpu')).run({'x': torch.from_numpy(x)})['y']
        assert np.array_equal(y, wanted.numpy().ravel()) and x.std() > 0.1


@pytest.mark.parametrize(
    'number, words, says',
    [
        (
            101303,
            '--tune-build-routes=-a=[0|1]',
            'needs trtexec of TensorRT 11.1 or later, and that of 10.13.3 is here',
        ),
        (110100, '--tune-build-routes=-a=[0|1] --no-trtexec', 'and none is used here'),
        (110100, '--tune-build-routes=-a=[0|1] --generate-graph', '--generate-graph: not with --tune-build-routes'),
        (110100, '--accuracy-threshold 0.1', 'only with --tune-build-routes'),
    ],
)
def test_what_cannot_tune_says_so(file, tmp_path, monkeypatch, number, words, says):
    tuner(tmp_path, number)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert says in command('scripts/build_engine.py', file('int8'), *words.split(), code=2)
    assert not list(tmp_path.glob('*.engine'))


@pytest.mark.parametrize('failing, beside, ended', [('w', 'f', 'ended by the script'), ('f', 'w', 'to its end')])
def test_val_trt_sh_ends_if_one_of_two_builds_fails(tmp_path, failing, beside, ended):
    """The builds are a script; a build that is waited for runs to its end, and the other one does not outlive the script."""
    fake = f"""#!/bin/bash
        case "$*" in
            *--which*) echo 10 ;;
            *build_engine.py*{failing}.onnx*) while [[ ! -e begun ]]; do sleep 0.05; done; exit 3 ;;
            *build_engine.py*{beside}.onnx*)
                trap 'echo ended by the script > how; kill $!; exit' TERM
                touch begun; sleep {60 if beside == 'f' else 1} & wait
                echo to its end > how ;;
            *build_engine.py* | *eval*) touch other ;;
        esac"""
    (tmp_path / 'python').write_text(fake)
    (tmp_path / 'python').chmod(0o755)
    for name in ('w.pt', 'f.pt', 'data.yaml'):
        (tmp_path / name).touch()
    script = ['bash', REPO / 'scripts/val_trt.sh', 'w.pt', 'data.yaml', '64', '--float', 'f.pt', '--level', '0']
    done = subprocess.run(script, cwd=tmp_path, env={**os.environ, 'PYTHON': str(tmp_path / 'python')}, timeout=50)
    assert done.returncode == 3 and not (tmp_path / 'other').exists()
    for _ in range(100):  # 10 s for a process that was just told to end
        if (tmp_path / 'how').exists():
            break
        time.sleep(0.1)
    assert (tmp_path / 'how').read_text().strip() == ended


@pytest.mark.parametrize('script', ['val_trt.sh', 'generate_trt_engine.sh'])
def test_a_shell_script_without_its_arguments_shows_its_usage(script):
    done = subprocess.run([REPO / 'scripts' / script], capture_output=True, text=True)
    assert done.returncode == 2 and f'{script} ' in done.stderr and '--generate-graph' in done.stderr
