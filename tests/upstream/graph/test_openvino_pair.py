"""The law of OpenVINO's two files: whenever an export is killed, a whole pair lies there, the old one or the new one."""

import contextlib
import os
import shutil
import sys

import numpy as np
import pytest
from helpers.graphs import graph_of, node

from utils.qat.core import files
from utils.qat.vendors.openvino import write as openvino
from utils.qat.vendors.openvino.model import one_core, write_ir
from utils.qat.vendors.openvino.write import atomic_pair

pytest.importorskip('openvino')
CODE = {module.__file__ for module in (openvino, files)}
SHAPE = (1, 3, 40, 40)
KILLED = 9  # exit status of a child that did not come to its end


@pytest.fixture(scope='module')
def exports(tmp_path_factory):
    """Two exports of other values, the second of more of them: (.xml, .xml), each with its .bin."""
    folder, made = tmp_path_factory.mktemp('exports'), []
    for name, layers in (('few', 1), ('many', 6)):
        values = {f'w{i}': np.random.default_rng([layers, i]).random(SHAPE, np.float32) for i in range(layers)}
        names = ['x', *(f'x{i}' for i in range(1, layers)), 'y']
        nodes = [node('Mul' if i % 2 else 'Add', names[i], f'w{i}', names[i + 1]) for i in range(layers)]
        made.append(folder / f'{name}.xml')
        write_ir(graph_of(nodes, initializers=values, shape=SHAPE), made[-1])
    return made


def pair(xml):
    """The content of both files; None for one that is not there."""
    return [file.read_bytes() if file.is_file() else None for file in (xml, xml.with_suffix('.bin'))]


def computed(xml):
    """The outputs of a pair in OpenVINO, loaded as any other program loads it."""
    model = one_core().compile_model(str(xml), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    return model(np.linspace(-1, 1, np.prod(SHAPE), dtype=np.float32).reshape(SHAPE))[0].tobytes()


def export(new, xml, last):
    """Replace the pair `xml` by the pair `new` in a child, which dies before its line number `last`; whether it came to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status, lines = 1, 0

    def die(frame, event, _):
        nonlocal lines
        lines += event == 'line'
        if lines == last:
            os._exit(KILLED)
        return die

    def watch(frame, event, _):
        return die if frame.f_code.co_filename in CODE else None

    try:
        sys.settrace(watch)
        with atomic_pair(xml) as tmp:
            shutil.copy(new, tmp)
            shutil.copy(new.with_suffix('.bin'), tmp.with_suffix('.bin'))
        status = 0
    finally:
        os._exit(status)


@pytest.mark.faults
@pytest.mark.parametrize('before', ['few', 'many'])
def test_killed_at_any_line_a_whole_pair_is_there(exports, tmp_path, before):
    old, new = exports if before == 'few' else exports[::-1]
    allowed, met, last = {computed(old): 'old', computed(new): 'new'}, {}, 0
    xml = tmp_path / 'model.xml'
    done = False
    while not done:
        last += 1
        for file in tmp_path.iterdir():
            file.unlink()
        for suffix in ('.xml', '.bin'):
            shutil.copy(old.with_suffix(suffix), xml.with_suffix(suffix))
        done = export(new, xml, last)
        state = tuple(pair(xml))
        met[state] = met.get(state) or allowed[computed(xml)]  # a KeyError: neither the old nor the new
    assert list(met.values()) == ['old', 'old', 'new', 'new', 'new', 'new'] and last > 30
    assert pair(xml) == pair(new) and {f.name for f in tmp_path.iterdir()} == {'model.xml', 'model.bin'}


@pytest.mark.faults
@pytest.mark.parametrize('there', [(), ('.xml',), ('.bin',)], ids=['nothing', 'an .xml alone', 'a .bin alone'])
def test_where_there_was_no_pair_there_is_none_or_the_new_one(exports, tmp_path, there):
    old, new = exports
    xml, last, done = tmp_path / 'model.xml', 0, False
    while not done:
        last += 1
        for file in tmp_path.iterdir():
            file.unlink()
        for suffix in there:
            shutil.copy(old.with_suffix(suffix), xml.with_suffix(suffix))
        done = export(new, xml, last)
        assert None in pair(xml) or pair(xml) == pair(new)
    assert pair(xml) == pair(new) and {f.name for f in tmp_path.iterdir()} == {'model.xml', 'model.bin'}


def test_a_pair_replaces_the_old_one_if_it_is_whole(exports, tmp_path):
    xml = tmp_path / 'model.xml'
    for suffix in ('.xml', '.bin'):
        shutil.copy(exports[0].with_suffix(suffix), xml.with_suffix(suffix))
    for whole in (False, True):
        with contextlib.nullcontext() if whole else pytest.raises(OSError, match='model'), atomic_pair(xml) as tmp:
            shutil.copy(exports[1], tmp)
            if whole:
                shutil.copy(exports[1].with_suffix('.bin'), tmp.with_suffix('.bin'))
        assert pair(xml) == pair(exports[whole]) and {f.name for f in tmp_path.iterdir()} == {'model.xml', 'model.bin'}
