"""The installed TensorRT: its module, the capabilities of its version, its log and its progress; and its program trtexec.

One code path serves TensorRT 8.6, 10 and 11 and TensorRT-RTX. Differences are detected once from the module itself
(`capabilities`), never from the version number. Neither this file nor `build` imports TensorRT before it is needed.
"""

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any

from utils.qat.config.export import OPSETS
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError, one_line
from utils.qat.core.log import LOGGER

OLDEST = (8, 6)  # version of TensorRT

# of trtexec in NVIDIA's packages and containers, need not be on the PATH; the wheels of pip have no trtexec
PLACES = ('/usr/src/tensorrt/bin', '/opt/tensorrt/bin')
BANNER = re.compile(r'TensorRT\.trtexec \[TensorRT v(\d+)\]')


class Capability(Enum):
    """An attribute that only some versions have: (class of the module, attribute); None for an attribute of the module itself.

    tests/unit/test_tensorrt_api.py checks them against recorded lists of attributes.
    """

    EXPLICIT_BATCH = 'NetworkDefinitionCreationFlag', 'EXPLICIT_BATCH'  # an explicit batch needs a flag
    TYPED = 'NetworkDefinitionCreationFlag', 'STRONGLY_TYPED'  # a flag selects the types of the file
    # the builder chooses FP16 and INT8 by flags; without these flags every network is typed
    PRECISION_FLAGS = 'BuilderFlag', 'FP16'
    PROGRESS = None, 'IProgressMonitor'
    NODE_NAMES = 'ParserError', 'node_name'  # an error of the parser has the node's name, not only its number


# Major version → its capabilities, for trtexec, which does not report them. TensorRT-RTX 1.7 equals TensorRT 11.
VERSIONS = {
    8: {Capability.EXPLICIT_BATCH, Capability.PRECISION_FLAGS},
    10: set(Capability),
    11: set(Capability) - {Capability.EXPLICIT_BATCH, Capability.PRECISION_FLAGS},
}


def capabilities(trt: ModuleType) -> set[Capability]:
    """Find the capabilities of the module `trt`."""

    def has(owner: str | None, attribute: str) -> bool:
        return hasattr(getattr(trt, owner, None) if owner else trt, attribute)

    return {capability for capability in Capability if has(*capability.value)}


def product(trt: ModuleType) -> str:
    """Name the product and its version, without the build number: 'TensorRT 10.13.3' or 'TensorRT-RTX 1.7.1'."""
    return f'TensorRT{"-RTX" if "rtx" in trt.__name__ else ""} {".".join(trt.__version__.split(".")[:3])}'


def load_tensorrt(backend: str = 'tensorrt', flag: str = 'TensorRT') -> ModuleType:
    """Import the module of TensorRT, or of TensorRT-RTX, by the key of its backend. `flag` starts the error message."""
    failed = []
    for name in BACKENDS[backend].builders:
        try:
            trt = importlib.import_module(name)
        except (ImportError, OSError) as e:  # OSError: a shared library of the bindings is missing
            failed.append(one_line(e))
            continue
        if not hasattr(trt, 'Builder'):  # the package index has placeholders with this name
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


def reads() -> int:
    """Return the newest --trt that the installed TensorRT reads. Raises QatError if there is none."""
    major = int(load_tensorrt().__version__.split('.')[0])
    return max(version for version in OPSETS if version <= major)


def find_trtexec() -> str | None:
    """Find the path of trtexec on the PATH and in PLACES; None if it is not installed."""
    return shutil.which('trtexec') or shutil.which('trtexec', path=os.pathsep.join(PLACES))


def version_in(output: str) -> tuple[int, int, int] | None:
    """Read the version of TensorRT from the banner of trtexec: (major, minor, patch); None if there is no banner.

    The banner has one number. Since TensorRT 10, minor and patch have two digits each (101303 = 10.13.3). In TensorRT 8
    the minor has one digit and the patch two (8601 = 8.6.1).
    """
    match = BANNER.search(output)
    if not match:
        return None
    number = int(match[1])
    return (
        (number // 10000, number // 100 % 100, number % 100)
        if number >= 10000
        else (number // 1000, number // 100 % 10, number % 100)
    )


def version_of(trtexec: str) -> tuple[int, int, int]:
    """Ask the program `trtexec` for its version: (major, minor, patch)."""
    done = subprocess.run([trtexec, '--help'], capture_output=True, text=True)
    version = version_in(done.stdout + done.stderr)
    if not version or version[0] not in VERSIONS or version < (8, 6):
        raise QatError(
            f'{trtexec}: {"of TensorRT " + ".".join(map(str, version)) if version else "it does not tell its version"}; known are 8.6, '
            '10 and 11. Build with the Python package instead: --no-trtexec'
        )
    return version


def can_build() -> bool:
    """Tell whether TensorRT is installed, as a module or a program."""
    try:
        return bool(find_trtexec() or load_tensorrt())
    except QatError:
        return False


def logger(trt: Any, say: Callable[[str], object]) -> Any:
    """Make a trt.ILogger that sends warnings to `say`, line by line, and information to the log of --verbose.

    Its list `errors` keeps error messages, and `reason` gives one for the exception that follows.
    """

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def reason(self, which: int = 0) -> str:
            return self.errors[which] if self.errors else 'no reason given'

        def log(self, severity: object, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.Severity.WARNING:
                say(f'{product(trt)}: {message}')
            elif severity == trt.ILogger.Severity.INFO:
                LOGGER.debug(f'{product(trt)}: {message}')

    return Log()


def progress_monitor(trt: Any, bar: Any) -> Any:
    """Make a trt.IProgressMonitor that shows a build on a tqdm; Ctrl-C ends the build and sets its `interrupted`."""

    class Progress(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost: str | None = None
            self.interrupted = False

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.outermost = phase
                bar.reset(steps)
            bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            try:
                bar.update(phase == self.outermost)
            except KeyboardInterrupt:  # the exception must not pass through C++
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, phase: str) -> None:
            bar.refresh()

    return Progress()
