"""ONNX → engine by trtexec, NVIDIA's program, with the layers of the engine and their times.

Its flags depend on its version: 8.6 and 10 choose precisions by flags; 11 has no such flags, and its defaults for measurements are those needed here.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.vendors.tensorrt.engine.sidecar import write_sidecar

if TYPE_CHECKING:
    from utils.qat.vendors.tensorrt.engine.plan import Plan  # imports onnx


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
    config, start = plan.config, time.perf_counter()
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
    return write_sidecar(plan, trtexec=' '.join(command), seconds=round(time.perf_counter() - start, 1))
