"""Measure the cost and the gain of waiting threads that sleep: the same work with spinning and with sleeping threads.

Run it in a patched tree, on a float checkpoint of one branch, such as .work/demo/yolov9-demo.pt of the quickstart:

    cd yolov9
    python ../yolov9-qat/benchmarks/threads.py --weights yolov9-demo.pt --imgsz 320 --threads 2

Both ways take turns on the same --threads cores: first alone, then beside a busy process that this benchmark starts on these
cores. Before each turn all threads have time to stop spinning. The share of the cores that other programs used is printed: the
times `alone` are reliable only if it is small. Prints a Markdown table; --json FILE writes the same figures.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())

from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.markdown import markdown_table
from utils.qat.core.threads import CHOSEN

SPIN, SLEEP = 'spinning', 'sleeping'
ENVIRONMENT: dict[str, dict[str, str]] = {
    SPIN: {'GOMP_SPINCOUNT': '300000'},  # the default of GCC's OpenMP
    SLEEP: {},  # utils/qat/core/threads.py then chooses to sleep
}
PAUSE = 0.5  # seconds: ONNX Runtime's threads spin up to 0.4 after their last work
TURN = 0.3  # least seconds of calls in a turn


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint, of one branch')
    p.add_argument('--imgsz', type=int, default=320, help='image size in pixels')
    p.add_argument('--batch-size', type=int, default=4, help='of a step of fine-tuning; a forward pass has one image')
    p.add_argument('--threads', type=int, default=2, help='threads, and cores that they run on')
    p.add_argument(
        '--rounds', type=int, default=20, help='of each way, alone; beside another process a quarter of that'
    )
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


def make_work(args: argparse.Namespace, policy: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Make the pieces of work to measure.

    Args:
        args: the command line.
        policy: SPIN or SLEEP.
        folder: folder for the exported model.

    Returns:
        Name of each piece → a function without arguments.
    """
    import torch

    from finetune_step import prepare  # beside this file
    from models.deploy.onnx_export import export_onnx
    from models.quantize.finetuning.losses import relative_error
    from models.quantize.finetuning.training_step import TrainingStep
    from utils.qat.prediction.registry import open_file

    assert torch.get_num_threads() == args.threads
    images, teacher, model, layers = prepare(args, torch.device('cpu'), seed=0)
    one = images[:1].clone()
    if policy == SPIN:
        os.environ['OMP_WAIT_POLICY'] = 'active'  # OpenMP is already loaded; this is for ONNX Runtime
    export_onnx(model, folder / f'{policy}.onnx', (args.imgsz, args.imgsz))
    session = open_file(folder / f'{policy}.onnx')

    def forward() -> None:
        with torch.inference_mode():
            model(one)

    work = {'forward pass, INT8 simulated, PyTorch': forward, 'the same, ONNX Runtime': lambda: session(one)}
    step: TrainingStep | None = None
    student = deepcopy(model)

    def learn() -> None:
        nonlocal step
        step = step or TrainingStep(student, teacher, layers, relative_error, 1e-5)
        step(images)

    return {**work, f'step of fine-tuning, batch of {args.batch_size}': learn}


def measured(args: argparse.Namespace, policy: str, folder: Path, pipe: Connection) -> None:
    """Run as the process that is measured.

    First it sends the names of its pieces of work through `pipe`. For each name that it receives, it takes a turn and answers
    (seconds of a call, CPU seconds of the turn). None ends it. For the other arguments see `make_work`.
    """
    os.sched_setaffinity(0, args.cores)
    work = make_work(args, policy, folder)
    pipe.send(list(work))
    for name in iter(pipe.recv, None):
        start, cpu = time.perf_counter(), time.process_time()
        ends: list[float] = []
        while not ends or ends[-1] - start < TURN:
            work[name]()
            ends.append(time.perf_counter())
        pipe.send((statistics.median(b - a for a, b in pairwise([start, *ends])), time.process_time() - cpu))


def never_waits(cores: Sequence[int]) -> None:
    """Run as the busy process on `cores`."""
    parent = os.getppid()
    os.sched_setaffinity(0, cores)
    while os.getppid() == parent:  # it ends with its parent
        pass


def busy_seconds(cores: Sequence[int]) -> float:
    """Count the seconds in which these cores were not idle since the start of the machine."""
    with open('/proc/stat') as file:
        rows = {row.split()[0]: [int(n) for n in row.split()[1:9]] for row in file if row.startswith('cpu')}
    return sum(sum(row) - row[3] - row[4] for row in (rows[f'cpu{core}'] for core in cores)) / os.sysconf('SC_CLK_TCK')


def compare(
    pipes: dict[str, Connection], names: Sequence[str], rounds: int, cores: Sequence[int]
) -> tuple[dict[str, dict[str, list[float]]], float]:
    """Measure both ways in turns.

    Args:
        pipes: policy → pipe to its process, see `measured`.
        names: names of the pieces of work.
        rounds: number of turns of each way and piece of work.
        cores: the cores of the processes.

    Returns:
        Name → policy → milliseconds of each turn; and the share of the cores that other programs used.
    """
    times: dict[str, dict[str, list[float]]] = {name: {policy: [] for policy in pipes} for name in names}
    own = 0.0
    start = time.perf_counter()
    busy = busy_seconds(cores)
    for i in range(rounds + 1):
        for name in names:
            for policy in list(pipes) if i % 2 else reversed(pipes):
                time.sleep(PAUSE)
                pipes[policy].send(name)
                seconds, cpu = pipes[policy].recv()
                own += cpu
                times[name][policy] += [1e3 * seconds] * (i > 0)  # the first warms up
    others = (busy_seconds(cores) - busy - own) / (time.perf_counter() - start) / len(cores)
    return times, max(0, others)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures as plain values; `alone` and `beside` (a busy process) are the times of `compare`."""
    context = multiprocessing.get_context('spawn')
    pipes: dict[str, Connection] = {}
    running: list[Any] = []
    kept = {name: os.environ.pop(name, None) for name in CHOSEN}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for policy, variables in ENVIRONMENT.items():
                os.environ.update(variables, OMP_NUM_THREADS=str(args.threads))
                pipes[policy], there = context.Pipe()
                running.append(context.Process(target=measured, args=(args, policy, Path(folder), there), daemon=True))
                running[-1].start()
                for name in variables:
                    del os.environ[name]
            names, _ = (pipe.recv() for pipe in pipes.values())  # both processes are ready
            alone, others = compare(pipes, names, args.rounds, args.cores)
            running.append(context.Process(target=never_waits, args=(args.cores,), daemon=True))
            running[-1].start()
            beside, _ = compare(pipes, names, max(1, args.rounds // 4), args.cores)
    finally:
        for process in running:
            process.kill()
        os.environ.update({name: value for name, value in kept.items() if value is not None})
    return {
        'weights': args.weights.name,
        'imgsz': args.imgsz,
        'threads': args.threads,
        'cores': len(args.cores),
        'others': others,
        'alone': alone,
        'beside': beside,
    }


def row(name: str, alone: dict[str, list[float]], beside: dict[str, list[float]]) -> list[str]:
    """Write a row of the table: the medians, and the median ratio of the pairs that ran alone."""

    def middle(times: dict[str, list[float]], policy: str) -> float:
        return statistics.median(times[policy])

    return [
        name,
        *(f'{middle(alone, p):.1f}' for p in ENVIRONMENT),
        f'{statistics.median(b / a for a, b in zip(alone[SPIN], alone[SLEEP])):.2f}',
        *(f'{middle(beside, p):.1f}' for p in ENVIRONMENT),
        f'{middle(beside, SLEEP) / middle(beside, SPIN):.3f}',
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    require_file(args.weights, '--weights', ('.pt', '.pth'))
    args.cores = sorted(os.sched_getaffinity(0))[-args.threads :]
    if len(args.cores) < args.threads:
        raise QatError(f'--threads {args.threads}: this process may use {len(args.cores)} cores')
    figures = measure(args)
    print(
        '{weights} at {imgsz}, {threads} threads on {cores} cores; others used {others:.0%} of them while it ran alone\n'.format(
            **figures
        )
    )
    print(
        markdown_table(
            (
                'ms',
                *(f'alone, {p}' for p in ENVIRONMENT),
                'ratio',
                *(f'beside a busy process, {p}' for p in ENVIRONMENT),
                'ratio',
            ),
            [row(name, figures['alone'][name], figures['beside'][name]) for name in figures['alone']],
        )
    )
    if args.json:
        write_json(args.json, figures)


if __name__ == '__main__':
    raise SystemExit(run_command(main))
