"""ONNX → engine by trtexec, NVIDIA's program, with the layers of the engine and their times.

NVIDIA's containers have trtexec, the wheels of pip do not. Its flags depend on its version: 8.6 and 10 choose
precisions by flags; 11 has no such flags, and its defaults for measurements are those needed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.engine.api import VERSIONS
from utils.qat.engine.sidecar import write_sidecar

if TYPE_CHECKING:
    from utils.qat.engine.plan import Plan  # imports onnx

# folders of NVIDIA's packages and containers; they need not be on the PATH
PLACES = ('/usr/src/tensorrt/bin', '/opt/tensorrt/bin')
BANNER = re.compile(r'TensorRT\.trtexec \[TensorRT v(\d+)\]')


def find_trtexec() -> str | None:
    """Find the path of trtexec on the PATH and in PLACES; None if it is not installed."""
    return shutil.which('trtexec') or shutil.which('trtexec', path=os.pathsep.join(PLACES))


def version_in(output: str) -> tuple[int, int, int] | None:
    """Read the version of TensorRT from the banner of trtexec: (major, minor, patch); None if there is no banner.

    The banner has one number. Since TensorRT 10, minor and patch have two digits each (101303 = 10.13.3). In TensorRT 8
    the minor has one digit and the patch two (8601 = 8.6.1).
    """
    found = BANNER.search(output)
    if not found:
        return None
    number = int(found[1])
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


def arguments(
    plan: Plan, major: int, layer: Path | None = None, profile: Path | None = None, tuning: Sequence[str] = ()
) -> list[str]:
    """List the arguments of trtexec for a build.

    layer, profile: JSON files for a measurement of its layers; None = none. tuning: arguments of a search, which runs every engine.
    """
    config = plan.config
    args = [
        f'--onnx={config.onnx}',
        f'--saveEngine={config.engine}',
        f'--timingCacheFile={config.timing_cache}',
        f'--memPoolSize=workspace:{config.workspace}',
        '--profilingVerbosity=detailed',
    ]
    if major < 11:
        args += [{'FP16': '--fp16', 'INT8': '--int8'}[flag] for flag in plan.builder]
        args += ['--stronglyTyped'] * ('STRONGLY_TYPED' in plan.network)
    if config.level is not None:
        args.append(f'--builderOptimizationLevel={config.level}')
    if plan.dynamic:
        for which, number in (('min', 0), ('opt', 1), ('max', 2)):
            shapes = (f'{name}:{"x".join(map(str, shapes[number]))}' for name, shapes in plan.shapes.items())
            args.append(f'--{which}Shapes={",".join(shapes)}')
    if layer is None:
        return [*args, *(tuning or ['--skipInference'])]
    # the defaults of trtexec 11, which warns if they are given
    return [
        *args,
        f'--exportLayerInfo={layer}',
        f'--exportProfile={profile}',
        *(['--useCudaGraph', '--useSpinWait', '--noDataTransfers', '--separateProfileRun'] if major < 11 else []),
    ]


def build_with_trtexec(
    trtexec: str,
    major: int,
    plan: Plan,
    progress: Callable[..., Iterable[str]] = iter,
    layer: Path | None = None,
    profile: Path | None = None,
    tuning: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the engine plan.config.engine and write its sidecar, whose content is returned; see `arguments`."""
    config = plan.config
    config.engine.parent.mkdir(parents=True, exist_ok=True)
    with atomic(config.engine) as tmp:
        command = [trtexec, *arguments(plan, major, layer, profile, tuning)]
        command[command.index(f'--saveEngine={config.engine}')] = f'--saveEngine={tmp}'
        errors = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            for line in progress(running.stdout):
                LOGGER.debug(line.rstrip())
                errors += [line.strip()] * ('[E]' in line)
        if running.returncode or not Path(tmp).exists():
            raise QatError(
                f'{config.onnx}: {trtexec} failed: {errors[-1] if errors else f"exit code {running.returncode}"}'
            )
    return write_sidecar(plan, trtexec=' '.join(command))
