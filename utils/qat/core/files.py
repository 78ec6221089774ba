"""Files that are whole at any moment: written under a temporary name and renamed. And what tells them apart."""

import contextlib
import hashlib
import io
import json
import os
import re
from pathlib import Path


def sha256(path):
    """Hex digest of a file."""
    with open(path, 'rb') as f:
        return (
            hashlib.file_digest(f, 'sha256').hexdigest()
            if hasattr(hashlib, 'file_digest')
            else hashlib.sha256(f.read()).hexdigest()
        )


def write_torch(path, content):
    """torch.save to `path`, whole at any moment. In memory first: its own writer does not say that it was the disk that is full."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(path) as tmp:
        tmp.write_bytes(buffer.getbuffer())


HALF = re.compile(r'\..*\.\d+\.tmp(\..*)?', re.DOTALL)  # names of files that are being written, see `atomic`


@contextlib.contextmanager
def atomic(path):
    """Yield a temporary path beside `path`, in a folder that is there; rename it to `path` if the block succeeds, delete it if not.

    The suffix is kept, because writers such as matplotlib choose the format by it.
    """
    path = Path(path)
    tmp = path.with_name(f'.{path.stem}.{os.getpid()}.tmp{path.suffix}')
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        e.filename = str(path)  # a failed write does not say where
        raise
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path, text):
    """`path` with `text`, in UTF-8, whole at any moment."""
    with atomic(path) as tmp:
        tmp.write_text(text, encoding='utf-8', errors='backslashreplace')


def write_json(path, content):
    write_text(path, json.dumps(content, indent=2, default=str) + '\n')
