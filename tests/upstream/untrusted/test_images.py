"""Images of any kind and name among the data: each is used, left out, or named in one line; none is changed."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from helpers.faults import KINDS, lay, sampled
from PIL import Image

READERS = KINDS['data'].readers
VAL = READERS[0]
BOX = '3 0.5 0.5 0.2 0.2\n'


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_of(width, height):
    """The head of a PNG of that size, and no pixels."""

    def chunk(name, content):
        return struct.pack('>I', len(content)) + name + content + struct.pack('>I', zlib.crc32(name + content))

    head = chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0))
    return b'\x89PNG\r\n\x1a\n' + head + chunk(b'IDAT', zlib.compress(b'\0')) + chunk(b'IEND', b'')


COLOURS = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8))
DEEP = Image.fromarray(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20)
TURNED = b'Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0'
JPEG, PNG = saved(COLOURS, 'JPEG'), saved(COLOURS, 'PNG')
IMAGES = {  # name → (file name, bytes)
    '0 bytes': ('x.jpg', b''),
    'text': ('x.jpg', b'no image'),
    'half a PNG': ('x.png', PNG[: len(PNG) // 2]),
    'the head of a JPEG': ('x.jpg', JPEG[:30]),
    'half a JPEG': ('x.jpg', JPEG[: len(JPEG) // 2]),
    '1x1': ('x.png', saved(COLOURS.crop((0, 0, 1, 1)), 'PNG')),
    'a bomb': ('x.png', png_of(60000, 60000)),
    'a GIF': ('x.jpg', saved(COLOURS, 'GIF')),
    'a damaged PNG': ('x.png', PNG[:200] + b'xx' + PNG[202:]),
    'a WebP cut short': ('x.webp', saved(COLOURS, 'WEBP')[:40]),
    **{f'of mode {mode}': ('x.png', saved(COLOURS.convert(mode), 'PNG')) for mode in ('P', 'RGBA', '1', 'LA')},
    **{f'a JPEG of mode {mode}': ('x.jpg', saved(COLOURS.convert(mode), 'JPEG')) for mode in ('CMYK', 'L')},
    **{f'a {kind}': (f'x.{kind}', saved(COLOURS, kind.upper())) for kind in ('tiff', 'bmp')},
    '16 bits': ('x.png', saved(DEEP, 'PNG')),
    'a PNG called JPEG': ('x.jpg', PNG),
    'a JPEG called PNG': ('x.png', JPEG),
    'capitals': ('X.JPG', JPEG),
    'spaces': ('a b.jpg', JPEG),
    'accents': ('é.jpg', JPEG),
    'very wide': ('x.png', saved(COLOURS.resize((600, 10)), 'PNG')),
    'turned by EXIF': ('x.jpg', saved(COLOURS, 'JPEG', exif=TURNED)),
    'a progressive JPEG': ('x.jpg', saved(COLOURS, 'JPEG', progressive=True)),
}


@pytest.fixture
def data(material, tmp_path):
    """Callable: name and bytes of an image → writes it, with a label, to a set's training and validation images."""
    folder = lay(material, 'data', tmp_path).parent

    def add(name, content):
        for split in 'train', 'val':
            (folder / 'images' / split / name).write_bytes(content)
            (folder / 'labels' / split / name).with_suffix('.txt').write_text(BOX)
        return folder

    return add


EVERY = [(name, reader) for i, name in enumerate(IMAGES) for reader in (VAL, READERS[1 + i % 4])]


@pytest.mark.parametrize('name, reader', sampled(EVERY, 5))
def test_each_is_used_or_left_out(data, told, name, reader):
    folder = data(*IMAGES[name])
    before = {f: f.read_bytes() for f in folder.rglob('*.*') if f.suffix != '.cache'}
    code, line = told(reader)
    assert code != 2 or (name == 'a bomb' and 'x.png' in line), line
    assert {f: f.read_bytes() for f in folder.rglob('*.*') if f.suffix != '.cache'} == before, (
        'the data are as they were'
    )


@pytest.mark.parametrize('reader', sampled(READERS, 5))
@pytest.mark.parametrize(
    'name, says',
    [
        (b'\xff\xfe.jpg', 'is not UTF-8'),
        (b'a\x1b[2J.jpg', 'has control characters'),
        (b'a\n.jpg', 'has control characters'),
    ],
)
def test_a_name_that_is_no_text(data, told, name, says, reader):
    data(os.fsdecode(name), JPEG)
    code, line = told(reader)
    assert code == 2 and says in line and line.isprintable()


def test_folders_and_links_among_images(data, told):
    images = data('x.jpg', JPEG) / 'images/val'
    (images / 'folder.jpg').mkdir()
    for link, target in (('dangling.jpg', 'nowhere.jpg'), ('loop.jpg', 'loop.jpg'), ('again', '.')):
        (images / link).symlink_to(target)
    assert told(VAL)[0] == 0


def test_no_image_can_be_used(data, told):
    for file in (data('x.jpg', b'') / 'images/val').iterdir():
        file.write_bytes(b'')
    code, line = told(VAL)
    assert code == 2 and 'none of its 4 images can be used' in line


@pytest.mark.parametrize('workers', [0, 1])
def test_an_image_that_pillow_takes_and_opencv_does_not(data, told, workers):
    """It is met in the middle of the work, in a worker's process or in this one; a folder with the log is there by then."""
    data('x.bmp', IMAGES['a bmp'][1][:-10])
    code, line = told(VAL.replace('--workers 0', f'--workers {workers}'), leaves=('log.txt', 'exp', 'out'))
    assert code == 2 and 'x.bmp: cannot be read' in line
