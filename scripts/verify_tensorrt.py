"""Check everything that this toolkit does with TensorRT on this machine, row by row, and report it.

    python scripts/verify_tensorrt.py --weights INT8.pt --float FLOAT.pt --data DATA.yaml --imgsz 640

It exports and builds every kind of file, and compares engines with ONNX Runtime. It goes on after a failure. scripts/verify_tensorrt.sh does
the same with the embedded demo, set-up included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(sys.path[0]).parent))  # the patched tree; Python starts in scripts/
from utils.qat.config.options import read
from utils.qat.config.settings import require_multiples
from utils.qat.config.verify import VerifyConfig
from utils.qat.core.command import require_data, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT
from utils.qat.core.run_folder import own_folder

STARTING = 300  # seconds to find the facts about the machine
STRIDE = 32  # of every model of YOLOv9


def parse_args(argv: Sequence[str] | None) -> VerifyConfig:
    """Turn the command line into settings."""
    return read(VerifyConfig, argv, __doc__.splitlines()[0])


def write_subset(source: Path, file: Path, images: int) -> None:
    """Write a data YAML of at most so many val images of another, evenly spread.

    Args:
        source: the user's data YAML.
        file: the YAML to write; the list of its images goes beside it.
        images: number of images, at most.
    """
    from utils.qat.config.common import LoaderConfig
    from utils.qat.core.files import write_json, write_text
    from utils.qat.data.dataset import load_data, open_dataset

    data = load_data(source)
    files = open_dataset(data, 'val', LoaderConfig(workers=0), STRIDE, None, rect=False, pad=0.5).im_files
    n = min(images, len(files))
    chosen = [str(Path(files[i * len(files) // n]).resolve()) for i in range(n)]
    listed = file.with_suffix('.txt')
    write_text(listed, '\n'.join(chosen) + '\n')
    names = [data.names[i] for i in sorted(data.names)]
    content = {'path': str(listed.parent.resolve()), 'train': listed.name, 'val': listed.name, 'names': names}
    write_json(file, content)  # JSON is YAML too


def main(argv: Sequence[str] | None = None) -> int:
    """Check all rows. Returns the exit code: 1 if a row failed."""
    config = parse_args(argv)
    require_multiples(config.imgsz, STRIDE)
    checkpoints: dict[str, Path | None] = {'weights': config.weights, 'float': config.float_weights}
    checkpoints |= {'segment': config.segment, 'classify': config.classify}
    for flag, path in checkpoints.items():
        if path:
            require_file(path, f'--{flag}', ('.pt', '.pth'))
    for path, flag in ((config.data, '--data'), (config.segment_data, '--segment-data')):
        if path:
            require_file(path, flag, ('.yaml', '.yml'))
    if config.classify_data:
        require_data(config.classify_data, '--classify-data')

    from utils.qat.verify.bench import Bench, Failed, Machine, Skipped
    from utils.qat.verify.report import FAILED, PASSED, SKIPPED, Outcome, table, verdict, write_report
    from utils.qat.verify.rows import ROWS

    names = [row.name for row in ROWS]
    unknown = [name for name in config.only if name not in names]
    if unknown:
        raise QatError(f'--only {", ".join(unknown)}: allowed are {", ".join(names)}')
    rows = [row for row in ROWS if row.name in (config.only or names)]
    begin = time.monotonic()
    with TemporaryDirectory() as scratch:
        bench = Bench(config, Machine('', 0, None, None, {}), Path(scratch), begin + STARTING)
        try:
            bench.run('-m utils.qat.verify.machine', config.backend, 'machine.json')
        except Failed as e:
            raise QatError(str(e).partition(': exit code 2, not 0: ')[2] or str(e)) from e
        machine = Machine(**bench.json('machine.json'))
    with own_folder(config) as folder:
        bench = Bench(config, machine, folder, begin + 60 * config.minutes)
        for source, name in ((config.data, 'detect.yaml'), (config.segment_data, 'segment.yaml')):
            if source:
                write_subset(source, folder / name, config.images)
        if config.classify_data:
            (folder / 'classify').unlink(missing_ok=True)
            (folder / 'classify').symlink_to(config.classify_data.resolve())
        LOGGER.info(f'{machine.product}, {machine.gpu or "no GPU"}: {len(rows)} rows, in {folder}')
        outcomes: list[Outcome] = []
        for number, row in enumerate(rows, 1):
            bench.commands, start = [], time.monotonic()
            try:
                if start > bench.deadline:
                    raise Skipped(f'the {config.minutes:g} minutes were over (--minutes)')
                found, status = row.check(bench), PASSED
                bench.done.add(row.name)
            except Skipped as e:
                found, status = str(e), SKIPPED
            except Failed as e:
                found, status = str(e), FAILED
            except (OSError, LookupError, ValueError, TypeError, ArithmeticError) as e:  # a command wrote something odd
                found, status = f'{type(e).__name__}: {e}', FAILED
            outcomes.append(
                Outcome(row.name, row.title, status, found, time.monotonic() - start, tuple(bench.commands))
            )
            LOGGER.info(f'{number} of {len(rows)}  {status}  {row.name}: {found}')
            write_report(folder, config, machine, outcomes)
        LOGGER.log(RESULT, f'\n{table(outcomes)}\n\n{verdict(machine, outcomes)}')
        LOGGER.log(RESULT, f'report: {folder / "verify.md"}\ndetails: {folder / "verify.json"}, {folder / "log.txt"}')
    return int(any(outcome.status == FAILED for outcome in outcomes))


if __name__ == '__main__':
    sys.exit(run_command(main))
