"""The command that one would type next, with which each command ends."""

import os
import shlex
import sys
from pathlib import Path

DATA = 'DATA.yaml'  # to be replaced, where nothing tells which data is the user's


def command(file, *words):
    """`python FILE WORDS...` as one would type it here. file: of the toolkit, from its root."""
    here = Path(
        next((word for word in sys.orig_argv[1:] if word.endswith('.py')), '')
    ).parent  # a launcher changes sys.argv
    root = here.parent if here.name in ('scripts', 'segment') else here
    file = root / file if (root / file).is_file() else file
    return shlex.join(
        [
            'python',
            *(
                f'./{word}' if isinstance(word, Path) and str(word).startswith('-') else str(word)
                for word in (file, *words)
            ),
        ]
    )


def data_yaml(path):
    """`path`, noted in a checkpoint, if it names a file that is here."""
    return (
        path if isinstance(path, str) and os.path.isfile(path) else DATA
    )  # unlike Path.is_file, for names of any length


def after_scoring(model, imgsz, backend='tensorrt'):
    """What a model that was found good is followed by: .pt → ONNX → engine → how fast it is. imgsz: pixels."""
    by = [] if backend == 'tensorrt' else ['--backend', backend]
    if model.suffix == '.engine':
        return command('benchmark_trt.py', model, *by)
    if model.suffix == '.onnx':
        return command('scripts/build_engine.py', model, *by)
    return command('export_qat.py', '--weights', model, '--include', 'onnx', '--imgsz', imgsz)
