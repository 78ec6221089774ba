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


def patch(folder, *flags, script=PATCH, cwd=None, **environment):
    return subprocess.run(
        [script, folder, *flags], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )


def contents(folder):
    """Relative path -> mode and checksum, for every file that is not bytecode of upstream."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob('*'))
        if path.is_file() and path.suffix != '.pyc'
    }


def everything(folder):
    """The `contents` of a folder, and the folders in it."""
    return contents(folder), {str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_dir()}


def toolkit(folder, version, **files):
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
    same, both = {'models__quantize__a_py': 'same'}, ('qat_py', 'utils__qat__both_py')
    gone = {'utils__qat__gone_py': 'old', 'utils__qat__room_py': 'old', 'utils__qat__c_py': 'old'}
    old = toolkit(tmp_path / 'old', '0.1', **dict.fromkeys(both, 'old'), **gone, **same)
    come = {'scripts__b_py': 'new', 'utils__qat__room__c_py': 'new'}  # a folder where a file of the old one was
    new = toolkit(tmp_path / 'new', '0.2', **dict.fromkeys(both, 'new'), **come, **same)
    tree = tmp_path / 'tree'
    for name in ('val', 'models/yolo', 'models/common', 'models/__init__', 'utils/general', 'utils/__init__'):
        (tree / f'{name}.py').parent.mkdir(parents=True, exist_ok=True)
        (tree / f'{name}.py').write_text('class RepNCSPELAN4: ...\n')
    (tree / 'models/__init__.py').write_text('# no line end')
    (tree / 'models/__init__.py').chmod(0o640)
    return old, new, tree


def refused(result, *words):
    """One line on stderr that holds `words`, and exit code 2."""
    said = result.stderr
    assert result.returncode == 2 and said.count('\n') == 1 and said.startswith('patch_yolov9.sh: error: '), said
    for word in words:
        assert word in said


# ---- the toolkit on a clone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('flags', [(), ('--link',)])
def test_a_clone_is_patched_and_reverted(clone, flags):
    """Only two files of upstream change, a second time changes nothing, and --revert restores every byte."""
    before, hooked = everything(clone), {'utils/__init__.py', 'models/__init__.py'}
    assert patch(clone, '--check').returncode == 1
    first = patch(clone.name, *flags, cwd=clone.parent)
    assert first.returncode == 0, first.stderr
    for name in ('models/__init__.py (block', 'Next: ', "2 of upstream's with our block"):
        assert name in first.stdout
    after = contents(clone)
    assert {name for name in before[0] if after[name] != before[0][name]} == hooked
    assert all((clone / name).read_text().count('# >>> yolov9-qat >>>') == 1 for name in hooked)
    stay = (
        'README.md',
        'requirements.txt',
        *(f'scripts/{f}.sh' for f in ('get_yolov9', 'test_matrix', 'verify_tensorrt')),
    )
    assert not {*stay} & (after.keys() - before[0].keys())
    assert subprocess.run(['sha256sum', '--check', '--strict', '--quiet', MANIFEST], cwd=clone).returncode == 0
    assert f'# version {VERSION}' in (clone / MANIFEST).read_text()

    checked, times = patch(clone, '--check'), {path: path.lstat().st_mtime_ns for path in clone.rglob('*')}
    numbers = re.findall(r'(\d+) files', first.stdout + checked.stdout)
    assert checked.returncode == 0 and len(numbers) == 2 and numbers[0] == numbers[1]
    again = patch(clone, *flags)
    assert again.returncode == 0 and 'nothing written' in again.stdout
    assert {path: path.lstat().st_mtime_ns for path in clone.rglob('*')} == times

    # bytecode of our modules appears when they are used, and must go as well
    use = [sys.executable, '-c', 'import utils.qat.compat, models']
    subprocess.run(use, cwd=clone, check=True, env={**os.environ, 'PYTHONDONTWRITEBYTECODE': ''})
    assert patch(clone, '--revert').returncode == 0
    files, folders = everything(clone)
    assert files == before[0] and {f for f in folders if not f.endswith('__pycache__')} == before[1]
    assert not [path for path in clone.rglob('*.pyc') if path.name.startswith(('compat.', 'qat.'))]


FOREIGN = 'models/quantize.py', 'models/quantize_rules.py', 'utils/qat/both.py'


def write(name, text='mine'):
    """A change: a file of the user's."""

    def change(tree, _):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)

    return change


def of_another_tool(tree, script):
    for name in FOREIGN:
        write(name, '# of another tool\n')(tree, script)


def moved_out(name):
    """A change: the file lies beside the tree, and a link in its place."""

    def change(tree, _):
        elsewhere = (tree / name).rename(tree.parent / 'elsewhere')
        (tree / name).symlink_to(elsewhere)

    return change


def half_a_block(tree, _):
    file = tree / 'utils/__init__.py'
    file.write_text(file.read_text().replace('# <<< yolov9-qat <<<\n', ''))


def moved_aside_twice(tree, script):
    write('models/quantize.py', 'first')(tree, script)
    assert patch(tree, '--force', script=script).returncode == 0
    write('models/quantize.py', 'second')(tree, script)


def locked(tree, _):
    fcntl.flock(os.open(tree, os.O_RDONLY), fcntl.LOCK_EX)  # until the process of the test ends: the tree is its own


REFUSED = {  # what was done → (whether the tree was patched before, the change, verbs, words of the line)
    'another tool': (False, of_another_tool, ['', '--link'], [*FOREIGN, '--force']),
    'an edit': (True, write('utils/qat/both.py'), ['', '--revert'], ['utils/qat/both.py']),
    'a hooked file that is a link': (False, moved_out('utils/__init__.py'), [''], ['utils/__init__.py is a link']),
    'a manifest that is a link': (True, moved_out(MANIFEST), ['', '--check', '--revert --force'], ['is no file']),
    'half a block': (True, half_a_block, ['', '--revert', '--force'], ['utils/__init__.py: our block lacks']),
    'something moved aside twice': (True, moved_aside_twice, ['--force', '--revert'], ['models/quantize.py']),
    'another at work': (False, locked, ['', '--revert'], ['another patch_yolov9.sh is at work in']),
    'an unknown flag': (True, lambda tree, _: None, ['--remove'], ['--revert']),
    **{
        f'a file for the folder {place}': (False, write(place), ['', '--force', '--link'], [f'{place} is a file'])
        for place in ('utils/qat', 'models/quantize', 'scripts')
    },
    'no YOLOv9': (
        False,
        lambda tree, _: (tree / 'val.py').unlink(),
        ['', '--check', '--force'],
        ['not a YOLOv9 folder'],
    ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused_stays_as_it_is(upgrade, name):
    _, new, tree = upgrade
    patched, change, verbs, words = REFUSED[name]
    if patched:
        patch(tree, script=new)
    change(tree, new)
    before = everything(tree)
    for verb in verbs:
        refused(patch(tree, *verb.split(), script=new), *words)
        assert everything(tree) == before


def test_neither_itself_nor_nowhere():
    for folder in (REPO, REPO / 'nowhere'):
        assert patch(folder).returncode == 2
    assert subprocess.run([PATCH], capture_output=True).returncode == 2


@pytest.mark.parametrize('change', [of_another_tool, write('utils/qat/both.py')], ids=['another tool', 'an edit'])
def test_force_moves_it_aside_and_revert_brings_it_back(upgrade, change):
    _, new, tree = upgrade
    change(tree, new)
    before = contents(tree)
    assert patch(tree, '--force', script=new).returncode == 0 == patch(tree, '--check', script=new).returncode
    assert not (tree / 'models/quantize.py').exists()  # it would hide behind our package models/quantize/
    assert patch(tree, script=new).returncode == 0  # a later run remembers what was moved
    (tree / 'utils/qat/both.py').write_text('edited')
    assert patch(tree, '--revert', '--force', script=new).returncode == 0 and contents(tree) == before


def test_edits_beside_the_block_and_of_what_is_no_longer_ours_survive(upgrade):
    old, new, tree = upgrade
    patch(tree, script=old)
    hooked, gone = tree / 'utils/__init__.py', tree / 'utils/qat/gone.py'
    hooked.write_text(hooked.read_text() + 'MINE = 1\n')
    gone.write_text('mine')
    result = patch(tree, script=new)
    assert result.returncode == 0 and 'kept though it is no longer ours: utils/qat/gone.py' in result.stdout
    assert patch(tree, '--revert', script=new).returncode == 0 and gone.read_text() == 'mine'
    assert hooked.read_text().endswith('MINE = 1\n') and 'yolov9-qat' not in hooked.read_text()


def test_check_tells_the_state(upgrade):
    _, new, tree = upgrade
    patch(tree, script=new)
    for name, text, says in (
        ('utils/qat/both.py', 'edited\n', 'edited: utils/qat/both.py'),
        ('utils/__init__.py', "# upstream's own again\n", 'block missing or older: utils/__init__.py'),
    ):
        (tree / name).write_text(text)
        result = patch(tree, '--check', script=new)
        assert result.returncode == 1 and says in result.stdout
        patch(tree, '--force', script=new)


@pytest.mark.parametrize('flags', [(), ('--link',)])
def test_upgrades_an_older_version(upgrade, flags):
    """Nothing of the older one is left, bytecode among it, where a folder has the name that a file had."""
    old, new, tree = upgrade
    before = contents(tree)
    assert patch(tree, *flags, script=old).returncode == 0
    if not flags:
        for file in (tree / 'utils/qat').glob('*.py'):
            file.write_text('')
            py_compile.compile(file)
        patch(tree, '--force', script=old)
    result = patch(tree, '--check', script=new)
    gone = 'no longer part of the toolkit: utils/qat/gone.py'
    assert result.returncode == 1
    assert all(line in result.stdout for line in ('version 0.1, this toolkit is 0.2', 'older: utils/qat/both.py', gone))
    assert patch(tree, *flags, script=new).returncode == 0 == patch(tree, '--check', script=new).returncode
    ours = {line.split()[-1] for line in (tree / MANIFEST).read_text().splitlines() if not line.startswith('#')}
    assert contents(tree).keys() == before.keys() | ours | {MANIFEST} and 'utils/qat/room/c.py' in ours
    assert {path.name.split('.')[0] for path in tree.glob('utils/qat/__pycache__/*')} <= {'both'}
    for switch, linked in (([], False), (['--link'], True), ([], False)):
        assert patch(tree, *switch, script=new).returncode == 0 == patch(tree, '--check', script=new).returncode
        assert (tree / 'utils/qat/both.py').is_symlink() is linked
    patch(tree, '--revert', script=new)
    assert contents(tree) == before


# ---- killed, at every point ----------------------------------------------------------------------------------------------

WRITERS = 'cp ln mkdir mv rm rmdir find'.split()  # what the script changes files with, besides > into its own folder


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

    count, points, told_of = tmp_path / 'count', 0, 0
    argv, first = ([new, tree, '--force', *flags], 'older') if verb == 'patch' else ([new, tree, '--revert'], 'whole')
    while True:
        points += 1
        shutil.rmtree(tree)
        shutil.copytree(folders[first], tree, symlinks=True)
        count.write_text('1\n')
        told = {**os.environ, 'PATH': f'{writers}:{os.environ["PATH"]}', 'COUNT': count, 'AT': str(points)}
        done = subprocess.run(argv, env=told, capture_output=True, text=True, start_new_session=True)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        stopped = shutil.copytree(tree, tmp_path / f'stopped {points}', symlinks=True)
        told_of += 'a patch was interrupted' in patch(stopped, '--check', script=new).stdout
        assert patch(tree, '--force', *flags, script=new).returncode == 0 and everything(tree) == whole, points
        again = patch(stopped, '--revert', script=old if points % 5 == 0 else new)  # either knows what to take away
        assert again.returncode == 0 and everything(stopped) == before, (points, again.stderr)
        shutil.rmtree(stopped)
    assert points > 12 and (told_of > 3 or verb == 'revert')


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
    result = patch(tree, *verb, script=new, PATH=f'{tmp_path}:{os.environ["PATH"]}')
    refused(result, 'mv: no room; half done: mend that and run it again')
    assert not (tree / '.yolov9-qat.new').exists()
    assert patch(tree, script=new).returncode == 0 and patch(tree, '--check', script=new).returncode == 0
    assert patch(tree, '--revert', script=new).returncode == 0 and everything(tree) == before


# ---- what is not touched -------------------------------------------------------------------------------------------------


HOSTILE = [
    *(
        '../victim',
        '/tmp/victim',
        'utils/qat/../../../victim',
        'val.py',
        'models/common.py',
        'utils/qat',
        'utils/qat/.py',
    ),
    *('.git/config', 'utils/qat/a b.py', '', 'scripts/get_coco.sh'),
]
FORMS = '{sum}  {name}', '# folder {name}', '# moved {name}', '# original {sum}  {name}'
SPOILT = [(form, name) for form in FORMS for name in HOSTILE if form.format(sum=0, name=name) != '# folder utils/qat']
VERBS = (), ('--check',), ('--revert',), ('--revert', '--force')


@pytest.mark.parametrize(
    'content, says',
    [
        ('a' * 1500, 'is longer than any'),
        ('# moved qat.py\n' * 14_000, 'has more than 200000 bytes'),
        pytest.param('# moved qat.py\n' * 9_000, None, marks=pytest.mark.faults),
    ],
    ids=['line', 'size', 'lines'],
)
def test_a_manifest_has_bounds(upgrade, content, says):
    _, new, tree = upgrade
    patch(tree, script=new)
    (tree / MANIFEST).write_text((tree / MANIFEST).read_text() + content)
    checked = patch(tree, '--check', script=new)
    if says:
        refused(checked, says)
    else:
        assert checked.returncode == 0, checked.stderr


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


@pytest.mark.faults
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
