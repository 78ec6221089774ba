#!/usr/bin/env python3
"""Print the final tables of the quickstart: AP of the float model and its INT8 forms, each from its file, and their speed.

python demo/summary.py .work/demo    (or .work/demo-seg, .work/demo-cls)
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.benchmark.baseline import NOTICEABLE, int8_gains
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.text import markdown_table
from utils.qat.evaluation.metrics import ClassMetrics, from_json
from utils.qat.evaluation.score_tables import Columns

SHAPES = """
Rectangles: padded as little as the image's shape allows, as in upstream's val.py. Squares: the images of a deployed
model. Compare only rows with the same images."""
ENGINES = """
PyTorch and ONNX Runtime on a CPU simulate INT8 in float: they show that the file is right. OpenVINO computes it in
integers."""
AMX = 'AMX-INT8'
FAST = 'AVX512-VNNI', 'AVX-VNNI', AMX, 'NEON-DOT', 'I8MM'  # instructions that make INT8 fast


def rows(folder: Path) -> Iterator[list[Any]]:
    """Yield a row for each scored file of the quickstart: model, runtime, images, metrics, MB on disk."""
    report = json.loads((folder / 'qat' / 'report.json').read_text())
    single, best = folder / Path(report['settings']['weights']).name, folder / 'qat' / 'weights' / 'best.pt'
    trained = f'QAT, epoch {report["best"]["epoch"]}' if report['best']['epoch'] else 'best: PTQ'
    for name, metrics, file in (
        ('float', report['origin'], single),
        ('PTQ', report['ptq'], folder / 'qat' / report['ptq']['file']),
        (trained, report['best'], best),
    ):
        scores = from_json(metrics)
        classifier = isinstance(scores, ClassMetrics)  # has one shape of images
        seen = '{} x {}'.format(*report['settings']['imgsz']) if classifier else 'rectangles'
        yield [name, 'PyTorch', seen, scores, megabytes(file)]
    again = [] if classifier else [(trained, 'PyTorch', best)]
    for name, runtime, file in (
        *again,
        (trained, 'ONNX Runtime', best.with_suffix('.onnx')),
        (trained, 'OpenVINO', best.with_suffix('.xml')),
        ('float', 'OpenVINO', single.with_suffix('.xml')),
    ):
        metrics = json.loads((folder / f'eval-{file.name}' / 'metrics.json').read_text())
        height, width = metrics['settings']['imgsz']
        yield [name, runtime, f'{height} x {width}', from_json(metrics), megabytes(file)]


def speeds(report: dict[str, Any]) -> str:
    """Format benchmark.json, of the float file and the INT8 file in OpenVINO: a table, and a conclusion about INT8."""
    results, machine = report['results'], report['machine']
    table = markdown_table(
        ('in OpenVINO', 'ms/image', 'times FP32', 'images/s in streams'),
        [
            [
                r['types'],
                f'{r["compute"]["median"]:.2f}',
                f'{r["against"]["latency_speed_up"]:.2f}',
                f'{r["images_per_s"]:.0f}',
            ]
            for r in results
        ],
    )
    (gain,) = int8_gains(results)
    verdict = f'INT8 is {gain.times:.2f} times as fast as {gain.precision}, the fastest float precision here.'
    if gain.times < NOTICEABLE:
        verdict = f'INT8 is not faster than {gain.precision} here ({gain.times:.2f} times as fast): {cause(machine["instructions"])}.'
    notes = [line for r in results if r['precision'] == 'int8' for line in r['notes']]
    return '\n'.join(
        [table, '', verdict, f'{machine["device"]}, {machine["threads"]} threads: {machine["instructions"]}', *notes]
    )


def cause(instructions: str) -> str:
    """Explain why INT8 gains nothing for a small model on a CPU with these instructions."""
    if AMX in instructions:
        return 'small models gain little from AMX; try ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI'
    if set(instructions.split(', ')) & {*FAST}:
        return 'so small a model on small images is mostly overhead'
    who = 'this CPU has none' if instructions else 'the system does not tell whether this CPU has any'
    return f'{who} of {", ".join(FAST)}'


def megabytes(file: Path) -> str:
    """Format the size of a file in MB; an OpenVINO .xml counts with its .bin."""
    files = [file, *[file.with_suffix('.bin')] * (file.suffix == '.xml')]
    return f'{sum(f.stat().st_size for f in files) / 1e6:.1f}'


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of the folder on the command line."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'folder', type=Path, help='folder that quickstart.sh filled: .work/demo, .work/demo-seg or .work/demo-cls'
    )
    folder = parser.parse_args(argv).folder
    if not (folder / 'qat' / 'report.json').is_file():
        raise QatError(
            f'{folder}: needs the folder that quickstart.sh filled, .work/demo, .work/demo-seg or .work/demo-cls'
        )
    found = list(rows(folder))
    columns = Columns(*(metrics for *_, metrics, _ in found))
    print(
        markdown_table(
            ('model', 'run by', 'images', *columns.titles, 'MB'),
            [[*what, *columns.cells(metrics), size] for *what, metrics, size in found],
        )
    )
    notes = ENGINES if isinstance(found[0][3], ClassMetrics) else SHAPES + ENGINES
    print(notes, speeds(json.loads((folder / 'speed' / 'benchmark.json').read_text())), sep='\n\n')


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
