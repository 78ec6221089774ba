#!/usr/bin/env python3
"""Print the final table of the quickstart: the float model and its INT8 forms, each scored from its file.

python demo/summary.py .work/demo    (or .work/demo-seg)
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.markdown import markdown_table
from utils.qat.evaluation.figures import columns, figures

NOTES = """
Rectangles: padded as little as the image's shape allows, as in upstream's val.py. Squares: the images of a deployed
model. Compare only rows with the same images. ms/image: inference only, on this machine; - is not measured. PyTorch
only simulates INT8. ONNX Runtime on a CPU shows that the INT8 file is right, not that it is fast."""


def rows(folder: Path) -> Iterator[list[Any]]:
    """Yield a row for each scored file of the quickstart's `folder`.

    A row is: name of the model, runtime, images, plain metrics, MB on disk, ms per image.
    """
    report = json.loads((folder / 'qat' / 'report.json').read_text())
    single, best = folder / Path(report['settings']['weights']).name, folder / 'qat' / report['best']['file']
    trained = f'QAT, epoch {report["best"]["epoch"]}' if report['best']['epoch'] else 'best: PTQ'
    for name, metrics, file in (
        ('float', report['origin'], single),
        ('PTQ', report['ptq'], folder / 'qat' / report['ptq']['file']),
        (trained, report['best'], best),
    ):
        yield [name, 'PyTorch', 'rectangles', metrics, megabytes(file), '-']
    for name, runtime, scored, file in (
        (trained, 'PyTorch', 'eval_qat_square', best),
        ('float', 'ONNX Runtime', 'eval_onnx_float', single.with_suffix('.onnx')),
        ('INT8', 'ONNX Runtime', 'eval_onnx_int8', best.with_suffix('.onnx')),
    ):
        metrics = json.loads((folder / scored / 'metrics.json').read_text())
        size, ms = metrics['settings']['imgsz'], metrics['times']['ms_per_image']['inference']
        yield [name, runtime, f'{size} x {size}', metrics, megabytes(file), f'{ms:.1f}']


def megabytes(file: Path) -> str:
    """Write the size of a file in MB."""
    return f'{file.stat().st_size / 1e6:.1f}'


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the folder on the command line."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=Path, help='folder that quickstart.sh filled: .work/demo or .work/demo-seg')
    folder = parser.parse_args(argv).folder
    if not (folder / 'qat' / 'report.json').is_file():
        raise QatError(f'{folder}: needs the folder that quickstart.sh filled, .work/demo or .work/demo-seg')
    found = list(rows(folder))
    titles, masks = columns(*(metrics for *_, metrics, _, _ in found))
    print(
        markdown_table(
            ('model', 'run by', 'images', *titles, 'MB', 'ms/image'),
            [[*what, *figures(metrics, masks), size, ms] for *what, metrics, size, ms in found],
        )
    )
    print(NOTES)


if __name__ == '__main__':
    sys.exit(run_command(main))
