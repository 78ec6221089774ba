"""The law of what a command may write over: nothing of the user's.

What the user named, and what has the name of the input (MODEL.onnx of MODEL.pt), may be written again. A file under a name that the command
chose, or of an export, is not replaced, unless it says that this toolkit made it. A dry run writes nothing at all.
"""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import cv2
import numpy as np
import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.zoo import program

from models.deploy.formats.deepstream import FORMAT as DEEPSTREAM
from models.deploy.formats.format import Export
from models.deploy.load import load_format
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig
from utils.qat.config.tables import FORMATS
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY

RUN = '--project . --name run --exist-ok'
OF_SINGLE, OF_QUANTIZED = (f'--weights {{{name}}} --data {{data}} {RUN}' for name in ('single', 'quantized'))
CHOSEN = {  # a file of the user's in the way → the command; each name that a command chooses by itself
    'labels.txt': 'export_yoloV9.py -w {single} -s 64 --project .',
    'config_infer_primary_yoloV9.txt': 'export_yoloV9.py -w {single} -s 64 --project .',
    'run/weights/qat_best_single.pt': f'qat.py quantize {OF_SINGLE}',
    'run/report.md': f'qat.py quantize {OF_SINGLE}',
    'run/.lock': f'qat.py quantize {OF_SINGLE}',
    'run/sensitivity.png': f'qat.py sensitive {OF_SINGLE}',
    'run/metrics.json': f'qat.py eval {OF_QUANTIZED}',
    'run/log.txt': f'qat.py eval {OF_QUANTIZED}',
    'run/predictions.json': f'val_trt.py --weights model.onnx --device cpu --data {{data}} {RUN}',
    'run/compare.json': f'compare_outputs.py {{single}} {{quantized}} --random 1 {RUN}',
    'run/benchmark.md': f'benchmark_trt.py {{single}} --imgsz 64 --device cpu {RUN}',
    'model.engine': 'scripts/build_engine.py model.onnx',
    'model.engine.json': 'scripts/build_engine.py model.onnx',
    'coco/labels/a.txt': 'scripts/coco_to_yolo.py coco/a.json coco/images',
    'voc/labels/a.txt': 'scripts/voc_to_yolo.py coco voc/images',
    'made/data.yaml': 'demo/make_data.py --out made',
    'tree/README.md': 'scripts/get_yolov9.sh tree',
}
ELSEWHERE = {  # likewise, where the command finds another place
    'runs/qat_eval/exp/report.md': 'qat.py eval --weights {quantized} --data {data} --imgsz 64 --workers 0 --device cpu',
    'runs/infer/a.png': 'scripts/infer_onnx.py {onnx} coco/images --save',
}
DRY = {  # each command with --dry-run, on each kind of input
    'a checkpoint': 'qat.py quantize --weights {single} --dry-run',
    'a dual checkpoint': 'qat.py quantize --weights {dual} --dry-run --verbose',
    "torchvision's weights": 'classify/qat_cls.py quantize --weights resnet18-12345678.pth --dry-run',
    'the name of a network': 'qat.py quantize --weights resnet18 --dry-run',
    'a mistake': 'segment/qat_seg.py quantize --weights {single} --dry-run',
    'the packages': 'install_dependencies.sh --dry-run --defaults --no-trex',
}
OTHERS = {  # the other commands: they write what the user named, or under the name of their input, or into .work/ of the toolkit
    *('reparameterization.py', 'export_qat.py', 'scripts/build_engine.py', 'scripts/generate_trt_engine.sh'),
    *('scripts/val_trt.sh', 'scripts/audit_onnx.py', 'scripts/draw_engine.py', 'scripts/test_matrix.sh'),
    *('demo/weights.py', 'demo/train.sh', 'demo/setup.sh', 'quickstart.sh', 'run_tests.sh'),
    *('scripts/verify_tensorrt.py', 'scripts/verify_tensorrt.sh'),  # a run's folder
    'examples/infer_engine.py',  # it writes nothing
    'yolov9_qat.py',  # the library: it writes what its caller named
    'patch_yolov9.sh',  # tests/upstream/repository/test_patch.py
}
TASKS = {'segment/qat_seg.py': 'segment', 'classify/qat_cls.py': 'classify'}  # qat.py for one task only
FOLDERS = '.', 'segment', 'classify', 'scripts', 'demo', 'examples'
COMMANDS = {
    file.relative_to(REPO).as_posix(): file.read_text(encoding='utf-8')
    for folder in FOLDERS
    for file in (REPO / folder).iterdir()
    if file.suffix in ('.py', '.sh')
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with the inputs that the tables name, and a checkpoint of the user's with the name of a network."""
    (tmp_path / 'coco/images').mkdir(parents=True)
    cv2.imwrite(str(tmp_path / 'coco/images/a.png'), np.zeros((64, 64, 3), np.uint8))
    box = {'image_id': 1, 'id': 1, 'category_id': 1, 'bbox': [1, 1, 9, 9], 'iscrowd': 0}
    image = {'id': 1, 'file_name': 'a.png', 'width': 64, 'height': 64}
    content = {'images': [image], 'annotations': [box], 'categories': [{'id': 1, 'name': 'a'}]}
    (tmp_path / 'coco/a.json').write_text(json.dumps(content))
    shutil.copytree(tmp_path / 'coco/images', tmp_path / 'voc/images')
    (tmp_path / 'coco/a.xml').write_text('<annotation/>')
    (tmp_path / 'model.onnx').write_bytes(b'')  # refused before it is read
    (tmp_path / 'resnet18.pt').write_text('mine')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder):
    """Path → bytes, and the time of the last change, of all that lies in a folder."""

    def of(path):
        return path.read_bytes() if path.is_file() else None, path.lstat().st_mtime_ns

    return {path: of(path) for path in folder.rglob('*')}


@pytest.fixture
def answer(capfd, small, exports, monkeypatch):
    """Callable: line of a command → its exit code in the current folder, and what it said."""

    def answered(line):
        file, *words = (word.format(**vars(small), onnx=exports / 'float.onnx') for word in line.split())
        if file.endswith('.sh'):
            done = subprocess.run([REPO / file, *words], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        capfd.readouterr()
        needs = {'only_task': TASKS[file]} if file in TASKS else {}
        main = partial(program('qat.py' if file in TASKS else file).main, **needs)
        monkeypatch.setattr(sys, 'argv', [file, *words])
        try:
            code = run_command(main, words)
        except SystemExit as e:
            code = e.code
        return code or 0, ''.join(capfd.readouterr())

    return answered


def put_in_the_way(folder, name):
    mine = folder / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text('mine')
    return mine


@pytest.mark.parametrize('name', CHOSEN)
def test_a_file_in_the_way_stays_and_is_named(here, answer, name):
    mine = put_in_the_way(here, name)
    before = content(here)
    code, said = answer(CHOSEN[name])
    assert code == 2 and content(here) == before, said
    folder = name.partition('/')[0]
    assert any(text in said for text in (mine.name, f'{folder}: has ', f'{folder} exists')), said
    assert not re.search('calibrating|evaluating|exporting|measuring|comparing|converted', said), 'long work had begun'


@pytest.mark.parametrize('name', ELSEWHERE)
def test_where_a_command_finds_another_place(here, answer, name):
    mine = put_in_the_way(here, name)
    code, said = answer(ELSEWHERE[name])
    assert code == 0 and mine.read_text() == 'mine' and f'{mine.parent.name}2' in said, said
    assert [path.name for path in mine.parent.iterdir()] == [mine.name]


@pytest.mark.parametrize('name', DRY)
def test_a_dry_run_writes_nothing(here, answer, monkeypatch, name):
    (here / 'hub/checkpoints').mkdir(parents=True)
    for file in ('resnet18-12345678.pth', 'hub/checkpoints/resnet18-f37072fd.pth'):
        torch.save(classifiers.build('resnet18').state_dict(), here / file)
    monkeypatch.setenv('TORCH_HOME', str(here))
    before = content(here)
    code, said = answer(DRY[name])
    assert code == (2 if name == 'a mistake' else 0), said
    assert content(here) == before


def test_the_files_of_a_network_by_name_are_written_here(here, answer, monkeypatch):
    (here / 'hub/checkpoints').mkdir(parents=True)
    torch.save(classifiers.build('resnet18').state_dict(), here / 'hub/checkpoints/resnet18-f37072fd.pth')
    monkeypatch.setenv('TORCH_HOME', str(here))
    code, said = answer('export_qat.py --weights resnet18 --imgsz 64 --dynamic')
    assert code == 0 and (here / 'resnet18.onnx').is_file(), said
    shapes = ' '.join(f'--{name}Shapes=images:{n}x3x64x64' for name, n in (('min', 1), ('opt', 8), ('max', 16)))
    assert f'trtexec --onnx=resnet18.onnx {shapes} --fp16  (TensorRT 10)' in said


def test_what_a_command_made_of_the_same_model_is_written_again(here, small, answer):
    for name in ('a.pt', 'b.pt'):
        shutil.copy(small.single, name)
    assert answer('export_yoloV9.py -w a.pt -s 64')[0] == 0
    assert answer('export_yoloV9.py -w a.pt -s 64 --batch 2')[0] == 0
    assert 'batch-size=2' in (here / 'config_infer_primary_yoloV9.txt').read_text()
    before = content(here)
    code, said = answer('export_yoloV9.py -w b.pt -s 64')
    assert code == 2 and 'config_infer_primary_yoloV9.txt: is there already' in said and content(here) == before


@pytest.mark.parametrize('name', [*FORMATS, 'deepstream'])
def test_no_export_replaces_a_file_that_it_did_not_make(here, small, name):
    made = DEEPSTREAM if name == 'deepstream' else load_format(name)
    export = Export(ExportConfig(here / 'a.pt', tuple(FORMATS), imgsz=64), TorchModel(small.float_model()), [made])
    path = here / f'a{FORMATS[name].suffix if name in FORMATS else ".pt.onnx"}'
    for file in made.paths(export, path):
        put_in_the_way(here, file)
        with pytest.raises(QatError, match=re.escape(f'{file}: is there already')):
            export.require_ours(made, path)
        file.write_text(f'0 {MADE_BY} 1')
        export.require_ours(made, path)
        file.write_text('mine')
        sidecar = put_in_the_way(here, f'{file}.json')
        sidecar.write_text(MADE_BY)
        export.require_ours(made, path)
        sidecar.unlink()
        file.unlink()


def test_an_export_knows_its_own_files(here, small, answer):
    shutil.copy(small.single, 'a.pt')
    before = {*here.rglob('*')}
    here_too = {'openvino': 'openvino', 'openvino_end2end': 'openvino', 'litert': 'litert_torch'}
    others = 'aoti', 'torch_tensorrt', 'edge'  # they take long, a GPU, and a quantized checkpoint
    formats = [f for f in FORMATS if f not in others and find_spec(here_too.get(f, 'onnx'))]
    export = f'export_qat.py --weights a.pt --imgsz 64 --include {" ".join(formats)}'
    assert answer(export)[0] == 0
    written = {file for file in here.rglob('a*') if file.is_file()} - before
    assert len(written) >= 4 and not [file for file in written if MADE_BY.encode() not in file.read_bytes()]
    assert answer(export)[0] == 0
    for file in (here / 'a.pt2', here / 'a-end2end.pbtxt'):
        put_in_the_way(here, file)
        before = content(here)
        code, said = answer(export)
        assert (
            code == 2 and f'{file.name}: is there already' in said and '--overwrite' in said and content(here) == before
        )
        assert answer(f'{export} --overwrite')[0] == 0 and MADE_BY.encode() in file.read_bytes()


def test_a_converted_checkpoint_replaces_only_another(here, answer):
    mine, convert = put_in_the_way(here, 'b.pt'), 'reparameterization.py --weights {dual} --save b.pt'
    code, said = answer(convert)
    assert code == 2 and 'b.pt: is there already' in said and mine.read_text() == 'mine'
    mine.unlink()
    assert answer(convert)[0] == answer(convert)[0] == 0


def test_two_inputs_are_not_written_to_one_file(here, small, answer):
    for name in ('a.pt', 'a.pth'):
        shutil.copy(small.single, name)
    code, said = answer('export_qat.py --weights a.pt a.pth')
    assert code == 2 and 'two of them would be written to a.onnx' in said and not (here / 'a.onnx').exists()


def test_every_command_is_here():
    def files(*tables):
        return {line.split()[0] for table in tables for line in table.values()}

    assert files(CHOSEN, ELSEWHERE, DRY) | OTHERS == {*COMMANDS}
    assert {file for file, text in COMMANDS.items() if re.search('dry.run', text)} <= files(DRY)
