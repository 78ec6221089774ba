#!/usr/bin/env python3
"""Convert trained weights to a plain file, and back to a checkpoint.

    python demo/weights.py pack  CKPT  STATE.pt   upstream checkpoint -> {"state_dict", "yaml", "names"}, FP16
    python demo/weights.py build STATE.pt OUT.pt  that file -> checkpoint that upstream's attempt_load accepts

Why: an upstream checkpoint is a pickled module. Loading it can execute code, and fails when class paths change.
The packed file has only tensors, numbers and strings. It loads with weights_only=True and is small enough to commit.
Both directions are strict: a missing or additional key is an error. Both write a temporary file and rename it.

`import models.yolo` must find a patched YOLOv9 tree: run it there, or name the tree with --yolov9 DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_BYTES = 6_000_000  # a packed file is meant to be committed


class Mistake(Exception):
    """A user's mistake, reported in one line with exit code 2."""


def import_upstream(tree: str) -> ModuleType:
    """Import upstream's models.yolo from the folder `tree`."""
    if not (Path(tree) / 'models' / 'yolo.py').is_file():
        raise Mistake(f'{tree} is not a YOLOv9 tree (no models/yolo.py); name one with --yolov9 DIR')
    sys.path.insert(0, str(Path(tree).absolute()))
    import models.yolo

    return models.yolo


def save(content: dict[str, Any], path: str | Path) -> None:
    """Write a file by torch.save under a temporary name, then rename it: an incomplete file never has the final name."""
    import torch  # here, because `-h` must neither need it nor wait for it

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        torch.save(content, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def half(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a floating tensor to FP16; return others unchanged."""
    if not tensor.is_floating_point():
        return tensor
    if not tensor.half().isfinite().all():
        raise Mistake('the checkpoint holds values that are not finite in FP16')
    return tensor.half()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Make the content of a packed file from an upstream model: only plain types and FP16 tensors."""
    names = model.names if isinstance(model.names, dict) else dict(enumerate(model.names))
    return {
        'state_dict': {key: half(value).clone() for key, value in model.state_dict().items()},
        # a ClassificationModel has none: it is cut from the demo's detector
        'yaml': getattr(model, 'yaml', None) or {'cutoff': len(model.model)},
        'names': {int(key): str(name) for key, name in names.items()},
    }


def classifier_from(state: dict[str, Any], upstream: ModuleType) -> nn.Module:
    """Build upstream's ClassificationModel in FP16, cut from the demo's detector as classify/train.py does; see `model_from`."""
    names, cutoff = state['names'], state['yaml']['cutoff']
    detector = upstream.DetectionModel(str(Path(__file__).parent / 'yolov9-demo.yaml'))
    model = upstream.ClassificationModel(model=detector, nc=len(names), cutoff=cutoff)
    try:
        model.load_state_dict(state['state_dict'], strict=True)
    except RuntimeError as e:
        raise Mistake(f'tensors are missing, left over or of another shape: {" ".join(str(e).split())[:200]}') from e
    model.names = names
    return model.half().eval().requires_grad_(False)


def model_from(state: dict[str, Any], upstream: ModuleType) -> nn.Module:
    """Build upstream's model in FP16 from the content of a packed file, see `state_of`, which must match exactly.

    It has the attributes that upstream's training adds. The head, the last layer of the config, determines its class.
    """
    from models.quantize.reparameterize import parameter_shapes, require_small_maps

    if 'cutoff' in state['yaml']:
        return classifier_from(state, upstream)
    content = {**state['yaml'], 'nc': len(state['names'])}
    needed, given = (
        parameter_shapes(content, 'its config'),
        {key: tuple(value.shape) for key, value in state['state_dict'].items()},
    )
    if needed != given:
        wrong = [key for key in {**needed, **given} if needed.get(key) != given.get(key)]
        raise Mistake(f'{len(wrong)} tensors are missing, left over or of another shape, the first is {wrong[0]}')
    require_small_maps(content, 'its config')
    kind = upstream.SegmentationModel if content['head'][-1][2].endswith('Segment') else upstream.DetectionModel
    model = kind(content)
    model.load_state_dict(state['state_dict'], strict=True)
    model.names, model.nc = state['names'], len(state['names'])
    return model.half().eval().requires_grad_(False)


def pack(checkpoint: str, out: str) -> None:
    """Convert an upstream checkpoint to a packed file; as in upstream, the averaged weights (`ema`) take precedence."""
    from models.quantize.checkpoint import CheckpointFile  # of the patched tree

    _, model = CheckpointFile(checkpoint).load_dual_or_float()
    if not hasattr(model, 'yaml') and type(model).__name__ != 'ClassificationModel':
        raise Mistake(f'{checkpoint}: not an upstream checkpoint (its model has no yaml)')
    state = state_of(model)
    size = sum(value.numel() * value.element_size() for value in state['state_dict'].values())
    if size > MAX_BYTES:
        raise Mistake(
            f'{checkpoint}: {size / 1e6:.1f} MB of weights in FP16; at most {MAX_BYTES / 1e6:.0f} MB are packed'
        )
    save(state, out)


def build(packed: str, out: str, upstream: ModuleType) -> None:
    """Convert a packed file to an upstream checkpoint, like one of a finished training (epoch -1, no optimizer)."""
    from utils.qat.untrusted.plain_values import read_values  # of the patched tree

    state = read_values(packed, 'STATE.pt')
    missing = {'state_dict', 'yaml', 'names'} - set(state if isinstance(state, dict) else ())
    if missing:
        raise Mistake(f'{packed}: not a packed file (no {", ".join(sorted(missing))})')
    from utils.qat.core.errors import QatError

    try:
        model = model_from(state, upstream)
    except (Mistake, QatError, TypeError, AttributeError) as error:  # TypeError, AttributeError: content of other types
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
    """An argparse parser that reports an error in one line with exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f'{self.prog}: {message}\n')


def main() -> None:
    """Run the verb on the command line."""
    parser = Parser(description=__doc__.splitlines()[0])
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
    from utils.qat.core.log import quiet_upstream

    try:
        if args.verb == 'pack':
            pack(args.source, args.out)
        else:
            with quiet_upstream():  # it prints a table of the layers
                build(args.source, args.out, upstream)
    except (Mistake, QatError) as error:
        # keys and names come from the file
        parser.error(''.join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)))
    print(f'{args.out}: {Path(args.out).stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
