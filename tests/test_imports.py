"""Laws of the source tree, read from its syntax: imports go one way, nothing prints, nothing is swallowed or patched."""
import ast

import pytest
from conftest import REPO

COMMANDS = sorted([*REPO.glob('*.py'), *REPO.glob('scripts/*.py')])
DEPLOY, QUANTIZE, QAT = (sorted((REPO / folder).rglob('*.py')) for folder in ('models/deploy', 'models/quantize', 'utils/qat'))
OURS = [*COMMANDS, *DEPLOY, *QUANTIZE, *QAT]
COMMAND_NAMES = {file.stem for file in COMMANDS}
CLIENTS = [REPO / 'scripts/infer_onnx.py', *REPO.glob('examples/*.py')]  # to be copied out of this tree: they stand alone


def name_of(file):
    return file.relative_to(REPO).as_posix()


each_file = pytest.mark.parametrize('file', OURS, ids=name_of)


def tree_of(file):
    return ast.parse(file.read_text(encoding='utf-8'))


def imported(nodes):
    """Dotted names that the import statements among `nodes` bring in; `from a import b` gives both a and a.b."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f'line {node.lineno}: relative import'
            names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return names


def at_module_level(tree):
    """Nodes that run when the module is imported: all but those inside functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node)
                    if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]


def within(names, *packages):
    return sorted(n for n in names if any(n == p or n.startswith(p + '.') for p in packages))


def test_the_walk_finds_the_files():
    assert COMMANDS and DEPLOY and QUANTIZE and QAT
    assert {'qat', 'reparameterization', 'export_qat'} <= COMMAND_NAMES


def test_no_package_file_of_upstreams():
    assert not [p for p in ('models/__init__.py', 'utils/__init__.py') if (REPO / p).exists()]


@each_file
def test_imports_go_one_way(file):
    names = imported(ast.walk(tree_of(file)))
    assert not within(names, *COMMAND_NAMES), 'nothing imports a command file'
    if file in QUANTIZE:
        assert not within(names, 'models.deploy')
    if file in QAT:
        assert not within(names, 'models.deploy', 'models.quantize')
        assert not within(imported(at_module_level(tree_of(file))), 'models')


@each_file
def test_one_file_knows_the_quantization_library(file):
    if name_of(file) != 'models/quantize/quantizers.py':
        assert not within(imported(ast.walk(tree_of(file))), 'pytorch_quantization')


def test_commands_show_their_help_without_torch():
    """`-h` must not pay for heavy imports, and works where they are not installed yet."""
    for file in set(COMMANDS) - set(CLIENTS):
        assert not within(imported(at_module_level(tree_of(file))), 'torch', 'models', 'onnx', 'onnxruntime', 'numpy'), name_of(file)


@pytest.mark.parametrize('file', CLIENTS, ids=name_of)
def test_clients_need_neither_this_toolkit_nor_torch(file):
    assert not within(imported(ast.walk(tree_of(file))), 'torch', 'torchvision', 'models', 'utils')


PRINTS = {'utils/qat/errors.py': 'the one line on stderr that a mistake is answered with',
          'utils/qat/compat.py': "stands in for IPython's display(), whose job is to print"}


@each_file
def test_no_print(file):
    if file in COMMANDS or name_of(file) in PRINTS:
        return
    assert not [node.lineno for node in ast.walk(tree_of(file))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print']


SWALLOWS = {'scripts/infer_onnx.py': 'ends the program with one line; what ONNX Runtime raises shares no base class'}  # file → reason


@each_file
def test_nothing_is_swallowed(file):
    """A handler of everything raises again, at its end."""
    if name_of(file) in SWALLOWS:
        return
    broad = [handler for handler in ast.walk(tree_of(file)) if isinstance(handler, ast.ExceptHandler)
             and (handler.type is None or within({n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)},
                                                 'Exception', 'BaseException'))]
    assert not [handler.lineno for handler in broad if not isinstance(handler.body[-1], ast.Raise)]
    suppressed = [node.lineno for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)
                  and isinstance(node.func, ast.Attribute) and node.func.attr == 'suppress'
                  and within({a.id for a in node.args if isinstance(a, ast.Name)}, 'Exception', 'BaseException')]
    assert not suppressed


FORWARD_SET = {'models/quantize/checkpoint.py': 'on an instance, as upstream fuse() does, for trees whose fuse() does not'}


@each_file
def test_no_forward_is_replaced(file):
    if name_of(file) in FORWARD_SET:
        return
    targets = [t for node in ast.walk(tree_of(file)) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
               for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    assert not [t.lineno for t in targets if isinstance(t, ast.Attribute) and t.attr == 'forward']
