"""trtexec → engine, and the layers and times of it, where NVIDIA's program is there: the container has it, pip's wheels have not.

Its flags differ by version: 8.6 and 10 choose precisions by flags, 11 has none and measures as one wishes by default. A version is
told by the banner that every run begins with.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.engine.api import VERSIONS
from utils.qat.engine.sidecar import write_sidecar

PLACES = (
    '/usr/src/tensorrt/bin',
    '/opt/tensorrt/bin',
)  # of NVIDIA's packages and containers, which need not be on the PATH
BANNER = re.compile(r'TensorRT\.trtexec \[TensorRT v(\d+)\]')


def find_trtexec():
    """Path of the program, None if there is none."""
    return shutil.which('trtexec') or shutil.which('trtexec', path=os.pathsep.join(PLACES))


def version_in(output):
    """(major, minor, patch) of the TensorRT in the banner of trtexec; None if there is none.

    The number is major, minor, patch with two digits for each of the last two since TensorRT 10 (101303), and one and two in 8 (8601).
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


def version_of(trtexec):
    """version_in of what it prints. Raises QatError if that is no version this tool knows."""
    done = subprocess.run([trtexec, '--help'], capture_output=True, text=True)
    version = version_in(done.stdout + done.stderr)
    if not version or version[0] not in VERSIONS or version < (8, 6):
        raise QatError(
            f'{trtexec}: {"of TensorRT " + ".".join(map(str, version)) if version else "it does not tell its version"}; known are 8.6, '
            '10 and 11. Build with the Python package instead: --no-trtexec'
        )
    return version


def arguments(source, plan, major, layer=None, profile=None):
    """The command line, behind the program's name. source, plan: see engine_plan. layer, profile: JSON files to write; None = build only."""
    config = source.config
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
    if source.dynamic:
        for which, number in (('min', 0), ('opt', 1), ('max', 2)):
            shapes = (f'{name}:{"x".join(map(str, shapes[number]))}' for name, shapes in source.shapes.items())
            args.append(f'--{which}Shapes={",".join(shapes)}')
    if layer is None:
        return [*args, '--skipInference']
    # 11 measures so by default, and would warn of these
    return [
        *args,
        f'--exportLayerInfo={layer}',
        f'--exportProfile={profile}',
        *(['--useCudaGraph', '--useSpinWait', '--noDataTransfers', '--separateProfileRun'] if major < 11 else []),
    ]


def build_with_trtexec(trtexec, version, source, plan, say, progress=iter, layer=None, profile=None):
    """Build source.config.engine and its sidecar; returns the content of that.

    say: takes each line of the program's output. progress: wraps these lines. Raises QatError with its last error if it fails.
    """
    config = source.config
    config.engine.parent.mkdir(parents=True, exist_ok=True)
    with atomic(config.engine) as tmp:
        command = [trtexec, *arguments(source, plan, version[0], layer, profile)]
        command[command.index(f'--saveEngine={config.engine}')] = f'--saveEngine={tmp}'
        errors = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            for line in progress(running.stdout):
                say(line.rstrip())
                errors += [line.strip()] * ('[E]' in line)
        if running.returncode or not Path(tmp).exists():
            raise QatError(
                f'{config.onnx}: {trtexec} failed: {errors[-1] if errors else f"exit code {running.returncode}"}'
            )
    return write_sidecar(source, plan, f'TensorRT {".".join(map(str, version))}', {'trtexec': ' '.join(command)})
