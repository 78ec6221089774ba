"""patch_yolov9.sh: what it writes, what it refuses, and that it leaves nothing behind."""

import fcntl
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

PATCH = REPO / 'patch_yolov9.sh'
MANIFEST = '.yolov9-qat.manifest'
VERSION = (REPO / 'VERSION').read_text().strip()


def patch(folder, *flags, script=PATCH, cwd=None):
    return subprocess.run([script, folder, *flags], cwd=cwd, capture_output=True, text=True)


def contents(folder):
    """Relative path -> mode and checksum, for every file that is not bytecode of upstream."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob('*'))
        if path.is_file() and path.suffix != '.pyc'
    }


@pytest.mark.parametrize('flags', [(), ('--link',)])
def test_revert_restores_every_byte(clone, flags):
    before = contents(clone)
    folders = {path for path in clone.rglob('*') if path.is_dir()}
    assert patch(clone, *flags).returncode == 0
    assert contents(clone).keys() > before.keys()
    # bytecode of our modules appears when they are used, and must go as well
    subprocess.run(
        [sys.executable, '-c', 'import utils.qat.compat, models'],
        cwd=clone,
        check=True,
        env={**os.environ, 'PYTHONDONTWRITEBYTECODE': ''},
    )
    assert patch(clone, '--revert').returncode == 0
    assert contents(clone) == before
    left = {path for path in clone.rglob('*') if path.is_dir() and path.name != '__pycache__'}
    assert left == folders
    assert not [path for path in clone.rglob('*.pyc') if path.name.startswith(('compat.', 'qat.'))]


def test_no_upstream_file_is_overwritten(clone):
    before = contents(clone)
    patch(clone)
    after = contents(clone)
    assert {name for name in before if after[name] != before[name]} == {'utils/__init__.py', 'models/__init__.py'}
    stay = (
        'README.md',
        'requirements.txt',
        *(f'scripts/{f}' for f in ('get_yolov9.sh', 'test_matrix.sh', 'verify_tensorrt.sh')),
    )
    assert not {*stay} & (after.keys() - before.keys())
    for name in ('utils/__init__.py', 'models/__init__.py'):
        assert (clone / name).read_text().count('# >>> yolov9-qat >>>') == 1


@pytest.mark.parametrize('flags', [(), ('--link',)])
def test_twice_changes_nothing(clone, flags):
    patch(clone, *flags)
    first = {path: path.lstat().st_mtime_ns for path in clone.rglob('*')}
    again = patch(clone, *flags)
    assert again.returncode == 0 and 'nothing written' in again.stdout
    assert {path: path.lstat().st_mtime_ns for path in clone.rglob('*')} == first


def test_relative_path_from_anywhere_and_says_what_it_wrote(clone):
    result = patch(clone.name, cwd=clone.parent)
    assert result.returncode == 0, result.stderr
    for name in ('utils/qat/compat.py', 'models/__init__.py (block', 'Next: '):
        assert name in result.stdout


def test_manifest_is_readable_by_sha256sum(clone):
    patch(clone)
    assert subprocess.run(['sha256sum', '--check', '--strict', '.yolov9-qat.manifest'], cwd=clone).returncode == 0
    assert f'# version {VERSION}' in (clone / '.yolov9-qat.manifest').read_text()


def test_version_is_stated_once_more_in_python():
    from utils.qat import __version__

    assert __version__ == VERSION


def test_check_tells_the_state(clone):
    assert patch(clone, '--check').returncode == 1
    before = contents(clone)
    written, checked = patch(clone).stdout, patch(clone, '--check')
    assert checked.returncode == 0
    numbers = re.findall(r'(\d+) files', written + checked.stdout)
    assert len(numbers) == 2 and numbers[0] == numbers[1] and "2 of upstream's with our block" in written
    (clone / 'utils/qat/compat.py').write_text('edited\n')
    result = patch(clone, '--check')
    assert result.returncode == 1 and 'edited: utils/qat/compat.py' in result.stdout
    patch(clone, '--force')
    (clone / 'utils/__init__.py').write_text("# upstream's own again\n")
    result = patch(clone, '--check')
    assert result.returncode == 1 and 'block missing or older: utils/__init__.py' in result.stdout
    assert before.keys() < contents(clone).keys()


@pytest.mark.parametrize('flags', [(), ('--check',), ('--revert',), ('--force',)])
def test_refuses_what_is_not_yolov9(tmp_path, flags):
    result = patch(tmp_path, *flags)
    assert result.returncode == 2 and 'not a YOLOv9 folder' in result.stderr
    assert not list(tmp_path.iterdir())
    assert patch(tmp_path / 'nowhere', *flags).returncode == 2


def test_refuses_unknown_flags_and_itself(clone):
    result = patch(clone, '--remove')
    assert result.returncode == 2 and '--revert' in result.stderr
    assert patch(REPO).returncode == 2
    assert subprocess.run([PATCH], capture_output=True).returncode == 2


def test_refuses_another_tool_then_force_moves_it_aside(clone):
    for name in ('models/quantize.py', 'models/quantize_rules.py'):
        (clone / name).write_text('# of another tool\n')
    (clone / 'utils/qat').mkdir()
    (clone / 'utils/qat/compat.py').write_text('# of another tool\n')
    before = contents(clone)
    result = patch(clone)
    assert result.returncode == 2 and contents(clone) == before
    for name in ('models/quantize.py', 'models/quantize_rules.py', 'utils/qat/compat.py', '--force'):
        assert name in result.stderr
    assert patch(clone, '--force').returncode == 0
    assert not (clone / 'models/quantize.py').exists()  # it would hide behind our package models/quantize/
    assert patch(clone).returncode == 0  # a later run remembers what was moved
    assert patch(clone, '--revert').returncode == 0
    assert contents(clone) == before


def test_keeps_edits_unless_forced(clone):
    before = contents(clone)
    patch(clone)
    edited = clone / 'utils/qat/compat.py'
    edited.write_text(edited.read_text() + '# mine\n')
    state = contents(clone)
    for flags in ((), ('--revert',)):
        result = patch(clone, *flags)
        assert result.returncode == 2 and 'utils/qat/compat.py' in result.stderr
        assert contents(clone) == state
    assert patch(clone, '--force').returncode == 0
    assert patch(clone, '--check').returncode == 0
    edited.write_text('# mine\n')
    assert patch(clone, '--revert', '--force').returncode == 0
    assert contents(clone) == before


def test_edits_beside_the_block_survive_revert(clone):
    patch(clone)
    file = clone / 'utils/__init__.py'
    file.write_text(file.read_text() + 'MINE = 1\n')
    assert patch(clone).returncode == 0
    assert patch(clone, '--revert').returncode == 0
    assert file.read_text().endswith('MINE = 1\n') and 'yolov9-qat' not in file.read_text()


def test_switches_between_copy_and_link(clone):
    before = contents(clone)
    for flags, linked in (((), False), (('--link',), True), ((), False)):
        assert patch(clone, *flags).returncode == 0
        assert (clone / 'utils/qat/compat.py').is_symlink() is linked
        assert patch(clone, '--check').returncode == 0
    patch(clone, '--revert')
    assert contents(clone) == before


def test_upgrades_an_older_version(clone, tmp_path):
    old = tmp_path / 'old toolkit'
    (old / 'utils/qat').mkdir(parents=True)
    shutil.copy(PATCH, old)
    (old / 'VERSION').write_text('0.0.1\n')
    (old / 'utils/qat/compat.py').write_text('def apply():\n    pass\n')
    (old / 'utils/qat/gone.py').write_text('# part of 0.0.1 only\n')
    before = contents(clone)
    assert patch(clone, script=old / PATCH.name).returncode == 0
    result = patch(clone, '--check')
    assert result.returncode == 1
    for line in (
        f'version 0.0.1, this toolkit is {VERSION}',
        'older: utils/qat/compat.py',
        'no longer part of the toolkit: utils/qat/gone.py',
    ):
        assert line in result.stdout
    assert patch(clone).returncode == 0 and patch(clone, '--check').returncode == 0
    assert not (clone / 'utils/qat/gone.py').exists()
    patch(clone, '--revert')
    assert contents(clone) == before


ROOMS = [
    f for f in sorted((REPO / 'utils/qat').rglob('*.py')) if f.parent != REPO / 'utils/qat' and f.name != '__init__.py'
]


def flat_toolkit(folder):
    """A toolkit of the time before the rooms: the same modules in one folder, and one with the name that a room has now."""
    (folder / 'utils/qat').mkdir(parents=True)
    shutil.copy(PATCH, folder)
    (folder / 'VERSION').write_text('0.0.1\n')
    for name in {'compat.py', '__init__.py', *(f.name for f in ROOMS), *(f'{f.parent.name}.py' for f in ROOMS)}:
        (folder / 'utils/qat' / name).write_text('def apply():\n    pass\n')
    return folder


def toolkit_of_before(folder):
    """The toolkit as it was before the rooms, out of the history."""

    def git(*words):
        return subprocess.run(['git', '-C', REPO, *words], capture_output=True, check=True).stdout

    try:
        commit = (
            git('log', '--no-renames', '--diff-filter=D', '--format=%H', '-1', '--', 'utils/qat/errors.py')
            .decode()
            .strip()
        )
        archive = git('archive', f'{commit}^')
    except (OSError, subprocess.CalledProcessError):
        pytest.skip('no history of the time before the rooms here')
    folder.mkdir()
    subprocess.run(['tar', '-x', '-C', folder], input=archive, check=True)
    return folder


@pytest.mark.parametrize(
    'toolkit, flags', [(flat_toolkit, ()), (toolkit_of_before, ()), (toolkit_of_before, ('--link',))]
)
def test_an_upgrade_from_before_the_rooms_leaves_nothing(clone, tmp_path, toolkit, flags):
    before = contents(clone)
    old = toolkit(tmp_path / 'old toolkit')
    assert patch(clone, *flags, script=old / PATCH.name).returncode == 0
    if not flags:  # bytecode of both lies in one folder
        for file in (clone / 'utils/qat').glob('*.py'):
            py_compile.compile(file)
    assert (clone / 'utils/qat/config.py').exists() and not (clone / 'utils/qat/config').exists()
    assert patch(clone, *flags).returncode == 0 and patch(clone, '--check').returncode == 0
    ours = {line.split()[-1] for line in (clone / MANIFEST).read_text().splitlines() if not line.startswith('#')}
    assert (
        contents(clone).keys() == before.keys() | ours | {MANIFEST}
        and not {f'utils/qat/{f.name}' for f in ROOMS} & ours
    )
    assert {path.name.split('.')[0] for path in clone.glob('utils/qat/__pycache__/*')} <= {'__init__', 'compat'}
    patch(clone, '--revert')
    assert contents(clone) == before


# ---- killed, at every point ----------------------------------------------------------------------------------------------

WRITERS = (
    'cp',
    'ln',
    'mkdir',
    'mv',
    'rm',
    'rmdir',
    'find',
)  # what the script changes files with, besides > into its own folder


@pytest.fixture
def writers(tmp_path):
    """A folder to put first on PATH: of the commands that write, the AT-th call kills the script and all it started."""
    folder = tmp_path / 'writers'
    folder.mkdir()
    for name in WRITERS:
        (folder / name).write_text(
            f'#!/bin/sh\nread n <"$COUNT"\necho $((n + 1)) >"$COUNT"\n[ $n -ne "$AT" ] || kill -9 0\nexec {shutil.which(name)} "$@"\n'
        )
        (folder / name).chmod(0o755)
    return folder


def small(folder, version, **files):
    """A toolkit of a few files: all that the script asks of one."""
    for name, text in {'VERSION': f'{version}\n', **files}.items():
        file = folder / name.replace('__', '/').replace('_py', '.py')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copy(PATCH, folder)
    return folder / PATCH.name


@pytest.fixture
def upgrade(tmp_path):
    """An older and a newer toolkit, and a tree with no more than makes it one of YOLOv9, and a file of another tool."""
    old = small(
        tmp_path / 'old',
        '0.1',
        qat_py='old',
        utils__qat__both_py='old',
        utils__qat__gone_py='old',
        models__quantize__a_py='same',
    )
    new = small(
        tmp_path / 'new',
        '0.2',
        qat_py='new',
        utils__qat__both_py='new',
        models__quantize__a_py='same',
        scripts__b_py='new',
    )
    tree = tmp_path / 'tree'
    for name in (
        'val.py',
        'models/yolo.py',
        'models/common.py',
        'models/__init__.py',
        'utils/general.py',
        'utils/__init__.py',
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text('class RepNCSPELAN4: ...\n')
    (tree / 'models/__init__.py').write_text('# no line end')
    (tree / 'models/__init__.py').chmod(0o640)
    return old, new, tree


def everything(folder):
    """What `contents` says of the files, and which folders there are."""
    return contents(folder), {str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_dir()}


@pytest.mark.faults
@pytest.mark.parametrize('verb, flags', [('patch', ('--link',)), ('revert', ())], ids=['patch', 'revert'])
def test_killed_at_every_point(upgrade, writers, tmp_path, verb, flags):
    """Then --revert gives the tree of before, and a second patch the whole patch, as if nothing had happened."""
    old, new, tree = upgrade
    folders = {
        name: tmp_path / name for name in ('before', 'older', 'whole')
    }  # unpatched, patched by the old toolkit, by the new one
    foreign = {'models/quantize.py': 'of another tool', 'scripts/b.py': 'of another tool'}
    for name, text in foreign.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    shutil.copytree(tree, folders['before'])
    (tree / 'models/quantize.py').unlink()  # it came after the old one, which would have refused
    assert patch(tree, script=old).returncode == 0
    shutil.copy(folders['before'] / 'models/quantize.py', tree / 'models')
    shutil.copytree(tree, folders['older'], symlinks=True)
    assert patch(tree, '--force', *flags, script=new).returncode == 0
    shutil.copytree(tree, folders['whole'], symlinks=True)
    before, whole = (everything(folders[name]) for name in ('before', 'whole'))

    count, points = tmp_path / 'count', 0
    argv, first = ([new, tree, '--force', *flags], 'older') if verb == 'patch' else ([new, tree, '--revert'], 'whole')
    while True:
        points += 1
        shutil.rmtree(tree)
        shutil.copytree(folders[first], tree, symlinks=True)
        count.write_text('1\n')
        done = subprocess.run(
            argv,
            env={**os.environ, 'PATH': f'{writers}:{os.environ["PATH"]}', 'COUNT': count, 'AT': str(points)},
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        stopped = shutil.copytree(tree, tmp_path / f'stopped {points}', symlinks=True)
        assert patch(tree, '--force', *flags, script=new).returncode == 0 and everything(tree) == whole, points
        again = patch(stopped, '--revert', script=old if points % 5 == 0 else new)  # either knows what to take away
        assert again.returncode == 0 and everything(stopped) == before, (points, again.stderr)
        shutil.rmtree(stopped)
    assert points > 12


def test_an_interrupted_patch_is_told(upgrade, writers, tmp_path):
    _, new, tree = upgrade
    (tmp_path / 'count').write_text('1\n')
    subprocess.run(
        [new, tree],
        env={**os.environ, 'PATH': f'{writers}:{os.environ["PATH"]}', 'COUNT': tmp_path / 'count', 'AT': '18'},
        capture_output=True,
        start_new_session=True,
    )
    result = patch(tree, '--check', script=new)
    assert result.returncode == 1 and 'a patch was interrupted' in result.stdout


@pytest.mark.parametrize('verb', [(), ('--revert',)], ids=['patch', 'revert'])
def test_what_the_system_refuses_in_the_middle(upgrade, tmp_path, verb):
    """One line that says how to go on; and both ways do."""
    old, new, tree = upgrade
    before = everything(tree)
    patch(tree, script=old)
    (tmp_path / 'mv').write_text(
        f'#!/bin/sh\ncase "$*" in *utils/qat/both.py|*models/__init__.py) echo "mv: no room" >&2; exit 1;; esac\nexec {shutil.which("mv")} "$@"\n'
    )
    (tmp_path / 'mv').chmod(0o755)
    result = subprocess.run(
        [new, tree, *verb],
        env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
        capture_output=True,
        text=True,
    )
    refused(result, 'mv: no room; half done: mend that and run it again')
    assert not (tree / '.yolov9-qat.new').exists()
    assert patch(tree, script=new).returncode == 0 and patch(tree, '--check', script=new).returncode == 0
    assert patch(tree, '--revert', script=new).returncode == 0 and everything(tree) == before


# ---- what is not touched -------------------------------------------------------------------------------------------------


def refused(result, *words):
    """One line on stderr that holds `words`, and exit code 2."""
    assert (
        result.returncode == 2
        and result.stderr.count('\n') == 1
        and result.stderr.startswith('patch_yolov9.sh: error: ')
    ), result.stderr
    for word in words:
        assert word in result.stderr


HOSTILE = (
    '../victim',
    '/tmp/victim',
    'utils/qat/../../../victim',
    'val.py',
    'models/common.py',
    'utils/qat',
    'utils/qat/.py',
    '.git/config',
    'utils/qat/a b.py',
    '',
    'scripts/get_coco.sh',
)


FORMS = '{sum}  {name}', '# folder {name}', '# moved {name}', '# original {sum}  {name}'
SPOILT = [(form, name) for form in FORMS for name in HOSTILE if form.format(sum=0, name=name) != '# folder utils/qat']
VERBS = (), ('--check',), ('--revert',), ('--revert', '--force')


@pytest.mark.parametrize(
    'content', ['a' * 150_000, '# moved qat.py\n' * 9_000, 'a' * 3_000_000], ids=['line', 'lines', 'size']
)
@pytest.mark.faults
def test_a_long_manifest_ends_soon(clone, content):
    patch(clone)
    (clone / MANIFEST).write_text((clone / MANIFEST).read_text() + content)
    done = subprocess.run([PATCH, clone, '--check'], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if content.startswith('#') else 2), done.stderr
    assert content.startswith('#') or MANIFEST in done.stderr


@pytest.mark.parametrize('verb', VERBS, ids=' '.join)
def test_a_manifest_names_only_what_the_toolkit_writes(upgrade, tmp_path, verb):
    _, new, tree = upgrade
    (tmp_path / 'victim').write_text('mine')
    patch(tree, script=new)
    manifest = tree / '.yolov9-qat.manifest'
    whole = manifest.read_text()
    for form, name in SPOILT:
        target = tree / (name or 'val.py')
        digest = hashlib.sha256(target.read_bytes()).hexdigest() if target.is_file() else '0' * 64
        manifest.write_text(f'{whole}{form.format(sum=digest, name=name)}\n')
        before = everything(tree)
        refused(patch(tree, *verb, script=new), '.yolov9-qat.manifest, line ', 'remove that line')
        assert everything(tree) == before
    assert (tmp_path / 'victim').read_text() == 'mine'


@pytest.mark.parametrize(
    'place',
    [
        *('utils', 'models', 'utils/qat', 'models/quantize', 'scripts', '.yolov9-qat.backup'),
        *('__pycache__', 'utils/qat/__pycache__', 'scripts/__pycache__'),
    ],
)
@pytest.mark.parametrize('patched', [False, True], ids=['new', 'patched'])
def test_nothing_is_written_through_links(upgrade, tmp_path, place, patched):
    """A folder of the tree is a link that leads out of it: what is there stays as it is."""
    _, new, tree = upgrade
    if patched:
        (tree / 'models/quantize.py').write_text('of another tool')
        patch(tree, '--force', script=new)
    else:
        (tree / place).parent.mkdir(exist_ok=True)
    outside = tmp_path / 'outside'
    if (tree / place).exists():
        (tree / place).rename(outside)
    outside.mkdir(exist_ok=True)
    for module in ('qat', 'both', 'b'):  # a name of the patch's in each of these folders
        (outside / f'{module}.cpython-399.pyc').write_text('not ours')
    (tree / place).symlink_to(outside)

    def bytecode():
        return sorted(path.name for path in outside.glob('*.pyc'))

    before, there = (contents(outside), bytecode()), contents(tree)
    for verb in ((), ('--force',), ('--revert',), ('--revert', '--force')):
        result = patch(tree, *verb, script=new)
        if place.endswith('__pycache__'):
            assert result.returncode == 0, result.stderr
        else:
            refused(result, place, 'is a link')
            assert contents(tree) == there
        assert (contents(outside), bytecode()) == before


def test_a_hooked_file_that_is_a_link(upgrade, tmp_path):
    _, new, tree = upgrade
    (tree / 'utils/__init__.py').rename(tmp_path / 'elsewhere.py')
    (tree / 'utils/__init__.py').symlink_to(tmp_path / 'elsewhere.py')
    before = contents(tree)
    refused(patch(tree, script=new), 'utils/__init__.py is a link')
    assert contents(tree) == before and (tmp_path / 'elsewhere.py').read_text() == 'class RepNCSPELAN4: ...\n'


def test_half_a_block_is_not_taken_for_a_whole(upgrade):
    """Without its last line, all that upstream wrote would count as ours."""
    _, new, tree = upgrade
    patch(tree, script=new)
    file = tree / 'utils/__init__.py'
    file.write_text(file.read_text().replace('# <<< yolov9-qat <<<\n', ''))
    before = contents(tree)
    for verb in ((), ('--revert',), ('--force',)):
        refused(patch(tree, *verb, script=new), 'utils/__init__.py: our block lacks')
        assert contents(tree) == before


def test_what_was_moved_aside_is_not_replaced(upgrade):
    _, new, tree = upgrade
    (tree / 'models/quantize.py').write_text('first')
    assert patch(tree, '--force', script=new).returncode == 0
    (tree / 'models/quantize.py').write_text('second')
    refused(patch(tree, '--force', script=new), 'models/quantize.py is there already')
    refused(patch(tree, '--revert', script=new), 'models/quantize.py')
    assert (tree / '.yolov9-qat.backup/models/quantize.py').read_text() == 'first'


# ---- strange places ------------------------------------------------------------------------------------------------------


def test_a_name_that_ends_in_a_newline(upgrade, tmp_path):
    _, new, tree = upgrade
    other = shutil.copytree(tree, tmp_path / 'tree\n')
    before = everything(tree)
    assert patch(other, script=new).returncode == 0
    assert everything(tree) == before and (other / 'qat.py').exists()
    refused(patch(tmp_path / 'none\n\n', script=new), 'no such folder')
    assert patch(other, '--revert', script=new).returncode == 0
    assert contents(other) == before[0]


def test_cdpath(upgrade, tmp_path, monkeypatch):
    """Where cd finds a folder of that name first."""
    _, new, tree = upgrade
    elsewhere = shutil.copytree(tree, tmp_path / 'elsewhere/tree')
    before = everything(elsewhere)
    monkeypatch.setenv('CDPATH', str(tmp_path / 'elsewhere'))
    result = patch('tree', script=new, cwd=tmp_path)
    assert result.returncode == 0 and f'to {tree} (copy)' in result.stdout and (tree / 'qat.py').exists()
    assert everything(elsewhere) == before


@pytest.mark.parametrize('place', ['utils/qat', 'models/quantize', 'scripts'])
def test_a_file_where_a_folder_has_to_be(upgrade, place):
    _, new, tree = upgrade
    (tree / place).write_text('mine')
    before = everything(tree)
    for flags in ((), ('--force',), ('--link',)):
        refused(patch(tree, *flags, script=new), f'{place} is a file')
        assert everything(tree) == before


def test_one_at_a_time(upgrade):
    _, new, tree = upgrade
    before = everything(tree)
    holder = os.open(tree, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    for verb in ((), ('--revert',)):
        refused(patch(tree, *verb, script=new), 'another patch_yolov9.sh is at work in')
    assert everything(tree) == before
    os.close(holder)
    assert patch(tree, script=new).returncode == 0


@pytest.mark.faults
def test_a_tree_that_cannot_be_written_to(upgrade, small_disk):
    _, new, tree = upgrade
    disk = small_disk(1)
    there = shutil.copytree(tree, disk / 'tree')
    before = everything(there)
    for patched in (False, True):
        subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
        for verb in ((), ('--force',), ('--revert', '--force'))[: 2 + patched]:
            refused(patch(there, *verb, '--link', script=new), 'nothing was changed')
        assert everything(there) == before and patch(there, '--check', script=new).returncode == 1 - patched
        subprocess.run(['mount', '-o', 'remount,rw', disk], check=True)
        assert patch(there, script=new).returncode == 0
        before = everything(there)


@pytest.mark.faults
def test_a_full_disk(upgrade, small_disk):
    """Of 8 pages more and more: the tree is as it was, or wholly patched."""
    _, new, tree = upgrade
    disk = small_disk(1)
    there = shutil.copytree(tree, disk / 'tree')
    before, codes = everything(there), []
    page = os.sysconf('SC_PAGE_SIZE')
    for free in range(12):
        room = os.statvfs(disk).f_bfree - free
        (disk / 'ballast').write_bytes(bytes(room * page))
        result = patch(there, script=new)
        codes.append(result.returncode)
        (disk / 'ballast').unlink()
        if codes[-1]:
            refused(result, 'No space left on device', 'nothing was changed')
            assert everything(there) == before, free
        else:
            assert patch(there, '--revert', script=new).returncode == 0
    assert codes[0] == 2 and codes[-1] == 0


def test_folders_of_any_name(clone, tmp_path):
    """The next command can be typed as it is printed, and a launcher finds a toolkit whose folder no language can quote at once."""
    odd = tmp_path / 'it\'s "odd" \\n é $HOME'
    odd.mkdir()
    toolkit, tree = odd / 'toolkit', odd / 'tree'
    shutil.copytree(
        REPO, toolkit, ignore=shutil.ignore_patterns('.git', '.venv', '.work', 'runs', '.*_cache', '__pycache__')
    )
    clone.rename(tree)
    for flags in ((), ('--link',)):
        said = patch(tree, *flags, script=toolkit / 'patch_yolov9.sh').stdout.splitlines()[-1]
        line = said.removeprefix('Next: ').replace('python ', f'{sys.executable} ')
        for command in (line, line.replace('qat.py quantize', 'scripts/audit_onnx.py')):
            done = subprocess.run(['bash', '-c', command], cwd='/', capture_output=True, text=True)
            assert 'usage: ' in done.stdout, said + done.stderr
