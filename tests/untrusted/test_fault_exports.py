"""Damaged or unsuitable ONNX files, engines and JSON files: each command that reads them gives one line."""

import importlib.util
import json
import shutil

import numpy as np
import onnx
import pytest
from faults import TIMES, answer, damaged, sampled
from graphs import behind_functions
from onnx import TensorProto, helper, numpy_helper
from zoo import program

from utils.qat.run.state import STATE

SIZE = 64
RUN = ('--device', 'cpu', '--project', 'OUT', '--workers', 0)
COMMANDS = {
    'scripts/audit_onnx.py': ('FILE',),
    'qat.py eval': ('eval', '--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN),
    'val_trt.py': ('--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN),
    'benchmark_trt.py': (
        'FILE',
        '--batch',
        1,
        '--duration',
        0.01,
        '--backend',
        'onnxruntime',
        '--device',
        'cpu',
        '--project',
        'OUT',
    ),
    'compare_outputs.py': ('FILE', 'SINGLE', '--random', 1, *RUN),
    'scripts/infer_onnx.py': ('FILE', 'IMAGE'),
    'scripts/build_engine.py': ('FILE', '--backend', 'rtx', '--engine', 'OUT/x.engine'),
}
NO_RTX = pytest.mark.skipif(
    not importlib.util.find_spec('tensorrt_rtx_bindings'),
    reason='no TensorRT-RTX: ./install_dependencies.sh --tests (Linux x86_64 only)',
)
EACH = [pytest.param(name, marks=[NO_RTX] * ('rtx' in argv)) for name, argv in COMMANDS.items()]
DAMAGED = 20  # for each command, times TIMES


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp('exports')
    shutil.copy(small.quantized, folder / 'quantized.pt')
    program('export_qat.py').main(['--weights', str(folder / 'quantized.pt'), '--imgsz', str(SIZE)])
    images = sorted((small.data.parent / 'images/val').iterdir())
    return {'SINGLE': small.single, 'DATA': small.data, 'IMAGE': images[0], 'onnx': folder / 'quantized.onnx'}


def told(command, file, files, capfd, folder):
    out = folder / 'out'
    argv = [
        files[a] if a in files else str(a).replace('FILE', str(file)).replace('OUT', str(out))
        for a in COMMANDS[command]
    ]
    code, line = answer(command.split()[0], argv, capfd, folder)
    shutil.rmtree(out, ignore_errors=True)
    return code, line


def minimal(inputs, outputs, nodes, weights=(), **more):
    """A graph of FP32 tensors: {name: shape} and (operator, inputs, outputs, attributes)."""

    def values(shapes):
        return [
            helper.make_tensor_value_info(name, more.get('type', TensorProto.FLOAT), shape)
            for name, shape in shapes.items()
        ]

    graph = helper.make_graph(
        [helper.make_node(op, i, o, **a) for op, i, o, a in nodes], 'g', values(inputs), values(outputs), weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', more.get('opset', 17))], ir_version=9)
    for key, value in more.get('metadata', {}).items():
        model.metadata_props.add(key=key, value=value)
    return model


def strange():
    """name → serialized graph: valid or nearly valid, but no detector."""
    image, pool = {'images': [1, 3, 64, 64]}, ('Reshape', ['images', 'shape'], ['output0'], {})
    shape = [numpy_helper.from_array(np.array([1, 48, 256]), 'shape')]  # 4 + 44 classes

    def detector(**more):
        return minimal(image, {'output0': [1, 48, 256]}, [pool], shape, **more)

    def functions(calls, depth):
        model = detector()
        return behind_functions(model, model.graph.node[0], calls, depth)

    return {
        'no outputs': minimal(image, {}, [('Relu', ['images'], ['x'], {})]),
        'no inputs': minimal({}, {'y': [2]}, [('Constant', [], ['y'], {'value_floats': [1.0, 2.0]})]),
        'no nodes': minimal({}, {}, []),
        'two inputs': minimal(
            {**image, 'more': [1, 3, 64, 64]}, {'y': [1, 3, 64, 64]}, [('Add', ['images', 'more'], ['y'], {})]
        ),
        'an image out': minimal(image, {'y': [1, 3, 64, 64]}, [('Relu', ['images'], ['y'], {})]),
        'a scalar in': minimal({'images': []}, {'y': []}, [('Relu', ['images'], ['y'], {})]),
        'open axes': minimal(
            {'images': ['b', 3, 'h', 'w']}, {'y': ['b', 'n', 'k']}, [('Reshape', ['images', 'shape'], ['y'], {})], shape
        ),
        'an operator that is none': minimal(image, {'y': [1]}, [('Abracadabra', ['images'], ['y'], {})]),
        'an opset of the future': detector(opset=9999),
        'opset 1': detector(opset=1),
        'a cycle': minimal(image, {'y': [1]}, [('Add', ['y', 'z'], ['z'], {}), ('Relu', ['z'], ['y'], {})]),
        'names that are no Python': detector(metadata={'names': '{0: '}),
        'names that are code': detector(metadata={'names': "__import__('os').system('touch sprung')"}),
        'names that are a list': detector(metadata={'names': "['a', 'b']"}),
        'names that are a number': detector(metadata={'names': '3'}),
        'names nested': detector(metadata={'names': '(' * 5000}),
        'a stride that is text': detector(metadata={'stride': 'many'}),
        'a stride of 0': detector(metadata={'stride': '0'}),
        'a stride of NaN': detector(metadata={'stride': 'nan'}),
        'text in': minimal(image, {'output0': [1, 48, 256]}, [pool], shape, type=TensorProto.STRING),
        'numbers of 64 bits': minimal(image, {'output0': [1, 48, 256]}, [pool], shape, type=TensorProto.DOUBLE),
        'metadata that are no text': detector(metadata={'names': 'undecoded'}),
        'a shape that does not fit': minimal(
            image, {'output0': [1, 48, 256]}, [pool], [numpy_helper.from_array(np.array([1, 7, 7]), 'shape')]
        ),
        'functions of 2^40 nodes': functions(2, 40),
        'a chain of functions': functions(1, 9000),
        'half of the outputs of NMS': minimal(
            image,
            {'num_dets': [1, 3, 64, 64], 'det_boxes': [1, 3, 64, 64]},
            [('Relu', ['images'], ['num_dets'], {}), ('Relu', ['images'], ['det_boxes'], {})],
        ),
    }


@pytest.mark.parametrize('command', sampled(EACH, 7, 1))
def test_strange_graphs(files, tmp_path, monkeypatch, capfd, command):
    """Some of them a benchmark may measure, an audit may read and a builder may build."""
    monkeypatch.chdir(tmp_path)
    reads_any = command in ('scripts/audit_onnx.py', 'benchmark_trt.py', 'scripts/build_engine.py')
    for name, model in strange().items():
        (tmp_path / 'model.onnx').write_bytes(model.SerializeToString().replace(b'undecoded', b'\xff\xfe\xd4coded'))
        code, line = told(command, tmp_path / 'model.onnx', files, capfd, tmp_path)
        assert (
            code == 2
            or reads_any
            or name.startswith(('names', 'numbers'))
            or ('infer' in command and name.startswith('a stride'))
        ), (name, line)
        assert not (tmp_path / 'sprung').exists()


@pytest.mark.parametrize('command', sampled(EACH, 7, 4))
def test_damaged(files, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    refused, file = 0, tmp_path / 'model.onnx'
    for what, content in [
        ('empty', b''),
        ('text', b'no graph'),
        *damaged(files['onnx'].read_bytes(), DAMAGED, seed=list(COMMANDS).index(command)),
    ]:
        file.write_bytes(content)
        refused += told(command, file, files, capfd, tmp_path)[0] == 2
    assert refused > 4 * TIMES


ELSEWHERE = 'cut short', 'gone', 'outside the folder'


@pytest.mark.parametrize('command', sampled(EACH, 7))
def test_weights_in_another_file(files, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / 'model.onnx'
    onnx.save(onnx.load(files['onnx']), file, save_as_external_data=True, location='weights.bin', size_threshold=0)
    whole = (tmp_path / 'weights.bin').read_bytes()
    outside = onnx.load(file, load_external_data=False)
    for tensor in outside.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == 'location':
                entry.value = '../../../../../../etc/passwd'
    for name, prepare in {
        ELSEWHERE[0]: lambda: (tmp_path / 'weights.bin').write_bytes(whole[:1000]),
        ELSEWHERE[1]: lambda: (tmp_path / 'weights.bin').unlink(),
        ELSEWHERE[2]: lambda: onnx.save(outside, file),
    }.items():
        prepare()
        code, line = told(command, file, files, capfd, tmp_path)
        assert code == 2 and 'model.onnx' in line, (name, line)


# ---- JSON ---------------------------------------------------------------------------------------------------------------

NO_JSON = {
    'empty': '',
    'text': 'hello',
    'a list': '[]',
    'a number': '3',
    'null': 'null',
    'an empty object': '{}',
    'nested': '[' * 100_000,
    'binary': '\0\1',
    'a list of numbers': '[1, 2]',
    'a list of null': '[null]',
    'NaN': 'NaN',
    'no end': '{"settings": {',
}


def spoilt(content, keys):
    """name → text: JSON that is none or of another kind, and `content` where one of `keys` is missing or of another type."""
    return {
        **NO_JSON,
        **{f'{key} gone': json.dumps({k: v for k, v in content.items() if k != key}) for key in keys},
        **{
            f'{key} is {value}': json.dumps({**content, key: value})
            for key in keys
            for value in (None, 'x', 3, [3], [[3]])
        },
    }


PARTS = {
    'a run': ('settings', 'ptq', 'epochs'),
    'a summary': ('kind', 'version', 'units', 'flops', 'weights_sha256'),
    'layers': ('Layers', 'Bindings'),
}


@pytest.fixture(scope='module')
def run(small, tmp_path_factory):
    """The folder of a run that was interrupted before it was finished, and the summary of a sensitivity analysis."""
    from utils.qat.core.command import run_command

    folder = tmp_path_factory.mktemp('run')
    common = [
        str(a)
        for a in (
            '--weights',
            small.single,
            '--data',
            small.data,
            '--imgsz',
            SIZE,
            '--calib-images',
            2,
            '--calib-method',
            'max',
            '--device',
            'cpu',
            '--workers',
            0,
            '--project',
            folder,
        )
    ]
    with pytest.MonkeyPatch.context() as patch:
        from models.quantize.run.keeper import Keeper

        patch.setattr(Keeper, 'finish', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert (
            run_command(
                program('qat.py').main, ['quantize', *common, '--epochs', '1', '--iters', '1', '--name', 'quantize']
            )
            == 130
        )
    assert (
        run_command(
            program('qat.py').main,
            [
                'sensitive',
                *common,
                '--num-image',
                '1',
                '--metric',
                'distortion',
                '--granularity',
                'layer',
                '--name',
                'sensitive',
            ],
        )
        == 0
    )
    return folder


@pytest.mark.faults
def test_report_of_a_run(run, tmp_path, monkeypatch, capfd):
    """Only the report of a run without a state is read, to say why it is not resumed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / 'quantize', tmp_path / 'exp')
    (tmp_path / 'exp' / STATE).unlink()
    content = json.loads((tmp_path / 'exp/report.json').read_text())
    for name, text in spoilt(content, PARTS['a run']).items():
        (tmp_path / 'exp/report.json').write_text(text)
        code, line = answer('qat.py', ('quantize', '--resume', tmp_path / 'exp'), capfd, tmp_path, allowed=(2,))
        assert code and f'--resume {tmp_path}/exp' in line, (name, line)


@pytest.mark.faults
def test_summary_of_a_sensitivity_analysis(small, run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    content = json.loads((run / 'sensitive/summary-sensitive-analysis.json').read_text())
    for name, text in spoilt(content, PARTS['a summary']).items():
        (tmp_path / 'summary.json').write_text(text)
        argv = (
            'quantize',
            '--dry-run',
            '--weights',
            small.single,
            '--sensitive',
            tmp_path / 'summary.json',
            '--keep-float',
            1,
        )
        code, line = answer('qat.py', argv, capfd, tmp_path)
        assert code == 0 or 'summary.json' in line, (name, line)


@pytest.mark.faults
def test_layers_of_an_engine(tmp_path, monkeypatch, capfd, graphviz):
    """As layers and as their times. What is left of them is drawn where pygraphviz is installed."""
    monkeypatch.chdir(tmp_path)
    tensor = {'Name': 'x', 'Dimensions': [1, 3, 8, 8], 'Format/Datatype': 'Row major linear FP32'}
    content = {
        'Layers': [{'Name': 'a', 'LayerType': 'Convolution', 'Inputs': [tensor], 'Outputs': [{**tensor, 'Name': 'y'}]}],
        'Bindings': ['x', 'y'],
    }
    for name, text in spoilt(content, PARTS['layers']).items():
        for argv in (
            ('--layer', tmp_path / 'spoilt.json'),
            ('--layer', tmp_path / 'good.json', '--profile', tmp_path / 'spoilt.json'),
        ):
            (tmp_path / 'good.json').write_text(json.dumps(content))
            (tmp_path / 'spoilt.json').write_text(text)
            code, line = answer('scripts/draw_engine.py', argv, capfd, tmp_path)
            assert code == 0 or 'spoilt.json' in line, (name, line)
            for suffix in 'csv', 'dot', 'svg', 'png':
                for stem in 'spoilt', 'good':
                    (tmp_path / f'{stem}.{suffix}').unlink(missing_ok=True)
