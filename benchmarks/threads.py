"""What it costs, and what it saves, that threads sleep while they wait: each piece of work with threads that spin and with threads that sleep.

Run it in a patched tree, on a float checkpoint of one branch, such as .work/demo/yolov9-demo.pt of the quickstart:

    cd yolov9
    python ../yolov9-qat/benchmarks/threads.py --weights yolov9-demo.pt --imgsz 320 --threads 2

Both ways run in turns, on the same --threads cores: alone, then beside a process that never waits, which this starts on those
cores. Before each turn all threads have time to stop spinning. What else ran on the cores is printed: `alone` is worth something only
where that is little. Prints a Markdown table; --json FILE writes the same figures.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, os.getcwd())

from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.markdown import markdown_table
from utils.qat.core.threads import CHOSEN

SPIN, SLEEP = 'spinning', 'sleeping'
ENVIRONMENT = {
    SPIN: {'GOMP_SPINCOUNT': '300000'},  # what GCC's OpenMP does where nothing is set
    SLEEP: {},
}  # what utils/qat/core/threads.py makes of it
PAUSE = 0.5  # seconds: ONNX Runtime's threads spin up to 0.4 after their last work
TURN = 0.3  # seconds of calls in a turn, at least


def parse_args(argv):
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


def make_work(args, policy, folder):
    """What is measured: {name: callable without arguments}."""
    import torch

    from finetune_step import prepare  # beside this file
    from models.deploy.onnx_export import export_onnx
    from models.quantize.finetuning.losses import relative_error
    from models.quantize.finetuning.training_step import TrainingStep
    from utils.qat.prediction.onnxruntime import OnnxModel

    assert torch.get_num_threads() == args.threads
    images, teacher, model, layers = prepare(args, torch.device('cpu'), seed=0)
    one = images[:1].clone()
    if policy == SPIN:
        os.environ['OMP_WAIT_POLICY'] = 'active'  # OpenMP is loaded; ONNX Runtime is told by it
    export_onnx(model, folder / f'{policy}.onnx', (args.imgsz, args.imgsz))
    session = OnnxModel(folder / f'{policy}.onnx')

    def forward():
        with torch.inference_mode():
            model(one)

    work = {'forward pass, INT8 simulated, PyTorch': forward, 'the same, ONNX Runtime': lambda: session.run(one)}
    step, student = None, deepcopy(model)

    def learn():
        nonlocal step
        step = step or TrainingStep(student, teacher, layers, relative_error, 1e-5)
        step(images)

    return {**work, f'step of fine-tuning, batch of {args.batch_size}': learn}


def measured(args, policy, folder, pipe):
    """The process that is measured: for each name that it gets through `pipe` it answers (seconds of a call, CPU seconds of the turn)."""
    os.sched_setaffinity(0, args.cores)
    work = make_work(args, policy, folder)
    pipe.send(list(work))
    for name in iter(pipe.recv, None):
        start, cpu, ends = time.perf_counter(), time.process_time(), []
        while not ends or ends[-1] - start < TURN:
            work[name]()
            ends.append(time.perf_counter())
        pipe.send((statistics.median(b - a for a, b in pairwise([start, *ends])), time.process_time() - cpu))


def never_waits(cores):
    parent = os.getppid()
    os.sched_setaffinity(0, cores)
    while os.getppid() == parent:  # or it would go on without
        pass


def busy_seconds(cores):
    """Seconds that these cores were not idle since the machine started."""
    with open('/proc/stat') as file:
        rows = {row.split()[0]: [int(n) for n in row.split()[1:9]] for row in file if row.startswith('cpu')}
    return sum(sum(row) - row[3] - row[4] for row in (rows[f'cpu{core}'] for core in cores)) / os.sysconf('SC_CLK_TCK')


def compare(pipes, names, rounds, cores):
    """name → {policy: milliseconds of each round}, run in turns; and the part of the cores that others used."""
    times, own, start, busy = (
        {name: {policy: [] for policy in pipes} for name in names},
        0,
        time.perf_counter(),
        busy_seconds(cores),
    )
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


def measure(args):
    context, pipes, running = multiprocessing.get_context('spawn'), {}, []
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
            names = next(pipe.recv() for pipe in pipes.values())
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


def row(name, alone, beside):
    """A row of the table: medians, and of the pairs alone the median ratio."""

    def middle(times, policy):
        return statistics.median(times[policy])

    return [
        name,
        *(f'{middle(alone, p):.1f}' for p in ENVIRONMENT),
        f'{statistics.median(b / a for a, b in zip(alone[SPIN], alone[SLEEP])):.2f}',
        *(f'{middle(beside, p):.1f}' for p in ENVIRONMENT),
        f'{middle(beside, SLEEP) / middle(beside, SPIN):.3f}',
    ]


def main(argv=None):
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
