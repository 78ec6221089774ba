"""The command to type next: each command ends with it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

DATA = 'DATA.yaml'  # stands for the user's data YAML where none is known
FOLDER = 'FOLDER'  # likewise, for the images of a classifier


def command(file: str | Path, *words: object) -> str:
    """Make the command `python FILE WORDS...` as a user types it in the current folder.

    Args:
        file: a command of the toolkit, from its root, such as 'scripts/build_engine.py'.
        *words: its arguments.
    """
    # orig_argv, because a launcher changes sys.argv
    here = Path(next((word for word in sys.orig_argv[1:] if word.endswith('.py')), '')).parent
    root = here.parent if here.name in ('scripts', 'segment', 'classify') else here
    file = root / file if (root / file).is_file() else file
    typed = (
        f'./{word}' if isinstance(word, Path) and str(word).startswith('-') else str(word) for word in (file, *words)
    )
    return shlex.join(['python', *typed])


def converted(weights: Path) -> Path:
    """Return the file that reparameterization.py makes of a checkpoint unless --save names another."""
    return weights.with_name(f'{weights.stem}-converted.pt')


def data_of(path: object, classifies: bool = False) -> str:
    """Return the data that a checkpoint notes, if they are on this machine: a data YAML, or a classifier's folder; else DATA or FOLDER."""
    # os.path, because Path.is_file raises an error for a name that is too long
    there = os.path.isdir if classifies else os.path.isfile
    return path if isinstance(path, str) and there(path) else FOLDER if classifies else DATA


def typed_sides(imgsz: Iterable[int]) -> list[int]:
    """Return height and width as they are typed: one number if they are equal."""
    sides = list(imgsz)
    return sides[:1] if len(set(sides)) == 1 else sides


def after_scoring(model: Path, imgsz: Iterable[int], backend: str | None = None) -> str:
    """Make the command that follows a good score: .pt → export, .onnx → build the engine, .engine, .xml or .pt2 → benchmark.

    Args:
        model: the file that was scored.
        imgsz: height and width, in pixels.
        backend: the key of BACKENDS that scored it; None = the default for such files. A file that OpenVINO ran needs no engine.
    """
    by = [] if backend in (None, 'tensorrt', 'onnxruntime') else ['--backend', backend]
    if model.suffix in ('.engine', '.xml', '.pt2') or backend == 'openvino':
        return command('benchmark_trt.py', model, *by)
    if model.suffix == '.onnx':
        return command('scripts/build_engine.py', model, *by)
    return command('export_qat.py', '--weights', model, '--include', 'onnx', '--imgsz', *typed_sides(imgsz))
