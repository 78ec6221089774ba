"""Mutations of every kind of input: each has to end with exit code 0 or 2, without a traceback, in time, and with nothing left behind.

    python tests/mutate.py --tree ../yolov9                                       1000 of each kind
    python tests/mutate.py --tree ../yolov9 --kind onnx label --seed 7 --count 100
    python tests/mutate.py --tree ../yolov9 --kind onnx --seed 7 --only 31 --keep /tmp/kept    one of them again, its files and output kept

Number N of a kind follows from the seed, the kind and N alone. A case is a call of a command in a process of its own, forked from one
that has the libraries loaded, in a folder of its own, with limits on time and memory. What a command has to do is said by faults.answer.
Prints a table, and for each failure the line that repeats it; exit status 1 if there is one.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FORK = multiprocessing.get_context('fork')
SIZE = 64
REFUSED, FINE, TRACEBACK, HANG = 'refused (2)', 'fine (0)', 'failures', 'hangs'
RUN = ('--device', 'cpu', '--project', 'OUT', '--workers', 0)
PATCH = 'patch_yolov9.sh'
COMMANDS = {  # kind → the calls that read such a file, by turns. FILE is the mutated one; other capitals are files of `make_material`
    'checkpoint': [
        ('qat.py', 'quantize', '--dry-run', '--weights', 'FILE'),
        ('reparameterization.py', '--weights', 'FILE', '--save', 'OUT/saved.pt'),
        ('qat.py', 'eval', '--weights', 'FILE', '--data', 'DATA', *RUN, '--imgsz', SIZE),
    ],
    'onnx': [
        ('scripts/audit_onnx.py', 'FILE'),
        ('val_trt.py', '--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN),
        ('scripts/infer_onnx.py', 'FILE', 'IMAGE'),
        ('compare_outputs.py', 'FILE', 'SINGLE', '--random', 1, *RUN),
        (
            'benchmark_trt.py',
            'FILE',
            '--batch',
            1,
            '--duration',
            0.01,
            '--backend',
            'onnxruntime',
            '--device',
            'cpu',
            '--project',
            'OUT',
        ),
    ],
    'data': [
        ('val_trt.py', '--weights', 'ONNX', '--data', 'FILE', '--imgsz', SIZE, *RUN),
        ('qat.py', 'eval', '--weights', 'QUANTIZED', '--data', 'FILE', '--imgsz', SIZE, *RUN),
    ],
    'network': [('reparameterization.py', '--weights', 'DUAL', '--save', 'OUT/saved.pt', '--cfg', 'FILE')],
    'resume': [('qat.py', 'quantize', '--resume', 'exp')],
    'sensitivity': [
        ('qat.py', 'quantize', '--dry-run', '--weights', 'SINGLE', '--sensitive', 'FILE', '--keep-float', 1)
    ],
    'manifest': [(PATCH, 'tree', '--check'), (PATCH, 'tree'), (PATCH, 'tree', '--revert'), (PATCH, 'tree', '--link')],
}
COMMANDS |= {'label': COMMANDS['data'], 'image': COMMANDS['data']}
COMMANDS |= {
    'coco': COMMANDS['data'],
    'copy': COMMANDS['data'],
    'convert': [('scripts/coco_to_yolo.py', 'FILE', 'IMAGES', '--exist-ok')],
    'sidecar': [('benchmark_trt.py', 'model.engine', '--duration', 0.01, '--project', 'OUT')],
    'pth': [('qat.py', 'quantize', '--dry-run', '--weights', 'FILE')],
    'class image': [
        ('qat.py', 'eval', '--weights', 'CLASSIFIER', '--data', 'FILE', '--imgsz', SIZE, *RUN),
        ('val_trt.py', '--weights', 'CLASSES', '--data', 'FILE', '--imgsz', SIZE, *RUN),
        (
            'benchmark_trt.py',
            'UNKNOWN',
            '--data',
            'VAL',
            '--duration',
            0.01,
            '--batch',
            1,
            '--device',
            'cpu',
            '--project',
            'OUT',
        ),
    ],
    'openvino': [
        ('val_trt.py', '--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN),
        ('scripts/infer_onnx.py', 'FILE', 'IMAGE', '--backend', 'openvino'),
    ],
    'openvino weights': [('val_trt.py', '--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN)],
    'program': [('val_trt.py', '--weights', 'FILE', '--data', 'DATA', '--imgsz', SIZE, *RUN)],
    'hyp': [
        (
            *('qat.py', 'quantize', '--weights', 'SINGLE', '--data', 'DATA', '--hyp', 'FILE', '--imgsz', SIZE, *RUN),
            *('--epochs', 1, '--iters', 1, '--batch-size', 2, '--calib-images', 1, '--calib-method', 'max'),
        )
    ],
    'layers': [('scripts/draw_engine.py', '--layer', 'FILE')],
}
PLACES = {  # kind → the file that is changed, in the folder of `make_material`, and where the command finds it
    'onnx': ('quantized.onnx', 'model.onnx'),
    'data': ('set/data.yaml', 'set/data.yaml'),
    'network': ('network.yaml', 'network.yaml'),
    'resume': ('run/weights/resume.pt', 'exp/weights/resume.pt'),
    'sensitivity': ('sensitive/summary-sensitive-analysis.json', 'summary.json'),
    'manifest': ('tree/.yolov9-qat.manifest', 'tree/.yolov9-qat.manifest'),
    'label': ('set/labels/val/00000.txt', 'set/labels/val/00000.txt'),
    'coco': ('coco.json', 'set/annotations/instances_val2017.json'),
    'copy': ('copy.npy', 'set/images/val/00000.npy'),
    'convert': ('coco.json', 'coco.json'),
    'sidecar': ('sidecar.json', 'model.engine.json'),
    'pth': ('mobilenet_v3_small-00000000.pth', 'mobilenet_v3_small-00000000.pth'),
    'class image': ('classes/val/class 0/0.png', 'classes/val/class 0/0.png'),
    'openvino': ('quantized.xml', 'quantized.xml'),
    'openvino weights': ('quantized.bin', 'quantized.bin'),
    'program': ('quantized.pt2', 'quantized.pt2'),
    'hyp': ('hyp.yaml', 'hyp.yaml'),
    'layers': ('layers.json', 'layers.json'),
}
KINDS = tuple(COMMANDS)
LEFT = 'log.txt', 'exp', 'out', 'mobilenet_v3_small.pt'
WITHOUT_GPU = 'sidecar'  # its whole file is refused where no GPU is


# ---- what is mutated ------------------------------------------------------------------------------------------------------------


def linked(source, folder):
    """A copy of a folder whose files are hard links: who changes one has to write it anew, as our commands do."""
    shutil.copytree(source, folder, copy_function=os.link)


def make_material(folder, kinds):
    """Write what the cases begin with to `folder`; in a process of its own, whose threads nobody inherits."""
    import yaml
    from conftest import REPO, copy_upstream
    from PIL import Image
    from zoo import make_demo, program

    from models.quantize import checkpoint
    from utils.qat.core.command import run_command

    def call(file, *arguments, code=0):
        assert run_command(program(file).main, [str(a) for a in arguments]) == code, (file, arguments)

    def settle(file):  # else what is mutated would be a little different each time
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, 'times': dict.fromkeys(content['times'], 1.0)}, indent=2))

    Output(folder)
    os.chdir(folder)
    demo = make_demo(folder)
    network = checkpoint.CheckpointFile(demo.single).load_dual_or_float()[1].yaml
    (folder / 'network.yaml').write_text(yaml.safe_dump(json.loads(json.dumps(network)), sort_keys=False))
    call('export_qat.py', '--weights', demo.quantized, '--imgsz', SIZE)
    small = folder / 'set'
    for part in 'images', 'labels':
        for split in 'train', 'val':
            (small / part / split).mkdir(parents=True)
            for file in sorted((folder / 'data' / part / split).iterdir())[:3]:
                shutil.copy(file, small / part / split)
    (small / 'data.yaml').write_text(
        yaml.safe_dump(
            {'path': '.', 'train': 'images/train', 'val': 'images/val', 'nc': 10, 'names': [str(i) for i in range(10)]}
        )
    )
    (folder / 'whole.yaml').write_text((small / 'data.yaml').read_text().replace('path: .', f'path: {small}'))
    image = Image.open(sorted((small / 'images/val').iterdir())[0]).resize((SIZE, SIZE))
    (folder / 'pictures').mkdir()
    for suffix in 'jpg', 'png', 'bmp', 'webp', 'tif':
        image.save(folder / 'pictures' / f'x.{suffix}')
    common = (
        '--data',
        folder / 'whole.yaml',
        '--weights',
        demo.single,
        '--imgsz',
        SIZE,
        '--calib-images',
        2,
        '--calib-method',
        'max',
        '--device',
        'cpu',
        '--workers',
        0,
        '--project',
        folder,
    )
    if 'resume' in kinds:
        from models.quantize.run import stages

        finish_epoch = stages.finish_epoch

        def interrupted(student, epoch, *others):
            if epoch.number == 2:
                raise KeyboardInterrupt
            finish_epoch(student, epoch, *others)

        stages.finish_epoch = interrupted
        call('qat.py', 'quantize', *common, '--epochs', 2, '--iters', 1, '--batch-size', 2, '--name', 'run', code=130)
    if {'openvino', 'openvino weights'} & {*kinds}:
        call('export_qat.py', '--weights', demo.quantized, '--imgsz', SIZE, '--include', 'openvino')
    if 'program' in kinds:
        call('export_qat.py', '--weights', demo.quantized, '--imgsz', SIZE, '--include', 'pt2')
    if {'class image', 'pth'} & {*kinds}:
        make_classes(folder, call)
    make_small(folder, small)
    if 'sensitivity' in kinds:
        call(
            'qat.py',
            'sensitive',
            *common,
            '--num-image',
            1,
            '--metric',
            'distortion',
            '--granularity',
            'layer',
            '--name',
            'sensitive',
        )
        settle(folder / 'sensitive/summary-sensitive-analysis.json')
    if 'manifest' in kinds:
        tree = copy_upstream(folder / 'tree')
        subprocess.run([REPO / PATCH, tree], check=True, stdout=subprocess.DEVNULL)


def make_classes(folder, call):
    """Write images of classes, a classifier that learnt them, its export with and without metadata, and weights of torchvision."""
    import classifiers
    import onnx
    import torch

    data = classifiers.write_images(folder / 'classes', train=3, val=2)
    network = classifiers.learnt(classifiers.build('mobilenet_v3_small'), data)
    classifiers.save(network, folder / 'classifier.pt')
    call('export_qat.py', '--weights', folder / 'classifier.pt', '--imgsz', SIZE)
    model = onnx.load(folder / 'classifier.onnx')
    del model.metadata_props[:]
    onnx.save(model, folder / 'unknown.onnx')
    torch.save(classifiers.build('mobilenet_v3_small', 1000).state_dict(), folder / 'mobilenet_v3_small-00000000.pth')


def make_small(folder, data):
    """Write the small files of other tools: COCO's annotations of a data set, a copy of pixels, a sidecar, settings, layers."""
    import cv2
    import numpy as np
    import yaml
    from conftest import REPO
    from utils.general import coco80_to_coco91_class

    categories, images, things = coco80_to_coco91_class()[:10], [], []
    for file in sorted((data / 'images/val').iterdir()):
        height, width = cv2.imread(str(file)).shape[:2]
        images.append({'id': int(file.stem), 'file_name': file.name, 'width': width, 'height': height})
        for line in (data / f'labels/val/{file.stem}.txt').read_text().splitlines():
            c, x, y, w, h = map(float, line.split())
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            of = {'id': len(things) + 1, 'image_id': int(file.stem), 'category_id': categories[int(c)]}
            things.append({**of, 'bbox': box, 'area': box[2] * box[3], 'iscrowd': 0})
    named = [{'id': number, 'name': str(i)} for i, number in enumerate(categories)]
    (folder / 'coco.json').write_text(json.dumps({'images': images, 'annotations': things, 'categories': named}))
    (data / 'val2017.txt').write_text(''.join(f'./images/val/{image["file_name"]}\n' for image in images))
    of_coco = yaml.safe_load((data / 'data.yaml').read_text())
    (data / 'coco.yaml').write_text(yaml.safe_dump({**of_coco, 'val': 'val2017.txt'}))
    np.save(folder / 'copy.npy', cv2.imread(str(min((data / 'images/val').iterdir()))))
    shapes = {key: [1, 3, SIZE, SIZE] for key in ('min', 'opt', 'max')}
    built = {
        'sidecar': 1,
        'built_by': 'TensorRT 10.13.3',
        'gpu': None,
        'bytes': 6,
        'onnx': 'model.onnx',
        'onnx_sha256': '0' * 64,
    }
    more = {'precision': 'INT8', 'typed': False, 'inputs': {'images': shapes}, 'metadata': {'names': "{0: 'a'}"}}
    (folder / 'sidecar.json').write_text(json.dumps({**built, **more, 'workspace_mib': 1024, 'level': None}))
    shutil.copy(REPO / 'demo/hyp.yaml', folder / 'hyp.yaml')
    tensor = {'Name': 'x', 'Dimensions': [1, 3, 8, 8], 'Format/Datatype': 'Row major linear FP32'}
    layer = {'Name': 'a', 'LayerType': 'Convolution', 'Inputs': [tensor], 'Outputs': [{**tensor, 'Name': 'y'}]}
    (folder / 'layers.json').write_text(json.dumps({'Layers': [layer], 'Bindings': ['x', 'y']}))


def prepare(kind, number, chance, material):
    """Make a case in the current folder: (what was done, the mutated file, arguments of the command)."""
    from mutations import mutated

    call, here = COMMANDS[kind][number % len(COMMANDS[kind])], Path.cwd()
    source, place = PLACES.get(kind, (None, 'weights.pt'))  # a checkpoint or an image is chosen below
    file = here / place
    given = file
    if kind == 'checkpoint':
        source = ('single.pt', 'dual.pt', 'quantized.pt')[number % 3]  # each command gets its own
    elif kind == 'resume':
        linked(material / 'run', here / 'exp')
        shutil.copy(material / 'run/log.txt', here / 'log.txt')  # it is written on
        os.replace(here / 'log.txt', here / 'exp/log.txt')
    elif kind == 'manifest':
        linked(material / 'tree', here / 'tree')
    elif kind in ('data', 'label', 'image', 'coco', 'copy', 'convert'):
        shutil.copytree(material / 'set', here / 'set', ignore=shutil.ignore_patterns('*.cache'))
        given = file if kind == 'convert' else here / 'set' / ('coco.yaml' if kind == 'coco' else 'data.yaml')
        file.parent.mkdir(exist_ok=True)
        if kind == 'image':
            picture = chance.choice(sorted((material / 'pictures').iterdir()))
            source, file = picture, here / 'set/images/val' / picture.name
            (here / 'set/labels/val/x.txt').write_text('3 0.5 0.5 0.2 0.2\n')
    elif kind == 'class image':
        linked(material / 'classes', here / 'classes')
        given = here / 'classes'
    elif kind == 'sidecar':
        (here / 'model.engine').write_bytes(b'engine')
    elif kind.startswith('openvino'):
        given = here / 'quantized.xml'
        for name in 'quantized.xml', 'quantized.bin':
            os.link(material / name, here / name)
    whole = (material / source).read_bytes()
    what, content = mutated(kind, whole, chance) if number >= 0 else ('nothing', whole)
    file.unlink(missing_ok=True)  # it may be a link
    file.write_bytes(content)
    files = {
        'FILE': given,
        'DATA': 'whole.yaml',
        'ONNX': 'quantized.onnx',
        'QUANTIZED': 'quantized.pt',
        'SINGLE': 'single.pt',
        'DUAL': 'dual.pt',
        'IMAGE': 'pictures/x.jpg',
        'IMAGES': here / 'set/images/val',
        'VAL': here / 'classes/val',
        'CLASSIFIER': 'classifier.pt',
        'CLASSES': 'classifier.onnx',
        'UNKNOWN': 'unknown.onnx',
    }
    return (
        what,
        file,
        [str(material / files[a]) if a in files else str(a).replace('OUT', str(here / 'out')) for a in call],
    )


# ---- one case -------------------------------------------------------------------------------------------------------------------


class Output:
    """stdout and stderr of this process from now on, read as pytest's capfd is."""

    def __init__(self, folder):
        self.files = []
        for number, name in ((1, 'stdout'), (2, 'stderr')):
            file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            self.files.append(file)
        self.read = [0, 0]

    def readouterr(self):
        found = []
        for i, (stream, file) in enumerate(zip((sys.stdout, sys.stderr), self.files)):
            stream.flush()
            content = os.pread(file, os.fstat(file).st_size - self.read[i], self.read[i])
            self.read[i] += len(content)
            found.append(content.decode(errors='replace'))
        return found


def patched(arguments, output, folder):
    """As faults.answer, of patch_yolov9.sh: what bash itself complains about is its traceback; --check says 1 where the tree is another."""
    from conftest import REPO

    code = subprocess.run([REPO / PATCH, *arguments], cwd=folder).returncode
    out, err = output.readouterr()
    assert not re.search(r'line \d+: ', err), err[-1500:]
    assert code in ((0, 1, 2) if '--check' in arguments else (0, 2)), (code, err[-1500:])
    assert code != 2 or err.startswith(f'{PATCH}: '), err[-1500:]
    assert (folder / 'beside').read_text() == 'not in the tree', 'a file beside the tree was changed'
    return code


def one(args, material, kind, number, folder, pipe):
    """The process of a case: (outcome, what was done, what there is to say) into `pipe`."""
    from conftest import REPO
    from faults import answer

    os.setsid()  # its workers end with it
    resource.setrlimit(resource.RLIMIT_AS, (args.memory << 30,) * 2)
    what = ''
    try:
        sys.stdout, sys.stderr = open(1, 'w', closefd=False), open(2, 'w', closefd=False)
        output = Output(folder)
        work = folder / 'work'
        work.mkdir()
        os.chdir(work)
        what, file, (command, *arguments) = prepare(
            kind, number, random.Random(f'{args.seed} {kind} {number}'), material
        )
        what = f'{what}; {command} {" ".join(arguments).replace(str(material), "MATERIAL").replace(str(work), ".")}'
        if command == PATCH:
            (work / 'beside').write_text('not in the tree')
            code = patched(arguments, output, work)
        else:
            sys.argv = [str(REPO / command), *arguments]
            code, _ = answer(command, arguments, output, work, leaves=LEFT)
        pipe.send((REFUSED if code else FINE, what, ''))
    except AssertionError as e:
        pipe.send((TRACEBACK, what, str(e)))
    except BaseException:
        pipe.send((TRACEBACK, what, traceback.format_exc()))


def attempt(args, material, kind, number, root):
    """Run a case: (outcome, what was done, what there is to say)."""
    folder = root / f'{kind}-{number}'
    folder.mkdir()
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=one, args=(args, material, kind, number, folder, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(args.limit) else (HANG, '', f'not done after {args.limit} s')
    except EOFError:
        process.join()
        found = (
            TRACEBACK,
            '',
            f'ended without a word, exit code {process.exitcode}: {(folder / "stderr").read_text(errors="replace")[-1000:]}',
        )
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.join()
    if not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return found


# ---- all of them ----------------------------------------------------------------------------------------------------------------


def lane(args, material, todo, root, results):
    """A process that does each case whose number it gets."""
    while (case := todo.get()) is not None:
        start = time.perf_counter()
        found = attempt(args, material, *case, root)
        results.put((*case, time.perf_counter() - start, *found))


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ''


@dataclass
class Row:
    """Counts of a kind."""

    outcomes: Counter
    seconds: float = 0


def work_through(args, material, root):
    """kind → Row; prints each failure as it comes."""
    rows = {kind: Row(Counter()) for kind in args.kind}
    for kind in args.kind:
        for number in range(
            -len(COMMANDS[kind]), 0
        ):  # a file that is whole has to be fine, or its mutations would show nothing
            outcome, what, said = attempt(args, material, kind, number, root)
            if outcome != (REFUSED if kind == WITHOUT_GPU else FINE):
                sys.exit(f'{kind}, {what}: {outcome}: {said}')
    todo, results = FORK.Queue(), FORK.Queue()
    numbers = range(args.count) if args.only is None else [args.only]
    cases = [(kind, number) for kind in args.kind for number in numbers]
    for case in [*cases, *[None] * args.jobs]:
        todo.put(case)
    lanes = [FORK.Process(target=lane, args=(args, material, todo, root, results)) for _ in range(args.jobs)]
    for process in lanes:
        process.start()
    for _ in cases:
        kind, number, seconds, outcome, what, said = results.get()
        rows[kind].outcomes[outcome] += 1
        rows[kind].seconds += seconds
        if outcome in (TRACEBACK, HANG) or args.only is not None:
            print(
                f'{kind} {number}: {outcome}: {what}\n    {said if args.only is not None else last_line(said)}\n'
                f'    again: python tests/mutate.py --tree {args.tree} --kind {kind} --seed {args.seed} --only {number}',
                flush=True,
            )
    for process in lanes:
        process.join()
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kind', nargs='+', choices=KINDS, default=list(KINDS), help='of input; default: all')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--count', type=int, default=1000, help='mutations of each kind')
    parser.add_argument('--only', type=int, metavar='N', help='that mutation alone, with all that it says')
    parser.add_argument(
        '--tree', type=Path, default=os.environ.get('YOLOV9_DIR', '.work/yolov9'), help='YOLOv9; it is copied'
    )
    parser.add_argument('--jobs', type=int, default=2, help='cases at a time')
    parser.add_argument('--limit', type=float, default=60, help='seconds of a case, above which it hangs')
    parser.add_argument('--memory', type=int, default=16, help='GB of address space of a case')
    parser.add_argument('--keep', type=Path, help='folder for the files of the cases; default: deleted')
    args = parser.parse_args(argv)
    os.environ.update(YOLOV9_DIR=str(args.tree), CUDA_VISIBLE_DEVICES='')
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401  the tree, which it puts on sys.path, and what is loaded once for all cases
    import cv2
    import mutations  # noqa: F401
    import onnxruntime  # noqa: F401

    import utils.qat.data.loaders  # noqa: F401

    cv2.setNumThreads(0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix='yolov9-qat-mutations-') as folder:
        material, root = Path(folder) / 'material', (args.keep or Path(folder)).absolute()
        material.mkdir()
        root.mkdir(parents=True, exist_ok=True)
        making = FORK.Process(target=make_material, args=(material, args.kind))
        making.start()
        making.join()
        if making.exitcode:
            sys.exit(f'what is to be mutated could not be made:\n{(material / "stderr").read_text()[-2000:]}')
        print(
            f'seed {args.seed}, {args.count} of each kind; what they begin with took {time.perf_counter() - start:.0f} s',
            flush=True,
        )
        rows = work_through(args, material, root)
    print(f'\n| kind | cases | {REFUSED} | {FINE} | {TRACEBACK} | {HANG} | seconds |\n|---|--:|--:|--:|--:|--:|--:|')
    for kind, row in rows.items():
        print(
            f'| {kind} | {row.outcomes.total()} |',
            *(f'{row.outcomes[o]} |' for o in (REFUSED, FINE, TRACEBACK, HANG)),
            f'{row.seconds:.0f} |',
        )
    return int(any(row.outcomes[TRACEBACK] or row.outcomes[HANG] for row in rows.values()))


if __name__ == '__main__':
    sys.exit(main())
