"""Checkpoints by an expert attacker on pickles, archives and arrays: one error line each, and nothing runs."""

import io
import os
import pickle
import random
import stat
import struct
import tarfile
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.faults import Call, archive, members, npy, pickle_in, sampled
from helpers.zoo import LOADERS, load_dual_or_float

from models.quantize.pickled_modules import build
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import require_own_cache
from utils.qat.untrusted.plain_values import read_values
from utils.qat.untrusted.torch_archive import Refused, read_archive

RANDOM = 1500  # programs


# ---- an assembler of pickles: each function gives bytes that leave one object on the stack --------------------------------------


def text(value):
    return b'X' + struct.pack('<I', len(value.encode())) + value.encode()


def named(path):
    module, _, name = path.rpartition('.')
    return f'c{module}\n{name}\n'.encode()


def stacked(path):
    module, _, name = path.rpartition('.')
    return text(module) + text(name) + b'\x93'


def many(*objects):
    return b'(' + b''.join(objects) + b't'


def mapping(**pairs):
    return b'}(' + b''.join(text(key) + value for key, value in pairs.items()) + b'u'


def called(function, *arguments):
    return function + many(*arguments) + b'R'


def made(cls, state=b''):
    return named(cls) + b')\x81' + (state + b'b' if state else b'')


SQUARE = 'torch.nn.modules.linear.Identity'
HOLDERS = (
    SQUARE,
    'models.common.Conv',
    'models.yolo.DetectionModel',
    'argparse.Namespace',
    'torch.nn.modules.container.Sequential',
    'torch.nn.utils.parametrize.ParametrizationList',
)


def payloads(sprung):
    """name → pickle of a callable, and of its one argument: called, it would make the file `sprung`, or do what a checkpoint has no need of."""
    touch = text(f'touch {sprung}')
    code = text(f"open({str(sprung)!r}, 'w')")
    return {
        'os.system': (named('os.system'), touch),
        'posix.system': (named('posix.system'), touch),
        'eval': (named('builtins.eval'), code),
        'exec': (named('builtins.exec'), code),
        'subprocess': (named('subprocess.getoutput'), touch),
        'runpy': (named('runpy.run_path'), text(str(sprung))),
        'import': (named('importlib.import_module'), text('antigravity')),
        'by name on the stack': (stacked('os.system'), touch),
        'torch.load': (named('torch.load'), text(str(sprung))),
        'torch.hub': (named('torch.hub.load_state_dict_from_url'), text('http://127.0.0.1:9/x')),
        'torch.jit': (named('torch.jit.load'), text(str(sprung))),
        'numpy.load': (named('numpy.load'), text(str(sprung))),
        'a model that evals': (named('models.yolo.DetectionModel'), mapping(activation=code)),
        'a model that loads': (named('models.common.DetectMultiBackend'), text(str(sprung))),
        'a function of ours': (named('utils.qat.core.files.sha256'), text(str(sprung))),
    }


def routes(function, argument):
    """name → pickle that would call `function` with `argument`, by each operation that calls something."""
    found = {
        'REDUCE': called(function, argument),
        'NEWOBJ': function + many(argument) + b'\x81',
        'NEWOBJ_EX': function + many(argument) + b'}\x92',
        'OBJ': b'(' + function + argument + b'o',
        'REDUCE twice': called(called(function, argument), argument),
        'getattr': called(called(named('builtins.getattr'), function, text('__call__')), argument),
        'map': called(named('builtins.list'), called(named('builtins.map'), function, b']' + argument + b'a')),
        'OrderedDict of a method': called(named('collections.OrderedDict'), called(function, argument)),
        'in a tensor': called(
            named('torch._utils._rebuild_tensor_v2'), called(function, argument), b'K\0', b')', b')', b'\x89', b'N'
        ),
        'in a persistent id': called(function, argument) + b'Q',
        'as a key': b'}' + called(function, argument) + b'Ns',
        'in a set': b'\x8f(' + called(function, argument) + b'\x90',
        'as hooks': called(named('torch._utils._rebuild_parameter'), b'N', b'\x88', called(function, argument)),
    }
    for holder in HOLDERS:
        for method, use in (
            ('__setstate__', mapping(a=argument) + b'b'),
            ('append', argument + b'a'),
            ('extend', b'(' + argument + b'e'),
            ('add', b'(' + argument + b'\x90'),
            ('__setitem__', text('k') + argument + b's'),
        ):
            found[f'{method} of {holder.rpartition(".")[2]}'] = made(holder, mapping(**{method: function})) + use
        for method in 'forward float eval modules model hook _forward_hooks _compiled_call_impl __class__'.split():
            found[f'a {holder.rpartition(".")[2]} whose {method} is another'] = made(
                holder, mapping(**{method: function, '_modules': b'}', '_parameters': b'}', '_buffers': b'}'})
            )
    return found


def program(content):
    """A pickle of a checkpoint that has `content` beside, and in place of, its model; its names look like those of a float one."""
    return (
        b'\x80\x02'
        + named('models.yolo.DetectionModel')
        + b'0'
        + mapping(first=content, model=content, ema=content)
        + b'.'
    )


def refused(file, loaders=LOADERS):
    for load in loaders:
        with pytest.raises(QatError) as error:
            load(file)
        assert (
            str(file) in str(error.value)
            and '\n' not in str(error.value)
            and len(str(error.value)) < 600 + len(str(file))
        )


def test_no_operation_calls_anything(tmp_path):
    file, sprung, count = tmp_path / 'weights.pt', tmp_path / 'sprung', 0
    for function, argument in payloads(sprung).values():
        for name, content in routes(function, argument).items():
            file.write_bytes(saved(program(content)))
            refused(file, LOADERS[:1])
            assert not sprung.exists(), name
            count += 1
    assert count >= 120
    pickle.loads(b'\x80\x02' + called(named('os.system'), text(f'touch {sprung}')) + b'.')
    assert sprung.exists(), 'it would have'


def test_random_programs_call_nothing(tmp_path):
    """Operations in any order, on objects of any kind: the property does not hang on a list of attacks."""
    chance, file, sprung = random.Random(0), tmp_path / 'weights.pt', tmp_path / 'sprung'
    pieces = [piece for pair in payloads(sprung).values() for piece in pair]
    pieces += [made(holder) for holder in HOLDERS] + [text('append'), text('__setstate__'), named('builtins.getattr')]
    pieces += [named('collections.OrderedDict'), b'(', b')', b'}', b']', b'\x8f', b'N', b'K\1', b'q\0', b'h\0', b'0']
    acts = [bytes([act]) for act in b'R\x81baesu\x90t\x85\x86\x87Q\x93\x94o\x92']
    for _ in range(RANDOM):
        content = b''.join(
            chance.choice(pieces) + b''.join(chance.choices(acts, k=chance.randrange(3)))
            for _ in range(chance.randrange(1, 9))
        )
        file.write_bytes(saved(b'\x80\x02' + named('models.yolo.DetectionModel') + b'0' + content + b'.'))
        refused(file, LOADERS[2:3])
        assert not sprung.exists(), content


# ---- routes that an attacker took, each by itself --------------------------------------------------------------------------------


def replaced(**values):
    return lambda model: model.__dict__.update(values)


def layer_of(name):
    """Make the second layer a module of upstream that has no state."""

    def change(model):
        import models.common

        layer = model.model[1] = object.__new__(getattr(models.common, name))
        torch.nn.Module.__init__(layer)

    return change


METHODS = 'float eval modules parameters fuse forward type half to _apply state_dict named_modules'
ATTRIBUTES = {  # what is done to a model before it is saved: each hides code, or makes code of the tree run something
    'a hook': lambda model: model.register_forward_hook(print),
    'a hook of the state dict': lambda model: model.model[0].register_state_dict_pre_hook(print),
    **{f'{name} replaced': replaced(**{name: torch.nn.Identity()}) for name in METHODS.split()},
    'a module among the data': replaced(extra=torch.nn.Identity()),
    'modules in a list': replaced(extra=[torch.nn.Identity()]),
    'a class among the data': replaced(extra=torch.nn.Conv2d),
    'a function': replaced(extra=torch.relu),
    'a forward of a stranger': lambda model: replaced(forward=Call(getattr, type(model), 'fuse'))(model),
    'a bound method of itself': lambda model: replaced(forward=model.fuse)(model),
    'a stride of gigabytes': lambda model: setattr(model, 'stride', torch.tensor([8.0, 16.0, 1e6])),
    'a model that holds itself': lambda model: model.model.append(model),
    'a string for layers': lambda model: model._modules.update(model='x'),
    **{f'{name} for a layer': layer_of(name) for name in ('AutoShape', 'DetectMultiBackend')},  # they read files
}


@pytest.mark.parametrize('name', sampled(ATTRIBUTES, 3))
def test_attributes_that_hide_code(small, tmp_path, name):
    model = small.float_model()
    ATTRIBUTES[name](model)
    torch.save({'model': model}, tmp_path / 'weights.pt')
    refused(tmp_path / 'weights.pt', LOADERS[:1])


# ---- tensors and arrays ------------------------------------------------------------------------------------------------------------


def tensor(storage='torch.FloatStorage', key='0', length=4, offset=0, size=(2, 2), stride=(2, 1), hooks=None):
    """The pickle of a tensor over data/0, which has 16 bytes."""

    def number(n):
        return b'\x8a\x08' + struct.pack('<q', n)

    identity = many(text('storage'), named(storage), text(key), text('cpu'), number(length)) + b'Q'
    return called(
        named('torch._utils._rebuild_tensor_v2'),
        identity,
        number(offset),
        many(*map(number, size)),
        many(*map(number, stride)),
        b'\x89',
        hooks or called(named('collections.OrderedDict')),
    )


MINUS = [b'J\xff\xff\xff\xff'] * 2


def dtype(name, order=None, *rest):
    """The pickle of a type of NumPy, with its state if `order` is given."""
    made = called(named('numpy.dtype'), text(name), b'\x89', b'\x88')
    return made if order is None else made + many(b'K\3', text(order), b'N', b'N', b'N', *rest) + b'b'


TENSORS = {
    'beyond its data': tensor(size=(3, 2)),
    'offset beyond': tensor(offset=1),
    'negative offset': tensor(offset=-1),
    'negative size': tensor(size=(-1, 2)),
    'negative stride': tensor(stride=(-2, 1)),
    'huge size': tensor(size=(2**40, 2**40)),
    'expanded to gigabytes': tensor(size=(10**5, 10**5), stride=(0, 0)),
    'stride that overflows': tensor(stride=(2**62, 2**62)),
    'fewer strides than sizes': tensor(stride=(1,)),
    'no such data': tensor(key='7'),
    'path for a key': tensor(key='../../etc/passwd'),
    'more data than there are': tensor(length=5),
    'negative length': tensor(length=-4),
    'another type': tensor('torch.DoubleStorage'),
    'type of another module': tensor('os.system'),
    'untyped': tensor('torch.UntypedStorage'),
    'objects': tensor('torch.ObjectStorage'),
    'hooks': tensor(hooks=called(named('collections.OrderedDict'), b'](]K\1K\2ee')),
    'hooks of another kind': tensor(hooks=b'}'),
    'three over the same data': many(*[tensor()] * 3),  # each as large as all data after conversion
    'data by themselves': many(text('storage'), named('torch.FloatStorage'), text('0'), text('cpu'), b'K\4') + b'Q',
    'a parameter of no tensor': called(
        named('torch._utils._rebuild_parameter'), b'K\1', b'\x88', called(named('collections.OrderedDict'))
    ),
    'objects of NumPy': dtype('O8'),
    'fields of NumPy': dtype('V8'),
    'a pointer for a number': called(
        named('numpy._core.multiarray.scalar'), dtype('O8', '|', *[b'K\0'] * 3), b'C\x08AAAAAAAA'
    ),
    'short number': called(named('numpy._core.multiarray.scalar'), dtype('f8', '<', *MINUS, b'K\0'), b'C\x02AA'),
}


def saved(pickled):
    """A whole file of torch.save with this pickle, and 16 bytes of data."""
    return archive({'a/data.pkl': pickled, 'a/byteorder': b'little', 'a/version': b'3\n', 'a/data/0': bytes(16)})


def alone(content):
    return saved(b'\x80\x02' + content + b'.')


@pytest.mark.parametrize('name', TENSORS)
def test_tensors_stay_within_their_data(name, tmp_path):
    file = tmp_path / 'weights.pt'
    file.write_bytes(alone(tensor()))
    assert read_values(file, '--weights').tolist() == [[0, 0], [0, 0]]
    file.write_bytes(alone(TENSORS[name]))
    refused(file, [lambda file: read_values(file, '--weights')])


HOOKS = called(named('collections.OrderedDict'))
WHOLE = {  # pickles of objects that are read
    'a list': b']',
    'a dictionary': b'}',
    'a bare set': b'\x8f',
    'a set': called(named('builtins.set'), b'](K\1e'),
    'a size': called(named('torch.Size'), many(b'K\1', b'K\2')),
    'a device': called(named('torch.device'), text('cpu')),
    'a path': called(named('pathlib.PosixPath'), text('a')),
    'bytes': called(named('_codecs.encode'), text('a'), text('latin1')),
    'a tensor': tensor(),
    'a parameter': called(named('torch._utils._rebuild_parameter'), tensor(), b'\x88', HOOKS),
    'a type of NumPy': dtype('f4', '<', *MINUS, b'K\0'),
    'an ordered dictionary': HOOKS,
    'a namespace': made('argparse.Namespace'),
}
MORE = {
    'an attribute': mapping(x=b'N') + b'b',
    'an attribute that is called': mapping(x=called(named('os.system'), text('ls'))) + b'b',
    'an item': text('x') + b'Ns',
    'items': b'(' + text('x') + b'Nu',
    'a key that is a function': named('os.system') + b'Ns',
    'an element': b'(K\1\x90',
    'an element that is a function': b'(' + named('os.system') + b'\x90',
    'attributes twice': 2 * (mapping(x=b'N') + b'b'),
}
TAKES = {  # what else an object of these may have
    'a dictionary': {'an item', 'items'},
    'a bare set': {'an element'},
    'an ordered dictionary': {'an attribute', 'an item', 'items'},
    'a namespace': {'an attribute'},
}


SAYS = 'an object that (takes|has|is) no|that do not fit|asks for os.system|a key that is neither'
OTHERWISE = {b'R': b'\x81', b'\x81': b'R'}  # called or made without a constructor


@pytest.mark.parametrize('name', WHOLE)
def test_an_object_takes_only_what_its_kind_has_and_is_made_in_one_way(name, tmp_path):
    whole, file = WHOLE[name], tmp_path / 'weights.pt'
    found = {what: whole + more for what, more in {'nothing more': b'', **MORE}.items()}
    if whole[-1:] in OTHERWISE:
        found['made otherwise'] = whole[:-1] + OTHERWISE[whole[-1:]]
    for what, content in found.items():
        file.write_bytes(alone(content))
        if what in ('nothing more', *TAKES.get(name, ())):
            read_values(file, '--weights')
        else:
            with pytest.raises(QatError, match=SAYS):
                read_values(file, '--weights')


def zeros(number):
    return b'\x8e' + struct.pack('<Q', number) + bytes(number)


def test_a_module_is_made_of_its_attributes_alone(tmp_path):
    file, empty = tmp_path / 'weights.pt', dict.fromkeys(('_parameters', '_buffers', '_modules'), b'}')

    def built(content):
        file.write_bytes(alone(content))
        return build(read_archive(file))

    def attributes(**others):
        return mapping(**{**empty, 'training': b'\x88', **others}) + b'b'

    begun = named(SQUARE) + b')\x81'
    whole = begun + attributes()
    assert type(built(whole)) is torch.nn.Identity
    for more in (
        begun,
        begun + b']b',
        whole + text('x') + b'Ns',
        named(SQUARE) + many(b'K\1') + b'\x81' + attributes(),
        named(SQUARE) + b')R' + attributes(),
        made('models.deploy.decomposed.Passed', attributes()[:-1]),
        begun + attributes(_parameters=mapping(weight=b'K\1')),
        begun + attributes(_buffers=mapping(total=b'K\1')),
        begun + attributes(_modules=mapping(inner=tensor())),
        begun + attributes(_modules=b'}(' + text('a.b') + b'Nu'),
    ):
        with pytest.raises(Refused):
            built(more)


def lists(depth, width):
    """The pickle of `depth` lists in each other, each with the one within `width` times, of few bytes."""
    inner = b']'
    for i in range(depth - 1):
        inner += bytes([ord('q'), i, ord('0')]) + b'](' + bytes([ord('h'), i]) * width + b'e'
    return inner


@pytest.mark.parametrize(
    'most, more, says',
    [
        (lists(100, 1), lists(101, 1), 'nested more than 100 deep'),
        (lists(20, 2), lists(22, 2), 'more than 4000000 values'),
        (lists(1, 0), b']q\0h\0a', 'contains itself'),
        (b'\x8a\x08' + b'\x7f' * 8, b'\x8a\x09' + b'\x7f' * 9, 'more than 64 bits'),
        (zeros(7_900_000), zeros(8_100_000), 'at most 8 MB are read'),
    ],
    ids=['depth', 'values', 'itself', 'a number', 'bytes'],
)
def test_the_limits_of_values(most, more, says, tmp_path):
    """Values count as often as they are used: 2^22 of them take a few bytes."""
    file = tmp_path / 'weights.pt'
    file.write_bytes(alone(most))
    read_values(file, '--weights')
    file.write_bytes(alone(more))
    with pytest.raises(QatError, match=says):
        read_values(file, '--weights')


# ---- archives ----------------------------------------------------------------------------------------------------------------------


def archives(small):
    """name → bytes of an archive that is none of torch.save, or whose members lie about themselves."""
    whole = small.single.read_bytes()
    parts = members(whole)
    first = next(name for name in parts if name.endswith('/data/0'))
    linked = zipfile.ZipInfo(first)
    linked.external_attr = (stat.S_IFLNK | 0o777) << 16
    tar, script, old = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode='w') as file:
        pipe = tarfile.TarInfo('pickle')
        pipe.type = tarfile.FIFOTYPE
        file.addfile(pipe)
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), script)
    torch.save({'model': 1}, old, _use_new_zipfile_serialization=False)
    twice = archive(
        {**parts, first.replace('/data/0', '/decoy/data.pkl'): parts[first.replace('/data/0', '/data.pkl')]}
    )
    directory = whole.rindex(b'PK\1\2')
    return {
        'TorchScript': script.getvalue(),
        'legacy': old.getvalue(),
        'a tar': tar.getvalue(),
        'a tar with a pipe, and a zip': tar.getvalue() + whole,
        'compressed': archive(parts, compression=zipfile.ZIP_DEFLATED),
        'a bomb': archive({**parts, 'a/data/0': bytes(30_000_000)}, compression=zipfile.ZIP_DEFLATED),
        'bzip2': archive(parts, compression=zipfile.ZIP_BZIP2),
        'a link': archive({linked if name == first else name: part for name, part in parts.items()}),
        'a second pickle': twice,
        'code inside': archive({**parts, 'a/code/x.py': b'import os'}),
        'constants inside': archive({**parts, 'a/constants.pkl': b'N.'}),
        'a path out': archive({**parts, '../../x': b''}),
        'an absolute path': archive({**parts, '/etc/x': b''}),
        'two folders': archive({**parts, 'other/data/0': b''}),
        'no pickle': archive({'a/version': b'3'}),
        'something before it': b'#!/bin/sh\n' + whole,
        'nothing in it': archive({}),
        'big-endian': archive({**parts, first.replace('data/0', 'byteorder'): b'big'}),
        'a directory that lies': whole[: directory + 42] + struct.pack('<I', 0) + whole[directory + 46 :],
        'cut short': whole[:-30],
        'its end alone': whole[-22:],
        'an encrypted member': whole[: directory + 8] + b'\1' + whole[directory + 9 :],
        'a longer member': whole[: directory + 20] + b'\xff\xff\xff\x00' * 2 + whole[directory + 28 :],
    }


def test_only_archives_of_torch_save(small, tmp_path):
    found = archives(small)
    for name, content in found.items():
        (tmp_path / 'weights.pt').write_bytes(content)
        refused(tmp_path / 'weights.pt', LOADERS[:1])
    os.mkfifo(tmp_path / 'pipe.pt')
    refused(tmp_path / 'pipe.pt', LOADERS[:1])


def test_a_small_file_takes_little_memory(tmp_path):
    """A pickle can ask for more than it holds: a memo of 2^32 places, strings of gigabytes, lists of lists of lists, numbers of a million digits."""
    import resource

    nested = b'](Nt' + b''.join(
        b'q' + bytes([i]) + b'0]h' + bytes([i]) + b'h' + bytes([i]) + b'\x86' for i in range(60)
    )
    greedy = {
        'a memo': b'Nr\xff\xff\xff\xff',
        'text': b'X\xff\xff\xff\xff',
        'bytes': b'\x8e' + b'\xff' * 7 + b'\x7f',
        'a frame': b'\x95' + b'\xff' * 8 + b'N',
        'a number': b'\x8b' + struct.pack('<i', 10**6) + b'\x7f' * 10**6,
        'lists of lists': nested,
        'depth': b']' * 10**5 + b'a' * (10**5 - 1),
        'tuples': b')' + b'\x85' * 10**5,
        'dictionaries': b'}' * 3_000_000,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, content in greedy.items():
        (tmp_path / 'weights.pt').write_bytes(saved(program(content)))
        refused(tmp_path / 'weights.pt', LOADERS[:1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000, 'KiB'


# ---- caches of labels, which upstream unpickles after our check ----------------------------------------------------------------------


def cache_of(content):
    """NumPy's file of one object whose pickle is `content`."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {'descr': '|O', 'fortran_order': False, 'shape': ()})
    return out.getvalue() + content


def held(content):
    """The pickle of an array of one object, as np.save writes it."""
    return (
        b'\x80\x04'
        + called(named('numpy._core.multiarray._reconstruct'), named('numpy.ndarray'), b'K\0\x85', b'C\1b')
        + many(
            b'K\1',
            b')',
            dtype('O8', '|', *MINUS, b'K\x3f'),
            b'\x89',
            b'](' + content + b'e',
        )
        + b'b.'
    )


def test_caches_of_labels(tmp_path):
    (tmp_path / 'images').mkdir()
    (tmp_path / 'labels').mkdir()
    image, cache, sprung = tmp_path / 'images' / 'a.jpg', tmp_path / 'labels.cache', tmp_path / 'sprung'
    labels = [np.zeros((1, 5), np.float32), (64, 48), [np.ones((3, 2), np.float32)]]
    good = {str(image): labels, 'hash': 'x', 'results': (1, 0, 0, 0, 1), 'msgs': [], 'version': 0.6}

    def check():
        require_own_cache([str(image)], [str(tmp_path / 'images')])

    cache.write_bytes(npy(good))
    check()
    cache.write_bytes(cache_of(held(mapping(hash=text('x')))))
    check()
    hostile = [
        cache_of(held(mapping(hash=content)))
        for function, argument in list(payloads(sprung).values())[:3]
        for content in routes(function, argument).values()
    ]
    hostile += [cache_of(held(mapping(hash=content))) for content in TENSORS.values()]
    path = made('pathlib.PosixPath', mapping(x=b'N'))
    hostile += [cache_of(content) for content in (b'', held(b'N'), held(mapping() + mapping()), held(mapping(a=path)))]
    hostile += [cache_of(b'\x80\x04' + called(*payloads(sprung)['os.system']) + b'.'), b'', b'x', b'PK\3\4']
    hostile += [b'\x80\x02' + called(*payloads(sprung)['eval']) + b'.']
    assert len(hostile) > 300
    for content in hostile:
        cache.write_bytes(content)
        with pytest.raises(QatError, match='labels.cache: no cache of labels.*delete it'):
            check()
        assert not sprung.exists()


# ---- and what must still load --------------------------------------------------------------------------------------------------------


def test_plain_values_come_back_as_they_were(tmp_path):
    values = {
        'a': [1, 2.5, None, True, 'ü', b'x'],
        'b': (1, (2, [3])),
        3: {'x', 'y'},
        'tensor': torch.arange(6).view(2, 3).t(),
        'bf16': torch.ones(2, dtype=torch.bfloat16),
        'empty': torch.empty(0, 3),
        'scalar': torch.tensor(2.5),
        'size': torch.Size([1, 2]),
        'dtype': torch.float16,
        'device': torch.device('cpu'),
        'ordered': OrderedDict(b=1, a=2),
        'number': np.float64(0.5),
        'array': np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        'big': 2**63,
    }
    torch.save(values, tmp_path / 'values.pt')
    again = read_values(tmp_path / 'values.pt', '--weights')
    assert again.keys() == values.keys()
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            assert again[key].dtype == value.dtype and torch.equal(again[key], value)
        elif isinstance(value, np.ndarray):
            assert again[key].dtype == value.dtype and (again[key] == value).all()
        else:
            assert again[key] == value and type(again[key]) is type(value)


def test_shared_tensors_stay_shared(tmp_path):
    one = torch.zeros(3)
    torch.save([one, one, one[1:]], tmp_path / 'values.pt')
    first, second, part = read_values(tmp_path / 'values.pt', '--weights')
    first[1] = 5
    assert first is second and part[0] == 5


def test_a_layer_of_ones_own_loads_without_a_call(small, tmp_path, monkeypatch):
    """Defined under models/ of the tree, with a constructor and a __setstate__ that must not run."""
    from pathlib import Path

    import models

    file = Path(models.__path__[0]) / 'my_layers.py'
    file.write_text(
        'import torch\n\n\nclass Mine(torch.nn.Identity):\n    def __init__(self):\n        super().__init__()\n\n'
        '    def __setstate__(self, state):\n        raise SystemExit("called")\n'
    )
    try:
        from models.my_layers import Mine

        model = small.float_model()
        before = model.model[0]
        model.model[0] = Mine()
        model.model[0].i, model.model[0].f, model.model[0].type, model.model[0].np = before.i, before.f, 'Mine', 0
        model.model[0].add_module('inner', before)
        Mine.forward = lambda self, x: self.inner(x)
        torch.save({'model': model}, tmp_path / 'weights.pt')
        _, loaded = load_dual_or_float(tmp_path / 'weights.pt')
        assert type(loaded.model[0]) is Mine and torch.equal(loaded.model[0].inner.conv.weight, before.conv.weight)
    finally:
        file.unlink()


def test_the_pickle_of_a_real_checkpoint_has_room_below_every_limit(small):
    from utils.qat.untrusted import plain_values, torch_archive

    assert 80 * len(pickle_in(small.dual.read_bytes())) < torch_archive.MOST_PICKLE and plain_values.DEEPEST == 100
