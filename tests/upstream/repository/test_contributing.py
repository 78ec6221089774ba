"""The worked example of CONTRIBUTING.md: a vendor is a folder and a line, and then every command knows it."""

import re
import subprocess
import sys

from conftest import REPO, copy_upstream

PAGE = (REPO / 'CONTRIBUTING.md').read_text(encoding='utf-8')
SECTION = PAGE.split('\n## A vendor\n')[1].split('\n## ')[0]
FILES, FACTS, LINE, COMMANDS = re.findall(r'```\w*\n(.*?)```', SECTION, re.DOTALL)


def test_the_room_that_is_shown_has_these_files():
    rooms = REPO / 'utils/qat/vendors'
    assert {*re.findall(r'\w+\.py', FILES)} == {file.name for file in (rooms / 'openvino').glob('*.py')}


def test_a_vendor_is_a_folder_and_a_line(small, tmp_path):
    tree = copy_upstream(tmp_path / 'yolov9')
    subprocess.run([REPO / 'patch_yolov9.sh', tree], check=True, stdout=subprocess.DEVNULL)
    (tree / 'utils/qat/vendors/npu').mkdir()
    (tree / 'utils/qat/vendors/npu/__init__.py').write_text(FACTS)
    table, last = tree / 'utils/qat/config/tables.py', "    'pytorch',\n"
    table.write_text(table.read_text().replace(last, last + LINE, 1))

    extra = *('--imgsz', '64', '--calib-images', '2', '--calib-method', 'max'), *('--device', 'cpu', '--workers', '0')
    given = {'MODEL.pt': [str(small.single)], 'DATA.yaml': [str(small.data), *extra]}
    for line in COMMANDS.splitlines():
        words = [word for typed in line.split()[1:] for word in given.get(typed, [typed])]
        done = subprocess.run([sys.executable, *words], cwd=tree, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert 'best.onnx, for NPU' in done.stdout
    assert 'In float, as it should be: 3\n' in done.stdout, 'the outputs for classes, of three levels'
