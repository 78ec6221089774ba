"""Laws of the source tree, from its syntax: each is one test over all files, and lists the places that break it."""

import ast
import functools
import re

from conftest import REPO

from utils.qat.config.tables import BACKENDS, FORMATS, TARGETS, VENDORS

COMMANDS = sorted([*REPO.glob('*.py'), *REPO.glob('scripts/*.py')])
DEPLOY, QUANTIZE, QAT = (
    sorted((REPO / folder).rglob('*.py')) for folder in ('models/deploy', 'models/quantize', 'utils/qat')
)
CLIENTS = [*REPO.glob('examples/*.py')]  # to be copied out of this tree: they stand alone
TREES = {file: ast.parse(file.read_text(encoding='utf-8')) for file in (*COMMANDS, *DEPLOY, *QUANTIZE, *QAT, *CLIENTS)}
OURS = [*COMMANDS, *DEPLOY, *QUANTIZE, *QAT]


def name_of(file):
    return file.relative_to(REPO).as_posix()


def module_of(file):
    return name_of(file).removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def at_module_level(tree):
    """Nodes that run when the module is imported: neither inside functions, nor for type checkers alone."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            and not (isinstance(child, ast.If) and ast.unparse(child.test) == 'TYPE_CHECKING')
        ]


def imported(nodes):
    """Dotted names that the import statements among `nodes` bring in; `from a import b` gives both a and a.b, a relative one '.'."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= (
                {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)} if not node.level else {'.'}
            )
    return names


IMPORTS = {file: imported(ast.walk(tree)) for file, tree in TREES.items()}  # in functions too
AT_ONCE = {file: imported(at_module_level(tree)) for file, tree in TREES.items()}


def within(names, *packages):
    return sorted(n for n in names if any(n == p or n.startswith(p + '.') for p in packages))


def importing(files, *packages, names=IMPORTS):
    """'file: name' for each of `files` that imports something of `packages`."""
    return [f'{name_of(file)}: {name}' for file in files for name in within(names[file], *packages)]


def but(files, names):
    """`files` without those with these names."""
    names = set(names)
    return [file for file in files if name_of(file) not in names]


def lines(files, breaks):
    """'file:line' for each node of `files` for which `breaks` is true."""
    return [f'{name_of(file)}:{node.lineno}' for file in files for node in ast.walk(TREES[file]) if breaks(node)]


def test_the_walk_finds_the_files():
    assert {'qat', 'reparameterization', 'export_qat'} <= {file.stem for file in COMMANDS}
    assert DEPLOY and QUANTIZE and QAT and CLIENTS
    assert not [p for p in ('models/__init__.py', 'utils/__init__.py') if (REPO / p).exists()], (
        'they would replace those of upstream'
    )


# ---- imports ------------------------------------------------------------------------------------------------------------


def test_imports_go_one_way():
    """Commands import the rest, in the order of LEVELS."""
    assert not importing(OURS, '.'), 'relative'
    assert not importing(OURS, *(file.stem for file in COMMANDS)), 'nothing imports a command file'
    assert not importing(
        [f for f in QAT if level_of(module_of(f)) < level_of('models.quantize')], 'models', names=AT_ONCE
    )
    assert not importing(but(OURS, ['models/quantize/quantizers.py']), 'pytorch_quantization'), (
        'one file knows that library'
    )


def test_what_loads_nothing_heavy():
    """Commands show their help before they load anything, and where it is not installed; clients need neither this toolkit nor torch,
    and reading the layers of an engine needs neither torch nor TensorRT."""
    assert not importing(
        but(COMMANDS, map(name_of, CLIENTS)), 'torch', 'models', 'onnx', 'onnxruntime', 'numpy', names=AT_ONCE
    )
    assert not importing(CLIENTS, 'torch', 'torchvision', 'models', 'utils')
    layers = sorted(REPO.glob('utils/qat/vendors/tensorrt/engine/layer*.py'))
    assert len(layers) == 4 and not importing(layers, 'torch', 'tensorrt', 'models')


ROOMS = rf'utils\.qat\.vendors\.({"|".join(VENDORS)})'
# From the lowest up: patterns of modules, of which the first that fits counts. A module imports those of its own level and of lower ones
LEVELS = [
    r'utils\.qat\.compat',
    r'utils\.qat\.core',
    r'utils\.qat\.untrusted',
    rf'utils\.qat\.vendors\.vendor|{ROOMS}$',  # the facts
    r'utils\.qat\.config',
    r'utils\.qat\.data',
    r'utils\.qat\.graph',
    rf'utils\.qat\.vendors\.graphs|{ROOMS}\.(graph|half)',
    r'utils\.qat\.vendors\.session|utils\.qat\.backends',
    r'utils\.qat\.vendors\.measured',
    rf'utils\.qat\.vendors\.(load|next_step)|{ROOMS}(?!\.(write|quantize_op))',
    r'utils\.qat\.evaluation',
    r'utils\.qat\.tasks',
    r'utils\.qat\.benchmark',
    r'utils\.qat\.run',
    r'models\.quantize',
    rf'models\.deploy|{ROOMS}',  # what writes files
]
# Files that load modules of ours by name → these modules, each of which counts as imported
BY_NAME = {
    'utils/qat/config/tables.py': [f'utils.qat.vendors.{name}' for name in VENDORS],
    'utils/qat/vendors/graphs.py': [target.graph for target in TARGETS.values()],
    'utils/qat/vendors/load.py': [backend.module for backend in BACKENDS.values()],
    'models/deploy/load.py': [kind.module.partition(':')[0] for kind in FORMATS.values()],
    'models/quantize/checkpoint.py': [
        module_of(file) for file in QUANTIZE if file.match('trainers/[!_]*') and file.stem != 'trainer'
    ],
}
OTHERS_BY_NAME = {  # file → what else it loads
    'models/deploy/verify.py': 'the library of a backend, for its version',
    'models/quantize/pickled_modules.py': "upstream's classes",
    'utils/qat/compat.py': 'packages that may be missing',
    'utils/qat/core/machine.py': 'NVML',
    'utils/qat/vendors/pytorch/write_aoti.py': 'torchao',
    'utils/qat/vendors/tensorrt/engine/api.py': 'TensorRT',
    'utils/qat/config/tasks.py': 'a task, and so it climbs: evaluation/, which tasks import, asks for tasks',
}


def circles(graph):
    """Lists of modules of {module: modules that it imports} that import each other, directly or not. In: every module is a key."""

    def reached(start):
        seen, waiting = set(), [*graph[start]]
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        return seen

    reach = {module: reached(module) for module in graph}
    found = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return sorted(map(list, found))


@functools.cache
def our_imports():
    """{module: modules of ours that it imports, in functions and by name too}; those of a package are those of its __init__.py."""
    modules = {module_of(file): file for file in (*DEPLOY, *QUANTIZE, *QAT)}
    return {
        module: {name for name in (*IMPORTS[file], *BY_NAME.get(name_of(file), ())) if name in modules} - {module}
        for module, file in modules.items()
    }


def level_of(module):
    """Position in LEVELS; -1 of a package with a docstring alone."""
    return next((level for level, pattern in enumerate(LEVELS) if re.match(pattern, module)), -1)


def test_no_file_imports_itself_through_others():
    """Imports inside functions and by name count too, because they only hide a circle."""
    assert circles({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == [['b', 'c']], 'circles are seen'
    assert not circles(our_imports())


def test_what_is_loaded_by_name_is_known():
    def by_name(node):
        return isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module')

    assert {place.split(':')[0] for place in lines(OURS, by_name)} == {*BY_NAME, *OTHERS_BY_NAME}
    assert all({*names} <= our_imports().keys() for names in BY_NAME.values())


def test_each_level_imports_itself_and_those_below():
    climbs = [
        f'{module}: {name}'
        for module, names in our_imports().items()
        for name in names
        if 0 <= level_of(module) < level_of(name)
    ]
    assert not climbs
    assert {module for module in our_imports() if level_of(module) < 0} == {'utils.qat', 'utils.qat.vendors'}


def test_rooms_of_vendors_stand_alone():
    """No room imports another: shared code stands below the rooms. But LiteRT takes its facts from ONNX Runtime's, and changes some, and the
    files for edge chips are LiteRT's."""
    rooms = {module: found[1] for module in our_imports() if (found := re.match(ROOMS, module))}
    crossed = {
        (room, rooms[name])
        for module, room in rooms.items()
        for name in our_imports()[module]
        if rooms.get(name, room) != room
    }
    assert {*rooms.values()} == {*VENDORS} and crossed == {('litert', 'onnxruntime'), ('edge', 'litert')}


def test_no_folder_is_crowded():
    folders = {file.parent for file in OURS} - {REPO} | {file.parent for file in (REPO / 'tests').rglob('*.py')}
    assert not [f'{name_of(folder)}: {count}' for folder in folders if (count := len(list(folder.glob('*.py')))) > 15]


def test_only_the_room_of_tasks_knows_what_differs_between_them():
    """Upstream calls the outlines in its labels `segments`."""
    outside = but(OURS, map(name_of, (REPO / 'utils/qat/tasks').glob('*.py')))
    words = [
        (name_of(file), re.findall(r'classifies|(?<!dataset)\.segments|segments=', file.read_text()))
        for file in outside
    ]
    assert not [place for place in words if place[1]]


# ---- what is not done ---------------------------------------------------------------------------------------------------

PRINTS = {
    'utils/qat/core/command.py': 'the one line on stderr that a mistake is answered with',
    'utils/qat/compat.py': "stands in for IPython's display(), whose job is to print",
}
SWALLOWS = {
    'models/quantize/quantizers.py': 'logs the error and goes on with the kernels of PyTorch; Triton calls a C compiler',
}  # file → reason
FORWARD_SET = {
    'models/quantize/checkpoint.py': 'on an instance, as upstream fuse() does, for trees whose fuse() does not'
}


def test_no_print():
    """Commands print; everything else returns, or logs."""
    assert not lines(
        but((*DEPLOY, *QUANTIZE, *QAT), PRINTS),
        lambda node: isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print',
    )


def of_everything(node):
    """Whether the names in an expression are those of exceptions that every error is one of."""
    return bool(within({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}, 'Exception', 'BaseException'))


def swallows(node):
    """A handler of everything that does not raise again, at its end; or contextlib.suppress of everything."""
    if isinstance(node, ast.ExceptHandler):
        return (node.type is None or of_everything(node.type)) and not isinstance(node.body[-1], ast.Raise)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == 'suppress'
        and any(map(of_everything, node.args))
    )


def sets_forward(node):
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, (ast.AugAssign, ast.AnnAssign))
        else []
    )
    return any(isinstance(target, ast.Attribute) and target.attr == 'forward' for target in targets)


def test_nothing_is_swallowed_or_patched():
    assert not lines(but(OURS, SWALLOWS), swallows)
    assert not lines(but(OURS, FORWARD_SET), sets_forward)


def test_each_exception_is_needed():
    """Each file on a list of exceptions needs its entry."""
    excused = [
        (PRINTS, lambda node: isinstance(node, ast.Name) and node.id == 'print'),
        (SWALLOWS, swallows),
        (FORWARD_SET, sets_forward),
    ]
    assert not [name for names, breaks in excused for name in names if not lines([REPO / name], breaks)]
