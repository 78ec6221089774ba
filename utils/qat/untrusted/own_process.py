"""Python code in a process of its own, such as code that may crash. It imports nothing of the current folder, which may have anything."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# `python -c` would import what lies in the current folder: a torch.py there must not run. -I would leave out PYTHONPATH and the
# packages of the user too, and -P is of Python 3.11.
ALONE = 'import sys; sys.path[:] = filter(None, sys.path)\n'


def run_apart(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which imports nothing of the current folder.

    Args:
        code: the code; `sys` is imported.
        *arguments: sys.argv[1:].
        **options: as subprocess.run takes them.

    Returns:
        Its exit code, standard output and errors.
    """
    line = [sys.executable, '-c', ALONE + code, *map(str, arguments)]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
