"""Files that nobody should trust: the kinds of them with the commands that read each, and the check of a command's answer."""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
import zipfile
from dataclasses import dataclass

import cv2
import numpy as np
import pytest
import torch
import yaml
from conftest import REPO, copy_upstream
from PIL import Image

from helpers.commands import PATCH, answer, call, judged, sampled  # noqa: F401  tests have them from here too
from helpers.labelled import coco_labels
from helpers.zoo import command, interrupt

RUN = '--imgsz 64 --device cpu --project out --workers 0'
DRY = 'qat.py quantize --dry-run --weights'
FEW = '--calib-images 2 --calib-method max'


@dataclass
class Kind:
    """A kind of file. file: where a whole one lies in `Material` and in the folder of a case, a pattern if there are several.

    readers: the commands that read it, the quickest first; @NAME is a file of `Material`. beside: other files that lie in the folder.
    """

    file: str
    readers: list
    beside: tuple = ()


def of_data(data):
    return [
        f'val_trt.py --weights @quantized.onnx --data {data} {RUN}',
        f'qat.py eval --weights @quantized.pt --data {data} {RUN}',
        f'compare_outputs.py @quantized.onnx @quantized.onnx --data {data} --device cpu --project out --workers 0',
        f'qat.py quantize --weights @single.pt --data {data} {RUN} {FEW} --epochs 0 --no-eval-origin',
        f'qat.py sensitive --weights @single.pt --data {data} {RUN} {FEW} --num-image 1 --metric distortion --granularity layer',
    ]


def of_model(model, infer=True):
    scored = [f'val_trt.py --weights {model} --data @set/data.yaml {RUN}']
    return scored + [f'scripts/infer_onnx.py {model} @set/images/val/00000.jpg'] * infer


BENCHMARK = '--batch 1 --duration 0.01 --device cpu --project out'
OF_TWO = '--random 1 --imgsz 64 --device cpu --project out'
HYP = f'qat.py quantize --weights @single.pt --data @set/data.yaml {RUN} {FEW} --epochs 1 --iters 1 --batch-size 2 --hyp hyp.yaml'
KINDS = {
    'float checkpoint': Kind(
        'single.pt',
        [
            f'{DRY} single.pt',
            'export_qat.py --weights single.pt --imgsz 64',
            f'benchmark_trt.py single.pt {BENCHMARK} --imgsz 64',
            f'compare_outputs.py single.pt @single.pt {OF_TWO}',
            f'qat.py sensitive --weights single.pt --data @set/data.yaml {RUN} {FEW} --num-image 1 --metric distortion --granularity layer',
        ],
    ),
    'dual checkpoint': Kind(
        'dual.pt',
        ['reparameterization.py --weights dual.pt --save out/saved.pt', 'export_yoloV9.py --weights dual.pt --size 64'],
    ),
    'quantized checkpoint': Kind(
        'quantized.pt',
        [
            f'qat.py eval --weights quantized.pt --data @set/data.yaml {RUN}',
            'export_qat.py --weights quantized.pt --imgsz 64',
            f'compare_outputs.py quantized.pt @single.pt {OF_TWO}',
        ],
    ),
    'onnx': Kind(
        'quantized.onnx',
        [
            *of_model('quantized.onnx'),
            f'compare_outputs.py quantized.onnx @single.pt {OF_TWO} --workers 0',
            f'qat.py eval --weights quantized.onnx --data @set/data.yaml {RUN}',
            'scripts/audit_onnx.py quantized.onnx',
            f'benchmark_trt.py quantized.onnx {BENCHMARK} --backend onnxruntime',
            'scripts/build_engine.py quantized.onnx --backend rtx --engine out/x.engine',
        ],
    ),
    'data': Kind('set/data.yaml', of_data('set/data.yaml')),
    'network': Kind(
        'network.yaml', ['reparameterization.py --weights @dual.pt --save out/saved.pt --cfg network.yaml']
    ),
    'hyp': Kind('hyp.yaml', [HYP]),
    'label': Kind('set/labels/val/00000.txt', of_data('set/data.yaml')[:-1]),  # the last needs none
    'image': Kind('pictures/images/val/x*', of_data('pictures/data.yaml')),
    'copy': Kind('copies/images/val/00000.npy', of_data('copies/data.yaml')),
    'coco': Kind('coco/annotations/instances_val2017.json', of_data('coco/coco.yaml')[:2]),
    'convert': Kind('coco/coco.json', ['scripts/coco_to_yolo.py coco/coco.json coco/images/val --exist-ok']),
    'voc': Kind('coco/xml/00000.xml', ['scripts/voc_to_yolo.py coco/xml coco/images/val --exist-ok']),
    'resume': Kind('run/weights/resume.pt', ['qat.py quantize --resume run']),
    'report': Kind('unsaved/report.json', ['qat.py quantize --resume unsaved']),
    'sensitivity': Kind(
        'sensitive/summary-sensitive-analysis.json',
        [f'{DRY} @single.pt --sensitive sensitive/summary-sensitive-analysis.json --keep-float 1'],
    ),
    'manifest': Kind(
        'tree/.yolov9-qat.manifest', [f'{PATCH} tree{verb}' for verb in ('', *' --check, --revert, --link'.split(','))]
    ),
    'sidecar': Kind('model.engine.json', [f'benchmark_trt.py model.engine {BENCHMARK}'], ('model.engine',)),
    'layers': Kind('layers.json', ['scripts/draw_engine.py --layer layers.json']),
    'profile': Kind(
        'profile.json', ['scripts/draw_engine.py --layer layers.json --profile profile.json'], ('layers.json',)
    ),
    'pth': Kind('mobilenet_v3_small-00000000.pth', [f'{DRY} mobilenet_v3_small-00000000.pth']),
    'class image': Kind(
        'classes/val/class 0/0.png',
        [
            f'qat.py eval --weights @classifier.pt --data classes {RUN}',
            f'val_trt.py --weights @classifier.onnx --data classes {RUN}',
            f'benchmark_trt.py @unknown.onnx --data classes/val {BENCHMARK}',
        ],
    ),
    'openvino': Kind(
        'quantized.xml',
        [
            *of_model('quantized.xml', False),
            'scripts/infer_onnx.py quantized.xml @set/images/val/00000.jpg --backend openvino',
        ],
        ('quantized.bin',),
    ),
    'openvino weights': Kind('quantized.bin', of_model('quantized.xml', False), ('quantized.xml',)),
    'program': Kind('quantized.pt2', of_model('quantized.pt2', False)),
}


# ---- whole files --------------------------------------------------------------------------------------------------------


class Material:
    """A folder of whole files of each kind, each made when it is first asked for: material['set/data.yaml']. Do not write to them."""

    def __init__(self, small, folder):
        self.small, self.folder = small, folder

    def __getitem__(self, name):
        top = name.split('/')[0]
        if not (self.folder / top).exists():
            MADE_BY[top](self)
        return self.folder / name

    def of_small(self, name):
        shutil.copy(getattr(self.small, name.removesuffix('.pt')), self.folder / name)

    def exported(self, kind):
        command('export_qat.py', '--weights', self['quantized.pt'], '--imgsz', 64, '--include', kind)

    def data(self, name):
        """A set of three images for training and three for validation, in a folder of this name."""
        for part in 'images', 'labels':
            for split in 'train', 'val':
                (self.folder / name / part / split).mkdir(parents=True)
                for file in sorted((self.small.data.parent / part / split).glob('*.*'))[:3]:
                    shutil.copy(file, self.folder / name / part / split)
        content = yaml.safe_load(self.small.data.read_text())
        content.update(path='.', train='images/train', val='images/val')
        (self.folder / name / 'data.yaml').write_text(yaml.safe_dump(content))
        return self.folder / name

    def pictures(self):
        folder = self.data('pictures')
        image = Image.open(folder / 'images/val/00000.jpg').resize((64, 64))
        for i, suffix in enumerate(('jpg', 'png', 'bmp', 'webp', 'tif')):
            image.save(folder / f'images/val/x{i}.{suffix}')
            (folder / f'labels/val/x{i}.txt').write_text('3 0.5 0.5 0.2 0.2\n')

    def copies(self):
        folder = self.data('copies')
        np.save(folder / 'images/val/00000.npy', cv2.imread(str(folder / 'images/val/00000.jpg')))

    def coco(self):
        """A set whose validation images have COCO's annotations, which upstream finds by the name of the list of images."""
        from utils.general import coco80_to_coco91_class

        folder = self.data('coco')
        (folder / 'xml').mkdir()
        box = '<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>'
        thing = f'<object>\n<name>1</name>\n<difficult>0</difficult>\n{box}\n</object>\n'
        (folder / 'xml/00000.xml').write_text(f'<?xml version="1.0"?>\n<annotation>\n{3 * thing}</annotation>\n')
        labels = coco_labels(sorted(folder.glob('images/val/*.jpg')), coco80_to_coco91_class()[:10])
        (folder / 'coco.json').write_text(json.dumps(labels))
        (folder / 'annotations').mkdir()
        shutil.copy(folder / 'coco.json', folder / 'annotations/instances_val2017.json')
        (folder / 'val2017.txt').write_text(
            ''.join(f'./images/val/{image["file_name"]}\n' for image in labels['images'])
        )
        content = yaml.safe_load((folder / 'data.yaml').read_text())
        (folder / 'coco.yaml').write_text(yaml.safe_dump({**content, 'val': 'val2017.txt'}))

    def network(self):
        from models.quantize.checkpoint import CheckpointFile

        content = json.loads(json.dumps(CheckpointFile(self.small.single).load_dual_or_float()[1].yaml))
        (self.folder / 'network.yaml').write_text(yaml.safe_dump(content, sort_keys=False))

    def run(self):
        """A run that was interrupted in its second epoch."""
        words = f'{RUN} {FEW} --batch-size 2 --epochs 2 --iters 1 --name run'.replace(' out ', f' {self.folder} ')
        given = '--weights', self['single.pt'], '--data', self['set/data.yaml']
        interrupt('epoch 2/2', 0, 'qat.py', 'quantize', *given, *words.split())

    def unsaved(self):
        """A run without a state: only its report tells why it cannot go on."""
        shutil.copytree(self['run'], self.folder / 'unsaved')
        (self.folder / 'unsaved/weights/resume.pt').unlink()

    def sensitive(self):
        line = of_data(self['set/data.yaml'])[-1].replace('@single.pt', str(self['single.pt']))
        command(*line.replace(' out ', f' {self.folder} ').split(), '--name', 'sensitive')

    def tree(self):
        subprocess.run([REPO / PATCH, copy_upstream(self.folder / 'tree')], check=True, stdout=subprocess.DEVNULL)

    def classes(self):
        """Images of classes, a classifier that learnt them, its export with and without metadata, and weights of torchvision."""
        import onnx
        import torch

        from helpers import classifiers

        data = classifiers.write_images(self.folder / 'classes', train=3, val=2)
        network = classifiers.learnt(classifiers.build('mobilenet_v3_small'), data)
        file = classifiers.save(network, self.folder / 'classifier.pt')
        command('export_qat.py', '--weights', file, '--imgsz', 64)
        model = onnx.load(self.folder / 'classifier.onnx')
        del model.metadata_props[:]
        onnx.save(model, self.folder / 'unknown.onnx')
        whole = classifiers.build('mobilenet_v3_small', 1000)
        torch.save(whole.state_dict(), self.folder / 'mobilenet_v3_small-00000000.pth')

    def engine(self):
        """An engine that is none, what stands beside an engine, and the layers of one with their times."""
        (self.folder / 'model.engine').write_bytes(b'engine')
        shapes = {key: [1, 3, 64, 64] for key in ('min', 'opt', 'max')}
        built = {'sidecar': 1, 'built_by': 'TensorRT 10.13.3', 'gpu': None, 'bytes': 6, 'onnx': 'model.onnx'}
        more = {'precision': 'INT8', 'typed': False, 'inputs': {'images': shapes}, 'metadata': {'names': "{0: 'a'}"}}
        content = {**built, **more, 'onnx_sha256': '0' * 64, 'workspace_mib': 1024, 'level': None}
        (self.folder / 'model.engine.json').write_text(json.dumps(content))
        tensor = {'Name': 'x', 'Dimensions': [1, 3, 8, 8], 'Format/Datatype': 'Row major linear FP32'}
        layer = {'Name': 'a', 'LayerType': 'Convolution', 'Inputs': [tensor], 'Outputs': [{**tensor, 'Name': 'y'}]}
        (self.folder / 'layers.json').write_text(json.dumps({'Layers': [layer], 'Bindings': ['x', 'y']}))
        (self.folder / 'profile.json').write_text(json.dumps([{'count': 1}, {'name': 'a', 'averageMs': 1}]))


MADE_BY = {
    **{name: lambda it, name=name: it.of_small(name) for name in ('single.pt', 'dual.pt', 'quantized.pt')},
    **dict.fromkeys(['quantized.onnx'], lambda it: it.exported('onnx')),
    **dict.fromkeys(['quantized.xml', 'quantized.bin'], lambda it: it.exported('openvino')),
    'quantized.pt2': lambda it: it.exported('pt2'),
    'set': lambda it: it.data('set'),
    'network.yaml': Material.network,
    'hyp.yaml': lambda it: shutil.copy(REPO / 'demo/hyp.yaml', it.folder),
    **dict.fromkeys(['model.engine', 'model.engine.json', 'layers.json', 'profile.json'], Material.engine),
    **dict.fromkeys(
        ['classes', 'classifier.pt', 'classifier.onnx', 'unknown.onnx', 'mobilenet_v3_small-00000000.pth'],
        Material.classes,
    ),
    **{name: getattr(Material, name) for name in ('pictures', 'copies', 'coco', 'run', 'unsaved', 'sensitive', 'tree')},
}


@pytest.fixture(scope='session')
def material(small, tmp_path_factory):
    return Material(small, tmp_path_factory.mktemp('material'))


def lay(material, kind, folder, change=lambda whole: whole, pattern_choice=min):
    """Write the file of this kind to the folder of a case, its content changed, with what belongs beside it; returns its path."""
    where = KINDS[kind].file
    material[where]
    source = pattern_choice(sorted(material.folder.glob(where)))
    for name in (*KINDS[kind].beside, where.split('/')[0]):
        whole = material[name]
        if whole.is_dir():
            links = name in ('tree', 'run')  # large, and never written in place
            shutil.copytree(whole, folder / name, copy_function=os.link if links else shutil.copy2, symlinks=True)
        else:
            shutil.copy(whole, folder)
    file = folder / source.relative_to(material.folder)
    file.unlink()
    content = change(source.read_bytes())
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# ---- answers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(material, tmp_path, monkeypatch, capfd):
    """Callable: the line of a command → its exit code and last line, see `answer`; @NAME is a file of `Material`, and `out` a folder that is
    emptied before the next. The test runs in its own folder."""
    monkeypatch.chdir(tmp_path)

    def tell(line, **options):
        name, *words = line.split() if isinstance(line, str) else line
        argv = [material[w[1:]] if isinstance(w, str) and w.startswith('@') else w for w in words]
        result = answer(name, argv, capfd, tmp_path, **options)
        shutil.rmtree(tmp_path / 'out', ignore_errors=True)
        return result

    return tell


# ---- calls in processes of their own ------------------------------------------------------------------------------------


class Forker:
    """Calls functions in forks of this process as it is now: later libraries have threads, and whoever is forked then waits for them."""

    def __init__(self):
        self.pipe, there = multiprocessing.Pipe()
        if not os.fork():
            self.pipe.close()
            try:
                self._serve(there)
            finally:  # whoever asked has ended
                os._exit(0)
        there.close()

    def _serve(self, pipe):
        while True:
            function, arguments = pipe.recv()
            if not (process := os.fork()):
                code = 1
                try:
                    os.setsid()  # what it starts ends with it
                    code = function(*arguments)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code or 0)
            _, status = os.waitpid(process, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            pipe.send(os.waitstatus_to_exitcode(status))

    def __call__(self, function, *arguments):
        """The exit code of function(*arguments), or less than 0 the signal that ended it; function: of a module that can be imported."""
        self.pipe.send((function, arguments))
        return self.pipe.recv()


def limited(command, argv, folder, seconds, memory):
    """Call a command in `folder`, with limits; what it says goes to hidden files there."""
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (memory,) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    for number, name in ((1, '.stdout'), (2, '.stderr')):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (open(number, 'w', buffering=1, closefd=False) for number in (1, 2))
    return call(command, argv)


# ---- archives of torch.save, and files of NumPy ---------------------------------------------------------------------------


class Call:
    """Is pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def saved(content):
    """The bytes that torch.save writes."""
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def npy(content):
    """The bytes that np.save writes."""
    out = io.BytesIO()
    np.save(out, content, allow_pickle=True)
    return out.getvalue()


def members(whole):
    """name → content, of what is in the bytes of a zip file."""
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        return {name: file.read(name) for name in file.namelist()}


def archive(parts, **options):
    """The bytes of a zip file with these members, as torch.save writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', **options) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return out.getvalue()


def with_pickle(whole, pickled):
    """A torch.save archive with another pickle inside, its checksums right."""
    return archive({name: pickled if name.endswith('/data.pkl') else part for name, part in members(whole).items()})


def pickle_in(whole):
    return next(part for name, part in members(whole).items() if name.endswith('/data.pkl'))
