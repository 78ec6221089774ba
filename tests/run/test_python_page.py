"""The program of docs/python.md runs, on the demo."""

import re

from conftest import REPO
from fresh import fresh


def test_the_program_runs(small, tmp_path):
    [program] = re.findall(r'```python\n(.*?)```', (REPO / 'docs/python.md').read_text(encoding='utf-8'), re.DOTALL)
    given = "weights=Path('yolov9-c-converted.pt'), data=Path('data/coco.yaml'), imgsz=640"
    assert program.count(given) == 1
    ours = f'weights=Path({str(small.single)!r}), data=Path({str(small.data)!r}), imgsz=64, workers=0, batch_size=4'
    program = program.replace(given, ours).replace("Path('int8", f"Path('{tmp_path}/int8")
    said = fresh('-c', program)
    assert re.search(r'(?m)^\S.*, loss 0\.\d+, AP 0\.\d{4}, \(1, 14, \d+\)$', said), said
