#!/usr/bin/env python3
"""Trained weights as a plain file, and back.

    python demo/weights.py pack  CKPT  STATE.pt   upstream checkpoint -> {"state_dict", "yaml", "names"}, FP16
    python demo/weights.py build STATE.pt OUT.pt  that file -> checkpoint that upstream's attempt_load accepts

Why: an upstream checkpoint is a pickled module. Loading one can execute code, and it breaks when class paths change.
The packed file is tensors, numbers and strings; it loads with weights_only=True and is small enough to commit.
Both directions are strict: a key missing or left over is an error. Both write a temporary name and rename.

`import models.yolo` must find a patched YOLOv9 tree: run it there, or name the tree with --yolov9 DIR.
"""

import argparse
import os
import sys
from pathlib import Path

MAX_BYTES = 6_000_000  # a packed file is meant to be committed


class Mistake(Exception):
    """The user's: told in one line, exit code 2."""


def import_upstream(tree):
    """upstream's models.yolo, from the tree at `tree`."""
    if not (Path(tree) / 'models' / 'yolo.py').is_file():
        raise Mistake(f'{tree} is not a YOLOv9 tree (no models/yolo.py); name one with --yolov9 DIR')
    sys.path.insert(0, str(Path(tree).absolute()))
    import models.yolo

    return models.yolo


def save(content, path):
    """torch.save under a temporary name, then rename: a half-written file never has the final name."""
    import torch  # in the function: `-h` must not pay for it, nor need it

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        torch.save(content, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def half(tensor):
    """FP16, if it is a floating tensor. A value that FP16 cannot hold is a Mistake."""
    if not tensor.is_floating_point():
        return tensor
    if not tensor.half().isfinite().all():
        raise Mistake('the checkpoint holds values that are not finite in FP16')
    return tensor.half()


def state_of(model):
    """Packed content of an upstream model: plain types and FP16 tensors only."""
    names = model.names if isinstance(model.names, dict) else dict(enumerate(model.names))
    return {
        'state_dict': {key: half(value).clone() for key, value in model.state_dict().items()},
        'yaml': model.yaml,
        'names': {int(key): str(name) for key, name in names.items()},
    }


def model_from(state, upstream):
    """Upstream's model in FP16 from packed content; the attributes upstream's training would have hung on it included.

    Its class follows from the head, the last layer of the config. Nothing is built that is not a network of the tensors that are there.
    """
    from models.quantize.weightless import parameter_shapes

    content = {**state['yaml'], 'nc': len(state['names'])}
    needed, given = (
        parameter_shapes(content, 'its config'),
        {key: tuple(value.shape) for key, value in state['state_dict'].items()},
    )
    if needed != given:
        wrong = [key for key in {**needed, **given} if needed.get(key) != given.get(key)]
        raise Mistake(f'{len(wrong)} tensors are missing, left over or of another shape, the first is {wrong[0]}')
    kind = upstream.SegmentationModel if content['head'][-1][2].endswith('Segment') else upstream.DetectionModel
    model = kind(content)
    model.load_state_dict(state['state_dict'], strict=True)
    model.names, model.nc = state['names'], len(state['names'])
    return model.half().eval().requires_grad_(False)


def pack(checkpoint, out):
    """Upstream checkpoint -> packed file. Prefers the averaged weights (`ema`), as upstream does."""
    from models.quantize.checkpoint import load_dual_or_float  # of the patched tree

    _, model = load_dual_or_float(checkpoint)
    if not hasattr(model, 'yaml'):
        raise Mistake(f'{checkpoint}: not an upstream checkpoint (its model has no yaml)')
    state = state_of(model)
    size = sum(value.numel() * value.element_size() for value in state['state_dict'].values())
    if size > MAX_BYTES:
        raise Mistake(
            f'{checkpoint}: {size / 1e6:.1f} MB of weights in FP16; at most {MAX_BYTES / 1e6:.0f} MB are packed'
        )
    save(state, out)


def build(packed, out, upstream):
    """Packed file -> upstream checkpoint, as upstream's training leaves it when it has finished (epoch -1, no optimizer)."""
    from utils.qat.untrusted.plain_values import read_values  # of the patched tree

    state = read_values(packed, 'STATE.pt')
    missing = {'state_dict', 'yaml', 'names'} - set(state if isinstance(state, dict) else ())
    if missing:
        raise Mistake(f'{packed}: not a packed file (no {", ".join(sorted(missing))})')
    from utils.qat.core.errors import QatError

    try:
        model = model_from(state, upstream)
    except (Mistake, QatError, TypeError, AttributeError) as error:  # the last: of content of other types
        raise Mistake(f'{packed}: {error}') from None
    save(
        {
            'model': model,
            'ema': None,
            'epoch': -1,
            'optimizer': None,
            'best_fitness': None,
            'updates': None,
            'opt': None,
            'git': None,
            'date': None,
        },
        out,
    )


class Parser(argparse.ArgumentParser):
    """argparse without the usage block: a mistake gets one line and exit code 2."""

    def error(self, message):
        self.exit(2, f'{self.prog}: {message}\n')


def main():
    parser = Parser(description='Trained weights as a plain file, and back.')
    parser.add_argument('verb', choices=('pack', 'build'))
    parser.add_argument('source', help='pack: upstream checkpoint; build: packed file')
    parser.add_argument('out', help='pack: packed file; build: upstream checkpoint')
    parser.add_argument('--yolov9', default='.', metavar='DIR', help='patched YOLOv9 tree (default: this folder)')
    args = parser.parse_args()
    try:
        upstream = import_upstream(args.yolov9)
    except Mistake as error:
        parser.error(str(error))
    from utils.qat.core.errors import QatError

    try:
        if args.verb == 'pack':
            pack(args.source, args.out)
        else:
            build(args.source, args.out, upstream)
    except (Mistake, QatError) as error:
        parser.error(
            ''.join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        )  # keys and names are the file's
    print(f'{args.out}: {Path(args.out).stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
