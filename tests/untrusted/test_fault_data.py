"""Bad YAML of data, augmentation and network, bad labels and images: one line, or the other images are used."""

import io
import os
import pickle
import shutil
import struct
import zlib

import numpy as np
import pytest
from conftest import REPO
from faults import TIMES, answer, damaged, sampled
from PIL import Image
from zoo import program

SIZE = 64
DAMAGED_YAML, DAMAGED_IMAGES = 40, 30  # times TIMES


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    """Checkpoints and the ONNX file of one, and a data set of 4 + 4 images."""
    folder = tmp_path_factory.mktemp('fault files')
    shutil.copy(small.single, folder / 'single.pt')
    program('export_qat.py').main(['--weights', str(folder / 'single.pt'), '--imgsz', str(SIZE)])
    for kind in 'images', 'labels':
        for split in 'train', 'val':
            (folder / 'data' / kind / split).mkdir(parents=True)
            for file in sorted((small.data.parent / kind / split).iterdir())[:4]:
                shutil.copy(file, folder / 'data' / kind / split)
    return {
        'FLOAT': small.single,
        'QUANTIZED': small.quantized,
        'DUAL': small.dual,
        'ONNX': folder / 'single.onnx',
        'data': folder / 'data',
    }


COMMON = ('--device', 'cpu', '--project', 'OUT', '--workers', 0)
COMMANDS = {
    'val_trt.py': ('--weights', 'ONNX', '--data', 'DATA', '--imgsz', SIZE, *COMMON),
    'compare_outputs.py': ('ONNX', 'ONNX', '--data', 'DATA', *COMMON),
    'qat.py eval': ('eval', '--weights', 'QUANTIZED', '--data', 'DATA', '--imgsz', SIZE, *COMMON),
    'qat.py quantize': (
        'quantize',
        '--weights',
        'FLOAT',
        '--data',
        'DATA',
        '--imgsz',
        SIZE,
        '--epochs',
        0,
        '--calib-images',
        2,
        '--calib-method',
        'max',
        '--no-eval-origin',
        *COMMON,
    ),
    'qat.py sensitive': (
        'sensitive',
        '--weights',
        'FLOAT',
        '--data',
        'DATA',
        '--imgsz',
        SIZE,
        '--calib-images',
        2,
        '--num-image',
        1,
        '--metric',
        'distortion',
        '--calib-method',
        'max',
        '--granularity',
        'layer',
        *COMMON,
    ),
    'export_qat.py': ('--weights', 'OUT/w.pt', '--imgsz', SIZE, '--verify', 'DATA'),
}


def told(command, data, files, capfd, folder):
    out = folder / 'out'
    if command == 'export_qat.py':
        out.mkdir(exist_ok=True)
        shutil.copy(files['FLOAT'], out / 'w.pt')
    argv = [
        str(a).replace('OUT', str(out)) if a != 'DATA' else data for a in (files.get(a, a) for a in COMMANDS[command])
    ]
    code, line = answer(
        command.split()[0], argv, capfd, folder, allowed=(0, 1, 2) if command == 'export_qat.py' else (0, 2)
    )
    shutil.rmtree(out, ignore_errors=True)
    return code, line


# ---- data YAML ----------------------------------------------------------------------------------------------------------

GOOD = 'path: {data}\ntrain: images/train\nval: images/val\nnc: 10\nnames: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]\n'
BOMB = 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(
    f'{n}: &{n} [{", ".join([f"*{m}"] * 9)}]\n' for m, n in zip('abcdefgh', 'bcdefghi')
)
YAMLS = {  # name → text; {data} is the folder of good data
    'empty': '',
    'null': 'null\n',
    'a number': '3\n',
    'a list': '- 1\n',
    'text': 'hello',
    'tabs': GOOD.replace('train: ', '\ttrain:\t'),
    'binary': '\0\1\2\3',
    'no end': 'names: [',
    'nested': '[' * 5000,
    'a control character': GOOD + '\7',
    'a bomb': BOMB + GOOD.replace('names: [', 'names: [*i, ', 1),
    'a bomb for a path': BOMB + GOOD.replace('images/val', '*i'),
    'a bomb for nc': BOMB + GOOD.replace('nc: 10', 'nc: *i'),
    'an anchor in itself': GOOD.replace('images/val', '&v [*v]'),
    'an unknown anchor': GOOD.replace('images/val', '*none'),
    'Python': GOOD + 'x: !!python/object/apply:os.system ["touch sprung"]\n',
    'a date that is none': GOOD + 'x: 2021-13-45\n',
    'a long number': GOOD + f'x: {"9" * 5000}\n',
    'an empty number': GOOD + 'x: !!int ""\n',
    'no bool': GOOD + 'x: !!bool maybe\n',
    'no date': GOOD + 'x: !!timestamp soon\n',
    'a key that is a list': GOOD + '? [a]\n: b\n',
    'a path that is a number': GOOD.replace('{data}', '3'),
    'a path that is a list': GOOD.replace('{data}', '[a, b]'),
    'train that is a number': GOOD.replace('images/train', '5'),
    'train that is a map': GOOD.replace('images/train', '{{a: b}}'),
    'val that is a date': GOOD.replace('images/val', '2020-01-01'),
    'val that has numbers': GOOD.replace('images/val', '[1, 2]'),
    'val to nowhere': GOOD.replace('images/val', 'nowhere'),
    'val with a null byte': GOOD.replace('images/val', '"a\\0b"'),
    'val too long': GOOD.replace('images/val', 'x' * 5000),
    'val empty': GOOD.replace('images/val', '""'),
    'val a device': GOOD.replace('images/val', '/dev/null'),
    'val of nowhere in a list': GOOD.replace('images/val', '[images/val, nowhere]'),
    'val the YAML': GOOD.replace('images/val', 'FILE'),
    'names a number': GOOD.replace('names: [', 'names: 7\nx: ['),
    'names text': GOOD.replace('names: [', 'names: abc\nx: ['),
    'names of lists': GOOD.replace('"0"', '["0"]'),
    'names of maps': GOOD.replace('"0"', '{{a: 0}}'),
    'names with a gap': GOOD.replace('names: [', 'names: {{0: a, 2: b}}\nx: ['),
    'names from 1': GOOD.replace('names: [', 'names: {{1: a, 2: b}}\nx: ['),
    'names of mixed keys': GOOD.replace('names: [', 'names: {{0: a, b: c}}\nx: ['),
    'names too few': GOOD.replace(', "9"', ''),
    'nc text': GOOD.replace('nc: 10', 'nc: ten'),
    'nc negative': GOOD.replace('nc: 10', 'nc: -10'),
    'nc a list': GOOD.replace('nc: 10', 'nc: [10]'),
    'too large': GOOD + '#' * 3_000_000,
}
HARMLESS = {
    'keys twice': GOOD + GOOD,
    'a byte order mark': '\ufeff' + GOOD,
    'lines of Windows': GOOD.replace('\n', '\r\n'),
    'lists of paths': GOOD.replace('images/val', '[images/val]'),
    'unknown keys': GOOD + 'download: |\n  rm -rf /\n',
    'names of numbers': GOOD.replace('"0"', '0')
    .replace('"1"', '1.5')
    .replace('"2"', 'true')
    .replace('"3"', '2020-01-01'),
}


def written(folder, text, files):
    (folder / 'data.yaml').write_bytes(
        text.replace('{{', '{').replace('}}', '}').replace('{data}', str(files['data'])).encode()
    )
    return folder / 'data.yaml'


def share(cases, command):
    """The cases of a command: all for the quickest, every fifth for the others, so that each case meets two."""
    which = list(COMMANDS).index(command)
    return {name: cases[name] for i, name in enumerate(cases) if which == 0 or i % (len(COMMANDS) - 1) == which - 1}


@pytest.mark.parametrize('command', sampled(COMMANDS, 6, 2))
def test_yaml(files, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    for name, text in share(YAMLS, command).items():
        code, line = told(command, written(tmp_path, text, files), files, capfd, tmp_path)
        assert code == 2 and 'data.yaml' in line and len(line) < 6000, name
    assert not (tmp_path / 'sprung').exists()


@pytest.mark.parametrize('name', sampled(HARMLESS, 3))
def test_yaml_that_is_fine(files, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    assert told('val_trt.py', written(tmp_path, HARMLESS[name], files), files, capfd, tmp_path)[0] == 0


@pytest.mark.faults
def test_yaml_damaged(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    refused = 0
    for what, content in damaged(GOOD.replace('{data}', str(files['data'])).encode(), DAMAGED_YAML):
        (tmp_path / 'data.yaml').write_bytes(content)
        refused += told('val_trt.py', tmp_path / 'data.yaml', files, capfd, tmp_path)[0] == 2
    assert refused > 20 * TIMES


# ---- other YAML ---------------------------------------------------------------------------------------------------------

HYP = (REPO / 'demo/hyp.yaml').read_text()
HYPS = {
    **{name: YAMLS[name] for name in ('empty', 'a number', 'a list', 'text', 'binary', 'no end', 'nested')},
    'text for a number': HYP.replace('hsv_h:', 'hsv_h: many #'),
    'a list for a number': HYP.replace('mosaic:', 'mosaic: [1] #'),
    'NaN': HYP.replace('degrees:', 'degrees: .nan #'),
    'infinity': HYP.replace('scale:', 'scale: .inf #'),
    'nothing for a number': HYP.replace('shear:', 'shear: #'),
    'one missing': HYP.replace('fliplr:', 'flip:'),
    'a bomb': BOMB + HYP.replace('hsv_h:', 'hsv_h: *i #'),
    'no date': HYP + 'x: !!timestamp soon\n',
}
CFG = (REPO / 'demo/yolov9-demo.yaml').read_text()
CFGS = {
    **{name: YAMLS[name] for name in ('empty', 'a number', 'a list', 'text', 'binary', 'no end', 'nested')},
    'code for a layer': CFG.replace('Silence', "\"__import__('os').system('touch sprung')\""),
    'code for an argument': CFG.replace(
        '[-1, 1, Silence, []]', "[-1, 1, Silence, [\"__import__('os').system('touch sprung')\"]]"
    ),
    'code for the activation': CFG + 'activation: __import__("os").system("touch sprung")\n',
    'a call of the system': CFG + 'activation: os.abort()\n',
    'a call in a call': CFG + 'activation: nn.ReLU(open("sprung", "w"))\n',
    'no head': CFG[: CFG.index('head:')],
    'rows that are none': 'backbone: [1]\nhead: [2]\n',
    'another model': CFG.replace('[-1, 1, SPPELAN, [', '[-1, 1, SPPELAN, [2', 1),
    'a layer that is none': CFG.replace('Silence', 'Silent', 1),
    'a layer without arguments': CFG.replace('ADown, [', 'ADown, [[]], [', 1),
    'channels that are text': CFG.replace('Conv, [', 'Conv, [nearest, ', 1),
}


@pytest.mark.parametrize('name', sampled(HYPS, 5))
def test_hyp(files, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'hyp.yaml').write_text(HYPS[name])
    argv = (
        'quantize',
        '--weights',
        files['FLOAT'],
        '--data',
        written(tmp_path, GOOD, files),
        '--hyp',
        tmp_path / 'hyp.yaml',
        '--project',
        tmp_path / 'out',
        '--imgsz',
        SIZE,
        '--device',
        'cpu',
        '--workers',
        0,
    )
    code, line = answer('qat.py', argv, capfd, tmp_path)
    assert code == 2 and 'hyp.yaml' in line


@pytest.mark.parametrize('name', sampled(CFGS, 6, 1))
def test_network_yaml(files, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'cfg.yaml').write_text(CFGS[name])
    code, line = answer(
        'reparameterization.py',
        ('--weights', files['DUAL'], '--save', tmp_path / 'out.pt', '--cfg', tmp_path / 'cfg.yaml'),
        capfd,
        tmp_path,
    )
    assert code == 2 and 'cfg.yaml' in line and not (tmp_path / 'sprung').exists()


# ---- labels -------------------------------------------------------------------------------------------------------------

BOX = '3 0.5 0.5 0.2 0.2\n'
LABELS = {  # one line of a label file of a val image, or all of it
    'NaN': '3 nan 0.5 0.2 0.2',
    'infinity': '3 0.5 inf 0.2 0.2',
    'negative': '3 -0.5 0.5 0.2 0.2',
    'above 1': '3 0.5 0.5 1.2 0.2',
    'pixels': '3 120 80 30 40',
    'a class of NaN': 'nan 0.5 0.5 0.2 0.2',
    'a class of infinity': 'inf 0.5 0.5 0.2 0.2',
    'a negative class': '-1 0.5 0.5 0.2 0.2',
    'a class and a half': '1.5 0.5 0.5 0.2 0.2',
    'a class out of range': '10 0.5 0.5 0.2 0.2',
    'a huge class': '1e30 0.5 0.5 0.2 0.2',
    'a class by name': 'seven 0.5 0.5 0.2 0.2',
    'four columns': '3 0.5 0.5 0.2',
    'six columns': '3 0.5 0.5 0.2 0.2 0.9',
    'one column': '3',
    'commas': '3,0.5,0.5,0.2,0.2',
    'text': 'no labels here',
    'an outline with half a point': '3 0.1 0.1 0.2 0.1 0.2 0.2 0.1',
    'an outline beside a box': BOX + '3 0.1 0.1 0.2 0.1 0.2 0.2',
    'a box beside an outline': '3 0.1 0.1 0.2 0.1 0.2 0.2\n' + BOX,
    'an outline above 1': '3 0.1 0.1 1.2 0.1 0.2 0.2',
    'the second line': BOX + '3 0.5 0.5 2 0.2',
    'binary': '\0\1\2',
    'a long line': '3 ' + '0.5 ' * 100001,
    'a number in hexadecimal': '0x3 0.5 0.5 0.2 0.2',
}
FINE_LABELS = {
    'empty': '',
    'blank lines': f'\n\n{BOX}\n  \n',
    'a box twice': BOX * 2,
    'no width': '3 0.5 0.5 0 0',
    'a class as 3.0': '3.0 0.5 0.5 0.2 0.2',
    'exponents': '3 5e-1 5e-1 2e-1 2e-1',
    'an outline': '3 0.1 0.1 0.2 0.1 0.2 0.2',
    'lines of Windows': BOX.replace('\n', '\r\n') * 2,
    'a line that does not end': BOX.strip(),
    'tabs': BOX.replace(' ', '\t'),
    'the whole image': '3 0.5 0.5 1 1',
    'at the border': '3 1 1 0.5 0.5',
}


def labelled(files, folder, content, name='data'):
    """The good data set with `content` as the labels of the first images of train and val."""
    shutil.copytree(files['data'], folder / name, ignore=shutil.ignore_patterns('*.cache'))
    for split in 'train', 'val':
        (folder / name / 'labels' / split / '00000.txt').write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    return {**files, 'data': folder / name}


@pytest.mark.parametrize('command', sampled(COMMANDS, 6, 3))
def test_labels(files, tmp_path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    for i, (name, content) in enumerate(share(LABELS, command).items()):
        spoilt = labelled(files, tmp_path, content, str(i))
        code, line = told(command, written(tmp_path, GOOD, spoilt), files, capfd, tmp_path)
        assert code == 2 and '00000.txt' in line and len(line) < 600, name


def test_labels_that_are_no_text(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    spoilt = labelled(files, tmp_path, b'3 0.5 0.5 \xff\xfe0.2 0.2\n')
    code, line = told('val_trt.py', written(tmp_path, GOOD, spoilt), files, capfd, tmp_path)
    assert code == 2 and '00000.txt:1' in line


@pytest.mark.parametrize('name', sampled(FINE_LABELS, 4))
def test_labels_that_are_fine(files, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    fine = labelled(files, tmp_path, FINE_LABELS[name])
    assert told('val_trt.py', written(tmp_path, GOOD, fine), files, capfd, tmp_path)[0] == 0


class Trap:
    def __init__(self, sprung):
        self.sprung = str(sprung)

    def __reduce__(self):
        return open, (self.sprung, 'w')


def test_a_cache_of_labels_is_not_run(files, tmp_path, monkeypatch, capfd):
    """Upstream unpickles the .cache beside the labels: a data set from elsewhere could bring one."""
    monkeypatch.chdir(tmp_path)
    trapped, sprung = labelled(files, tmp_path, BOX), tmp_path / 'sprung'
    cache, data = tmp_path / 'data/labels/val.cache', written(tmp_path, GOOD, trapped)
    bare, array = pickle.dumps(Trap(sprung)), io.BytesIO()
    np.save(array, {'a': Trap(sprung)}, allow_pickle=True)
    for content in bare, array.getvalue(), pickle.dumps(Trap(sprung), 0):
        cache.write_bytes(content)
        code, line = told('val_trt.py', data, files, capfd, tmp_path)
        assert code == 2 and f'{cache}: no cache of labels' in line and not sprung.exists()
    np.load(io.BytesIO(array.getvalue()), allow_pickle=True)
    assert sprung.exists(), 'it would have'
    sprung.unlink()
    cache.unlink()
    assert told('val_trt.py', data, files, capfd, tmp_path)[0] == 0
    whole = cache.read_bytes()
    for end in np.linspace(0, len(whole) - 1, 9).astype(int):
        cache.write_bytes(whole[:end])
        code, line = told('val_trt.py', data, files, capfd, tmp_path)
        assert code == 2 and f'{cache}: no cache of labels' in line and 'delete it' in line


# ---- images -------------------------------------------------------------------------------------------------------------


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_of(width, height):
    """The head of a PNG of that size, and no pixels."""

    def chunk(name, content):
        return struct.pack('>I', len(content)) + name + content + struct.pack('>I', zlib.crc32(name + content))

    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0))
        + chunk(b'IDAT', zlib.compress(b'\0'))
        + chunk(b'IEND', b'')
    )


def pictures():
    """name → (file name, bytes); those above FINE are left out, those below are used."""
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8))
    jpeg, png = saved(colours, 'JPEG'), saved(colours, 'PNG')
    bad = {
        '0 bytes': ('x.jpg', b''),
        'text': ('x.jpg', b'no image'),
        'half a PNG': ('x.png', png[: len(png) // 2]),
        'the head of a JPEG': ('x.jpg', jpeg[:30]),
        'half a JPEG': ('x.jpg', jpeg[: len(jpeg) // 2]),
        '1x1': ('x.png', saved(colours.crop((0, 0, 1, 1)), 'PNG')),
        'a bomb': ('x.png', png_of(60000, 60000)),
        'a GIF': ('x.jpg', saved(colours, 'GIF')),
        'a damaged PNG': ('x.png', png[:200] + b'xx' + png[202:]),
        'a WebP cut short': ('x.webp', saved(colours, 'WEBP')[:40]),
    }
    fine = {
        'CMYK': ('x.jpg', saved(colours.convert('CMYK'), 'JPEG')),
        'grey': ('x.jpg', saved(colours.convert('L'), 'JPEG')),
        '16 bits': ('x.png', saved(Image.fromarray(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20), 'PNG')),
        'a palette': ('x.png', saved(colours.convert('P'), 'PNG')),
        'RGBA': ('x.png', saved(colours.convert('RGBA'), 'PNG')),
        'black and white': ('x.png', saved(colours.convert('1'), 'PNG')),
        'grey with alpha': ('x.png', saved(colours.convert('LA'), 'PNG')),
        'a PNG called JPEG': ('x.jpg', png),
        'a JPEG called PNG': ('x.png', jpeg),
        'capitals': ('X.JPG', jpeg),
        'spaces': ('a b.jpg', jpeg),
        'a TIFF': ('x.tif', saved(colours, 'TIFF')),
        'a BMP': ('x.bmp', saved(colours, 'BMP')),
        'very wide': ('x.png', saved(colours.resize((600, 10)), 'PNG')),
        'turned by EXIF': (
            'x.jpg',
            saved(colours, 'JPEG', exif=b'Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0'),
        ),
        'accents': ('é.jpg', jpeg),
        'a progressive JPEG': ('x.jpg', saved(colours, 'JPEG', progressive=True)),
    }
    return bad, fine


UNREAD, READ = pictures()


def with_image(files, folder, name, content):
    """A data set as the good one, with one more image in train and val, and a box on it."""
    made = labelled(files, folder, BOX)
    for split in 'train', 'val':
        (made['data'] / 'images' / split / name).write_bytes(content)
        (made['data'] / 'labels' / split / name).with_suffix('.txt').write_text(BOX)
    return written(folder, GOOD, made)


EVERY_IMAGE = [(name, 'val_trt.py') for name in (*UNREAD, *READ)] + [
    (name, list(COMMANDS)[1 + i % 5]) for i, name in enumerate((*UNREAD, *READ))
]


@pytest.mark.parametrize('name, command', sampled(EVERY_IMAGE, 8, 4))
def test_images(files, tmp_path, monkeypatch, capfd, name, command):
    monkeypatch.chdir(tmp_path)
    data = with_image(files, tmp_path, *{**UNREAD, **READ}[name])
    before = {f: f.read_bytes() for f in (tmp_path / 'data').rglob('*.*') if f.suffix != '.cache'}
    code, line = told(command, data, files, capfd, tmp_path)
    assert code != 2 or (name == 'a bomb' and 'x.png' in line), line
    assert {f: f.read_bytes() for f in (tmp_path / 'data').rglob('*.*') if f.suffix != '.cache'} == before, (
        'the data are as they were'
    )


@pytest.mark.faults
def test_an_image_whose_name_is_no_text(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        data = with_image(files, tmp_path, os.fsdecode(b'\xff\xfe.jpg'), READ['grey'][1])
        code, line = told(command, data, files, capfd, tmp_path)
        shutil.rmtree(tmp_path / 'data')
        assert code == 2 and 'is not UTF-8' in line


@pytest.mark.faults
def test_folders_and_links_among_images(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    made = labelled(files, tmp_path, BOX)
    images = made['data'] / 'images/val'
    (images / 'folder.jpg').mkdir()
    (images / 'dangling.jpg').symlink_to('nowhere.jpg')
    (images / 'loop.jpg').symlink_to('loop.jpg')
    assert told('val_trt.py', written(tmp_path, GOOD, made), files, capfd, tmp_path)[0] == 0
    (images / 'again').symlink_to('.')
    assert told('val_trt.py', written(tmp_path, GOOD, made), files, capfd, tmp_path)[0] == 0


def test_no_image_can_be_used(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    made = labelled(files, tmp_path, BOX)
    for file in (made['data'] / 'images/val').iterdir():
        file.write_bytes(b'')
    code, line = told('val_trt.py', written(tmp_path, GOOD, made), files, capfd, tmp_path)
    assert code == 2 and 'none of its 4 images can be used' in line


@pytest.mark.parametrize('workers', [0, 1])
def test_an_image_that_pillow_takes_and_opencv_does_not(files, tmp_path, monkeypatch, capfd, workers):
    """It is met in the middle of the work, in a worker's process or in this one; a folder with the log is there by then."""
    monkeypatch.chdir(tmp_path)
    data = with_image(files, tmp_path, 'x.bmp', READ['a BMP'][1][:-10])
    argv = (
        '--weights',
        files['ONNX'],
        '--data',
        data,
        '--imgsz',
        SIZE,
        '--device',
        'cpu',
        '--project',
        tmp_path / 'out',
        '--workers',
        workers,
    )
    code, line = answer('val_trt.py', argv, capfd, tmp_path, leaves=('log.txt', 'exp', 'out'))
    assert code == 2 and 'x.bmp: cannot be read' in line


def array(*shape, kind=np.uint8):
    out = io.BytesIO()
    np.save(out, np.zeros(shape, kind))
    return out.getvalue()


COPIES = {  # height and width of an image → IMG.npy, which upstream takes in place of IMG.jpg
    'no array': lambda h, w: b'no array',
    'nothing': lambda h, w: b'',
    'cut short': lambda h, w: array(h, w, 3)[:-9],
    'of no size': lambda h, w: array(0, 0, 3),
    'grey': lambda h, w: array(h, w),
    'RGBA': lambda h, w: array(h, w, 4),
    '64 bits': lambda h, w: array(h, w, 3, kind=np.int64),
    'complex': lambda h, w: array(h, w, 3, kind=complex),
    'a row': lambda h, w: array(h),
    'of another image': lambda h, w: array(h, w - 8, 3),
    'objects': lambda h, w: array(2, kind=object),
}


def with_copies(files, folder, copy):
    """The good data set with a copy of the pixels beside an image of each split, and its name."""
    made = labelled(files, folder, BOX)
    for split in 'train', 'val':
        image = sorted((made['data'] / 'images' / split).iterdir())[1]
        image.with_suffix('.npy').write_bytes(copy(*Image.open(image).size[::-1]))
    return written(folder, GOOD, made), f'{image.stem}.npy'


@pytest.mark.parametrize('name, command', sampled([(name, c) for name in COPIES for c in COMMANDS], 18))
def test_copies_of_pixels(files, tmp_path, monkeypatch, capfd, name, command):
    monkeypatch.chdir(tmp_path)
    data, copy = with_copies(files, tmp_path, COPIES[name])
    code, line = told(command, data, files, capfd, tmp_path)
    assert code == 2 and f'{copy}: ' in line and 'delete it' in line


def test_a_copy_of_pixels_is_taken(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    data, _ = with_copies(files, tmp_path, lambda h, w: array(h, w, 3))
    assert told('val_trt.py', data, files, capfd, tmp_path)[0] == 0


@pytest.mark.parametrize('place', ['images/val/x.jpg', 'images/val/00000.npy', 'labels/val.cache'])
def test_a_pipe_is_not_waited_for(files, tmp_path, monkeypatch, capfd, place):
    monkeypatch.chdir(tmp_path)
    made = labelled(files, tmp_path, BOX)
    os.mkfifo(made['data'] / place)
    code, line = told('val_trt.py', written(tmp_path, GOOD, made), files, capfd, tmp_path)
    assert code == 2 and place in line


@pytest.mark.faults
def test_images_damaged(files, tmp_path, monkeypatch, capfd):
    """In a set with many damaged images, each is used, left out, or named."""
    monkeypatch.chdir(tmp_path)
    for kind, whole in (('jpg', (files['data'] / 'images/val/00000.jpg').read_bytes()), ('png', READ['RGBA'][1])):
        for i, (what, content) in enumerate(damaged(whole, DAMAGED_IMAGES)):
            made = tmp_path / 'data' / 'images/val'
            if not i % 10:
                shutil.rmtree(tmp_path / 'data', ignore_errors=True)
                labelled(files, tmp_path, BOX)
            (made / f'x{i}.{kind}').write_bytes(content)
            if i % 10 == 9:
                code, line = told(
                    'val_trt.py', written(tmp_path, GOOD, {'data': tmp_path / 'data'}), files, capfd, tmp_path
                )
                assert code == 0 or 'cannot be read' in line, line
