"""TensorRT as it is installed: the module, what its version can, and what it says.

One code path serves TensorRT 8.6, 10 and 11 and TensorRT-RTX: what differs is asked of the module once (`capabilities`), never
of the version's number. Nothing here or in `runner` and `build` imports TensorRT before it is needed.
"""

import importlib
from dataclasses import dataclass

from utils.qat.config.backends import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER

OLDEST = (8, 6)

# Attributes that some versions have and others lack: name here → (class of the module, None for the module itself; attribute).
# docs/tensorrt.md has the table of versions; tests/engine/test_tensorrt_api.py holds it against recorded lists of attributes.
OPTIONAL = {
    'explicit_batch': ('NetworkDefinitionCreationFlag', 'EXPLICIT_BATCH'),  # has to be asked for
    'typed': ('NetworkDefinitionCreationFlag', 'STRONGLY_TYPED'),  # computes in the types of the file, if asked
    'precision_flags': (
        'BuilderFlag',
        'FP16',
    ),  # FP16 and INT8 are chosen by the builder; else networks are always typed
    'progress': (None, 'IProgressMonitor'),
    'memory_v2': ('ICudaEngine', 'device_memory_size_v2'),  # the new name of device_memory_size
    'node_names': ('ParserError', 'node_name'),  # the parser's errors name the node, not only its number
}


@dataclass(frozen=True)
class Capabilities:
    """What an installed TensorRT has of OPTIONAL."""

    explicit_batch: bool
    typed: bool
    precision_flags: bool
    progress: bool
    memory_v2: bool
    node_names: bool


# Major version → what it has: for trtexec, which cannot be asked. TensorRT-RTX 1.7 is as TensorRT 11.
VERSIONS = {
    8: Capabilities(
        explicit_batch=True, typed=False, precision_flags=True, progress=False, memory_v2=False, node_names=False
    ),
    10: Capabilities(
        explicit_batch=True, typed=True, precision_flags=True, progress=True, memory_v2=True, node_names=True
    ),
    11: Capabilities(
        explicit_batch=False, typed=True, precision_flags=False, progress=True, memory_v2=True, node_names=True
    ),
}


def capabilities(trt):
    """Capabilities of the module `trt`."""

    def has(owner, attribute):
        owner = getattr(trt, owner, None) if owner else trt
        return hasattr(owner, attribute)

    return Capabilities(**{name: has(*where) for name, where in OPTIONAL.items()})


def product(trt):
    """'TensorRT 10.13.3' or 'TensorRT-RTX 1.7.1', without the number of the build, which trtexec does not tell alike."""
    return f'TensorRT{"-RTX" if "rtx" in trt.__name__ else ""} {".".join(trt.__version__.split(".")[:3])}'


def load_tensorrt(backend='tensorrt', flag='TensorRT'):
    """The module of `backend`, see config/backends.py. Raises QatError, which begins with `flag`, if it is not installed or too old."""
    failed = []
    for name in BACKENDS[backend].builders:
        try:
            trt = importlib.import_module(name)
        except (ImportError, OSError) as e:  # OSError: a library that the bindings load is missing
            failed.append(' '.join(str(e).split())[:200])
            continue
        if not hasattr(trt, 'Builder'):  # the package index has placeholders of that name
            failed.append(f'the package {name} is only a placeholder')
            continue
        if backend == 'tensorrt' and tuple(map(int, trt.__version__.split('.')[:2])) < OLDEST:
            raise QatError(
                f'{flag}: TensorRT {trt.__version__} is installed; at least {OLDEST[0]}.{OLDEST[1]} is needed: '
                './install_dependencies.sh --tensorrt 10'
            )
        return trt
    what, option = ('TensorRT', '10') if backend == 'tensorrt' else ('TensorRT-RTX', 'rtx')
    raise QatError(
        f'{flag}: no {what} here ({"; ".join(failed)}); ./install_dependencies.sh --tensorrt {option} installs it, the '
        'NVIDIA PyTorch container has it. Without it ONNX Runtime evaluates the .onnx: python val_trt.py --weights MODEL.onnx'
    )


def logger(trt, say):
    """A trt.ILogger. Warnings go to `say`, what it tells besides is for --verbose; `.errors` keeps what went wrong, for the exception
    that follows."""

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors = []

        def log(self, severity, message):
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.Severity.WARNING:
                say(f'{product(trt)}: {message}')
            elif severity == trt.ILogger.Severity.INFO:
                LOGGER.debug(f'{product(trt)}: {message}')

    return Log()


def progress_monitor(trt, bar):
    """A trt.IProgressMonitor that moves `bar` (a tqdm) by the outermost phase and names the innermost; ctrl-C ends the build."""

    class Progress(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self.outermost, self.interrupted = None, False

        def phase_start(self, phase, parent, steps):
            if parent is None:
                self.outermost = phase
                bar.reset(steps)
            bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase, step):
            try:
                bar.update(phase == self.outermost)
            except KeyboardInterrupt:  # it must not leave through C++
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, phase):
            bar.refresh()

    return Progress()
