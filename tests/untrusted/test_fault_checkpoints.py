"""Damaged, foreign or hostile checkpoints: each command gives one line, leaves no file and runs no code of the data."""

import argparse
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import REPO
from faults import TIMES, answer, damaged, pickle_in, sampled, with_pickle
from models.common import Conv, DetectMultiBackend
from models.yolo import DetectionModel
from zoo import build, full, image, load_dual_or_float, load_float, load_quantized, output, same

from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import read_pickle

COMMANDS = {  # each takes FILE; OTHER is data of another number of classes, so that what does load does not go on for long
    'qat.py quantize': ('quantize', '--dry-run', '--weights', 'FILE'),
    'qat.py sensitive': (
        'sensitive',
        '--weights',
        'FILE',
        '--data',
        'OTHER',
        '--project',
        'OUT',
        '--device',
        'cpu',
        '--imgsz',
        64,
    ),
    'qat.py eval': (
        'eval',
        '--weights',
        'FILE',
        '--data',
        'OTHER',
        '--project',
        'OUT',
        '--device',
        'cpu',
        '--imgsz',
        64,
    ),
    'reparameterization.py': ('--weights', 'FILE', '--save', 'OUT/saved.pt'),
    'export_qat.py': ('--weights', 'FILE', '--imgsz', 64, '--verify', 'OTHER'),
    'export_yoloV9.py': ('--weights', 'FILE', '--size', 64),
    'benchmark_trt.py': (
        'FILE',
        '--imgsz',
        64,
        '--batch',
        1,
        '--duration',
        0.01,
        '--device',
        'cpu',
        '--project',
        'OUT',
    ),
    'compare_outputs.py': ('FILE', 'SINGLE', '--random', 1, '--imgsz', 64, '--device', 'cpu', '--project', 'OUT'),
}


class Call:
    """Is pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(sprung):
    """name → (object, bytes of a pickle): of each, one is None. Loaded by pickle, they make the file `sprung`, or call what has no place in a
    checkpoint."""
    touch = f'touch {sprung}'
    evil = {
        **yaml.safe_load((REPO / 'demo/yolov9-demo.yaml').read_text()),
        'activation': f"__import__('os').system('{touch}')",
    }
    begin = b'\x80\x02cmodels.yolo\nDetectionModel\n0'  # so that it looks like a checkpoint
    objects = {
        'os.system': Call(os.system, touch),
        'eval': Call(eval, f"__import__('os').system('{touch}')"),
        'exec': Call(exec, f"import os; os.system('{touch}')"),
        'open': Call(open, str(sprung), 'w'),
        'getattr of a module': Call(getattr, Call(__import__, 'os'), 'system'),
        'an import': Call(__import__, 'antigravity'),
        'a function of PyTorch': Call(torch.hub.load, 'a/b', 'c'),
        'one that loads': Call(torch.jit.load, str(sprung)),
        'a function of the tree': Call(sha256, str(sprung)),
        "a model's constructor, which evals": Call(DetectionModel, evil),
        'a constructor that loads files': Call(DetectMultiBackend, str(sprung)),
        "a layer's constructor": Call(Conv, 3, 8),
    }
    pickles = {
        'an instance as of protocol 0': begin + f"(S'{touch}'\nios\nsystem\n.".encode(),
        'an object as of protocol 1': begin + f"(cos\nsystem\nS'{touch}'\no.".encode(),
        'a name with dots': begin + '\x8c\x08torch.nn\x8c\x0fmodules.conv.os\x93.'.encode('latin1'),
        'names of protocol 4': begin + pickle.dumps(Call(os.system, touch), 4),
        'an extension': begin + b'\x82\x01.',
        'a jump out of the stack': begin + b'R.',
        'no end': begin + b'}' * 40,
    }
    return {
        **{name: (thing, None) for name, thing in objects.items()},
        **{name: (None, bytes_) for name, bytes_ in pickles.items()},
    }


def foreign(small):
    """name → what is saved: no checkpoint of ours, but no attack either."""
    model = small.float_model()
    headless, nameless, broken = small.float_model(), small.float_model(), small.float_model()
    headless.model = headless.model[:-1]
    del nameless.names
    del broken.model[1].conv
    return {
        'nothing': None,
        'a number': 3,
        'a list': [model],
        'a tensor': torch.ones(3),
        'a string': 'weights',
        'an empty dict': {},
        'no model': {'epoch': 3},
        'no model in model': {'model': None, 'ema': None},
        'a state dict': {'model': model.state_dict()},
        'a state dict alone': model.state_dict(),
        'text for a model': {'model': 'weights.pt'},
        'a bare model': model,
        'another module': {'model': torch.nn.Conv2d(3, 3, 1)},
        'layers alone': {'model': model.model},
        'no head': {'model': headless},
        'no names': {'model': nameless},
        'a layer without weights': {'model': broken},
    }


MODELS = ['demo', *full('gelan-c', 'yolov9-t', 'gelan-c-seg', 'gelan-c-dseg')]


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp('other')
    content = yaml.safe_load(small.data.read_text())
    (folder / 'other.yaml').write_text(yaml.safe_dump({**content, 'nc': 2, 'names': ['a', 'b']}))
    return {
        'OTHER': folder / 'other.yaml',
        'SINGLE': small.single,
        **{k: getattr(small, k).read_bytes() for k in ('single', 'quantized', 'dual')},
    }


def told(command, file, files, capfd):
    out = file.parent / 'out'
    argv = [
        str(a).replace('FILE', str(file)).replace('OUT', str(out)) if a not in files else files[a]
        for a in COMMANDS[command]
    ]
    return answer(command.split()[0], argv, capfd, file.parent)


KINDS = {
    'single': ['qat.py quantize', 'qat.py sensitive', 'export_qat.py', 'benchmark_trt.py', 'compare_outputs.py'],
    'quantized': ['qat.py eval', 'export_qat.py', 'export_yoloV9.py', 'compare_outputs.py'],
    'dual': ['reparameterization.py', 'export_yoloV9.py'],
}
PER_COMMAND, REWRITTEN = 10, 60  # times TIMES
DAMAGED = [(kind, command) for kind, commands in KINDS.items() for command in commands]


@pytest.mark.parametrize('kind, command', sampled(DAMAGED, 6, 5))
def test_damaged(files, tmp_path, monkeypatch, capfd, kind, command):
    """A damaged file is accepted only if the damage hits a part that nobody reads, such as a date."""
    monkeypatch.chdir(tmp_path)
    named = 0
    for what, content in damaged(files[kind], PER_COMMAND, seed=DAMAGED.index((kind, command))):
        (tmp_path / 'weights.pt').write_bytes(content)
        code, line = told(command, tmp_path / 'weights.pt', files, capfd)
        named += code == 2 and 'weights.pt' in line
    assert named >= PER_COMMAND * TIMES / 2


HOSTILE, FOREIGN = (
    list(hostile(Path('x'))),
    [
        'nothing',
        'a number',
        'a list',
        'a tensor',
        'a string',
        'an empty dict',
        'no model',
        'no model in model',
        'a state dict',
        'a state dict alone',
        'text for a model',
        'a bare model',
        'another module',
        'layers alone',
        'no head',
        'no names',
        'a layer without weights',
    ],
)


@pytest.mark.parametrize('command', sampled(COMMANDS, 8))
def test_hostile(small, files, tmp_path, monkeypatch, capfd, command):
    """Beside a model that is fine, and first, so that it would run; and the kind of file says float."""
    monkeypatch.chdir(tmp_path)
    good, sprung = small.float_model(), tmp_path / 'sprung'
    for name, (thing, pickled) in hostile(sprung).items():
        if pickled is None:
            torch.save({'first': thing, 'model': good}, tmp_path / 'weights.pt')
        else:
            (tmp_path / 'weights.pt').write_bytes(with_pickle(files['single'], pickled))
        code, line = told(command, tmp_path / 'weights.pt', files, capfd)
        assert code == 2 and 'weights.pt' in line and not sprung.exists(), name


@pytest.mark.parametrize('command', sampled(COMMANDS, 8, 2))
def test_foreign(small, files, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    cases = foreign(small)
    assert list(cases) == FOREIGN
    for name, content in cases.items():
        torch.save(content, tmp_path / 'weights.pt')
        code, line = told(command, tmp_path / 'weights.pt', files, capfd)
        assert code == 2 and 'weights.pt' in line, (name, line)


@pytest.mark.faults
def test_rewritten_pickles(files, tmp_path):
    """Any pickle with right checksums gives a model that computes, or a QatError."""
    file, loaded = tmp_path / 'weights.pt', 0
    for kind, load in (('single', load_float), ('quantized', load_quantized)):
        for what, pickled in damaged(pickle_in(files[kind]), REWRITTEN):
            file.write_bytes(with_pickle(files[kind], pickled))
            try:
                load(file)
                loaded += 1
            except QatError as e:
                assert 'weights.pt' in str(e) and '\n' not in str(e), what
    assert loaded, 'some changes do no harm'


@pytest.mark.parametrize('kind', ['PosixPath', 'WindowsPath'])
@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'])
def test_a_path_as_each_python_pickles_it(module, kind):
    """Upstream keeps the options of the training, and who trained on another system cannot be told to train again."""
    record, _ = read_pickle(f'\x80\x02c{module}\n{kind}\n(X\x04\0\0\0runsX\x03\0\0\0exptR.'.encode('latin1'))
    assert Values().value(record) == {'PosixPath': 'runs/exp', 'WindowsPath': r'runs\exp'}[kind]


@pytest.mark.parametrize('name', MODELS)
def test_every_model_of_upstream_is_loaded(name, tmp_path):
    """As its training pickles it, with what else is in such a file; what is computed is the same."""
    model = build(name, **({} if name == 'demo' else {'width_multiple': 0.25}))
    torch.save(
        {
            'epoch': 3,
            'best_fitness': np.float64(0.5),
            'model': None,
            'ema': model,
            'optimizer': {'state': {}, 'lr': np.array([0.1])},
            'date': 'today',
            'opt': {'save_dir': Path('runs'), 'cfg': argparse.Namespace(a=1)},
            'hyp': {'box': 7.5},
        },
        tmp_path / 'last.pt',
    )
    ckpt, loaded = load_dual_or_float(tmp_path / 'last.pt')
    assert (
        ckpt['best_fitness'] == 0.5
        and ckpt['optimizer']['lr'] == [0.1]
        and ckpt['opt']['save_dir'] == 'runs'
        and ckpt['opt']['cfg'] == {'a': 1}
    )
    assert same(output(loaded, image()), output(model, image()))
