"""The next command to type, which each command prints at its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from utils.qat.core.distributed import world_size


def command(file: str | Path, *words: object) -> str:
    """Make the command `python FILE WORDS...` for the current folder; `file` is from the root of the toolkit."""
    # orig_argv, because a launcher changes sys.argv
    here = Path(next((word for word in sys.orig_argv[1:] if word.endswith('.py')), '')).parent
    root = here.parent if here.name in ('scripts', 'segment', 'classify') else here
    file = root / file if (root / file).is_file() else file
    typed = (
        f'./{word}' if isinstance(word, Path) and str(word).startswith('-') else str(word) for word in (file, *words)
    )
    return shlex.join(['python', *typed])


def repeated(file: str | Path, *words: object) -> str:
    """Make a command with as many torchrun processes as this run. Arguments: see `command`."""
    typed = command(file, *words)
    return f'torchrun --nproc_per_node {world_size()} {typed.removeprefix("python ")}' if world_size() > 1 else typed


def converted(weights: Path) -> Path:
    """Return the default output of reparameterization.py for a checkpoint."""
    return weights.with_name(f'{weights.stem}-converted.pt')


def typed_sides(imgsz: Iterable[int]) -> list[int]:
    """Return height and width as they are typed: one number if they are equal."""
    sides = list(imgsz)
    return sides[:1] if len(set(sides)) == 1 else sides


def after_scoring(model: Path, imgsz: Iterable[int], backend: str | None = None) -> str:
    """Make the command that follows a good score.

    .pt → export; .onnx → build the engine; .engine, .xml or .pt2 → benchmark. `backend` is the key of BACKENDS that
    scored the file. A file that OpenVINO ran needs no engine.
    """
    by = [] if backend in (None, 'tensorrt', 'onnxruntime') else ['--backend', backend]
    if model.suffix in ('.engine', '.xml', '.pt2') or backend == 'openvino':
        return command('benchmark_trt.py', model, *by)
    if model.suffix == '.onnx':
        return command('scripts/build_engine.py', model, *by)
    return command('export_qat.py', '--weights', model, '--include', 'onnx', '--imgsz', *typed_sides(imgsz))
