#!/usr/bin/env python3
"""The quickstart's closing table: the float model and its INT8 forms, scored as files.

    python demo/summary.py .work/demo
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.report import COLUMNS, figures, markdown_table  # noqa: E402  needs neither torch nor upstream


def rows(folder):
    """One row per scored file: what it is, what ran it, on which images, AP AP50 P R, MB on disk, ms per image."""
    run = folder / 'qat'
    report = json.loads((run / 'report.json').read_text())
    float_model = folder / Path(report['settings']['weights']).name

    def row(name, runtime, images, metrics, file):
        ms = metrics.get('times', {}).get('ms_per_image', {}).get('inference')
        return [name, runtime, images, *figures(metrics), f'{file.stat().st_size / 1e6:.1f}', '-' if ms is None else f'{ms:.1f}']

    yield row('float', 'PyTorch', 'rectangles', report['origin'], float_model)
    yield row('PTQ', 'PyTorch', 'rectangles', report['ptq'], run / report['ptq']['file'])
    yield row(f"QAT epoch {report['best']['epoch']}", 'PyTorch', 'rectangles', report['best'], run / report['best']['file'])
    for name, runtime, scored in (('QAT', 'PyTorch', 'eval_qat_square'), ('INT8', 'ONNX Runtime', 'eval_onnx_int8'),
                                  ('float', 'ONNX Runtime', 'eval_onnx_float')):
        metrics = json.loads((folder / scored / 'metrics.json').read_text())
        size = metrics['settings']['imgsz']
        best = run / report['best']['file']
        file = {'eval_qat_square': best, 'eval_onnx_int8': best.with_suffix('.onnx')}.get(scored, float_model.with_suffix('.onnx'))
        yield row(name, runtime, f'{size}x{size}', metrics, file)


def main():
    print(markdown_table(('model', 'run by', 'images', *COLUMNS, 'MB', 'ms/image'), rows(Path(sys.argv[1]))))
    print('\nRectangles: padded as little as the shape of the image allows, as upstream\'s val.py does. Squares: as a deployed\n'
          'model sees images. Compare rows with the same images. ms/image: inference alone, on this machine; PyTorch only\n'
          'simulates INT8, so its time says nothing about INT8.')


if __name__ == '__main__':
    main()
