"""The job where nothing is handy: spaces and foreign letters in every path, LC_ALL=C, a source tree and a data set that cannot be
written to, a user with no home, no network. One run in such a place; each test looks at one side of it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO, copy_upstream
from helpers.commands import python
from helpers.labelled import words
from helpers.zoo import assert_within_interval, program, quiet_upstream

pytestmark = pytest.mark.faults

NOBODY = 65534
NAMES = [f'Größe {i} 数' for i in range(10)]
SETTINGS = '--imgsz 128 --batch-size 4 --workers 1 --device cpu'
JOB = """
reparameterization.py --weights {weights}/dual.pt --save {single}
qat.py quantize --weights {single} DATA --epochs 1 --iters 2
export_qat.py --weights {best}.pt --imgsz 128
qat.py eval --weights {best}.onnx DATA --baseline {best}.pt --name {scored}
val.py --weights {single} DATA --name val
"""  # upstream's own command wants a font

# Python reads this file at its start. Whoever asks for another machine is written down and gets an error.
WATCH = """
import os
import sys

LOCAL = None, '', 'localhost', '127.0.0.1', '::1', b'localhost', b'127.0.0.1'


def watch(event, arguments):
    if event == 'socket.connect' and isinstance(arguments[1], tuple) and arguments[1][0] not in LOCAL:
        asked = f'connect {arguments[1]}'
    elif event in ('socket.getaddrinfo', 'socket.gethostbyname') and arguments[0] not in LOCAL:
        asked = f'look up {arguments[0]}'
    elif event in ('subprocess.Popen', 'os.system') and {'pip', 'curl', 'wget', 'ping', 'fetch', 'clone', 'ls-remote', 'gsutil'} & set(
            (arguments[1] if isinstance(arguments[1], str) else ' '.join(map(str, arguments[1]))).split()
            if event == 'subprocess.Popen' else arguments[0].decode().split()):
        asked = f'run {arguments}'
    else:
        return
    descriptor = os.open(os.environ['WATCHED'], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, f'{sys.argv}: {asked}\\n'.encode())
    os.close(descriptor)
    raise OSError(f'no network in this test: {asked}')


sys.addaudithook(watch)
"""


def works(prefix):
    """Whether `PREFIX python` is this very Python, with its packages (another one may be found where this cannot be read)."""
    code = f'import sys, torch; sys.exit(sys.version != {sys.version!r})'
    return (
        shutil.which(prefix[0])
        and not subprocess.run([*prefix, sys.executable, '-c', code], capture_output=True).returncode
    )


def as_nobody():
    """What to put before a command so that another user than root runs it; nothing if we are not root, None if it cannot be.

    Where root's own Python lies in a folder that only root may enter, the user gets the right to read everything, and no other.
    """
    if os.getuid():
        return []
    user = ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups']
    ways = user, [*user, '--inh-caps=+dac_read_search', '--ambient-caps=+dac_read_search']
    return next(filter(works, ways), None)


def offline():
    """What to put before a command so that it has no network, None if that cannot be."""
    way = (
        ['unshare', '--net'] if os.getuid() == 0 else ['unshare', '--map-current-user', '--net']
    )  # as its root it could write anywhere
    return way if works(way) else None


# Runs a command, and adds to the file $COUNTED what the kernel counted in the meantime: packets, of whatever library in whatever
# language, for which there was no way out. Only where there is no network is that the command's own.
COUNT = """"$@"; code=$?; awk '/^Ip: [0-9]/ { print $13 } /^Ip6OutNoRoutes/ { print $2 }' /proc/net/snmp /proc/net/snmp6 >>"$COUNTED"; exit $code"""


def listing(folder):
    """Path -> mode, size and time of everything in a folder, and of the folder itself."""
    return {
        path: (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in [folder, *folder.rglob('*')]
    }


def allow(folder, files, folders):
    """Set the modes of everything in `folder`."""
    for path in [folder, *folder.rglob('*')]:
        if not path.is_symlink():
            path.chmod(folders if path.is_dir() else files | path.stat().st_mode & 0o111)


@dataclass
class Place:
    """root: all of it. tree, data, weights: read-only. out: for results. home: for one command, the others have none. user, net: see
    as_nobody, offline."""

    root: Path
    user: list
    net: list

    def __post_init__(self):
        names = ('tree', 'yolov9 Größe 模型'), ('data', 'Ziffern und 数字'), ('out', 'out put ü')
        for name, folder in (*names, *((name, name) for name in 'weights home tmp hook watched'.split())):
            setattr(self, name, self.root / folder)
        self.asked, self.counted = self.watched / 'asked', self.watched / 'counted'

    def environment(self, home):
        """Next to nothing: no PYTHONUTF8, no settings of upstream's."""
        kept = {k: v for k, v in os.environ.items() if k in ('PATH', 'LD_LIBRARY_PATH')}
        places = {
            'HOME': home,
            'TMPDIR': self.tmp,
            'PYTHONPATH': self.hook,
            'WATCHED': self.asked,
            'COUNTED': self.counted,
        }
        plain = dict.fromkeys(('LC_ALL', 'LANG'), 'C')
        return {**kept, **plain, **{name: str(place) for name, place in places.items()}}

    def python(self, *arguments, code=0, home='/nonexistent'):
        """stdout + stderr of `python ARGUMENTS...` in the tree; fails unless it exits with `code`."""
        prefix = [*([*self.net, 'sh', '-c', COUNT, 'sh'] if self.net else []), *(self.user or [])]
        env = self.environment(home)
        return python(*arguments, code=code, env=env, cwd=self.tree, prefix=prefix, encoding='utf-8')


@pytest.fixture(scope='module')
def place():
    """A patched tree, data and weights, as they are before the job. Not under pytest's own folder, which only its user may enter."""
    place = Place(Path(tempfile.mkdtemp(prefix='yolov9-qat Größe ')), as_nobody(), offline())
    try:
        place.root.chmod(0o755)
        for folder in (place.weights, place.out, place.home, place.tmp, place.hook, place.watched):
            folder.mkdir()
        (place.hook / 'sitecustomize.py').write_text(WATCH)
        copy_upstream(place.tree)
        subprocess.run([REPO / 'patch_yolov9.sh', place.tree], check=True, stdout=subprocess.DEVNULL)
        program('demo/make_data.py').make_data(place.data, train=8, val=8)
        yaml = place.data / 'data.yaml'
        head = yaml.read_text(encoding='utf-8').split('names:')[0]
        yaml.write_text(f'{head}names: {json.dumps(NAMES, ensure_ascii=False)}\n', encoding='utf-8')
        with quiet_upstream():
            program('demo/weights.py').build(REPO / 'demo' / 'demo-weights.pt', place.weights / 'dual.pt')
        for folder in (place.tree, place.data, place.weights):
            allow(folder, 0o444, 0o555)
        for folder in (place.out, place.home, place.tmp, place.watched):
            folder.chmod(0o777)
        yield place
    finally:
        allow(place.root, 0o644, 0o755)
        shutil.rmtree(place.root)


@pytest.fixture(scope='module')
def job(place):
    """The place after the job; `before`: what was there, `said`: command -> output."""
    read_only = place.tree, place.data, place.weights
    place.said, place.before = {}, {folder: listing(folder) for folder in read_only}
    named = {'single': place.out / 'einfach ü.pt', 'best': place.out / 'exp/weights/qat_best_einfach ü'}
    here = {**vars(place), **named, 'scored': 'eval 值'}
    for line in JOB.strip().splitlines():
        typed = words(line.replace('DATA', f'--data {{data}}/data.yaml {SETTINGS} --project {{out}}'), **here)
        place.said[typed[1] if typed[0] == 'qat.py' else typed[0]] = place.python(
            *typed, home=place.home if 'eval' in typed else '/nonexistent'
        )
    place.counted_after_the_job = place.counted.read_text() if place.net else ''
    return place


def test_the_job_is_done(job):
    report = json.loads((job.out / 'exp' / 'report.json').read_text(encoding='utf-8'))
    metrics = json.loads((job.out / 'eval 值' / 'metrics.json').read_text(encoding='utf-8'))
    assert report['best']['ap'] > 0.2 and metrics['ap'] > 0.2
    assert_within_interval(metrics['against_baseline'])
    assert list(report['classes'].values()) == NAMES and str(job.out) in report['settings']['weights']
    assert NAMES[0] in job.said['val.py'] or 'all' in job.said['val.py']
    files = 'weights report.json report.md ap.png classes.png log.txt .lock'
    assert {p.name for p in (job.out / 'exp').iterdir()} == {*files.split()}
    texts = ((job.out / 'exp' / name).read_text(encoding='utf-8') for name in ('log.txt', 'report.md'))
    assert all('Größe' in text for text in texts)


def test_nothing_is_written_but_to_the_project(job):
    for folder, before in job.before.items():
        assert listing(folder).keys() - before.keys() == set()
        assert listing(folder) == before
    left = [p for p in job.tmp.rglob('*') if p.is_file()]
    assert not left, 'no temporary file stays'


def test_the_label_cache_that_cannot_be_written_is_told_of(job):
    if job.user is None:
        pytest.skip('root can write to read-only folders, and there is no setpriv that makes another user of it')
    assert 'so each command reads the labels anew' in job.said['quantize'] and 'Traceback' not in job.said['quantize']


def test_a_user_may_not_write_to_the_tree(job):
    """What the others stand on."""
    if job.user is None:
        pytest.skip('root can write to read-only folders, and there is no setpriv that makes another user of it')
    assert 'PermissionError' in job.python('-c', 'open("note.txt", "w")', code=1)
    weights = job.out / 'exp' / 'weights' / 'qat_best_einfach ü.pt'
    said = job.python(
        'qat.py', 'eval', '--weights', weights, '--data', job.data / 'data.yaml', *SETTINGS.split(), code=2
    )
    assert '--project' in said and 'Traceback' not in said  # the default is a folder in the tree


def test_nothing_asks_for_the_network(job):
    assert not job.asked.exists(), job.asked.read_text()
    for attempt in (
        'import socket; socket.create_connection(("192.0.2.1", 80))',
        'import urllib.request as r; r.urlopen("http://example.org")',
        'import os; os.system("ping -c 1 192.0.2.1")',
        'import subprocess; subprocess.run(["git", "fetch"])',
    ):
        job.python('-c', attempt, code=1)
    assert len(job.asked.read_text().splitlines()) == 4, 'the watch sees what there is to see'


def test_the_kernel_saw_no_packet(job):
    """With the network really off, and whatever language a library is written in."""
    if job.net is None:
        pytest.skip('unshare --net is not permitted here; the job ran with the network watched')
    counts = [int(n) for n in job.counted_after_the_job.split()]
    assert len(counts) == 2 * len(job.said) and not any(counts)
    assert 'Network is unreachable' in job.python(
        '-S', '-c', 'import socket; socket.socket().connect(("192.0.2.1", 80))', code=1
    )  # -S: without the watch
    assert any(map(int, job.counted.read_text().split())), 'the kernel counts'


def test_no_library_leaves_anything_at_home(job):
    """ONNX Runtime would leave the identifier that it reports with; upstream keeps its font there, matplotlib its list of fonts."""
    left = {p.relative_to(job.home).parts[1] for p in job.home.glob('.*/*')}
    assert left <= {'Ultralytics', 'matplotlib'}
