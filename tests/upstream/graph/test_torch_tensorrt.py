"""Laws of the program for Torch-TensorRT: the Q/DQ of the ONNX file, the scales of the quantizers, the outputs of the model.

TensorRT itself needs a GPU: row `torch_tensorrt` of scripts/verify_tensorrt.sh.
"""

import importlib
import io
import json
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from helpers.faults import sampled
from helpers.zoo import command, deployed, reading_parts

from models.deploy.agreement import made_images, output_differences, traceable_copy
from models.deploy.formats.format import Export
from models.deploy.formats.onnx import export_onnx
from models.deploy.load import load_format
from models.quantize.quantizers import QMAX, QMIN, named_quantizers
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig
from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import constants, count_qdq
from utils.qat.vendors.tensorrt import write as torch_tensorrt
from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar, require_fit, sidecar_of
from utils.qat.vendors.tensorrt.quantize_op import amax_of, quantize_op_program
from utils.qat.vendors.tensorrt.write import compile_settings, write_engine

SIDE = 64, 96
RECORDED = json.loads((Path(__file__).parents[2] / 'data' / 'torch_tensorrt_api.json').read_text(encoding='utf-8'))
SCHEMA = '(Tensor input, Tensor amax, int num_bits, int exponent_bits, bool unsigned, bool narrow_range) -> Tensor'


@pytest.fixture(scope='module', autouse=True)
def quantize_op():
    """The operator as ModelOpt 0.47.0 defines it, with PyTorch's arithmetic. ModelOpt's own kernel is CUDA."""
    library = torch.library.Library('tensorrt', 'FRAGMENT')
    library.define(f'quantize_op{SCHEMA}')

    def compute(x, amax, num_bits, exponent_bits, unsigned, narrow_range):
        assert (num_bits, exponent_bits, unsigned, narrow_range) == (8, 0, False, False)
        if amax.numel() == 1 and not amax.dim():
            return torch.fake_quantize_per_tensor_affine(x, (amax / QMAX).item(), 0, QMIN, QMAX)
        zeros = torch.zeros(amax.numel(), dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, (amax / QMAX).flatten(), zeros, 0, QMIN, QMAX)

    library.impl('quantize_op', compute, 'CPU')
    library._register_fake('quantize_op', lambda x, *_: torch.empty_like(x))
    yield
    library._destroy()


def quantize_ops(program):
    return [n for n in program.graph.nodes if str(n.target).startswith('tensorrt.quantize_op')]


def scales_of(program):
    return Counter((amax_of(program, n) / QMAX).numpy().tobytes() for n in quantize_ops(program))


def scales_in_file(file):
    graph = onnx.load(file)
    values = constants(graph)
    return Counter(
        np.asarray(values[n.input[1]], np.float32).tobytes() for n in graph.graph.node if n.op_type == 'QuantizeLinear'
    )


def agrees(ours, theirs):
    figures = output_differences(ours, theirs)
    return max(figures.values()) < 1e-3


@pytest.mark.parametrize('files', sampled(['small', 'demo_seg'], 2))
def test_the_program_has_the_qdq_of_the_onnx_file_and_computes_the_model(request, files, tmp_path):
    model = request.getfixturevalue(files).quantized_model()
    with reading_parts:
        done = export_onnx(model, tmp_path / 'model.onnx', imgsz=SIDE, int8_weights=False)
    program = quantize_op_program(model, SIDE)
    nodes = quantize_ops(program)
    assert len(nodes) == done.qdq[0] == done.qdq[1]
    assert scales_of(program) == scales_in_file(tmp_path / 'model.onnx')
    assert {q.scale.numpy().tobytes() for _, q in named_quantizers(model)} == set(scales_of(program))
    weights = 0
    for node in nodes:  # as torch_tensorrt's converter takes them: dynamo/conversion/impl/quantize.py
        given, amax = node.args[0].meta['val'], node.args[1].meta['val']
        assert tuple(node.args[2:]) == (8, 0, False, False) and amax.dtype == torch.float32
        if node.args[0].op == 'placeholder' and given.dim() == 4 and node.args[0].name != 'images':
            assert tuple(amax.shape) == (given.shape[0], 1, 1, 1)
            weights += 1
        else:
            assert amax.shape == ()
    assert weights == len([m for m in model.modules() if hasattr(m, 'weight_quantizer')])
    assert [n.name for n in program.graph.nodes if n.op == 'placeholder'][-1] == 'images'  # the engine's input

    images = made_images(1, SIDE)
    with torch.no_grad():
        theirs = traceable_copy(model)(images)
        assert agrees(program.module()(images), theirs)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    again = torch.export.load(buffer)
    assert scales_of(again) == scales_of(program)
    with torch.no_grad():
        assert agrees(again.module()(images), theirs)


@pytest.mark.parametrize('kind, options', [('quantized', {'batch': 4, 'dynamic': True}), ('float', {})])
def test_an_open_batch_and_a_float_model(small, kind, options):
    model = small.quantized_model() if kind == 'quantized' else small.float_model()
    program = quantize_op_program(model, SIDE, **options)
    assert bool(quantize_ops(program)) == (kind == 'quantized')
    with torch.no_grad():
        for batch in (1, 3, 4) if options else (1,):
            images = made_images(batch, SIDE)
            assert agrees(program.module()(images), traceable_copy(model)(images))


@pytest.mark.parametrize('files', sampled(['small', 'demo_seg'], 2))
def test_fp16_ends_where_the_decoding_begins(request, files, tmp_path):
    model = request.getfixturevalue(files).quantized_model()
    program = quantize_op_program(model, SIDE, half=True)
    convs = [n for n in program.graph.nodes if n.target is torch.ops.aten.conv2d.default]
    floats = [n for n in convs if n.meta['val'].dtype == torch.float32]
    assert len(convs) == len([m for m in model.modules() if isinstance(m, torch.nn.Conv2d)])
    assert len(floats) == 1, 'the DFL'
    assert all(n.meta['val'].dtype == torch.float16 for n in quantize_ops(program))
    (returned,) = [n for n in program.graph.nodes if n.op == 'output']
    assert {n.meta['val'].dtype for n in returned.all_input_nodes} == {torch.float32}
    assert len(quantize_ops(program)) == len(quantize_ops(quantize_op_program(model, SIDE)))
    with reading_parts:
        export_onnx(model, tmp_path / 'model.onnx', imgsz=SIDE, int8_weights=False)
    assert len(quantize_ops(program)) == count_qdq(onnx.load(tmp_path / 'model.onnx'))[0]


# ---- the calls --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('version', [v for v in RECORDED if v != 'source'])
def test_torch_tensorrt_has_every_argument(version):
    # unknown arguments are swallowed there (**kwargs), so a wrong name would go unnoticed
    tt, shapes = SimpleNamespace(Input=dict), ((1, 3, 64, 64), (8, 3, 64, 64))
    settings = compile_settings(tt, torch.device('cpu'), *shapes, 1, Path('model.ep'))
    for function in ('compile', 'convert_exported_program_to_serialized_trt_engine'):
        assert set(settings) <= set(RECORDED[version][function])
    assert {'require_full_compilation', 'min_block_size'} <= set(RECORDED[version]['compile'])
    assert {'module', 'file_path', 'output_format', 'arg_inputs'} <= set(RECORDED[version]['save'])
    assert settings['workspace_size'] == 2**20
    (images,) = settings['arg_inputs']
    assert images['min_shape'] == (1, 3, 64, 64) and images['max_shape'] == images['opt_shape'] == (8, 3, 64, 64)


def test_the_engine_appears_with_its_sidecar_or_not_at_all(tmp_path):
    engine = tmp_path / 'model-torch_tensorrt.engine'
    inputs = {'images': {name: [1, 3, 64, 64] for name in ('min', 'opt', 'max')}}
    entries = {'weights': 'model.pt', 'workspace_mib': 1, 'inputs': inputs, 'metadata': {'stride': '32'}}

    def refuse(_):
        raise QatError('other outputs')

    with pytest.raises(QatError, match='other outputs'):
        write_engine(engine, b'plan', 'TensorRT 11.1.0', refuse, **entries)
    assert not list(tmp_path.iterdir())
    write_engine(
        engine,
        b'plan',
        'TensorRT 11.1.0',
        lambda file: require_fit(file, read_sidecar(file), 'TensorRT 11.1.0', None),
        **entries,
    )
    assert {p.name for p in tmp_path.iterdir()} == {engine.name, sidecar_of(engine).name}
    with pytest.raises(QatError, match=r'--weights model\.pt --include torch_tensorrt'):
        require_fit(engine, read_sidecar(engine), 'TensorRT 11.2.0', None)


def test_the_sidecar_names_the_target_and_a_refusal_writes_nothing(small, tmp_path, monkeypatch):
    model = small.quantized_model()
    tt = SimpleNamespace(
        Input=dict,
        __version__='2.14.0',
        dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=lambda *_, **__: b'plan'),
    )
    monkeypatch.setattr(torch_tensorrt, 'load_torch_tensorrt', lambda device: tt)
    monkeypatch.setattr(torch_tensorrt, 'product', lambda trt: 'TensorRT 11.1.0')
    monkeypatch.setattr(torch_tensorrt, 'load_tensorrt', lambda: None)
    monkeypatch.setattr(torch_tensorrt, 'open_file', lambda *_: traceable_copy(model))
    recipe = {'target': 'openvino', 'kept_float': ['model.3']}
    options = {'formats': ('engine',), 'dtype': 'fp32', 'imgsz': SIDE, **recipe}
    written = deployed('torch_tensorrt', model, tmp_path / 'model.ep', **options)
    engine = tmp_path / 'model-torch_tensorrt.engine'
    metadata = read_sidecar(engine)['metadata']
    assert metadata['target'] == 'openvino' and metadata['kept_float'] == "['model.3']"
    [following] = torch_tensorrt.FORMAT.next_commands(None, written, 'd.yaml')
    assert f'--engine-file {engine} --data d.yaml' in following

    def refuse(*_, **__):
        raise RuntimeError('no such layer')

    tt.dynamo.convert_exported_program_to_serialized_trt_engine = refuse
    with pytest.raises(QatError, match=r'2.14.0 did not take the model \(no such layer\); no file'):
        deployed('torch_tensorrt', model, tmp_path / 'other.ep', **options)
    assert not list(tmp_path.glob('other*'))


@pytest.mark.parametrize(
    'device, content, says',
    [
        ('cpu', '', 'needs an NVIDIA GPU, and this is --device cpu'),
        ('cuda', 'raise OSError("libnvinfer.so.10: cannot open")', r'cannot be loaded here \(OSError: libnvinfer'),
        ('cuda', '__version__ = "2.9.1"', '2.9.1 is installed; at least 2.10 is needed'),
        ('cuda', '__version__ = "2.10.0"', 'nvcc'),
    ],
)
def test_an_installation_that_does_not_work_says_what_to_do(tmp_path, monkeypatch, device, content, says):
    packages = {'torch_tensorrt': content, 'huggingface_hub': ''}
    modelopt = 'modelopt', 'modelopt.torch', 'modelopt.torch.quantization', 'modelopt.torch.quantization.extensions'
    packages |= {**dict.fromkeys(modelopt, ''), modelopt[-1]: 'get_cuda_ext = lambda: None'}
    for name, text in packages.items():
        file = tmp_path.joinpath(*name.split('.'), '__init__.py')
        file.parent.mkdir()
        file.write_text(text)
        monkeypatch.setitem(sys.modules, name, None)  # so that it is gone after the test
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    with pytest.raises(QatError, match=f'--include torch_tensorrt: .*{says}'):
        torch_tensorrt.load_torch_tensorrt(torch.device(device))


@pytest.mark.parametrize(
    'installed, wanted', [('2.9.1', '2.10'), ('2.10.0+cu130', '2.10'), ('2.14.1', '2.14'), ('2.15.0', '2.14')]
)
def test_the_named_torch_tensorrt_exists(installed, wanted):
    said = torch_tensorrt.how_to_get(installed)
    assert f"'torch-tensorrt=={wanted}.*'" in said
    assert (f'brings torch {wanted}' in said) != installed.startswith(f'{wanted}.'), 'another torch is said'


@pytest.mark.skipif(find_spec('torch_tensorrt') is not None, reason='torch_tensorrt is installed')
def test_without_torch_tensorrt(small):
    said = command('export_qat.py', '--weights', small.quantized, '--include', 'torch_tensorrt', code=2)
    assert 'no package torch_tensorrt' in said and 'pip install' in said
    assert not list(small.quantized.parent.glob('*.ep'))


@pytest.mark.parametrize(
    'options, message',
    [
        ({'include': ('torch_tensorrt',), 'dynamic': True}, '--batch-size'),
        ({'include': ('torch_tensorrt',), 'verify': Path('data.yaml')}, 'val_trt.py'),
        ({'include': ('torch_tensorrt',), 'half': True}, '--dtype'),
    ],
)
def test_options_that_do_not_fit(small, options, message):
    with pytest.raises(QatError) as error:
        config = ExportConfig(weights=Path('model.pt'), **options)
        export = Export(config, TorchModel(small.quantized_model()), list(map(load_format, config.include)))
        for each in export.formats:
            each.require(export)
    assert message in str(error.value)
