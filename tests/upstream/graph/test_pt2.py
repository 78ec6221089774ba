"""Laws of .pt2 files: an exported program computes what PyTorch computes, and a package of AOTInductor what it was compiled of.

Compiling takes half a minute, so one small package of each kind is compiled, with --faults.
"""

import importlib.util
import json
import os
import shutil

import pytest
import torch
from helpers.faults import answer, archive, members
from helpers.fresh import fresh
from helpers.segmenters import segmenter
from helpers.zoo import FLIPS, calibrated, command, deployed, image, program, python, same, share_of_float

from models.deploy.agreement import made_images, output_differences, traceable_copy
from models.deploy.decomposed import on_integers
from models.deploy.formats.onnx import input_metadata
from models.quantize.blocks import QuantConv2d
from models.quantize.calibration.calibrate import calibrate_weights
from models.quantize.quantizers import named_quantizers
from utils.qat.config.tables import TARGETS, load_target
from utils.qat.core import machine
from utils.qat.core.errors import QatError
from utils.qat.core.machine import int8_sums_overflow
from utils.qat.graph.padding import PADDED
from utils.qat.untrusted.program_archive import read_program
from utils.qat.vendors.load import open_file
from utils.qat.vendors.pytorch.pt2 import ExportedProgram
from utils.qat.vendors.pytorch.write_aoti import require_compiler, sums_fit

SIDE = 64


def of_packages(test):
    """Marks a test that compiles."""
    for needs, there in (('g++', shutil.which('g++')), ('torchao', importlib.util.find_spec('torchao'))):
        test = pytest.mark.skipif(not there, reason=f'no {needs}')(test)
    return pytest.mark.faults(test)


def outputs(file, images):
    """The outputs of a .pt2 file, as a tuple."""
    found = open_file(file)(images)
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    """Folder with float.{pt,pt2} and int8.{pt,pt2}; the second takes any batch."""
    folder = tmp_path_factory.mktemp('pt2')
    shutil.copy(small.single, folder / 'float.pt')
    shutil.copy(small.quantized, folder / 'int8.pt')
    command('export_qat.py', '--weights', folder / 'float.pt', '--include', 'pt2', '--imgsz', SIDE)
    command('export_qat.py', '--weights', folder / 'int8.pt', '--include', 'pt2', 'onnx', '--imgsz', SIDE, '--dynamic')
    return folder


# ---- exported programs ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize('target', TARGETS)
def test_integers_have_the_values_of_the_fake_quantizers(small, target):
    model = small.float_model()
    images = made_images(2, (SIDE, SIDE))
    calibrated(model, [images], load_target(target))
    model = traceable_copy(model)
    for unsigned in (False, True):
        integers = on_integers(model, unsigned)
        assert same(integers(images), model(images))
        assert all(m.weight is None for m in integers.modules() if isinstance(m, QuantConv2d))
    before = model(images)
    named_quantizers(model)[0][1].disable()
    assert same(on_integers(model)(images), model(images)) and not same(model(images), before), 'off stays off'


@torch.no_grad()
def test_a_program_computes_what_pytorch_computes(small, files):
    images = image(SIDE, batch=16)
    floating, int8 = (traceable_copy(model)(images) for model in (small.float_model(), small.quantized_model()))
    assert torch.allclose(*outputs(files / 'float.pt2', images), floating, rtol=1e-4, atol=1e-3)
    for batch in (1, 16):
        found = torch.cat([*map(open_file(files / 'int8.pt2'), images.split(batch))])
        assert share_of_float(found, int8, floating) < FLIPS


@torch.no_grad()
def test_a_program_has_masks(tmp_path):
    model = segmenter(quantized=True)
    deployed('pt2', model, tmp_path / 'masks.pt2', imgsz=(SIDE, SIDE))
    images = made_images(1, (SIDE, SIDE))
    found, theirs = outputs(tmp_path / 'masks.pt2', images), traceable_copy(model)(images)
    assert len(found) == 2 and [f.shape for f in found] == [t.shape for t in theirs]
    assert read_program(tmp_path / 'masks.pt2')[1]['task'] == 'segment'


def test_half_is_near_the_float_program(small, tmp_path):
    model, images = small.float_model(), made_images(1, (SIDE, SIDE))
    deployed('pt2', model, tmp_path / 'half.pt2', imgsz=(SIDE, SIDE), half=True)
    (found,) = outputs(tmp_path / 'half.pt2', images)
    assert 0 < output_differences(found, traceable_copy(model)(images))['boxes'] < 5e-3
    session = ExportedProgram(tmp_path / 'half.pt2', torch.device('cpu'))
    assert session.metadata['precision'] == 'FP16' and session.signature().inputs == {'images': (1, 3, SIDE, SIDE)}
    assert {p.dtype for p in session.program.parameters()} == {torch.float16}


def test_a_fresh_process_computes_the_same(files):
    text = (
        'import torch, sys; from pathlib import Path; from utils.qat.vendors.load import open_file; '
        'from models.deploy.agreement import made_images; '
        f'print(open_file(Path(sys.argv[1]))(made_images(1, ({SIDE}, {SIDE}))).double().sum().item())'
    )
    here = open_file(files / 'int8.pt2')(made_images(1, (SIDE, SIDE))).double().sum().item()
    assert float(fresh('-c', text, files / 'int8.pt2').split()[-1]) == here


def test_the_metadata_are_those_of_the_onnx_file(files):
    import onnx

    theirs = {p.key: p.value for p in onnx.load(files / 'int8.onnx').metadata_props}
    for key in ('simulated_in', PADDED, *input_metadata(1, (SIDE, SIDE), False)):  # for readers of ONNX files
        del theirs[key]
    ours = read_program(files / 'int8.pt2')[1]
    assert {k: ours[k] for k in theirs} == theirs
    assert ours['imgsz'] == f'{SIDE},{SIDE}' and ours['batch'] == 'dynamic' and ours['precision'] == 'INT8 and FP32'
    assert str(files.parent) not in json.dumps(ours)


def test_the_archive_names_no_file_of_this_machine(files):
    [graph] = [part for name, part in members((files / 'int8.pt2').read_bytes()).items() if name.endswith('model.json')]
    assert b'.py' not in graph


@pytest.mark.parametrize('words, says', [(('--imgsz', 128), 'takes 64 x 64'), (('--backend', 'aoti'), 'for')])
def test_what_does_not_fit_is_refused_in_one_line(words, says, files, small, tmp_path):
    given = '--weights', files / 'int8.pt2', '--data', small.data, '--device', 'cpu', '--project', tmp_path
    assert says in command('val_trt.py', *given, '--imgsz', SIDE, *words, code=2).splitlines()[-1]


# ---- packages -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def packages(small, tmp_path_factory):
    """Folder with float-aoti.pt2 and, where the CPU can, int8-aoti.pt2, of batch 1."""
    folder = tmp_path_factory.mktemp('aoti')
    for name, checkpoint in (('float', small.single), ('int8', small.quantized))[: 1 if int8_sums_overflow() else 2]:
        shutil.copy(checkpoint, folder / f'{name}.pt')
        command('export_qat.py', '--weights', folder / f'{name}.pt', '--include', 'aoti', '--imgsz', SIDE)
    return folder


def with_metadata(file, new, **changes):
    """Write a copy of a package with other metadata."""
    parts = members(file.read_bytes())
    for name in parts:
        if name.endswith('_metadata.json'):
            parts[name] = json.dumps({**json.loads(parts[name]), **changes})
    new.write_bytes(archive(parts))
    return new


@of_packages
@pytest.mark.skipif(int8_sums_overflow(), reason='AOTInductor has no INT8 on a CPU without VNNI')
def test_a_package_computes_in_integers(small, packages):
    from utils.qat.vendors.pytorch.aoti import AotPackage, compiled_layers

    model = small.quantized_model()
    quantized = sum(isinstance(m, QuantConv2d) for m in model.modules())
    convs = sum(isinstance(m, torch.nn.Conv2d) for m in model.modules())
    assert compiled_layers(packages / 'int8-aoti.pt2') == (quantized, convs)
    assert compiled_layers(packages / 'float-aoti.pt2') == (0, convs)
    session = AotPackage(packages / 'int8-aoti.pt2', torch.device('cpu'))
    assert session.notes == [f'INT8: {quantized} of {convs} convolutions ({convs - quantized} float by design)']
    assert dict(session.loader.get_metadata())['imgsz'] == f'{SIDE},{SIDE}'


@of_packages
def test_a_package_of_another_machine_is_refused(packages, tmp_path):
    from utils.qat.vendors.pytorch.aoti import AotPackage

    good = packages / 'float-aoti.pt2'
    for changes, said in (
        ({'device': 'cuda'}, 'was compiled for cuda'),
        ({'torch': '2.4.0'}, 'by PyTorch 2.4.0'),
        ({'cpu': 'avx2 amx_of_tomorrow'}, 'another CPU, with amx_of_tomorrow'),
        ({'imgsz': 'large'}, 'do not tell batch and image size'),
    ):
        with pytest.raises(QatError, match=said):
            AotPackage(with_metadata(good, tmp_path / 'other.pt2', **changes), torch.device('cpu'))
    whole = good.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / 'cut.pt2').write_bytes(whole[:cut])
        with pytest.raises(QatError, match='cut short'):
            AotPackage(tmp_path / 'cut.pt2', torch.device('cpu'))


@pytest.mark.parametrize(
    'device, quantized, half, says',
    [
        ('mps', False, False, 'this is --device mps'),
        ('cpu', False, True, '--half: .* for GPUs only'),
        ('cuda', True, False, 'no INT8 convolutions for GPUs'),
        ('cpu', False, False, r'no C\+\+ compiler'),
    ],
)
def test_what_cannot_be_compiled_is_refused(device, quantized, half, says, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(QatError, match=says):
        require_compiler(torch.device(device), quantized, half)


@pytest.mark.parametrize(
    'flags, reduced, says',
    [
        (['avx2', 'avx512f'], False, 'no VNNI'),
        (['avx2', 'avx512f'], True, 'compiler'),
        (['avx2', 'avx_vnni'], False, 'compiler'),
        ([], False, 'compiler'),
    ],
)
def test_int8_is_refused_where_its_sums_overflow(small, flags, reduced, says, monkeypatch, tmp_path):
    model = small.quantized_model()
    calibrate_weights(model, reduced)
    monkeypatch.setattr(machine, 'instruction_flags', lambda: flags)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(QatError, match=says):
        require_compiler(torch.device('cpu'), True, False, sums_fit(model))


def test_int8_needs_torchao(small, tmp_path, capfd, monkeypatch):
    import sys

    monkeypatch.setattr(machine, 'instruction_flags', lambda: ['avx2', 'avx_vnni'])
    monkeypatch.setitem(sys.modules, 'torchao', None)
    shutil.copy(small.quantized, tmp_path / 'int8.pt')
    monkeypatch.delitem(sys.modules, program('export_qat.py').__name__, raising=False)
    code, line = answer(
        'export_qat.py', ('--weights', tmp_path / 'int8.pt', '--include', 'aoti', '--imgsz', SIDE), capfd, tmp_path
    )
    assert code == 2 and ('torchao' in line or 'compiler' in line)


COMPILER = """#!/bin/sh
case " $* " in *" -shared "*) exec g++ "$@" {source};; esac
exec g++ "$@"
"""


@pytest.mark.faults
def test_a_package_that_crashes_is_an_error(small, tmp_path):
    """A compiler brings a library into the package that ends the process; the process of the export goes on."""
    source, compiler = tmp_path / 'library.cpp', tmp_path / 'g++'
    source.write_text('#include <csignal>\nstatic int crash = std::raise(SIGSEGV);\n')
    compiler.write_text(COMPILER.format(source=source))
    compiler.chmod(0o755)
    shutil.copy(small.single, tmp_path / 'float.pt')
    arguments = ('--weights', tmp_path / 'float.pt', '--include', 'aoti', '--imgsz', SIDE)
    variables = {
        'CXX': str(compiler),
        'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache'),
    }  # read when PyTorch is imported
    said = python('export_qat.py', *arguments, code=2, env={**os.environ, **variables})
    assert 'signal 11' in said and f'compiler {compiler}' in said
    assert not list(tmp_path.glob('*.pt2'))
