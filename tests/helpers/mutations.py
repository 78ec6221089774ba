"""Files changed a little, each way that their format offers: (content, chance) → (what was done, content). `chance` is a random.Random.

Half of the changes know the format, so that they get past the first look at a file; the others are those of `damage`.
"""

import contextlib
import io
import json
import pickletools
import struct
import zipfile
import zlib

import numpy as np
import onnx
import yaml
from google.protobuf import json_format

from helpers.faults import archive, members, npy, pickle_in, with_pickle
from helpers.graphs import behind_functions

NUMBERS = 0, 1, -1, 3, 1 << 70, 0.5, -0.0, 1e308, float('nan'), float('inf')
PARTS = [], {}, [None], [[]], {'x': 1}, {'': None}, [1, 'x']
ODD = None, True, False, *NUMBERS, *PARTS, '', 'x', 'ä\0\n', '../../x', '9' * 400
WORDS = *'nan -inf inf -1 1e400 x 0x1 1_0 ٣ 1.0.0 1e-400 -0 # 0,5 \0 1e30 "'.split(' '), '', '9' * 400, '- '


def mutated(kind, whole, chance):
    """(what was done, the content of a file of `kind` that was `whole`)."""
    if whole and (chance.random() < 0.5 or FORMATS[kind] is None):
        return damage(whole, chance)
    return FORMATS[kind](whole, chance)


def damage(whole, chance):
    """Cut short, overwritten by noise, a bit flipped, a part left out or doubled; where the file says what the rest is, or anywhere."""
    length, size = chance.choice([1, 4, 16, 300]), len(whole)
    at = chance.choice(
        [chance.randrange(size), chance.randrange(256) % size, (size - 1 - chance.randrange(512)) % size]
    )
    how = chance.choice(('cut', 'noise', 'bit', 'without', 'doubled'))
    return f'{how} at {at}, {length}', {
        'cut': lambda: whole[:at],
        'noise': lambda: whole[:at] + chance.randbytes(length) + whole[at + length :],
        'bit': lambda: whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :],
        'without': lambda: whole[:at] + whole[at + length :],
        'doubled': lambda: whole[: at + length] + whole[at:],
    }[how]()


# ---- trees: JSON and YAML ---------------------------------------------------------------------------------------------------


def places(tree, path=()):
    """(container, key, path) of each value inside nested dicts and lists."""
    for key, value in list(
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
        yield tree, key, (*path, key)
        yield from places(value, (*path, key))


def change_tree(tree, chance):
    """Change one value of a tree in place: another one, one of elsewhere in it, none, another name. Returns what was done."""
    container, key, path = chance.choice(list(places(tree)))
    how, name = chance.choice(('other', 'other', 'moved', 'gone', 'renamed')), '.'.join(map(str, path))
    if how == 'other':
        container[key] = chance.choice(ODD)
        return f'{name} is {container[key]!r:.40}'
    if how == 'moved':
        other, at, there = chance.choice(list(places(tree)))
        container[key] = json.loads(json.dumps(other[at], default=str))
        return f'{name} is {".".join(map(str, there))}'
    value = container.pop(key)
    if how == 'renamed' and isinstance(container, dict):
        container[chance.choice(('', 'x', f'{key} '))] = value
    return f'{name} {how}'


def change_json(whole, chance):
    tree = json.loads(whole)
    what = change_tree(tree, chance)
    return what, json.dumps(tree).encode()


def change_yaml(whole, chance):
    if chance.random() < 0.4:
        return change_lines(whole, chance)
    tree = yaml.safe_load(whole)
    what = change_tree(tree, chance)
    return what, yaml.safe_dump(
        tree,
        sort_keys=False,
        allow_unicode=chance.random() < 0.5,
        default_flow_style=chance.choice((None, True, False)),
    ).encode()


# ---- lines of words: labels, YAML, manifests ----------------------------------------------------------------------------------


def change_lines(whole, chance):
    """A line or one of its words left out, doubled, moved, or another word."""
    lines = whole.split(b'\n')
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    how = chance.choice(
        (
            *('line gone', 'line doubled', 'lines swapped', 'lines joined', 'word gone', 'word doubled'),
            *['word replaced'] * 3,
        )
    )
    words, word = lines[at].split(b' '), chance.choice(WORDS).encode()
    i = chance.randrange(len(words))
    if how == 'line gone':
        del lines[at]
    elif how == 'line doubled':
        lines.insert(other, lines[at])
    elif how == 'lines swapped':
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 'lines joined':
        lines[at : at + 2] = [b' '.join(lines[at : at + 2])]
    else:
        words[i : i + 1] = {'word gone': [], 'word doubled': [words[i]] * 2, 'word replaced': [word]}[how]
        lines[at] = b' '.join(words)
    return f'{how}, line {at + 1}, word {i + 1}, {word[:20]}', b'\n'.join(lines)


# ---- checkpoints: archives with a pickle and tensors ----------------------------------------------------------------------------


def change_archive(whole, chance):
    """Its pickle, or one of its tensors, with right checksums."""
    if chance.random() < 0.8:
        what, pickled = change_pickle(pickle_in(whole), chance)
        return what, with_pickle(whole, pickled)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, 'w') as new:
        names = old.namelist()
        chosen, how = chance.choice(names), chance.choice(('gone', 'empty', 'cut', 'longer', 'twice', 'noise'))
        for name in names:
            content = old.read(name)
            if name == chosen:
                content = {
                    'empty': b'',
                    'cut': content[: len(content) // 2],
                    'longer': content * 2,
                    'noise': chance.randbytes(len(content)),
                }.get(how, content)
            for _ in range({'gone': 0, 'twice': 2}.get(how, 1) if name == chosen else 1):
                new.writestr(zipfile.ZipInfo(name), content)
    return f'{chosen} {how}', out.getvalue()


def change_program(whole, chance):
    """A value of the graph of an exported program, or of its metadata."""
    parts = members(whole)
    chosen = chance.choice([name for name in parts if name.endswith('.json')])
    what, parts[chosen] = change_json(parts[chosen], chance)
    return f'{chosen}: {what}', archive(parts)


def change_pickle(pickled, chance):
    """One opcode left out, doubled, swapped with the next, another one, or with another argument."""
    starts = [position for _, _, position in pickletools.genops(pickled)]
    parts = [pickled[a:b] for a, b in zip(starts, [*starts[1:], len(pickled)])]
    at = chance.randrange(len(parts) - 1)
    how = chance.choice(('gone', 'doubled', 'swapped', 'opcode', 'argument', 'argument', 'of another', 'of another'))
    if how == 'argument' and len(parts[at]) > 1:
        i = chance.randrange(1, len(parts[at]))
        parts[at] = parts[at][:i] + chance.randbytes(1) + parts[at][i + 1 :]
    elif how == 'of another':  # such as a string for a string, a number for a number
        same = [part for part in parts if part[:1] == parts[at][:1]]
        parts[at] = chance.choice(same)
    elif how == 'swapped':
        parts[at : at + 2] = parts[at : at + 2][::-1]
    elif how in ('gone', 'doubled'):
        parts[at : at + 1] = [parts[at]] * (2 * (how == 'doubled'))
    else:
        parts[at] = chance.choice(pickletools.opcodes).code.encode('latin1') + parts[at][1:]
    return f'opcode {at} of the pickle, {how}', b''.join(parts)


# ---- ONNX -----------------------------------------------------------------------------------------------------------------------


def change_onnx(whole, chance):
    """One value of the graph as a tree, or a node behind functions that call each other."""
    if chance.random() < 0.1:
        model = onnx.load_from_string(whole)
        calls, depth = chance.choice(((2, 40), (1, 3000), (1, 2)))
        behind_functions(model, chance.choice(model.graph.node), calls, depth)
        return f'{depth} functions', model.SerializeToString()
    while True:
        tree = json_format.MessageToDict(onnx.load_from_string(whole))
        what = change_tree(tree, chance)
        with contextlib.suppress(json_format.ParseError):  # the field cannot hold this value: another change
            return what, json_format.ParseDict(tree, onnx.ModelProto()).SerializeToString()


# ---- images ---------------------------------------------------------------------------------------------------------------------


def change_image(whole, chance):
    """Bytes of the head; of a PNG with a right checksum."""
    at, value = chance.randrange(4, 64), chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    if whole.startswith(b'\x89PNG'):
        head, at = bytearray(whole[16:29]), at % 13
        head[at] = value
        return f'IHDR {at} is {value}', whole[:16] + head + struct.pack('>I', zlib.crc32(b'IHDR' + head)) + whole[33:]
    return f'byte {at} is {value}', whole[:at] + bytes([value]) + whole[at + 1 :]


# ---- arrays of NumPy ------------------------------------------------------------------------------------------------------------


def change_array(whole, chance):
    """An array of another shape or type, with a right header."""
    array = np.load(io.BytesIO(whole))
    kind = chance.choice((np.uint8, np.uint8, np.int64, np.float32, np.complex128, bool, 'S3', object))
    axes = [n + chance.choice((0, 0, 0, 1, -1, -n)) for n in array.shape]
    shape = chance.choice((axes, axes[:2], axes[:1], [], [*axes, 1], [*axes[:2], 4], axes[::-1]))
    return f'{kind} {shape}', npy(np.zeros(shape, kind, order=chance.choice('CF')))


FORMATS = {  # of faults.KINDS; None: nothing is known of it
    **dict.fromkeys(['float checkpoint', 'dual checkpoint', 'quantized checkpoint', 'resume', 'pth'], change_archive),
    **dict.fromkeys(['sensitivity', 'coco', 'convert', 'sidecar', 'layers', 'profile', 'report'], change_json),
    **dict.fromkeys(['data', 'network', 'hyp'], change_yaml),
    **dict.fromkeys(['label', 'manifest', 'openvino', 'voc'], change_lines),
    **dict.fromkeys(['image', 'class image'], change_image),
    'onnx': change_onnx,
    'copy': change_array,
    'program': change_program,
    'openvino weights': None,
}
