"""Laws of building engines (with TensorRT-RTX, which needs no GPU), of trtexec's options, and of fitting machines."""

import json
import re
import stat
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import REPO, TREE
from graphs import FLOAT, INT8_BLOCK, copy, graph_of, node, with_values
from onnx import helper
from zoo import python

from utils.qat.config.engine import BuildConfig, min_opt_max
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.engine.api import VERSIONS
from utils.qat.engine.build import EngineFromOnnx
from utils.qat.engine.plan import Source, plan
from utils.qat.engine.runner import require_within
from utils.qat.engine.sidecar import read_sidecar, require_fit, sidecar_of, write_sidecar
from utils.qat.engine.trtexec import arguments, build_with_trtexec, version_in, version_of
from utils.qat.graph.half import to_half

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


FILES = {
    'float': FLOAT_CONV,
    'int8': INT8_BLOCK,
    'half': to_half(copy(FLOAT_CONV)),
    'typed int8': to_half(copy(INT8_BLOCK)),
    'open batch': opened(INT8_BLOCK, 0),
    'open size': opened(FLOAT_CONV, 2, 3),
}


@pytest.fixture
def file(tmp_path):
    """Function: name in FILES, or a model → path of it on disk."""

    def write(model):
        onnx.save(FILES[model] if isinstance(model, str) else model, tmp_path / 'model.onnx')
        return tmp_path / 'model.onnx'

    return write


# ---- what is asked of which TensorRT ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kind, major, precision, network, builder, words',
    [
        ('float', 8, 'auto', ['EXPLICIT_BATCH'], ['FP16'], 'FP16'),
        ('float', 10, 'fp32', ['EXPLICIT_BATCH'], [], 'FP32'),
        ('int8', 8, 'auto', ['EXPLICIT_BATCH'], ['FP16', 'INT8'], 'INT8 and FP16'),
        ('int8', 10, 'int8', ['EXPLICIT_BATCH'], ['FP16', 'INT8'], 'INT8 and FP16'),
        ('int8', 11, 'auto', ['STRONGLY_TYPED'], [], 'INT8 and FP32'),
        ('typed int8', 10, 'auto', ['STRONGLY_TYPED', 'EXPLICIT_BATCH'], [], 'INT8 and FP16'),
        ('typed int8', 11, 'int8', ['STRONGLY_TYPED'], [], 'INT8 and FP16'),
        ('half', 11, 'fp16', ['STRONGLY_TYPED'], [], 'FP16'),
        ('float', 11, 'auto', ['STRONGLY_TYPED'], [], 'FP32'),
    ],
)
def test_flags_follow_from_the_file_and_the_version(file, kind, major, precision, network, builder, words):
    made = plan(Source(BuildConfig(file(kind), precision=precision)), VERSIONS[major], f'TensorRT {major}')
    assert (made.network, made.builder, made.precision) == (network, builder, words)


@pytest.mark.parametrize(
    'kind, major, precision, says',
    [
        ('float', 10, 'int8', ['--precision int8', 'no Q/DQ', 'qat.py quantize']),
        ('int8', 10, 'fp16', ['--precision fp16', 'has Q/DQ']),
        ('typed int8', 8, 'auto', ['TensorRT 8 cannot', '--trt 8']),
        ('float', 11, 'fp16', ['--precision fp16', 'types of the file', '--trt 11 --half']),
        ('half', 10, 'fp32', ['--precision fp32', 'FP16']),
    ],
)
def test_a_precision_that_cannot_come_of_the_file_is_refused(file, kind, major, precision, says):
    with pytest.raises(QatError) as refused:
        plan(Source(BuildConfig(file(kind), precision=precision)), VERSIONS[major], f'TensorRT {major}')
    assert all(text in str(refused.value) for text in says)


def test_fp32_outside_qdq_is_warned_of_where_types_are_those_of_the_file(file, capsys):
    for major in VERSIONS:
        plan(Source(BuildConfig(file('int8'))), VERSIONS[major], f'TensorRT {major}')
    (said,) = {line for line in capsys.readouterr().out.splitlines() if line}
    assert 'slower than FP16' in said and 'TensorRT 11' in said and '--trt 11' in said


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
    source = Source(BuildConfig(file(kind), **options))
    assert source.shapes == {'x': shapes} and source.dynamic == kind.startswith('open')


@pytest.mark.parametrize(
    'kind, options, says',
    [
        ('int8', {'batch': (1, 4, 8)}, ['--batch 1,4,8', 'fixed batch of 1', '--dynamic']),
        ('int8', {'imgsz': [640]}, ['--imgsz 640 640', 'takes 4 x 4']),
        ('open size', {}, ['--imgsz', 'leaves the image size open']),
        ('float', {'workspace': 0}, ['--workspace 0']),
        ('float', {'level': 6}, ['--level 6', '0 to 5']),
        ('float', {'engine': Path('model.plan')}, ['--engine model.plan', '.engine']),
    ],
)
def test_what_the_file_does_not_take_is_refused(file, kind, options, says):
    with pytest.raises(QatError) as refused:
        Source(
            BuildConfig(file(kind), **{'imgsz': [32] if kind == 'open size' and len(options) > 1 else None, **options})
        )
    assert all(text in str(refused.value) for text in says)


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
    'kind, options',
    [
        ('float', {}),
        ('int8', {}),
        ('half', {}),
        ('typed int8', {}),
        ('open batch', {'batch': (1, 2, 4)}),
        ('open size', {'imgsz': [32]}),
    ],
)
def test_an_engine_and_its_sidecar(rtx, file, kind, options):
    path = file(kind)
    content = EngineFromOnnx(BuildConfig(path, backend='rtx', **options)).build()
    engine = path.with_suffix('.engine')
    assert engine.stat().st_size == content['bytes'] > 1000
    assert json.loads(sidecar_of(engine).read_text()) == json.loads(json.dumps(content)) == read_sidecar(engine)
    assert (
        content['onnx_sha256'] == sha256(path)
        and content['built_by'].startswith('TensorRT-RTX 1.')
        and content['typed']
    )
    assert content['precision'] == {
        'float': 'FP32',
        'int8': 'INT8 and FP32',
        'half': 'FP16',
        'typed int8': 'INT8 and FP16',
    }.get(kind, content['precision'])
    assert {p.name for p in path.parent.iterdir()} == {
        'model.onnx',
        'model.engine',
        'model.engine.json',
        'model.timing.cache',
    }


def test_a_timing_cache_is_gone_on_from(rtx, file):
    config = BuildConfig(file('float'), backend='rtx')
    first, second = (EngineFromOnnx(config).build()['timing_cache_reused'] for _ in range(2))
    assert (first, second) == (False, True)
    config.timing_cache.write_bytes(b'no timings')
    assert EngineFromOnnx(config).build()['timing_cache_reused'] is False, 'what cannot be read is made anew'
    assert EngineFromOnnx(config).build()['timing_cache_reused'] is True


def test_progress_is_shown(rtx, file):
    class Bar:
        def __init__(self):
            self.total, self.done, self.closed = 0, 0, False

        def reset(self, total):
            self.total = total

        def update(self, n):
            self.done += n

        def close(self):
            self.closed = True

        def set_postfix_str(self, text, refresh):
            assert text

        def refresh(self):
            assert self.done <= self.total

    bar = Bar()
    EngineFromOnnx(BuildConfig(file('float'), backend='rtx'), lambda: bar).build()
    assert bar.closed and 0 < bar.done <= bar.total


def test_ctrl_c_ends_the_build_and_leaves_nothing(rtx, file):
    class Bar:
        reset = refresh = set_postfix_str = close = lambda *_, **__: None

        def update(self, n):
            raise KeyboardInterrupt

    path = file('float')
    with pytest.raises(KeyboardInterrupt):
        EngineFromOnnx(BuildConfig(path, backend='rtx'), Bar).build()
    assert [p.name for p in path.parent.iterdir()] == ['model.onnx']


@pytest.mark.parametrize(
    'model, says',
    [
        (with_values(INT8_BLOCK, zero=3), ['Non-zero zero point', 'QuantizeLinear']),
        (
            helper.make_model(
                helper.make_graph(
                    [helper.make_node('NoSuchOp', ['x'], ['y'], name='odd one', domain='mine')],
                    'g',
                    [helper.make_tensor_value_info('x', FLOAT, (1, 4))],
                    [helper.make_tensor_value_info('y', FLOAT, (1, 4))],
                ),
                opset_imports=[helper.make_opsetid('', 17), helper.make_opsetid('mine', 1)],
                ir_version=8,
            ),
            ['odd one', 'NoSuchOp'],
        ),
    ],
)
def test_a_graph_that_is_refused_names_the_node(rtx, file, model, says):
    path = file(model)
    with pytest.raises(QatError) as refused:
        EngineFromOnnx(BuildConfig(path, backend='rtx')).build()
    assert all(text in str(refused.value) for text in [str(path), 'node', *says])
    assert [p.name for p in path.parent.iterdir()] == ['model.onnx']


def test_a_file_that_is_no_onnx_is_refused(rtx, tmp_path):
    (tmp_path / 'bad.onnx').write_bytes(b'no graph')
    with pytest.raises(QatError, match='bad.onnx: no valid ONNX'):
        EngineFromOnnx(BuildConfig(tmp_path / 'bad.onnx', backend='rtx'))


def test_the_command(rtx, file):
    path = file('open batch')
    out = python(TREE / 'scripts/build_engine.py', path, '--backend', 'rtx', '--batch', '1,2,4', '--imgsz', 4)
    assert (
        'INT8 and FP32' in out and '[4, 4, 4, 4]' in out and re.search(r'(?m)^next: python .*benchmark_trt.py ', out)
    ), 'val_trt.py scores YOLOv9 alone'
    assert path.with_suffix('.engine').exists()


# ---- which engine fits where --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(file):
    """An engine file with its sidecar, as if built by TensorRT 10.13.3."""
    source = Source(BuildConfig(file('int8')))
    source.config.engine.write_bytes(b'engine' * 100)
    write_sidecar(source, plan(source, VERSIONS[10], ''), 'TensorRT 10.13.3', {'gpu': GPU})
    return source.config.engine


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
    with pytest.raises(QatError) as refused:
        require_fit(engine, read_sidecar(engine), product, gpu)
    assert all(text in str(refused.value) for text in [*says, 'scripts/generate_trt_engine.sh model.onnx'])


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
        ({'bytes': '600'}, 'bytes'),
        ({'inputs': []}, 'inputs'),
        ({'inputs': {}}, 'inputs'),
        ({'inputs': {'images': {'min': [1], 'opt': [1], 'max': []}}}, 'inputs.images.max'),
        ({'metadata': {'names': None}}, 'metadata.names'),
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
        with pytest.raises(QatError) as refused:
            require_within('e.engine', 'images', shape, profile)
        assert f'images of shape {list(shape)}' in str(refused.value) and '[1, 3, 320, 320] to [8, 3, 640, 640]' in str(
            refused.value
        )
        assert '--batch MIN,OPT,MAX' in str(refused.value)


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


def test_flags_of_trtexec_by_version(file):
    def flags(kind, major, *files, **options):
        source = Source(BuildConfig(file(kind), **options))
        return arguments(source, plan(source, VERSIONS[major], ''), major, *files)

    for major in VERSIONS:
        wanted = {'--skipInference', '--profilingVerbosity=detailed', '--memPoolSize=workspace:4096'}
        assert wanted <= set(flags('int8', major)) and not any('export' in flag for flag in flags('int8', major))
    assert {'--fp16', '--int8'} <= set(flags('int8', 8)) and {'--fp16', '--int8'} <= set(flags('int8', 10))
    assert {'--fp16', '--int8', '--stronglyTyped'}.isdisjoint(flags('typed int8', 11))
    assert '--stronglyTyped' in flags('typed int8', 10) and '--fp16' not in flags('typed int8', 10)
    assert (
        '--int8' not in flags('float', 10)
        and '--fp16' in flags('float', 10)
        and '--fp16' not in flags('float', 10, precision='fp32')
    )
    measured = {'--exportLayerInfo=l.json', '--exportProfile=p.json'}
    assert measured | {'--useCudaGraph', '--noDataTransfers', '--separateProfileRun'} <= set(
        flags('int8', 10, 'l.json', 'p.json')
    )
    assert measured <= set(flags('int8', 11, 'l.json', 'p.json')) and '--useCudaGraph' not in flags(
        'int8', 11, 'l.json', 'p.json'
    )
    shapes = {'--minShapes=x:1x4x4x4', '--optShapes=x:4x4x4x4', '--maxShapes=x:8x4x4x4'}
    assert shapes <= set(flags('open batch', 10, batch=(1, 4, 8))) and not any('Shapes' in f for f in flags('int8', 10))


def program(folder, text):
    """An executable `trtexec` that runs a shell script."""
    path = folder / 'trtexec'
    path.write_text(f'#!/bin/sh\n{text}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_trtexec_leaves_is_checked(file, tmp_path):
    """A shell script takes the place of trtexec, so only the handling of its process is tested."""
    source = Source(BuildConfig(file('int8')))
    said, flags = [], plan(source, VERSIONS[10], '')
    writes = program(
        tmp_path, 'for a; do case $a in --saveEngine=*) printf engine > "${a#*=}";; esac; done; echo "[I] done"'
    )
    content = build_with_trtexec(writes, (10, 13, 3), source, flags, said.append)
    assert said == ['[I] done'] and source.config.engine.read_text() == 'engine' and content['bytes'] == 6
    assert content['built_by'] == 'TensorRT 10.13.3' and read_sidecar(source.config.engine) == json.loads(
        json.dumps(content)
    )
    source.config.engine.unlink()
    for text in (
        'echo "[E] no memory"; exit 1',
        'echo "[E] no memory"',
        'for a; do case $a in --saveEngine=*) printf half > "${a#*=}";; esac; done; echo "[E] no memory"; exit 3',
    ):
        with pytest.raises(QatError, match='trtexec failed.*no memory'):
            build_with_trtexec(program(tmp_path, text), (10, 13, 3), source, flags, said.append)
        assert not source.config.engine.exists()
    with pytest.raises(QatError, match='does not tell its version.*--no-trtexec'):
        version_of(program(tmp_path, 'echo hello'))
    with pytest.raises(QatError, match='of TensorRT 7.2.3'):
        version_of(program(tmp_path, 'echo "&&&& RUNNING TensorRT.trtexec [TensorRT v7203] # trtexec"'))


@pytest.mark.parametrize('script', ['val_trt.sh', 'generate_trt_engine.sh'])
def test_a_shell_script_without_its_arguments_shows_its_usage(script):
    done = subprocess.run([REPO / 'scripts' / script], capture_output=True, text=True)
    assert done.returncode == 2 and f'{script} ' in done.stderr and '--generate-graph' in done.stderr
