"""Bad input for the commands: generators of damaged files, and the check of a command's answer.

All cases follow from a seed: `cases(kind, n)` is the same list in every run, and a longer one begins with a shorter one.
"""

import io
import os
import random
import zipfile

import pytest
from zoo import program

TIMES = int(os.environ.get('FAULTS', 1))  # a larger round, for a release: FAULTS=10


def answer(command, argv, capfd, folder, allowed=(0, 2), leaves=()):
    """Exit code, of `allowed`, and last line on stderr of a command called with `argv` in this process.

    Fails if it raises or shows a traceback, if a refusal is not its last line, and if it leaves in `folder` a temporary
    file or, without success, a result.
    """
    from utils.qat.core.command import run_command

    main, before = program(command).main, set(folder.rglob('*'))
    capfd.readouterr()
    try:
        code = (
            run_command(main, [str(a) for a in argv])
            if command != 'scripts/infer_onnx.py'
            else main(argv=[str(a) for a in argv])
        )
    except SystemExit as e:
        code = e.code
    out, err = capfd.readouterr()
    assert 'Traceback' not in out + err, f'{command} {argv}\n{(out + err)[-3000:]}'
    line = (err.strip().splitlines() or [''])[-1]
    left = {f for f in folder.rglob('*') if f.suffix != '.cache' and f.name not in (*leaves, '.lock')} - before
    assert not [f for f in left if f.name.startswith('.')], f'{command} {argv} left {left}'
    assert code in allowed, f'{command} {argv}: {code}\n{err[-2000:]}'
    if code == 2:
        assert ': error: ' in line, f'{command} {argv}\n{err[-2000:]}'
        assert not left, f'{command} {argv} failed and left {left}'
    return code, line


def sampled(cases, every, first=0):
    """These cases as pytest parameters: cases first, first + every, ... run always, the others with --faults."""

    def later(case):
        if not hasattr(case, 'marks'):
            case = pytest.param(*(case if isinstance(case, tuple) else [case]))
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.faults], id=case.id)

    return [case if i % every == first else later(case) for i, case in enumerate(cases)]


def damaged(whole, n, seed=0):
    """`n` * TIMES pairs (what was done, bytes), see `damage`."""
    chance = random.Random(seed)
    for i in range(n * TIMES):
        yield damage(whole, chance, i)


def damage(whole, chance, number):
    """(what was done, bytes): cut short, overwritten by noise, a bit flipped, a part left out or doubled, by turns of `number`."""

    def somewhere():  # the beginning and the end of a file say what the rest is
        return min(
            len(whole) - 1,
            chance.choice([chance.randrange(len(whole)), chance.randrange(256), len(whole) - 1 - chance.randrange(512)])
            % len(whole),
        )

    at, length = somewhere(), chance.choice([1, 4, 16, 300])
    how = ('cut', 'noise', 'bit', 'without', 'doubled')[number % 5]
    return f'{how} at {at}, {length}', {
        'cut': lambda: whole[:at],
        'noise': lambda: whole[:at] + chance.randbytes(length) + whole[at + length :],
        'bit': lambda: whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :],
        'without': lambda: whole[:at] + whole[at + length :],
        'doubled': lambda: whole[: at + length] + whole[at:],
    }[how]()


def with_pickle(whole, pickled):
    """A torch.save archive with another pickle inside, its checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, 'w') as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith('/data.pkl') else old.read(name))
    return out.getvalue()


def pickle_in(whole):
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith('/data.pkl'))
