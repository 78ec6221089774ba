"""Each kind of file (faults.KINDS), damaged, foreign or hostile: each command that reads it says so in one line and leaves nothing.

Without --faults a third of the damages, each with one of its readers; with it all with all.
"""

import argparse
import importlib.util
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from conftest import REPO
from helpers import zoo
from helpers.faults import KINDS, lay, sampled, with_pickle
from helpers.graphs import behind_functions, model_of
from helpers.zoo import build, full, image, load_dual_or_float, output, same
from onnx import TensorProto, helper

from utils.qat.core.files import sha256
from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import read_pickle

SPRUNG = Path('sprung')  # what hostile code would make, in the folder of the test
TOUCH = f'touch {SPRUNG}'
SPRING = f"__import__('os').system('{TOUCH}')"


def edits(whole, **changes):
    """name → the text `whole` with the first text of a pair replaced by the second."""
    assert all(old in whole for old, _ in changes.values())
    return {name.replace('_', ' '): whole.replace(old, new) for name, (old, new) in changes.items()}


# ---- YAML ---------------------------------------------------------------------------------------------------------------

NO_YAML = {
    'empty': '',
    'a number': '3\n',
    'a list': '- 1\n',
    'text': 'hello',
    'binary': '\0\1\2\3',
    'no end': 'names: [',
    'nested': '[' * 5000,
}
BOMB = 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(
    f'{n}: &{n} [{", ".join([f"*{m}"] * 9)}]\n' for m, n in zip('abcdefgh', 'bcdefghi')
)
DATA = (
    'path: .\ntrain: images/train\nval: images/val\nnc: 10\nnames: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]\n'
)
NAMES, VAL = 'names: [', 'images/val'
YAMLS = {
    **NO_YAML,
    'null': 'null\n',
    'a bomb': BOMB + DATA.replace(NAMES, 'names: [*i, '),
    'a bomb for a path': BOMB + DATA.replace(VAL, '*i'),
    'a bomb for nc': BOMB + DATA.replace('nc: 10', 'nc: *i'),
    'too large': DATA + '#' * 3_000_000,
    **{
        f'a line {line!r:.30}': f'{DATA}{line}\n'
        for line in (
            *(
                '\7',
                f'x: !!python/object/apply:os.system ["{TOUCH}"]',
                'x: 2021-13-45',
                f'x: {"9" * 5000}',
                'x: !!int ""',
            ),
            *('x: !!bool maybe', 'x: !!timestamp soon', '? [a]\n: b'),
        )
    },
    'tabs': DATA.replace('train: ', '\ttrain:\t'),
    **{f'path {value}': DATA.replace('path: .', f'path: {value}') for value in ('3', '[a, b]')},
    **{f'train {value}': DATA.replace('images/train', value) for value in ('5', '{a: b}')},
    **{
        f'val {value:.30}': DATA.replace(VAL, value)
        for value in (
            *(
                '2020-01-01',
                '[1, 2]',
                'nowhere',
                '"a\\0b"',
                'x' * 5000,
                '""',
                '/dev/null',
                '[images/val, nowhere]',
                'data.yaml',
            ),
            *('&v [*v]', '*none'),
        )
    },
    **{
        f'names {value}': DATA.replace(NAMES, f'names: {value}\nx: [')
        for value in ('7', 'abc', '{0: a, 2: b}', '{1: a, 2: b}', '{0: a, b: c}')
    },
    **edits(DATA, names_of_lists=('"0"', '["0"]'), names_of_maps=('"0"', '{a: 0}'), names_too_few=(', "9"', '')),
    **{f'nc {value}': DATA.replace('nc: 10', f'nc: {value}') for value in ('ten', '-10', '[10]')},
}
FINE_YAMLS = {
    'keys twice': DATA + DATA,
    'a byte order mark': '\ufeff' + DATA,
    'lines of Windows': DATA.replace('\n', '\r\n'),
    'lists of paths': DATA.replace(VAL, f'[{VAL}]'),
    'unknown keys': DATA + 'download: |\n  rm -rf /\n',
    'names of numbers': DATA.replace('"0", "1", "2", "3"', '0, 1.5, true, 2020-01-01'),
}
HYP = (REPO / 'demo/hyp.yaml').read_text()
HYPS = {
    **NO_YAML,
    'a bomb': BOMB + HYP.replace('hsv_h:', 'hsv_h: *i #'),
    'no date': HYP + 'x: !!timestamp soon\n',
    'one missing': HYP.replace('fliplr:', 'flip:'),
    **{
        f'the value {value}': HYP.replace('scale:', f'scale: {value} #')
        for value in ('many', '[1]', '.nan', '.inf', '')
    },
}


def network(**changes):
    """A change of a network's YAML: other values of its keys; `row` stands for its second."""

    def change(whole):
        content = yaml.safe_load(whole)
        if 'row' in changes:
            content['backbone'][1] = changes['row']
        return yaml.safe_dump({**content, **changes})

    return change


NETWORKS = {  # tests/upstream/untrusted/test_yaml.py has all that can be wrong with one
    **NO_YAML,
    'code for a layer': network(row=[-1, 1, SPRING, []]),
    'code for an argument': network(row=[-1, 1, 'Conv', [SPRING, 3, 2]]),
    'code for the activation': network(activation=SPRING),
    'another model': network(row=[-1, 1, 'Conv', [32, 3, 2]]),
    'gigabytes of weights': network(row=[-1, 1, 'Conv', [99_999, 9_999]]),
    'no head': network(head=[]),
    'rows that are none': network(backbone=[1]),
}

# ---- labels, and copies of pixels ---------------------------------------------------------------------------------------

BOX = '3 0.5 0.5 0.2 0.2\n'
OUTLINE = '3 0.1 0.1 0.2 0.1 0.2 0.2'
LABELS = {
    f'{line!r:.40}': line
    for line in (
        *('3 nan 0.5 0.2 0.2', '3 0.5 inf 0.2 0.2', '3 -0.5 0.5 0.2 0.2', '3 0.5 0.5 1.2 0.2', '3 120 80 30 40'),
        *(
            'nan 0.5 0.5 0.2 0.2',
            'inf 0.5 0.5 0.2 0.2',
            '-1 0.5 0.5 0.2 0.2',
            '1.5 0.5 0.5 0.2 0.2',
            '10 0.5 0.5 0.2 0.2',
        ),
        *(
            '1e30 0.5 0.5 0.2 0.2',
            'seven 0.5 0.5 0.2 0.2',
            '0x3 0.5 0.5 0.2 0.2',
            '3 0.5 0.5 0.2',
            '3 0.5 0.5 0.2 0.2 0.9',
        ),
        *('3', '3,0.5,0.5,0.2,0.2', 'no labels here', f'{OUTLINE} 0.1', f'{BOX}{OUTLINE}', f'{OUTLINE}\n{BOX}'),
        *(
            '3 0.1 0.1 1.2 0.1 0.2 0.2',
            f'{BOX}3 0.5 0.5 2 0.2',
            '\0\1\2',
            '3 ' + '0.5 ' * 100_001,
            b'3 0.5 0.5 \xff\xfe0.2 0.2\n',
        ),
    )
}
FINE_LABELS = {
    f'{text!r:.40}': text
    for text in (
        *('', f'\n\n{BOX}\n  \n', BOX * 2, '3 0.5 0.5 0 0', '3.0 0.5 0.5 0.2 0.2', '3 5e-1 5e-1 2e-1 2e-1', OUTLINE),
        *(BOX.replace('\n', '\r\n') * 2, BOX.strip(), BOX.replace(' ', '\t'), '3 0.5 0.5 1 1', '3 1 1 0.5 0.5'),
    )
}


def array(*shape, kind=np.uint8):
    out = io.BytesIO()
    np.save(out, np.zeros(shape, kind))
    return out.getvalue()


def copied(make):
    """A change of a copy of pixels: make(height, width) are the new bytes."""
    return lambda whole: make(*np.load(io.BytesIO(whole)).shape[:2])


COPIES = {  # of IMG.npy, which upstream takes in place of IMG.jpg
    'no array': 'no array',
    'nothing': '',
    'objects': array(2, kind=object),
    'of no size': array(0, 0, 3),
    'cut short': copied(lambda h, w: array(h, w, 3)[:-9]),
    'grey': copied(array),
    'RGBA': copied(lambda h, w: array(h, w, 4)),
    '64 bits': copied(lambda h, w: array(h, w, 3, kind=np.int64)),
    'complex': copied(lambda h, w: array(h, w, 3, kind=complex)),
    'a row': copied(lambda h, w: array(h)),
    'of another image': copied(lambda h, w: array(h, w - 8, 3)),
}

# ---- checkpoints --------------------------------------------------------------------------------------------------------


class Call:
    """Is pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def saved(content):
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def beside(make):
    """A change of a checkpoint: what `make` returns stands first in it, so that it would run, and the model is fine."""
    return lambda whole: saved({'first': make(), **torch.load(io.BytesIO(whole), weights_only=False)})


def of_model(change):
    """A change of a checkpoint: what `change` makes of its model is all that it holds."""
    return lambda whole: saved(change(torch.load(io.BytesIO(whole), weights_only=False)['model']))


def pickled(content):
    """A change of a checkpoint: another pickle, which begins as if it held a model."""
    begin = b'\x80\x02cmodels.yolo\nDetectionModel\n0'
    return lambda whole: with_pickle(
        whole, begin + (content if isinstance(content, bytes) else content.encode('latin1'))
    )


def without(*names):
    """A change of a model: an attribute of it, or of its second layer, is gone."""

    def change(model):
        *path, last = names
        for name in path:
            model = getattr(model, name)
        delattr(model, last)

    def apply(model):
        change(model)
        return {'model': model}

    return of_model(apply)


def flipped(whole):
    """A bit of the largest member is another, and its checksum is the old one."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        largest = max((archive.read(name) for name in archive.namelist()), key=len)
    at = whole.index(largest) + len(largest) // 2
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def upstream(name):
    import models.common
    import models.yolo

    return getattr(models.yolo, name, None) or getattr(models.common, name)


HOSTILE = {
    'os.system': beside(lambda: Call(os.system, TOUCH)),
    'eval': beside(lambda: Call(eval, SPRING)),
    'exec': beside(lambda: Call(exec, f"import os; os.system('{TOUCH}')")),
    'open': beside(lambda: Call(open, str(SPRUNG), 'w')),
    'getattr of a module': beside(lambda: Call(getattr, Call(__import__, 'os'), 'system')),
    'an import': beside(lambda: Call(__import__, 'antigravity')),
    'a function of PyTorch': beside(lambda: Call(torch.hub.load, 'a/b', 'c')),
    'one that loads': beside(lambda: Call(torch.jit.load, str(SPRUNG))),
    'a function of the tree': beside(lambda: Call(sha256, str(SPRUNG))),
    "a model's constructor, which evals": beside(
        lambda: Call(upstream('DetectionModel'), {**zoo.config('demo'), 'activation': SPRING})
    ),
    'a constructor that loads files': beside(lambda: Call(upstream('DetectMultiBackend'), str(SPRUNG))),
    "a layer's constructor": beside(lambda: Call(upstream('Conv'), 3, 8)),
    'an instance as of protocol 0': pickled(f"(S'{TOUCH}'\nios\nsystem\n."),
    'an object as of protocol 1': pickled(f"(cos\nsystem\nS'{TOUCH}'\no."),
    'a name with dots': pickled('\x8c\x08torch.nn\x8c\x0fmodules.conv.os\x93.'),
    'names of protocol 4': pickled(pickle.dumps(Call(os.system, TOUCH), 4)),
    'an extension': pickled('\x82\x01.'),
    'a jump out of the stack': pickled('R.'),
    'no end': pickled(b'}' * 40),
}
FOREIGN = {
    'a bit of the weights': flipped,
    'no archive': 'hello',
    **{
        f'{content!r:.20}': lambda _, content=content: saved(content)
        for content in (
            None,
            3,
            'weights',
            {},
            {'epoch': 3},
            {'model': None, 'ema': None},
            {'model': 'weights.pt'},
            torch.ones(3),
        )
    },
    'a list': of_model(lambda model: [model]),
    'a state dict': of_model(lambda model: {'model': model.state_dict()}),
    'a state dict alone': of_model(lambda model: model.state_dict()),
    'another module': lambda _: saved({'model': torch.nn.Conv2d(3, 3, 1)}),
    'layers alone': of_model(lambda model: {'model': model.model}),
    'no head': of_model(lambda model: setattr(model, 'model', model.model[:-1]) or {'model': model}),
    'no names': without('names'),
    'a layer without weights': without('model', '1', 'conv'),
}

# ---- ONNX ---------------------------------------------------------------------------------------------------------------

IMAGE, OUT = {'images': [1, 3, 64, 64]}, {'output0': [1, 48, 256]}  # 4 + 44 classes


def graph(
    inputs=IMAGE, outputs=OUT, nodes=(('Reshape', ['images', 'shape'], ['output0']),), shape=(1, 48, 256), **more
):
    """The bytes of a graph of FP32 tensors: {name: shape}, and nodes as (operator, inputs, outputs)."""

    made = [helper.make_node(*node, **more.get('attributes', {})) for node in nodes]
    ends = [
        {name: (more.get('type', TensorProto.FLOAT), axes) for name, axes in of.items()} for of in (inputs, outputs)
    ]
    model = model_of(made, *ends, {'shape': np.array(shape)}, more.get('opset', 17), **more.get('metadata', {}))
    if 'functions' in more:
        behind_functions(model, model.graph.node[0], *more['functions'])
    return model.SerializeToString().replace(b'undecoded', b'\xff\xfe\xd4coded')


RELU = [('Relu', ['images'], ['y'])]
GRAPHS = {
    'empty': '',
    'text': 'no graph',
    'no outputs': graph(outputs={}, nodes=[('Relu', ['images'], ['x'])]),
    'no inputs': graph({}, {'y': [2]}, [('Constant', [], ['y'])], attributes={'value_floats': [1.0, 2.0]}),
    'no nodes': graph({}, {}, []),
    'two inputs': graph({**IMAGE, 'more': [1, 3, 64, 64]}, {'y': [1, 3, 64, 64]}, [('Add', ['images', 'more'], ['y'])]),
    'an image out': graph(outputs={'y': [1, 3, 64, 64]}, nodes=RELU),
    'a scalar in': graph({'images': []}, {'y': []}, RELU),
    'open axes': graph(
        {'images': ['b', 3, 'h', 'w']}, {'y': ['b', 'n', 'k']}, [('Reshape', ['images', 'shape'], ['y'])]
    ),
    'an operator that is none': graph(outputs={'y': [1]}, nodes=[('Abracadabra', ['images'], ['y'])]),
    'an opset of the future': graph(opset=9999),
    'opset 1': graph(opset=1),
    'a cycle': graph(outputs={'y': [1]}, nodes=[('Add', ['y', 'z'], ['z']), ('Relu', ['z'], ['y'])]),
    'text in': graph(type=TensorProto.STRING),
    'a shape that does not fit': graph(shape=(1, 7, 7)),
    'functions of 2^40 nodes': graph(functions=(2, 40)),
    'a chain of functions': graph(functions=(1, 9000)),
    'half of the outputs of NMS': graph(
        outputs={'num_dets': [1, 3, 64, 64], 'det_boxes': [1, 3, 64, 64]},
        nodes=[('Relu', ['images'], ['num_dets']), ('Relu', ['images'], ['det_boxes'])],
    ),
}
OF_NAMES = {  # a benchmark, an audit and a client for any model may take these
    'numbers of 64 bits': graph(type=TensorProto.DOUBLE),
    **{
        f'{key} {value!r:.20}': graph(metadata={key: value})
        for key, value in (
            *(('names', it) for it in ('{0: ', SPRING, "['a', 'b']", '3', '(' * 5000, 'undecoded')),
            *(('stride', it) for it in ('many', '0', 'nan')),
        )
    },
}

# ---- JSON ---------------------------------------------------------------------------------------------------------------

NO_JSON = {
    f'{text!r:.20}': text
    for text in (
        '',
        'hello',
        '[]',
        '3',
        'null',
        '{}',
        '[' * 100_000,
        '\0\1',
        '[1, 2]',
        '[null]',
        'NaN',
        '{"settings": {',
    )
}


def parts(*keys):
    """Changes of a JSON object: it is none, or one of these keys is missing or of another type."""

    def changed(key, *value):
        return lambda whole: json.dumps(
            {**{k: v for k, v in json.loads(whole).items() if k != key}, **dict([(key, *value)] * len(value))}
        )

    others = {f'{key} is {value}': changed(key, value) for key in keys for value in (None, 'x', 3, [3], [[3]])}
    return {**NO_JSON, **{f'{key} gone': changed(key) for key in keys}, **others}


REFUSED = {  # kind → what is done to the file → its new content, or a function of the old one
    'data': YAMLS,
    'hyp': HYPS,
    'network': NETWORKS,
    'label': LABELS,
    'copy': COPIES,
    **dict.fromkeys(['float checkpoint', 'dual checkpoint', 'quantized checkpoint'], HOSTILE | FOREIGN),
    'onnx': GRAPHS,
    'report': parts('settings', 'ptq', 'epochs'),
}
FINE = {'data': FINE_YAMLS, 'label': FINE_LABELS, 'copy': {'of the image': lambda whole: whole}}
ENDS = {  # some of these do no harm to what is read: the command ends well, or names the file
    'onnx': OF_NAMES,
    'sensitivity': parts('kind', 'version', 'units', 'flops', 'weights_sha256'),
    'layers': parts('Layers', 'Bindings'),
    'profile': NO_JSON,
}
ANY_GRAPH = 'audit_onnx', 'benchmark_trt', 'build_engine'  # commands for graphs that are no detector


def cases(table):
    """(kind, reader, damage) as pytest parameters: by default a third of the damages, each with one of the readers by turns."""
    for kind, damages in table.items():
        for j, reader in enumerate(KINDS[kind].readers):
            for i, name in enumerate(damages):
                marks = [pytest.mark.faults] * (i % (3 * len(KINDS[kind].readers)) != j)
                if 'rtx' in reader and not importlib.util.find_spec('tensorrt_rtx_bindings'):
                    marks += [pytest.mark.skip(reason='no TensorRT-RTX: ./install_dependencies.sh --tests')]
                yield pytest.param(kind, reader, name, marks=marks, id=f'{kind}-{" ".join(reader.split()[:2])}-{name}')


@pytest.mark.parametrize('kind, reader, name', cases(REFUSED))
def test_it_is_refused_in_one_line_that_names_the_file(material, tmp_path, told, kind, reader, name):
    change = REFUSED[kind][name]
    file = lay(material, kind, tmp_path, change if callable(change) else lambda _: change)
    code, line = told(reader, allowed=(0, 2) if any(c in reader for c in ANY_GRAPH) else (2,))
    named = {'report': file.parent.name, 'onnx': 'error'}.get(
        kind, file.name
    )  # of a graph it may be the classes that do not fit
    assert code == 0 or (named in line and len(line) < 6000), line
    assert not SPRUNG.exists()


@pytest.mark.parametrize('kind, reader, name', cases(ENDS))
def test_it_does_no_harm_or_is_refused(material, tmp_path, told, kind, reader, name):
    if kind in ('layers', 'profile'):
        pytest.importorskip('pygraphviz', exc_type=ImportError)
    change = ENDS[kind][name]
    file = lay(material, kind, tmp_path, change if callable(change) else lambda _: change)
    code, line = told(reader)
    assert code == 0 or file.name in line or kind == 'onnx', line
    assert not SPRUNG.exists()


@pytest.mark.parametrize('kind, name', sampled([(kind, name) for kind, names in FINE.items() for name in names], 3))
def test_it_is_fine(material, tmp_path, told, kind, name):
    content = FINE[kind][name]
    lay(material, kind, tmp_path, content if callable(content) else lambda _: content)
    assert told(KINDS[kind].readers[0])[0] == 0


@pytest.mark.parametrize('reader', sampled(KINDS['onnx'].readers, 7))
def test_weights_in_another_file(material, tmp_path, told, reader):
    file, weights = tmp_path / 'quantized.onnx', tmp_path / 'weights.bin'
    onnx.save(
        onnx.load(material['quantized.onnx']), file, save_as_external_data=True, location=weights.name, size_threshold=0
    )
    weights.write_bytes(weights.read_bytes()[:1000])
    outside = onnx.load(file, load_external_data=False)
    for tensor in outside.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == 'location':
                entry.value = '../../../../../../etc/passwd'
    for name, spoil in {
        'cut short': lambda: None,
        'gone': weights.unlink,
        'outside the folder': lambda: onnx.save(outside, file),
    }.items():
        spoil()
        code, line = told(reader)
        assert code == 2 and file.name in line, (name, line)


@pytest.mark.parametrize('place', ['set/images/val/x.jpg', 'set/images/val/00000.npy', 'set/labels/val.cache'])
def test_a_pipe_is_not_waited_for(material, tmp_path, told, place):
    lay(material, 'data', tmp_path)
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    code, line = told(KINDS['data'].readers[0])
    assert code == 2 and place in line


def test_a_cache_of_labels_is_not_run(material, tmp_path, told):
    """Upstream unpickles the .cache beside the labels: a data set from elsewhere could bring one."""
    lay(material, 'data', tmp_path)
    cache, val = tmp_path / 'set/labels/val.cache', KINDS['data'].readers[0]
    trap, arrays = Call(open, str(SPRUNG), 'w'), io.BytesIO()
    np.save(arrays, {'a': trap}, allow_pickle=True)
    for content in pickle.dumps(trap), pickle.dumps(trap, 0), arrays.getvalue():
        cache.write_bytes(content)
        code, line = told(val)
        assert code == 2 and f'{cache}: no cache of labels' in line and not SPRUNG.exists()
    np.load(io.BytesIO(arrays.getvalue()), allow_pickle=True)
    assert SPRUNG.exists(), 'it would have'
    cache.unlink()
    assert told(val)[0] == 0
    cache.write_bytes(cache.read_bytes()[:-40])
    code, line = told(val)
    assert code == 2 and f'{cache}: no cache of labels' in line and 'delete it' in line


# ---- and what must still load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['PosixPath', 'WindowsPath'])
@pytest.mark.parametrize('module', ['pathlib', 'pathlib._local'])
def test_a_path_as_each_python_pickles_it(module, kind):
    """Upstream keeps the options of the training, and who trained on another system cannot be told to train again."""
    record, _ = read_pickle(f'\x80\x02c{module}\n{kind}\n(X\x04\0\0\0runsX\x03\0\0\0exptR.'.encode('latin1'))
    assert Values().value(record) == {'PosixPath': 'runs/exp', 'WindowsPath': r'runs\exp'}[kind]


@pytest.mark.parametrize('name', ['demo', *full('gelan-c', 'yolov9-t', 'gelan-c-seg', 'gelan-c-dseg')])
def test_every_model_of_upstream_is_loaded(name, tmp_path):
    """As its training pickles it, with what else is in such a file; what is computed is the same."""
    model = build(name, **({} if name == 'demo' else {'width_multiple': 0.25}))
    rest = {
        'epoch': 3,
        'best_fitness': np.float64(0.5),
        'optimizer': {'state': {}, 'lr': np.array([0.1])},
        'date': 'today',
    }
    options = {'save_dir': Path('runs'), 'cfg': argparse.Namespace(a=1)}
    torch.save({**rest, 'model': None, 'ema': model, 'opt': options, 'hyp': {'box': 7.5}}, tmp_path / 'last.pt')
    ckpt, loaded = load_dual_or_float(tmp_path / 'last.pt')
    assert (ckpt['best_fitness'], ckpt['optimizer']['lr']) == (0.5, [0.1])
    assert ckpt['opt'] == {'save_dir': 'runs', 'cfg': {'a': 1}}
    assert same(output(loaded, image()), output(model, image()))
