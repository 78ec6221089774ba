"""The engines of all kinds, exported and built while the rows wait for them."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import pytest

from command_runner import engine_of
from kinds import KINDS, build, export
from utils.qat.vendors.tensorrt.engine.build import jobs_here

STEPS = 'build', 'trtexec'  # a row each, such as 'trtexec plain'
EXPORTS = 2  # at a time, beside the builds: they need no GPU
# The engines whose speed is measured are built at this level of optimization. At TensorRT's own, 3, the demo's three took 20 minutes on
# an H100; at 2 TensorRT generates no kernels.
LEVEL = '--level', 2


@contextmanager
def building(runner, chosen, speed_files):
    """Start the builds of the chosen rows; `runner.builds` has row → (Future, its commands).

    The Future is that of the figures in words; of the row speed, the arguments of benchmark_trt.py. speed_files(runner) exports the
    files of that row and returns these arguments.
    """
    with (
        ThreadPoolExecutor(jobs_here(runner.config.jobs, runner.config.level)) as pool,
        ThreadPoolExecutor(EXPORTS) as exports,
        ThreadPoolExecutor(1) as measured,  # beside the others, which time no kernels and leave it the GPU
    ):
        if 'speed' in chosen:
            job = replace(runner, commands=[])
            runner.builds['speed'] = measured.submit(build_measured, job, speed_files), job.commands
        for kind in KINDS:
            rows = [f'{step} {kind}' for step in STEPS if f'{step} {kind}' in chosen]
            first = replace(runner, commands=[])
            exported = exports.submit(export, first, kind) if rows else None
            for row in rows:
                job = replace(runner, commands=[])
                runner.builds[row] = pool.submit(build_kind, job, row, exported, first.commands), job.commands
        yield
        for queue in (exports, pool, measured):
            queue.shutdown(wait=False, cancel_futures=True)
        for process in [*runner.processes]:
            runner.end(process)


def build_kind(runner, row, exported, earlier):
    """Build the engine of a row; returns its figures in words. exported: Future of its export; earlier: commands of that."""
    step, kind = row.split()
    if step == 'trtexec' and runner.config.backend == 'rtx':
        pytest.skip('trtexec is a program of TensorRT, not of TensorRT-RTX')
    if step == 'trtexec' and runner.machine['trtexec'] is None:
        pytest.skip('no trtexec here; the wheels of pip do not contain it, containers do')
    wait([exported])
    runner.commands += earlier
    exported.result()
    built = build(runner, kind, engine_of(kind, step), *['--no-trtexec'] * (step == 'build'))
    by = f'by trtexec of {built["built_by"]}' if step == 'trtexec' else f'built in {built["seconds"]:g} s'
    return f'{built["precision"]}, {built["bytes"] / 1e6:.1f} MB, {by}'


def build_measured(runner, speed_files):
    """Build the engines that the row speed measures, one after the other; returns the arguments of benchmark_trt.py."""
    runner.need_gpu()
    words = *speed_files(runner), *LEVEL
    least = '--duration', 0.01, '--warmup', '0ms', '--jobs', 1
    runner.run('benchmark_trt.py', *words, *least, '--project', 'measured', '--name', 'speed-built', '--exist-ok')
    return words
