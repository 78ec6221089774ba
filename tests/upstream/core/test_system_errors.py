"""Errors of the system are told in one line that blames what failed."""

import errno
import os

import pytest
import torch

from utils.qat.config.common import LoaderConfig
from utils.qat.core.command import explain_out_of_memory
from utils.qat.core.errors import QatError, explain, one_line
from utils.qat.core.files import atomic
from utils.qat.data.loaders import Loader

KILLED = 'a data loading process was killed'


@pytest.mark.parametrize(
    'error, says',
    [
        (RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed.'), KILLED),
        (RuntimeError('DataLoader worker (pid(s) 7, 8) exited unexpectedly'), KILLED),
        (ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer'), None),  # of a download, for example
        (ConnectionRefusedError('refused'), None),
        (EOFError(), None),
        (OSError(errno.ENOSPC, 'No space left on device', 'a/b'), 'a/b: No space left on device'),
        (OSError(errno.EFBIG, 'File too large', 'a/b'), 'a/b: File too large, for ulimit -f'),
        (OSError(errno.ENOENT, 'No such file', 'a/b'), 'a/b: No such file; it or its folder was moved or deleted'),
        (OSError(errno.EMFILE, 'Too many', 'a/b'), 'too many open files'),
        (OSError(errno.ENFILE, 'Too many', 'a/b'), 'too many open files'),
        (MemoryError(), 'out of memory'),
        (RuntimeError('a bug'), None),
    ],
)
def test_the_line_of_an_error(error, says):
    line = explain(error)
    assert line is None if says is None else line.startswith(says)


def test_an_error_without_words_is_told_by_its_kind():
    assert one_line(EOFError()) == 'EOFError' and one_line('') == ''


@pytest.mark.parametrize('error', [ConnectionResetError(errno.ECONNRESET, 'reset'), EOFError()])
def test_a_loader_whose_worker_dies_while_it_hands_over_a_batch(error):
    class Images:
        def __getitem__(self, index):
            if index:
                raise error  # as the connection to the worker does
            return torch.zeros(3, 8, 8), index, ''

    batches = iter(Loader(Images(), LoaderConfig(workers=0), [[0], [1]]))
    _, classes, _ = next(batches)
    assert classes.tolist() == [0]
    with pytest.raises(RuntimeError) as raised:
        next(batches)
    assert explain(raised.value).startswith(KILLED)


@pytest.mark.parametrize(
    'fails, blamed',
    [
        (lambda tmp, other: other.read_bytes(), 'other.txt'),
        (lambda tmp, other: tmp.read_bytes(), 'made.txt'),
        (lambda tmp, other: tmp.with_name(f'{tmp.name}.json').read_bytes(), 'made.txt'),  # written beside it
        (lambda tmp, other: os.write(-1, b'text'), 'made.txt'),  # the error of a write has no file's name
        (lambda tmp, other: None, 'made.txt'),  # nothing was written, so it cannot be renamed
    ],
)
def test_a_file_that_cannot_be_written_is_named_and_so_is_one_that_cannot_be_read(tmp_path, fails, blamed):
    with pytest.raises(OSError) as raised, atomic(tmp_path / 'made.txt') as tmp:
        fails(tmp, tmp_path / 'other.txt')
    assert os.path.basename(raised.value.filename) == blamed and not list(tmp_path.iterdir())


@pytest.mark.parametrize('batch_size, advice', [(10, '--batch-size 5'), (1, '--imgsz')])
def test_out_of_gpu_memory_says_what_to_try(batch_size, advice):
    with pytest.raises(QatError, match=advice), explain_out_of_memory(batch_size):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')
