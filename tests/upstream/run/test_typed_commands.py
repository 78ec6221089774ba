"""Commands as people type them who know another tool: dual checkpoints, several files, sizes that files know, rectangles."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import REPO, TREE
from helpers.labelled import boxes_of, coco_labels, moved
from helpers.zoo import assert_within_interval, command, load_quantized, program, rows_of, settings
from utils.general import LOGGER as UPSTREAMS
from utils.general import scale_boxes, xywh2xyxy

from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.core.files import in_tree
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders

HEIGHT, WIDTH = 96, 160
QUICK = ('--batch-size', 4, '--workers', 0, '--device', 'cpu', '--exist-ok')
CALIBRATION = ('--calib-images', 4, '--calib-method', 'mse', '--imgsz', 64)


def content(folder, file):
    return json.loads((folder / file).read_text())


# ---- a dual-branch checkpoint -------------------------------------------------------------------------------------------


VERBS = {
    'quantize': ('report.json', '--epochs 0'),
    'sensitive': ('summary-sensitive-analysis.json', '--num-image 4 --metric distortion'),
}


@pytest.mark.parametrize('verb', VERBS)
def test_a_dual_checkpoint_is_what_reparameterization_makes_of_it(small, tmp_path, verb):
    file, more = VERBS[verb]

    def found(kind):
        given = '--weights', getattr(small, kind), '--data', small.data, '--project', tmp_path, '--name', kind
        said = command('qat.py', verb, *given, *QUICK, *CALIBRATION, *more.split())
        report = content(tmp_path / kind, file)
        for of_the_file in ('settings', 'times', 'weights', 'weights_sha256'):
            report.pop(of_the_file, None)
        report.get('ptq', {}).pop('file', None)
        return said, report

    (said, dual), (said_of_single, single) = found('dual'), found('single')
    assert dual == single, 'bit for bit'
    assert said.count('DualDDetect -> DDetect in memory, as reparameterization.py does') == 1
    assert 'in memory' not in said_of_single


def test_the_converted_file_lies_beside_the_checkpoint(small, tmp_path):
    shutil.copy(small.dual, tmp_path / 'yolov9-x.pt')
    out = command('reparameterization.py', '--weights', tmp_path / 'yolov9-x.pt')
    assert {p.name for p in tmp_path.iterdir()} == {'yolov9-x.pt', 'yolov9-x-converted.pt'}
    assert f'qat.py quantize --weights {tmp_path}/yolov9-x-converted.pt' in out


# ---- files and data that are found ---------------------------------------------------------------------------------------


@pytest.mark.full_tree
def test_the_default_data_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert EvalConfig(Path('w.pt')).data == TREE / 'data/coco.yaml'
    assert EvalConfig(Path('w.pt'), Path('mine.yaml')).data == Path('mine.yaml')
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/coco.yaml').write_text('')
    assert EvalConfig(Path('w.pt')).data == Path('data/coco.yaml'), 'the one that is here comes first'


@pytest.mark.full_tree
def test_a_bare_name_is_found_in_the_tree_as_upstream_finds_it(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hyp, coco = TREE / 'data/hyps/hyp.scratch-high.yaml', TREE / 'data/coco.yaml'
    assert [in_tree(word) for word in ('coco.yaml', 'hyps/hyp.scratch-high.yaml', 'hyp.scratch-high.yaml')] == [
        *(coco, hyp, hyp)
    ]
    (tmp_path / 'coco.yaml').touch()
    assert in_tree('coco.yaml') == Path('coco.yaml'), 'the one that is here comes first'
    for name in ('no.yaml', 'data', '/coco.yaml', '[a-z]oco.yaml'):
        assert in_tree(name) == Path(name)
    given = 'qat.py', 'quantize', '--weights', small.single, '--project', tmp_path
    said = command(*given, '--data', 'no.yaml', code=2)
    assert f'--data no.yaml: no such file here, in {TREE}, or under data/ and models/ there' in said
    said = command(*given, '--hyp', 'hyp.scratch-high.yaml', '--imgsz', 64, 96, code=2)
    assert f'--hyp {hyp}: augmented images are squares' in said
    given = 'reparameterization.py', '--weights', small.dual, '--save', tmp_path / 'single.pt'
    for flag, value in (('--cfg', 'gelan-c.yaml'), ('--model', 'c')):
        assert 'gelan-c.yaml is another model' in command(*given, flag, value, code=2)


def test_coco_is_found_where_upstreams_script_puts_it(small, tmp_path, monkeypatch):
    """get_coco.sh writes ./coco, data/coco.yaml says ../datasets/coco."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'coco').symlink_to(small.data.parent)
    text = small.data.read_text()
    given = text.replace(re.search('(?m)^path:.*$', text)[0], 'path: ../datasets/coco')
    (tmp_path / 'data.yaml').write_text(given)
    assert load_data('data.yaml').val == [str(tmp_path / 'coco/images/val')]
    (tmp_path / 'coco').unlink()
    with pytest.raises(QatError, match=rf'does not exist \(path: was looked for in .*{tmp_path}/coco.*\)'):
        load_data('data.yaml')


def test_data_in_a_checkpoint_are_named_only_if_a_run_would_start_on_them(small, tmp_path):
    checkpoint = torch.load(small.dual, weights_only=False)
    other = tmp_path / 'other.yaml'
    other.write_text(re.sub('(?ms)^names:.*', 'names: [one, two]\n', small.data.read_text()))
    for data, named in ((small.data, small.data), (other, 'DATA.yaml'), (tmp_path / 'none.yaml', 'DATA.yaml')):
        torch.save({**checkpoint, 'opt': {'data': str(data)}}, tmp_path / 'dual.pt')
        said = command('reparameterization.py', '--weights', tmp_path / 'dual.pt')
        assert shlex.split(said)[-2:] == ['--data', str(named)]
    said = command('qat.py', 'quantize', '--weights', small.single, '--data', other, '--dry-run')
    assert f'warning: --data {other}: ' in said and '2 ' in said and '--data DATA.yaml' in said.splitlines()[-1]


@pytest.mark.parametrize(
    'words, says',
    [
        ('none.pt data.yaml 640', 'WEIGHTS none.pt: no such file'),
        ('w.pt none.yaml 640', 'DATA none.yaml: no such file'),
        ('w.pt data.yaml big', 'IMGSZ big: must be one number'),
        ('w.pt data.yaml 640 --float none.pt', '--float none.pt: no such file'),
        ('w.pt data.yaml 640 --graph', '--graph: no such option'),
    ],
)
def test_val_trt_sh_names_a_missing_file_before_it_looks_for_tensorrt(tmp_path, words, says):
    (tmp_path / 'w.pt').touch()
    (tmp_path / 'data.yaml').touch()
    script, env = ['bash', REPO / 'scripts/val_trt.sh', *words.split()], {**os.environ, 'PYTHON': 'false'}
    done = subprocess.run(script, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count('\n') == 1


# ---- labels in a COCO JSON -----------------------------------------------------------------------------------------------


@pytest.fixture
def coco(small, tmp_path):
    """A data set whose labels are annotations.json; category ids are 1, 11, 21, ... and the boxes of digit n have 10 n + 1."""
    shutil.copytree(small.data.parent / 'images', tmp_path / 'images')
    labels = coco_labels(sorted(small.data.parent.glob('images/*/*.jpg')), [10 * c + 1 for c in range(10)])
    labels['images'].append({'id': 99, 'file_name': '../outside.jpg', 'width': 9, 'height': 9})
    labels['categories'].reverse()
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations/all.json').write_text(json.dumps(labels))
    (tmp_path / 'outside.jpg').touch()
    moved(small.data, tmp_path)
    return tmp_path


def test_images_without_labels_lead_to_the_converter_before_anything_is_computed(small, coco, monkeypatch):
    """The line names where the label was looked for, and its command makes the labels that the JSON was made of.

    Upstream adds none of its own to it.
    """
    monkeypatch.setattr(UPSTREAMS, 'handle', lambda record: pytest.fail(record.getMessage()))
    ours = '--data', coco / 'data.yaml', '--workers', 0, '--device', 'cpu', '--project', coco / 'runs'
    said = command('qat.py', 'eval', '--weights', small.single, *ours, code=2)
    assert 'evaluating' not in said and not (coco / 'runs').exists()
    assert 'val: none of its 12 images has a label' in said and f'{coco}/labels/val/' in said
    assert 'converted by: python scripts/coco_to_yolo.py' in said
    assert f'{coco}/annotations/all.json {coco}/images/val' in said
    quantize = 'qat.py', 'quantize', '--weights', small.single, *ours, *CALIBRATION
    command(*quantize, code=2)
    command('benchmark_trt.py', small.single, *ours, code=2)
    assert not (coco / 'runs').exists()
    # labels are needed for a score only
    command(*quantize, '--epochs', 0, '--no-eval-origin', '--no-eval-ptq')

    convert = 'scripts/coco_to_yolo.py', coco / 'annotations/all.json', coco / 'images/val'
    out = command(*convert)
    assert f'names: {json.dumps(list(map(str, range(10))))}' in out and '13 of 25 images are not in' in out
    made, true = (
        {f.name: np.loadtxt(f) for f in (folder / 'labels/val').iterdir()} for folder in (coco, small.data.parent)
    )
    assert made.keys() == true.keys() and not (coco / 'outside.txt').exists()
    assert all(np.allclose(made[name], true[name], atol=1e-4) for name in made)
    # what the run without labels kept in its cache does not count any more
    command('qat.py', 'eval', '--weights', small.single, *ours, '--imgsz', 64)
    said = command(*convert, code=2)
    assert 'there already' in said and '--exist-ok' in said


def test_voc_becomes_what_it_was_made_of(small, tmp_path):
    """A class in only one file counts, a difficult object does not, and the size that a file gives is not believed."""
    shutil.copytree(small.data.parent / 'images', tmp_path / 'images')
    for file in sorted((tmp_path / 'images').rglob('*.jpg')):
        _, found = boxes_of(small.data.parent / 'images' / file.parent.name / file.name)
        things = [(c, x, y, x + w, y + h, 0) for c, x, y, w, h in found] + [(10, 1, 1, 9, 9, 1)]
        objects = ''.join(
            f'<object><name>{c}</name><difficult>{difficult}</difficult><bndbox>'
            f'<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>'
            for c, left, top, right, bottom, difficult in things
        )
        xml = f'<annotation><size><width>0</width><height>0</height></size>{objects}</annotation>'
        (tmp_path / 'Annotations').mkdir(exist_ok=True)
        (tmp_path / f'Annotations/{file.parent.name}-{file.name}').with_suffix('.xml').write_text(xml)
        file.rename(file.with_name(f'{file.parent.name}-{file.name}'))
    moved(small.data, tmp_path)
    ours = '--data', tmp_path / 'data.yaml', '--workers', 0, '--device', 'cpu', '--project', tmp_path / 'runs'
    said = command('qat.py', 'eval', '--weights', small.single, *ours, code=2)
    assert f'python scripts/voc_to_yolo.py {tmp_path}/Annotations {tmp_path}/images/val' in said
    (tmp_path / 'images/val/other.png').write_bytes(next((tmp_path / 'images/val').iterdir()).read_bytes())
    out = command('scripts/voc_to_yolo.py', tmp_path / 'Annotations', tmp_path / 'images/val')
    assert f'names: {json.dumps(list(map(str, range(10))))}' in out and '1 of 13 images have no XML file' in out
    assert 'objects marked as difficult, left out: 12' in out
    made = {f.name: np.loadtxt(f) for f in (tmp_path / 'labels/val').iterdir()}
    true = {f'val-{f.name}': np.loadtxt(f) for f in (small.data.parent / 'labels/val').iterdir()}
    assert made.keys() == true.keys() and all(np.allclose(made[name], true[name], atol=1e-4) for name in made)
    command(
        'scripts/voc_to_yolo.py', tmp_path / 'Annotations', tmp_path / 'images/train', '--names', *reversed(range(10))
    )
    made = {f.name: np.loadtxt(f, ndmin=2) for f in (tmp_path / 'labels/train').iterdir()}
    true = {f'train-{f.name}': np.loadtxt(f, ndmin=2) for f in (small.data.parent / 'labels/train').iterdir()}
    assert made.keys() == true.keys() and all(np.array_equal(9 - made[name][:, 0], true[name][:, 0]) for name in made)


# ---- eval of anything ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def exported(small, tmp_path_factory):
    """A folder with single.pt and single.onnx, for rectangles of HEIGHT x WIDTH."""
    folder = tmp_path_factory.mktemp('rectangles')
    shutil.copy(small.single, folder / 'single.pt')
    out = command(
        *('export_qat.py', '--weights', folder / 'single.pt', '--imgsz', HEIGHT, WIDTH, '--batch-size', 4),
        *('--verify', small.data, '--max-ap-diff', 1e-4),
    )
    assert f'as rectangles of {HEIGHT} x {WIDTH}' in out, '--verify shows the images as the file wants them'
    return folder


def test_several_files_are_scored_each_at_its_size(small, exported, tmp_path):
    """Into folders of their own, with a log of each; test_tasks.py has the table of all."""
    files = small.dual, exported / 'single.onnx', small.quantized
    common = '--data', small.data, *QUICK, '--project', tmp_path
    out = command('qat.py', 'eval', '--weights', *files, *common)
    folders = [tmp_path / f'exp-{file.name}' for file in files]
    scores = [content(folder, 'metrics.json') for folder in folders]
    assert [m['settings']['imgsz'] for m in scores] == [[640, 640], [HEIGHT, WIDTH], [128, 128]], 'as each file says'
    assert 'squares of 640 x 640' in out and f'rectangles of {HEIGHT} x {WIDTH}' in out
    report, models = (tmp_path / 'exp/report.md').read_text(), content(tmp_path / 'exp', 'metrics.json')['models']
    assert f'--weights {shlex.join(map(str, files))} ' in report
    assert all(f'](../{folder.name}/report.md)' in report for folder in folders)
    for of_all, alone in zip(models, scores):
        assert {key: of_all[key] for key in alone if key in of_all} == {
            key: alone[key] for key in alone if key in of_all
        }
    logs = [(folder / 'log.txt').read_text() for folder in folders]
    assert all(str(file) in log for file, log in zip(files, logs)) and str(files[2]) not in logs[0]
    out = command('val_trt.py', '--weights', files[1], *common, '--name', 'trt')
    assert content(tmp_path / 'trt', 'metrics.json')['ap'] == scores[1]['ap'] and f'of {HEIGHT} x {WIDTH}' in out


def test_files_of_one_name_get_folders_with_the_names_of_their_runs(small, tmp_path):
    files = [tmp_path / 'a/weights/best.pt', tmp_path / 'b/weights/best.pt', tmp_path / 'c/float.pt']
    for file in files:
        file.parent.mkdir(parents=True)
        shutil.copy(small.single, file)
    words = '--weights', *files, '--data', small.data, '--imgsz', 64, *QUICK, '--project', tmp_path / 'eval'
    command('qat.py', 'eval', *words)
    made = ['exp', 'exp-a-best.pt', 'exp-b-best.pt', 'exp-float.pt']
    assert sorted(f.name for f in (tmp_path / 'eval').iterdir()) == made
    command('qat.py', 'eval', *words, '--exist-ok')
    assert sorted(f.name for f in (tmp_path / 'eval').iterdir()) == made
    said = command('qat.py', 'eval', *words, '--weights', files[0], files[0], '--exist-ok', code=2)
    assert 'several files are called a-best.pt' in said
    other = torch.load(small.single, weights_only=False)
    other['model'].names = [*'jihgfedcba']
    torch.save(other, tmp_path / 'other.pt')
    (tmp_path / 'letters.yaml').write_text(
        re.sub('names:.*', f'names: {[*"abcdefghij"]}', small.data.read_text(), flags=re.S)
    )
    others = '--weights', *files[:2], tmp_path / 'other.pt', '--data', tmp_path / 'letters.yaml', '--name', 'cut'
    command('qat.py', 'eval', *words, *others, code=2)
    report = (tmp_path / 'eval/cut/report.md').read_text()
    assert f'{files[1]} - {files[0]}, points' in report, 'of the files before one that does not fit the data'


def test_a_file_that_does_not_take_the_size_is_refused_before_any_is_scored(small, exported, tmp_path):
    words = '--weights', small.single, exported / 'single.onnx', '--data', small.data, '--imgsz', 64, *QUICK
    said = command('qat.py', 'eval', *words, '--project', tmp_path, code=2)
    assert f'takes {HEIGHT} x {WIDTH}; leave the flag out' in said and not [*tmp_path.iterdir()]


def test_an_ap_that_compares_with_no_other_is_said_to_be_so(small, tmp_path):
    """An end2end file leaves out scores up to 0.25; --conf-thres 0.25 does so too. `next:` leads to a fair figure."""
    shutil.copy(small.single, tmp_path / 'm.pt')
    common = '--data', small.data, *QUICK, '--project', tmp_path
    out = command('export_qat.py', '--weights', tmp_path / 'm.pt', '--imgsz', 64, '--include', 'onnx', 'onnx_end2end')
    assert [line for line in out.splitlines() if line.startswith('next:')] == [
        f'next: python qat.py eval --weights {tmp_path}/m.onnx --data DATA.yaml'
    ]
    warning = 'warning: .*m{}.onnx: scores up to 0.25 are left out .{}., and AP .* too high.* {}'
    said = command('qat.py', 'eval', '--weights', tmp_path / 'm-end2end.onnx', *common)
    inside = warning.format('-end2end', 'inside the file', 'export it with --conf-thres 0.001')
    assert re.search(inside, said)
    both, own = [tmp_path / 'm.pt', tmp_path / 'm-end2end.onnx'], ['--project', tmp_path, '--name']
    command('qat.py', 'eval', '--weights', *both, '--baseline', tmp_path / 'm.onnx', *common, '--name', 'both')
    assert re.search(inside, command('compare_outputs.py', *both, '--data', small.data, *own, 'compared'))
    for name in ('both', 'both-m-end2end.onnx', 'compared'):
        assert 'scores up to 0.25 are left out' in (tmp_path / name / 'report.md').read_text()
    beside = json.loads((tmp_path / 'both-m.pt/metrics.json').read_text())
    assert '64 x 64' in beside['seen'] and 'up to' not in beside['seen'], 'a file as baseline takes squares'
    assert abs(beside['against_baseline']['difference']) < 0.01
    joint, first = rows_of((tmp_path / 'both/report.md').read_text(), 'model'), 'm.onnx (baseline)'
    names = [file.name for file in both]
    assert [*joint][1:] == [first, *names, *(f'{name} - {first}, points' for name in names)]
    said = command('qat.py', 'eval', '--weights', tmp_path / 'm.onnx', *common, '--conf-thres', 0.25)
    assert re.search(warning.format('', '--conf-thres', 'leave --conf-thres out'), said)
    assert 'warning' not in command('qat.py', 'eval', '--weights', tmp_path / 'm.onnx', *common)
    as_eval = '--conf-thres 0.001 --iou-thres 0.7 --topk-all 84'.split()
    command('export_qat.py', '--weights', tmp_path / 'm.pt', '--imgsz', 64, '--include', 'onnx_end2end', *as_eval)
    assert 'warning' not in command('val_trt.py', '--weights', tmp_path / 'm-end2end.onnx', *common)


# ---- rectangles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('sides', [(96, 160), (160, 96), (64, 256), (128, 128)])
def test_the_images_and_their_labels_lie_where_the_client_puts_them(small, sides):
    """The evaluation letterboxes pixel by pixel as scripts/infer_onnx.py does, and maps its boxes back to the image."""
    letterbox = program('scripts/infer_onnx.py').letterbox
    config = EvalConfig(small.single, small.data, batch_size=3, imgsz=sides, workers=0)
    square = sides == (128, 128)  # images of other sizes are letterboxed in any case
    batches = Loaders(load_data(small.data), config, 32).scored(square)
    for images, targets, paths, shapes in batches:
        assert tuple(images.shape[2:]) == sides
        for i, (image, path) in enumerate(zip(images, paths)):
            original = cv2.imread(path)
            theirs, (_, ((gain, _), _)) = letterbox(original, sides)
            assert torch.equal(image, (theirs[0] * 255).round().byte())
            boxes = xywh2xyxy(targets[targets[:, 0] == i, 2:] * torch.tensor([*sides[::-1]] * 2))
            back = scale_boxes(sides, boxes, *shapes[i])
            label = Path(path.replace('images', 'labels')).with_suffix('.txt').read_text().split()
            true = xywh2xyxy(torch.tensor(list(map(float, label))).view(-1, 5)[:, 1:])
            error = (back - true * torch.tensor([*original.shape[1::-1]] * 2)).abs().max()
            assert error < 1 / gain, 'upstream scales by whole pixels of the input'


def test_quantized_for_rectangles_from_checkpoint_to_score(small, tmp_path):
    """`quantize`, `export --verify`, `eval` and the comparison see HEIGHT x WIDTH, and the file scores as PyTorch does."""
    common = '--data', small.data, *QUICK, '--project', tmp_path
    out = command(
        *('qat.py', 'quantize', '--weights', small.single, *common, '--name', 'run', '--calib-images', 4, '--iters', 2),
        *('--calib-method', 'mse', '--epochs', 1, '--imgsz', HEIGHT, WIDTH),
    )
    assert f'--imgsz {HEIGHT} {WIDTH}' in out.splitlines()[-1] and f'as rectangles of {HEIGHT} x {WIDTH}' in out
    best = tmp_path / 'run/weights/qat_best_single.pt'
    assert load_quantized(best)[1]['recipe']['imgsz'] == [HEIGHT, WIDTH]
    command('export_qat.py', '--weights', best, '--imgsz', HEIGHT, WIDTH, '--batch-size', 4)
    command('qat.py', 'eval', '--weights', best, best.with_suffix('.onnx'), *common, '--name', 'eval')
    scores = content(tmp_path / 'eval', 'metrics.json')['models']
    assert scores[0]['seen'] == scores[1]['seen']
    assert_within_interval(scores[1]['against_first'])
    assert scores[0]['ap'] == content(tmp_path / 'run', 'report.json')['best']['ap']
    command('compare_outputs.py', best, best.with_suffix('.onnx'), *common, '--name', 'compared')
    [compared] = content(tmp_path / 'compared', 'compare.json')['comparisons']
    assert compared['other']['ap'] == scores[1]['ap']


def test_calibration_on_rectangles(small):
    batches = Loaders(load_data(small.data), settings(imgsz=(64, 96)), 32, torch.device('cpu')).calibration()
    assert {tuple(images.shape[1:]) for images in batches} == {(3, 64, 96)}
