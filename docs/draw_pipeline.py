#!/usr/bin/env python3
"""Draw docs/pipeline.svg, the picture of the README: files as boxes, the commands between them, and the use of each file.

    python docs/draw_pipeline.py [FILE.svg|FILE.png ...]

Needs pygraphviz (./install_dependencies.sh --trex), neither torch nor YOLOv9. Without arguments: docs/pipeline.svg.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.engine.layer_graph import FILL, FONT, draw

ROWS: list[
    dict[str, tuple[str | None, str, str]]
] = [  # node → (type, what it is, the file or the commands); no type: something that is done with a file
    {
        'dual': ('FP32', 'trained, two branches', 'yolov9-c.pt'),
        'single': ('FP32', 'trained, one branch', 'yolov9-c-converted.pt'),
        'ptq': ('INT8', 'calibrated (PTQ)', 'ptq_ap_*.pt'),
        'qat': ('INT8', 'fine-tuned (QAT)', 'best.pt'),
    },
    {
        'deepstream': ('INT8', 'ONNX for DeepStream', 'best.pt.onnx'),
        'onnx': ('INT8', 'ONNX with Q/DQ', 'best.onnx'),
        'end2end': ('INT8', 'ONNX with NMS inside', 'best-end2end.onnx'),
    },
    {
        'streams': (None, 'DeepStream-Yolo', ''),
        'runtime': (None, 'ONNX Runtime', ''),
        'engine': ('INT8', 'TensorRT engine', '*.engine'),
    },
]
STEPS = [  # from, to, the command
    ('dual', 'single', 'reparameterization.py'),
    ('single', 'ptq', 'qat.py quantize'),
    ('ptq', 'qat', 'same run'),
    ('qat', 'onnx', 'export_qat.py'),
    ('qat', 'end2end', '--include onnx_end2end'),
    ('qat', 'deepstream', 'export_yoloV9.py'),
    ('onnx', 'engine', 'scripts/build_engine.py'),
    ('end2end', 'engine', ''),
    ('onnx', 'runtime', ''),
    ('deepstream', 'streams', ''),
]
CHECKS = [  # what looks at the files on the way
    ('qat.py eval, val_trt.py', 'AP of checkpoint, ONNX file, engine'),
    ('export_qat.py --verify', 'the ONNX file against PyTorch'),
    ('compare_outputs.py', 'any two of them, rank by rank'),
    ('scripts/audit_onnx.py', 'what keeps it from INT8 speed'),
    ('benchmark_trt.py', 'latency, throughput, memory'),
]


def dot() -> str:
    """Write the picture as DOT."""

    def node(name: str, kind: str | None, what: str, file: str) -> str:
        style = f'style=filled, fillcolor="{FILL[kind]}"' if kind else 'style="rounded,dashed"'
        return f'{name} [shape=box, {style}, label="{what}' + f'\\n{file}' * bool(file) + '"];'

    table = ''.join(f'<tr><td align="left">{command}</td><td align="left">{what}</td></tr>' for command, what in CHECKS)
    colours = ''.join(f'<td bgcolor="{FILL[kind]}" border="1">{kind}</td>' for kind in ('FP32', 'INT8'))
    lines = [
        'graph [bgcolor=white, nodesep=0.35, ranksep=0.55];',
        f'node [fontname="{FONT}", fontsize=11, margin="0.12,0.08"]; edge [fontname="{FONT}", fontsize=10, arrowsize=0.7];',
    ]
    lines += [node(name, *about) for row in ROWS for name, about in row.items()]
    lines += ['{rank=same; ' + ' '.join(row) + '}' for row in ROWS]
    lines += [f'{a} -> {b} [label=" {command} "];' for a, b, command in STEPS]
    lines += [
        f'checks [shape=plain, fontsize=10, label=<<table border="0" cellspacing="2">{table}<tr>{colours}</tr></table>>];',
        'single -> checks [style=invis];',
        '{rank=same; checks; ' + ' '.join(ROWS[1]) + '}',
    ]
    return '\n'.join(['digraph pipeline {', *lines, '}', ''])


def main(paths: Sequence[Path]) -> None:
    """Draw the picture into each of these files, as their endings say."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'pipeline.dot'
        file.write_text(dot(), encoding='utf-8')
        draw(file, paths)


if __name__ == '__main__':
    main([Path(p) for p in sys.argv[1:]] or [Path(__file__).with_name('pipeline.svg')])
