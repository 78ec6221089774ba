"""Hostile and damaged .pt2 files: nothing of a program runs, and each is refused in one line. A package is native code, and runs if it is named.

`torch.export.load` itself runs three of the programs, and `--backend aoti` the package, as two tests show: the laws are about real attacks.
"""

import contextlib
import json
import pickle
import random
import shutil
import subprocess
import zipfile

import pytest
import torch
from conftest import REPO
from helpers.faults import Call, answer, archive, members, saved
from helpers.mutations import damage
from helpers.zoo import deployed

from utils.qat.core.errors import QatError
from utils.qat.core.machine import instruction_flags
from utils.qat.untrusted.program_archive import AGAIN, OPERATOR, OTHERS, read_program
from utils.qat.vendors.pytorch.pt2 import ExportedProgram

CPU, SIDE = torch.device('cpu'), 64
TARGETS = 'torch.hub.load torch.load torch.ops.aten.from_file.default torch.ops.load_library math.factorial #x'  # no operators of ours
CUT = [0, 0.1, 0.5, 0.999]  # shares of a file
DAMAGED = 30


@pytest.fixture(scope='module')
def program(small, tmp_path_factory):
    """A program of the small quantized model, of any batch."""
    file = tmp_path_factory.mktemp('programs') / 'good.pt2'
    deployed('pt2', small.quantized_model(), file, imgsz=(SIDE, SIDE), dynamic=True)
    return file


def changed(program, new, change):
    """Write a copy whose members `change` has changed: name without the folder → bytes."""
    parts = {name.partition('/')[2]: part for name, part in members(program.read_bytes()).items()}
    change(parts)
    new.write_bytes(archive({f'x/{name}': part for name, part in parts.items()}))
    return new


def in_graph(change):
    """A change of the graph's JSON."""

    def apply(members):
        graph = json.loads(members['models/model.json'])
        change(graph)
        members['models/model.json'] = json.dumps(graph).encode()

    return apply


def expression(text):
    """Put `text` where a size is."""

    def change(graph):
        values = graph['graph_module']['graph']['tensor_values']
        sizes = next(v['sizes'] for v in values.values() if any('as_expr' in s for s in v['sizes']))
        next(s for s in sizes if 'as_expr' in s)['as_expr']['expr_str'] = text

    return in_graph(change)


def attacks(mark):
    """Changes of a program's members by which torch.export.load, or the result of it, runs code, by name."""
    opens = Call(open, str(mark), 'w')

    def sample(members):
        members['data/sample_inputs/model.pt'] = saved(opens)

    def weight(members):
        config = json.loads(members['data/weights/model_weights_config.json'])
        tensor = next(iter(config['config'].values()))
        tensor['use_pickle'] = True
        members[f'data/weights/{tensor["path_name"]}'] = saved(opens)
        members['data/weights/model_weights_config.json'] = json.dumps(config).encode()

    def opaque(members):
        config = json.loads(members['data/constants/model_constants_config.json'])
        config['config']['x'] = {
            'path_name': 'opaque_obj_0',
            'is_param': False,
            'use_pickle': True,
            'tensor_meta': None,
        }
        members['data/constants/opaque_obj_0'] = pickle.dumps(opens)
        members['data/constants/model_constants_config.json'] = json.dumps(config).encode()

    return {
        'sample inputs': sample,
        'pickled weight': weight,
        'pickled object': opaque,
        'size': expression(f"open('{mark}', 'w')"),
        'guard': in_graph(lambda graph: graph.update(guards_code=[f"open('{mark}', 'w')"])),
        'name of a source file': in_graph(
            lambda graph: graph['graph_module']['graph']['nodes'][0].update(metadata={'stack_trace': str(mark)})
        ),
        'legacy weights': lambda members: members.update({'data/weights/model.pt': saved(opens)}),
        'native code': lambda members: members.update({'data/aotinductor/model/x.so': b'\x7fELF'}),
    }


NAMES = sorted(attacks(''))
LEFT_OUT = 'sample inputs', 'guard', 'name of a source file'  # the rest of the program is sound, and is read


def require_attack(mark):
    """Fail unless the attack made the file `mark`; other versions of PyTorch than ours may refuse it."""
    tested = f'torch=={torch.__version__.partition("+")[0]} ' in (REPO / 'constraints.txt').read_text()
    if not mark.exists() and not tested:
        pytest.skip(f'PyTorch {torch.__version__} does not run it')
    assert mark.exists()


@pytest.mark.parametrize('name', ['sample inputs', 'pickled object', 'size'])
def test_torch_itself_runs_them(name, program, tmp_path):
    mark = tmp_path / 'ran'
    file = changed(program, tmp_path / 'bad.pt2', attacks(mark)[name])
    with contextlib.suppress(Exception):  # what the attack returned is no tensor and no size
        torch.export.load(file)
    require_attack(mark)


@pytest.mark.parametrize('name', NAMES)
def test_nothing_of_a_program_runs(name, program, tmp_path):
    mark = tmp_path / 'ran'
    file = changed(program, tmp_path / 'bad.pt2', attacks(mark)[name])
    try:
        session = ExportedProgram(file, CPU)
        session.run({'images': torch.zeros(1, 3, SIDE, SIDE)})
    except QatError as e:
        assert name not in LEFT_OUT and (AGAIN in str(e) or 'AOTInductor' in str(e))
    else:
        assert name in LEFT_OUT
        members, _ = read_program(file)
        assert str(mark).encode() not in b''.join(members.values()), 'PyTorch gets nothing of it'
    assert not mark.exists()


@pytest.mark.parametrize('target', TARGETS.split())
def test_other_operators_are_refused(target, program, tmp_path):
    change = in_graph(lambda graph: graph['graph_module']['graph']['nodes'][0].update(target=target))
    with pytest.raises(QatError, match='not on the list of operators'):
        ExportedProgram(changed(program, tmp_path / 'bad.pt2', change), CPU)


def test_the_list_holds_operators_only():
    for name in OTHERS - {'_operator.getitem'}:
        assert OPERATOR.fullmatch(name) is None and name.startswith('torch.ops.quantized_decomposed.')


@pytest.mark.faults
def test_damaged_programs_are_refused_or_equal(program, tmp_path):
    whole, good = program.read_bytes(), read_program(program)
    chance = random.Random(0)
    for what, content in (damage(whole, chance) for _ in range(DAMAGED)):
        (tmp_path / 'damaged.pt2').write_bytes(content)
        try:
            assert read_program(tmp_path / 'damaged.pt2') == good, what
        except QatError as e:
            assert '\n' not in str(e), what


@pytest.mark.parametrize('share', CUT)
def test_a_cut_program_is_refused(share, program, tmp_path):
    whole = program.read_bytes()
    (tmp_path / 'cut.pt2').write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(QatError, match='cut short|not loaded'):
        ExportedProgram(tmp_path / 'cut.pt2', CPU)


# ---- packages: native code ------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """A package for this machine whose library writes the file `ran` when it is loaded."""
    if not shutil.which('g++'):
        pytest.skip('no g++')
    source, library = tmp_path / 'library.cpp', tmp_path / 'library.so'
    source.write_text(f'#include <cstdio>\nstatic auto ran = std::fopen("{tmp_path}/ran", "w");\n')
    subprocess.run(['g++', '-shared', '-fPIC', source, '-o', library], check=True)
    metadata = {
        'AOTI_DEVICE_KEY': 'cpu',  # PyTorch's own
        'device': 'cpu',
        'cpu': ' '.join(instruction_flags()),
        'torch': torch.__version__,
        'imgsz': f'{SIDE},{SIDE}',
        'batch': '1',
    }
    with zipfile.ZipFile(tmp_path / 'package.pt2', 'w') as archive:
        archive.writestr('package/archive_format', 'pt2')
        archive.writestr('package/data/aotinductor/model/a.wrapper_metadata.json', json.dumps(metadata))
        archive.write(library, 'package/data/aotinductor/model/a.wrapper.so')
    return tmp_path / 'package.pt2'


def opening(small, package):
    """Command lines that open the package: alone, as one of several, as a baseline."""
    scored = ('--data', small.data, '--imgsz', SIDE, '--workers', 0)
    return [
        ('qat.py', 'eval', '--weights', package, *scored),
        ('qat.py', 'eval', '--weights', small.single, '--baseline', package, *scored),
        ('val_trt.py', '--weights', package, *scored),
        ('compare_outputs.py', package, small.single, '--random', 1),
        ('compare_outputs.py', small.single, package, '--random', 1),
        ('benchmark_trt.py', package, small.single, '--duration', 0.01),
        ('benchmark_trt.py', small.single, '--baseline', package, '--duration', 0.01),
    ]


def test_native_code_runs_only_if_its_backend_is_named(small, package, tmp_path, capfd):
    ran, run = tmp_path / 'ran', ('--device', 'cpu', '--project', tmp_path / 'runs')
    for command, *words in opening(small, package):
        code, line = answer(command, (*words, *run), capfd, tmp_path)
        assert code == 2 and 'native code' in line and line.endswith(': --backend aoti'), line
        assert not ran.exists(), command
    for command, *words in opening(small, package):
        code, _ = answer(command, (*words, *run, '--backend', 'aoti'), capfd, tmp_path, leaves=['ran'])
        assert code == 2, command  # its library is no model
        require_attack(ran)
        ran.unlink()
