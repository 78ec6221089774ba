"""Run Python code that may crash in a subprocess, without imports from the untrusted current folder."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# `python -c` would import from the current folder: a torch.py there must not run. -I would drop PYTHONPATH and the packages of the
# user too, and -P needs Python 3.11.
ALONE = 'import sys; sys.path[:] = filter(None, sys.path)\n'


def run_apart(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a subprocess that imports nothing from the current folder.

    Args:
        code: the code; `sys` is imported.
        *arguments: sys.argv[1:].
        **options: as subprocess.run takes them.

    Returns:
        Its exit code, standard output and errors.
    """
    line = [sys.executable, '-c', ALONE + code, *map(str, arguments)]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
