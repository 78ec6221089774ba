"""Laws of checkpoints: a saved model computes the same in any process; other files are refused, never executed."""

import pickle

import pytest
import torch
from helpers.faults import archive
from helpers.fresh import fresh
from helpers.zoo import (
    SMALL,
    calibrated,
    image,
    load_any,
    load_float,
    load_quantized,
    output,
    same,
    single,
    state,
)

from models.quantize import blocks
from models.quantize.blocks import is_quantized
from models.quantize.checkpoint import CheckpointFile, save_model
from models.quantize.quantizers import Quantizer, SiLUQuantizer
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.untrusted.torch_archive import read_archive

ACTIVATION_TWINS = {
    f'models.quantize.blocks.Quant{name}'
    for name in 'SiLU ReLU ReLU6 LeakyReLU PReLU ELU CELU SELU GELU Mish Hardswish Softplus Hardsigmoid Sigmoid Tanh'.split()
}
FROZEN = {
    'models.quantize.quantizers.Quantizer',
    'models.quantize.quantizers.SiLUQuantizer',
    *ACTIVATION_TWINS,
    *(
        f'models.quantize.blocks.{name}'
        for name in ('QuantConv2d', 'QuantBottleneck', 'QuantRepNBottleneck', 'QuantAConv', 'QuantADown', 'QuantCBFuse')
    ),
}

RELOAD = """
import sys, torch
torch.set_num_threads(1)
images = torch.load(sys.argv[2])
if sys.argv[4] == 'ours':
    from models.quantize.checkpoint import CheckpointFile
    model = CheckpointFile(sys.argv[1]).load_quantized()[0]
else:
    from models.experimental import attempt_load
    model = attempt_load(sys.argv[1], device='cpu')
def tensors(part):
    return [part] if isinstance(part, torch.Tensor) else [t for each in part for t in tensors(each)]
with torch.no_grad():
    torch.save(tensors(model(images)), sys.argv[3])
"""


# ---- what is saved ------------------------------------------------------------------------------------------------------


def in_a_fresh_process(file, images, folder, loader='ours'):
    """The output for `images` of a quantized checkpoint in a process of its own."""
    torch.save(images, folder / 'images.pt')
    fresh('-c', RELOAD, file, folder / 'images.pt', folder / 'out.pt', loader)
    return torch.load(folder / 'out.pt')


@pytest.mark.parametrize('files, loader', [('small', 'ours'), ('small', 'upstream'), ('demo_seg', 'ours')])
def test_a_fresh_process_computes_the_same(request, files, loader, tmp_path):
    files, images = request.getfixturevalue(files), image(96, 2)
    expected = output(files.quantized_model(), images)
    assert same(in_a_fresh_process(files.quantized, images, tmp_path, loader), expected)
    assert not same(output(files.float_model(), images)[0], expected[0]), 'it is quantized'


def test_class_paths_are_a_file_format(demo):
    """People have files with these names on disk. Add to this set; never change it."""
    ours = {name for name in read_archive(demo.quantized).names if name.startswith(('models.quantize', 'utils.qat'))}
    others = {'blocks.QuantBottleneck', 'quantizers.SiLUQuantizer'}
    assert ours == FROZEN - {f'models.quantize.{name}' for name in others} - ACTIVATION_TWINS, (
        'no Bottleneck in the demo; activation functions for ONNX Runtime'
    )
    classes = {*blocks.TWINS.values(), *blocks.ACTIVATIONS.values(), Quantizer, SiLUQuantizer}
    assert {f'{c.__module__}.{c.__qualname__}' for c in classes} == FROZEN
    assert not [name for name in read_archive(demo.quantized).names if name.startswith('pytorch_quantization')]


@torch.no_grad()
@pytest.mark.parametrize('activation', ['nn.ReLU(inplace=True)', 'nn.LeakyReLU(0.2)', 'nn.PReLU()', 'nn.Softplus(2)'])
def test_a_model_for_onnxruntime_is_read_again(tmp_path, activation):
    model = single('demo', **SMALL, activation=activation)
    calibrated(model, [image(batch=2)], load_target('onnxruntime'), tie=False)
    path = tmp_path / 'model.pt'
    save_model(path, model, {'target': 'onnxruntime'}, '0' * 64)
    again, _ = load_quantized(path)
    assert same(state(again), state(model)) and any(
        v.any() for k, v in state(again).items() if k.endswith('_zero_point')
    )
    assert same(output(again, image(96, 2)), output(model, image(96, 2)))


def test_saving_changes_neither_the_model_nor_its_output(small, tmp_path):
    model = small.quantized_model().train().requires_grad_(True)
    before, flags = (
        state(model),
        [(m.training, *(p.requires_grad for p in m.parameters(False))) for m in model.modules()],
    )
    save_model(tmp_path / 'new.pt', model, {}, sha256(small.single))
    assert same(state(model), before)
    assert [(m.training, *(p.requires_grad for p in m.parameters(False))) for m in model.modules()] == flags
    again, _ = load_quantized(tmp_path / 'new.pt')
    assert same(state(again), before) and not again.training and not [p for p in again.parameters() if p.requires_grad]
    assert all(t.dtype == torch.float32 for t in state(again).values() if t.is_floating_point())
    assert [p.name for p in tmp_path.iterdir()] == ['new.pt']


def test_provenance(small):
    _, quant = load_quantized(small.quantized)
    assert quant['source_sha256'] == sha256(small.single) and quant['recipe'] == {'imgsz': [128, 128]}
    assert set(quant['versions']) >= {'python', 'torch', 'pytorch-quantization'}


def test_names_and_stride_come_along(small):
    ours, theirs = small.quantized_model(), small.float_model()
    assert ours.names == theirs.names and list(ours.names) == list(range(10))
    assert torch.equal(ours.stride, theirs.stride) and ours.stride.tolist() == [8, 16, 32] and ours.yaml == theirs.yaml


def test_a_failed_save_leaves_the_old_file(small, tmp_path):
    (tmp_path / 'new.pt').write_bytes(b'the old one')
    model = small.quantized_model()
    model.cannot_be_pickled = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_model(tmp_path / 'new.pt', model, {}, sha256(small.single))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'new.pt': b'the old one'}


# ---- what is loaded -----------------------------------------------------------------------------------------------------


def test_kinds(small):
    assert [CheckpointFile(f).kind for f in (small.dual, small.single, small.quantized)] == [
        'float',
        'float',
        'quantized',
    ]
    (ours, quant), (theirs, none) = load_any(small.quantized), load_any(small.single)
    assert is_quantized(ours) and quant and not is_quantized(theirs) and none is None


def test_ema_goes_first(small, tmp_path):
    ckpt = torch.load(small.single, weights_only=False)
    other = torch.load(small.single, weights_only=False)['model']
    for p in other.parameters():
        p.data.zero_()
    torch.save({**ckpt, 'model': other, 'ema': ckpt['model']}, tmp_path / 'both.pt')
    assert same(output(load_float(tmp_path / 'both.pt'), image()), output(load_float(small.single), image()))


def pickle_of(*names):
    """Bytes of a pickle (as torch.save writes them, protocol 2) that refers to classes which need not exist."""
    parts = [n.rsplit('.', 1) for n in names]
    return b'\x80\x02' + b''.join(f'c{module}\n{cls}\n0'.encode() for module, cls in parts) + b'}.'


def written(path, pickled):
    path.write_bytes(archive({'archive/data.pkl': pickled, 'archive/version': '3\n'}))
    return path


def test_a_peer_is_recognized_by_its_class_names(tmp_path):
    for names in (
        ['models.yolo.DetectionModel', 'pytorch_quantization.nn.modules.quant_conv.QuantConv2d'],
        ['models.yolo.DetectionModel', 'models.quantize.QuantADown'],
        ['models.quantize_rules.Anything'],
    ):
        file = written(tmp_path / 'peer.pt', pickle_of(*names))
        assert read_archive(file).names == set(names) and CheckpointFile(file).kind == 'foreign'


def test_a_float_checkpoint_is_not_taken_for_a_quantized_one(small):
    for file in (small.dual, small.single):
        with pytest.raises(QatError, match=f'^--weights {file}: is not quantized.*python qat.py quantize'):
            load_quantized(file)


def test_another_format_is_refused(small, tmp_path):
    ckpt = torch.load(small.quantized, weights_only=False)
    for quant in ({**ckpt['quant'], 'format': 1}, None):
        torch.save({**ckpt, 'quant': quant}, tmp_path / 'new.pt')
        with pytest.raises(QatError, match=f'new.pt: quantized checkpoint of format {1 if quant else None}'):
            load_quantized(tmp_path / 'new.pt')
