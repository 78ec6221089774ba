"""YAML of an attacker (networks, data, others): nothing in it runs, and it costs little memory and time."""

import importlib
import math
import re
import sys
import textwrap
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml
from conftest import REPO, TREE
from helpers.faults import sampled
from helpers.zoo import build, config, full, program, python
from models.common import Conv

from models.quantize.reparameterize import parameter_shapes, reparameterize, require_small_maps
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.untrusted.model_yaml import LAYERS, require_network
from utils.qat.untrusted.yaml_file import NODES, read_yaml

CFG = yaml.safe_load((REPO / 'demo/yolov9-demo.yaml').read_text())


# ---- costs of any YAML --------------------------------------------------------------------------------------------------


def nested(link, levels=30):
    """A file of under 1 KB in which each level has the one before twice, by `link`."""
    return 'a0: &a0 {x: 1}\n' + ''.join(f'a{i}: &a{i} {link.format(i - 1)}\n' for i in range(1, levels))


DEAR = {  # name → text that is small, or at most as large as a data YAML, and takes gigabytes or minutes to build
    'merges': nested('{{<<: [*a{0}, *a{0}]}}'),
    'merges of one': nested('{{<<: *a{0}, y: *a{0}}}'),
    'lists of aliases': nested('[*a{0}, *a{0}]'),
    'maps of aliases': nested('{{x: *a{0}, y: *a{0}}}'),
    'a set of pairs': nested('!!omap [x: *a{0}, y: *a{0}]'),
    'itself': 'a: &a [*a]\n',
    'itself, merged': 'a: &a {x: {<<: *a}}\n',
    'lists within each other': '[' * 300_000,
    'maps within each other': '{a: ' * 100_000,
    'dashes within each other': '- ' * 300_000,
    'questions within each other': '? ' * 300_000,
    'indents': '\n'.join(' ' * i + '-' for i in range(1200)),
    'a million of values': 'x: [' + 'a,' * 990_000 + ']',
    'a million of keys': '{' + 'a,' * 990_000 + '}',
    'many anchors': ''.join(f'- &a{i} x\n' for i in range(150_000)),
    'many documents': '---\n' * 400_000,
    'a long number': 'x: ' + '9' * 1_000_000,
    'a long number, quoted': f'x: !!int "{"9" * 1_000_000}"',
    'a number of base 16': 'x: 0x' + 'f' * 1_000_000,
    'a number of base 60': 'x: 1' + ':59' * 600_000,
    'a short number of base 60': 'x: 1' + ':59' * 15_000,
    'a fraction of base 60': 'x: 1' + ':59' * 300 + '.5',
    'a number with underscores': 'x: 1' + '_1' * 20_000,
    'keys of one hash': ''.join(f'{i * (2**61 - 1)}: a\n' for i in range(40_000)),
    'a long text': f'x: "{"a" * 1_900_000}"',
    'a long key': f'"{"a" * 1_900_000}": x',
    'a long tag': f'x: !{"a" * 1_000_000} y',
}


@pytest.fixture(scope='module')
def largest(tmp_path_factory):
    """The CPU time on this machine of one of the largest files that are read."""
    file = tmp_path_factory.mktemp('largest') / 'data.yaml'
    file.write_text('- a\n' * (NODES - 1))
    start = time.process_time()
    assert len(read_yaml(file, '--data')) == NODES - 1
    return time.process_time() - start


@pytest.mark.parametrize('name', DEAR)
def test_a_yaml_that_would_cost_much(tmp_path, largest, name):
    """It is refused, and that costs about as much as a file that is read."""
    file = tmp_path / 'dear.yaml'
    file.write_text(DEAR[name])
    start = time.process_time()
    with pytest.raises(QatError, match='--data .*dear.yaml: ') as refused:
        read_yaml(file, '--data')
    assert (
        time.process_time() - start < 3 * largest and len(str(refused.value)) < 500 and '\n' not in str(refused.value)
    )


def test_they_take_no_memory(tmp_path):
    """All files are read in one process; its peak memory grows by less than 300 MB."""
    for i, text in enumerate(DEAR.values()):
        (tmp_path / f'{i}.yaml').write_text(text)
    (tmp_path / 'read.py').write_text(
        textwrap.dedent(f"""
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(TREE)!r})
        from utils.qat.untrusted.yaml_file import load_yaml
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for file in sorted(Path({str(tmp_path)!r}).glob('*.yaml')):
            try:
                load_yaml(file.read_text())
                print(file, 'was read')
            except Exception:
                pass
        print('MB', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
        """)
    )
    said = python(tmp_path / 'read.py')
    assert 'was read' not in said and int(said.split()[-1]) < 300, said


def test_what_people_write_is_read(tmp_path):
    """Among it anchors and merges, and ImageNet's 21 841 classes."""
    file = tmp_path / 'fine.yaml'
    file.write_text(
        'base: &base {a: 1, b: &list [1, 2.5e-3, 0x1F, 1_000]}\nmine: {<<: *base, b: *list, c: [*list, *list]}\nnames:\n'
        + ''.join(f'  {i}: some kind of thing {i}\n' for i in range(21_841))
    )
    content = read_yaml(file, '--data')
    assert len(content['names']) == 21_841 and content['mine'] == {
        'a': 1,
        'b': [1, 2.5e-3, 31, 1000],
        'c': [[1, 2.5e-3, 31, 1000]] * 2,
    }


@pytest.mark.parametrize(
    'file', [*sorted((TREE / 'data').rglob('*.yaml')), *sorted((REPO / 'demo').glob('*.yaml'))], ids=lambda f: f.name
)
def test_yaml_of_upstream_and_of_the_demo_is_read(file):
    assert read_yaml(file, '--data') == yaml.safe_load(file.read_text(encoding='utf-8', errors='ignore'))


def test_all_yaml_is_read_in_one_place():
    ours = [
        f
        for folder in ('models', 'utils', 'scripts', 'demo', 'segment', 'benchmarks', 'examples')
        for f in (REPO / folder).rglob('*.py')
    ] + [*REPO.glob('*.py')]
    loading = {
        f.relative_to(REPO).as_posix()
        for f in ours
        if re.search(r'yaml\.\w*(load|parse|compose|Loader)', f.read_text())
    }
    assert loading <= {'utils/qat/untrusted/yaml_file.py'}


# ---- networks -----------------------------------------------------------------------------------------------------------


def with_row(row):
    """The demo's network with another second row."""
    content = deepcopy(CFG)
    content['backbone'][1] = row
    return content


SPRING = '__import__("os").system("touch sprung")'
CALLED = (  # what upstream would call, each with an argument or two
    'open exit input print eval exec compile os.system os.abort contextlib.suppress torch.load torch.hub.load '
    'nn.Module.__init_subclass__ nn.modules.conv.os.abort Path LOGGER.info attempt_load parse_model check_yaml check_version '
    'select_device DetectionModel SegmentationModel ClassificationModel Model BaseModel DetectMultiBackend AutoShape Ensemble End2End '
    'ONNX_TRT Detections autopad nn.DataParallel nn.Sequential torch.nn.Conv2d d m Conv.default_act Conv()'
)
ROWS = {  # what a row is instead
    'no name': [-1, 1, '', []],
    'a name with a space': [-1, 1, 'Conv ', [64]],
    'a call': [-1, 1, SPRING, []],
    'a comprehension': [-1, 1, f'[{SPRING} for _ in "a"]', []],
    'a lambda': [-1, 1, f'(lambda *a: {SPRING})', []],
    'a long list': [-1, 1, 'SPP', [64, list(range(1000))]],
    'a layer that is a number': [-1, 1, 3, []],
    'a layer that is a list': [-1, 1, ['Conv'], [64]],
    'from text': ['-1', 1, 'Conv', [64, 3, 2]],
    'from nothing': [[], 1, 'Concat', [1]],
    'from a fraction': [-1.5, 1, 'Conv', [64, 3, 2]],
    'from far': [10**6, 1, 'Conv', [64, 3, 2]],
    'many repeats': [-1, 10**9, 'Conv', [64, 3, 2]],
    'repeats that are text': [-1, '1', 'Conv', [64, 3, 2]],
    'no repeats': [-1, 0, 'Conv', [64, 3, 2]],
    'layers within layers': [-1, 1, 'RepNCSPELAN4', [64, 64, 64, 99_999]],
    'terabytes of weights': [-1, 1, 'Conv', [99_999, 9_999]],
    'terabytes of maps': [-1, 1, 'nn.Upsample', ['None', 9_999, 'nearest']],
    'hours of pooling': [-1, 1, 'SP', [99_999]],
    'hours in a list': [-1, 1, 'SPP', [64, [5, 99_999]]],
    'a border of miles': [-1, 1, 'nn.ZeroPad2d', [[9_999] * 4]],
}
ARGUMENTS = [[SPRING, 3, 2], [64, 3, 2, 'exit()'], ['layers', 3, 2], ['nearest', 3, 2], [{'a': 1}, 3]]  # of a Conv
ARGUMENTS += [[64, [SPRING]], [b'64', 3], [math.nan, 3], [64, math.inf], [10**30, 3], ['10**10**10', 3], [1] * 1000]
ACTIVATIONS = f"""
{SPRING}
nn.ReLU({SPRING})
nn.ReLU(inplace=exit())
nn.Sequential()
nn.LeakyReLU("0.1")
nn.ReLU
nn.ReLU()()
nn.ReLU() or exit()
exit()
ReLU()
nn.LeakyReLU(*[0.1])
nn.LeakyReLU(**{{}})
nn.LeakyReLU(9e99)
 nn.ReLU()
nn.PReLU(999999999)
nn.modules.os.abort()
""".strip('\n').splitlines()
ACTIVATIONS += ['(' * 50, 3, ['nn.ReLU()'], '']
VALUES = {  # of other keys
    'nc': (SPRING, 0, 10**9, True, 1.5),
    'depth_multiple': (10**9, 'a', math.nan),
    'width_multiple': (math.inf, 0, None),
    'anchors': (SPRING, [], [[]], [[1, 'a']], 10**9, [[1] * 1000]),
    'ch': (10**9, 'c'),
    'inplace': (SPRING,),
    'more': (b'a', {'a': (1, 2)}),
    3: (4,),
    'head': ([], [[-1, 1, 'Conv']], {'a': 1}, CFG['head'] * 1000),
}
NETWORKS = {  # name → content that upstream would run, or that builds no network, or a huge one
    **{f'a call of {name}': with_row([-1, 1, name, ['sprung', 'w']]) for name in CALLED.split()},
    **{name: with_row(row) for name, row in ROWS.items()},
    **{f'arguments {it!r:.30}': with_row([-1, 1, 'Conv', it]) for it in ARGUMENTS},
    **{f'activation {it!r:.30}': {**CFG, 'activation': it} for it in ACTIVATIONS},
    **{f'{key} {value!r:.30}': {**CFG, key: value} for key, values in VALUES.items() for value in values},
    **{f'no {key}': {k: v for k, v in CFG.items() if k != key} for key in ('anchors', 'backbone')},
    'a branch of its own': {**CFG, 'head': CFG['head'] + [[-1, 1, 'nn.Upsample', ['None', 99_999, 'nearest']]]},
    'a list': [1],
    'nothing': None,
}


@pytest.mark.parametrize('name', NETWORKS)
def test_a_network_that_is_none(tmp_path, monkeypatch, largest, name):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with quiet_upstream(), pytest.raises(QatError, match='--cfg x.yaml: ') as refused:
        parameter_shapes(deepcopy(NETWORKS[name]), '--cfg x.yaml')
    assert time.process_time() - start < 4 * largest and len(str(refused.value)) < 500
    assert not list(tmp_path.iterdir())


def test_they_would_have():
    """Upstream's own parse_model, of the same content."""
    import models.yolo as upstream

    ran = []
    upstream.sprung = lambda: ran.append(1) or 'Conv'  # in its globals, as `open` is
    try:
        for content in (
            with_row([-1, 1, 'sprung()', [64, 3, 2]]),
            with_row([-1, 1, 'Conv', ['sprung() and 64', 3, 2]]),
            {**CFG, 'activation': 'sprung() and nn.SiLU()'},
        ):
            before = len(ran)
            with quiet_upstream(), pytest.raises(QatError):
                parameter_shapes(content, 'x')
            assert len(ran) == before
            try:
                upstream.parse_model(deepcopy(content), [3])
            except TypeError:  # 'Conv' is no layer
                pass
            assert len(ran) > before
    finally:
        del upstream.sprung


def test_a_whole_model_is_no_layer():
    """Whatever it calls: upstream's may call something else tomorrow. Ensemble is in a file of which parse_model knows nothing."""
    for (
        name
    ) in 'BaseModel DetectionModel SegmentationModel ClassificationModel DetectMultiBackend AutoShape Ensemble'.split():
        says = f'{name} is a whole model' if hasattr(sys.modules['models.yolo'], name) else f'no layer {name}'
        with pytest.raises(QatError, match=says):
            require_network(with_row([-1, 1, name, []]), 'x')


class Layer(torch.nn.Module):
    """Not in the tree."""


THINGS = [Layer, Layer(), Conv, torch.nn.SiLU(), eval, type('Text', (str,), {})('Conv'), type('Rows', (list,), {})([1])]


@pytest.mark.parametrize('thing', THINGS, ids=lambda thing: type(thing).__name__)
def test_what_a_pickle_may_bring_is_no_yaml(thing):
    """Inside a checkpoint the YAML is objects: a class, which parse_model would call, or text that is not what it looks like."""
    for content in (
        with_row([-1, 1, thing, []]),
        with_row([-1, 1, 'Conv', [thing]]),
        {**CFG, 'activation': thing},
        {**CFG, 'nc': thing},
        {**CFG, 'more': [thing]},
    ):
        with pytest.raises(QatError, match='^x: '):
            require_network(content, 'x')


SOME = 'a call of open', 'a call of DetectionModel', 'terabytes of weights', "activation 'exit()'", 'nothing'


@pytest.mark.parametrize(
    'name', sampled([*SOME, 'a call', 'nc 0', 'hours of pooling', 'many repeats', 'a branch of its own'], 5)
)
def test_inside_a_checkpoint(material, told, tmp_path, name):
    """The network itself is fine, so that it is loaded; what is built anew of it comes from its YAML."""
    content = torch.load(material['dual.pt'], weights_only=False)
    content['model'].yaml = deepcopy(NETWORKS[name])
    torch.save(content, tmp_path / 'weights.pt')
    code, said = told('reparameterization.py --weights weights.pt --save out/x.pt')
    assert code == 2 and not Path('sprung').exists() and not Path('out').exists(), said


@pytest.mark.parametrize('name', sampled([*SOME, 'a call', 'a list'], 4))
def test_in_a_packed_file(tmp_path, monkeypatch, name):
    """demo/weights.py builds a network of the YAML in a file of tensors."""
    monkeypatch.chdir(tmp_path)
    weights = program('demo/weights.py')
    packed = torch.load(REPO / 'demo/demo-weights.pt', weights_only=True)
    torch.save({**packed, 'yaml': NETWORKS[name]}, tmp_path / 'packed.pt')
    with quiet_upstream(), pytest.raises(QatError, match='packed.pt: '):
        weights.build(tmp_path / 'packed.pt', tmp_path / 'out.pt')
    assert [f.name for f in tmp_path.iterdir()] == ['packed.pt']


def test_maps_without_weights():
    """Layers that need no weights, so that the weights in a file fit, and maps of gigabytes."""
    content = deepcopy(CFG)
    require_small_maps(content, 'x')
    rows = [(i, row) for i, row in enumerate(content['head']) if row[2] == 'nn.Upsample']
    for i, row in rows:
        content['head'][i] = [row[0], 1, 'nn.Upsample', ['None', 64, 'nearest']]
    assert rows and parameter_shapes(content, 'x') == parameter_shapes(CFG, 'x')
    with quiet_upstream(), pytest.raises(QatError, match='x: '):
        require_small_maps(content, 'x')
    first = {
        **CFG,
        'backbone': [CFG['backbone'][0], [-1, 1, 'nn.Upsample', ['None', 64, 'nearest']], *CFG['backbone'][1:]],
    }
    with quiet_upstream(), pytest.raises(QatError, match='x: needs maps of more than 67 million values'):
        require_small_maps(first, 'x')


# ---- and what is a network ----------------------------------------------------------------------------------------------

NO_NETWORKS = {'anchors'}  # in models/hub
UPSTREAM = [f for f in sorted((TREE / 'models').rglob('*.yaml')) if f.stem not in NO_NETWORKS]


@pytest.mark.parametrize(
    'file',
    sampled([*(REPO / f'demo/yolov9-{name}.yaml' for name in ('demo', 'demo-seg')), *UPSTREAM], 6),
    ids=lambda f: f.name,
)
def test_networks_of_upstream_and_of_the_demo(file):
    content = read_yaml(file, '--cfg')
    require_network(content, file)
    if 'hub' not in file.parts:  # of YOLOv3, whose heads this upstream cannot build
        with quiet_upstream():
            assert parameter_shapes(content, file)


@pytest.mark.parametrize('name', sampled(['demo', 'demo-seg', *full('gelan-c-dseg')], 3))
def test_the_shapes_are_those_of_the_model(name):
    before = Conv.default_act
    changes = {
        'activation': 'nn.PReLU()',
        **({} if name == 'demo' else {'width_multiple': 0.25}),
    }  # CBLinear does not follow it
    content = config(name, **changes)
    with quiet_upstream():
        shapes = parameter_shapes(content, name)
    assert Conv.default_act is before and content == config(name, **changes)
    assert shapes == {k: tuple(v.shape) for k, v in build(name, **changes).state_dict().items()}


@pytest.mark.parametrize(
    'text', [None, 'nn.SiLU()', 'nn.LeakyReLU(0.1)', 'nn.LeakyReLU(negative_slope=0.1, inplace=True)', 'nn.Hardswish()']
)
def test_activations(text):
    require_network({**CFG, 'activation': text}, 'x')


OWN = """
import torch.nn as nn
from torch.nn import Dropout3d
import torch

class Mine(nn.Module):
    '''As a user writes one; it computes a few numbers while it is made.'''
    def __init__(self, factor=2, parts=(1, 2), bias=True):
        super().__init__()
        self.rates = torch.linspace(0, 0.5, factor).tolist()
        self.weight = nn.Parameter(torch.ones(factor))

    def forward(self, x):
        return x * self.weight.mean()

class Opens(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.text = open('sprung', 'w')

class Evals(Mine):
    def forward(self, x):
        return [eval('x') for _ in 'a'][0]

class Inherits(Opens):
    pass

def function(n):
    open('sprung', 'w')

class Plain:
    def __init__(self, *a):
        open('sprung', 'w')
"""


@pytest.fixture
def own(monkeypatch):
    """Classes of a user's, defined in models.common and so in what parse_model knows."""
    common, yolo = (importlib.import_module(f'models.{name}') for name in ('common', 'yolo'))
    scope = {'__name__': 'models.common'}
    exec(OWN, scope)
    scope['Whole'] = type('Whole', (yolo.DetectionModel,), {'__module__': 'models.yolo'})
    scope['Elsewhere'] = type('Elsewhere', (scope['Mine'],), {'__module__': 'a_package'})
    for name in ('Mine', 'Opens', 'Evals', 'Inherits', 'function', 'Plain', 'Whole', 'Elsewhere', 'Dropout3d'):
        for module in (common, yolo):
            monkeypatch.setattr(module, name, scope[name], raising=False)


def test_a_layer_of_ones_own(own, tmp_path, monkeypatch):
    """What is defined in the tree and takes numbers is a layer; what is imported there, is a whole model, opens or evaluates is none."""
    monkeypatch.chdir(tmp_path)
    content = deepcopy(CFG)
    content['backbone'].insert(2, [-1, 2, 'Mine', [4, [1, 2], False]])
    require_network(content, 'x')
    plain = {
        **CFG,
        'backbone': CFG['backbone'][:2] + [[-1, 2, 'Mine', [4, [1, 2], False]]],
        'head': [[[-1], 1, 'DDetect', ['nc']]],
    }
    with quiet_upstream():
        assert parameter_shapes(plain, 'x')['model.2.1.weight'] == (4,)
    for name in ('Opens', 'Evals', 'Inherits', 'function', 'Plain', 'Whole', 'Elsewhere', 'Dropout3d'):
        with quiet_upstream(), pytest.raises(QatError, match=name):
            parameter_shapes({**plain, 'head': [[-1, 1, name, [3]], *plain['head']]}, 'x')
    for argument in ('nearest', 'sprung', 'exit()'):
        with pytest.raises(QatError, match='is no argument of Mine'):
            require_network({**plain, 'head': [[-1, 1, 'Mine', [argument]]]}, 'x')
    assert not list(tmp_path.iterdir())


def test_each_layer_of_the_list_is_one_of_upstreams():
    text = ''.join((TREE / 'models' / name).read_text() for name in ('common.py', 'yolo.py'))
    known = {name for name in LAYERS if f'class {name}(' in text}
    assert len(known) > 25 and (len(known) == len(LAYERS) or 'class ELAN1' not in text), LAYERS - known
    assert sys.modules['models.yolo'].Conv is Conv and Path(sys.modules['models.yolo'].__file__).is_relative_to(TREE)


def test_a_network_with_a_layer_of_ones_own_is_reparameterized(own):
    """Its YAML inside the checkpoint names the layer."""
    content = deepcopy(CFG)
    content['backbone'][0] = [-1, 1, 'Mine', [1]]
    import models.yolo as upstream

    with quiet_upstream():
        model = upstream.DetectionModel(content).eval()
        single = reparameterize(model)
    assert type(single.model[0]).__name__ == 'Mine' or type(single.model[0]).__name__ == 'Conv'
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.isfinite(single.eval()(x)[0]).all()
