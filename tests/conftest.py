"""The tests of tests/unit run in the toolkit's own folder; all others on real upstream code, a copy of a YOLOv9 tree that
`patch_yolov9.sh --link` has patched.

The folder is first on sys.path when test modules are imported, so they write `from models.common import Conv` and
`from utils.qat import compat` at their top, as code inside a patched tree does.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
UNIT = REPO / 'tests' / 'unit'
LEFT = 'tests left for --faults'
UPSTREAM = Path(os.environ.get('YOLOV9_DIR') or REPO / '.work' / 'yolov9').resolve()


def copy_upstream(destination):
    """A copy of the upstream tree without history, data and results; unpatched even if UPSTREAM is patched."""
    shutil.copytree(
        UPSTREAM,
        destination,
        symlinks=True,
        ignore=shutil.ignore_patterns('.git', 'datasets', 'runs', 'figure', '__pycache__'),
    )
    if (destination / '.yolov9-qat.manifest').exists():
        subprocess.run(
            [REPO / 'patch_yolov9.sh', destination, '--revert', '--force'], check=True, stdout=subprocess.DEVNULL
        )
    return destination


def make_tree():
    """Path of the patched copy of this session; upstream's settings (its font) lie beside it, not at home."""
    if not (UPSTREAM / 'models' / 'yolo.py').exists():
        pytest.exit(
            f'no YOLOv9 tree at {UPSTREAM}. Set YOLOV9_DIR, or: scripts/get_yolov9.sh {REPO / ".work" / "yolov9"}', 2
        )
    scratch = Path(tempfile.mkdtemp(prefix='yolov9-qat-tests-'))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ['YOLOV5_CONFIG_DIR'] = str(scratch / 'config')
    tree = copy_upstream(scratch / 'yolov9')
    subprocess.run([REPO / 'patch_yolov9.sh', tree, '--link'], check=True, stdout=subprocess.DEVNULL)
    return tree


@pytest.fixture(autouse=True)
def log_files():
    """Close the log files of a test's commands, as the end of their process would: their folder is removed after the test."""
    yield
    log = sys.modules.get('utils.qat.core.log')
    for handler in log.LOGGER.handlers[1:] if log else ():
        log.LOGGER.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def upstreams_activation():
    """Reset the activation that upstream keeps from the last config, so that each test begins as a new process."""
    yield
    common = sys.modules.get('models.common')
    if common:
        common.Conv.default_act = common.RepConvN.default_act = common.nn.SiLU()


@pytest.fixture
def small_disk(tmp_path):
    """Callable: megabytes → a folder on a file system of that size; skips the test if none can be mounted."""
    folder = tmp_path / 'disk'

    def mounted(megabytes):
        folder.mkdir()
        done = subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', f'size={megabytes}M', 'tmpfs', folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f'no file system of {megabytes} MB: {done.stderr.strip()}')
        return folder

    yield mounted
    if os.path.ismount(folder):
        subprocess.run(['umount', folder], check=True)


@pytest.fixture
def clone(tmp_path):
    """An unpatched copy of upstream for this test alone, at a path with spaces."""
    return copy_upstream(tmp_path / 'my yolov9 clone')


@pytest.fixture
def graphviz():
    """pygraphviz, whose wheels still take a few libraries from the system."""
    return pytest.importorskip(
        'pygraphviz',
        reason='no Graphviz to draw with: ./install_dependencies.sh --trex, docs/tensorrt.md#the-picture',
        exc_type=ImportError,
    )


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='also run the tests marked slow')
    parser.addoption('--gpu', action='store_true', help='run the tests marked gpu, and only these')
    parser.addoption('--faults', action='store_true', help='run the tests marked faults, and only these')
    parser.addoption('--mutations', type=int, default=3, metavar='N', help='random changes of each kind of file')
    parser.addoption('--seed', type=int, default=0, help='what these follow from')


def asks_for_tensorrt(config):
    """Whether the rows of tests/gpu/verify are asked for, by -m tensorrt; they take many minutes."""
    return 'tensorrt' in config.getoption('markexpr')


def asks_for_units_alone(config):
    """Whether every file and folder of the command line lies in tests/unit."""
    asked = [Path(words.split('::')[0]).resolve() for words in config.args]
    return all(UNIT in (path, *path.parents) for path in asked)


def pytest_configure(config):
    """Make the tree, before test modules are imported, and load the fixtures that need it."""
    global TREE, FULL_TREE
    if not config.getoption('--gpu') and not asks_for_tensorrt(config):
        os.environ['CUDA_VISIBLE_DEVICES'] = (
            ''  # the others are the same on every machine; some fork, after which CUDA fails
        )
    TREE = REPO if asks_for_units_alone(config) else make_tree()
    FULL_TREE = (TREE / 'models' / 'detect' / 'yolov9-t.yaml').is_file() and 'class ELAN1' in (
        TREE / 'models' / 'common.py'
    ).read_text()
    sys.path.insert(0, str(TREE))
    from utils.qat.core.machine import set_environment

    set_environment()  # before torch

    if TREE == REPO:
        return
    from helpers import faults, zoo

    for module in (zoo, faults):
        config.pluginmanager.register(module)
    if config.getoption('--faults'):
        config.forker = faults.Forker()
    if 'VERIFY_TENSORRT' in os.environ:  # set by scripts/verify_tensorrt.py
        from verify_report import Report, settings_of_the_command

        config.pluginmanager.register(Report(settings_of_the_command().only))


def keep(items, mark, wanted=True):
    """Leave those of `items` that have this mark, or those that have not; returns the others."""
    others = [item for item in items if bool(item.get_closest_marker(mark)) != wanted]
    items[:] = [item for item in items if bool(item.get_closest_marker(mark)) == wanted]
    return others


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    import torch

    gpu = torch.cuda.is_available()
    for only in ('gpu', 'faults'):
        if config.getoption(f'--{only}'):
            config.hook.pytest_deselected(items=keep(items, only))
    if not config.getoption('--faults') and not config.getoption('--gpu'):
        getattr(config, 'workeroutput', vars(config))[LEFT] = len(keep(items, 'faults', wanted=False))
    if not asks_for_tensorrt(config):
        keep(items, 'tensorrt', wanted=False)
    for item in items:
        if item.get_closest_marker('full_tree') and not FULL_TREE:
            item.add_marker(
                pytest.mark.skip(reason=f'{UPSTREAM} lacks ELAN1 or its configs: it is the sdist, not a clone')
            )
        if item.get_closest_marker('gpu') and not gpu:
            item.add_marker(pytest.mark.skip(reason='needs an NVIDIA GPU, and --gpu'))
        if item.get_closest_marker('slow') and not config.getoption('--slow'):
            item.add_marker(pytest.mark.skip(reason='slow: pass --slow'))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the count from a process of pytest-xdist; all of them collect the same tests."""
    vars(node.config).setdefault(LEFT, getattr(node, 'workeroutput', {}).get(LEFT, 0))


def pytest_terminal_summary(terminalreporter, config):
    """Say how many tests were not asked for; the list of outcomes, which would count them too, is read by other plugins."""
    if vars(config).get(LEFT):
        terminalreporter.write_line(f'{LEFT}: {vars(config)[LEFT]}')
