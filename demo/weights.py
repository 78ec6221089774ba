#!/usr/bin/env python3
"""Convert trained weights to a plain file, and back to a checkpoint.

    python demo/weights.py pack  CKPT  STATE.pt   upstream checkpoint -> {"state_dict", "yaml", "names"}, FP16
    python demo/weights.py build STATE.pt OUT.pt  that file -> checkpoint that upstream's attempt_load accepts

Why: an upstream checkpoint is a pickled module. Loading it can execute code, and fails when class paths change.
The packed file has only tensors, numbers and strings. It loads with weights_only=True and is small enough to commit.
Both directions are strict: a missing or additional key is an error. Both write a temporary file and rename it.

Run it in a patched YOLOv9 tree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # says what is missing where there is no tree
sys.path.insert(0, os.getcwd())
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import write_torch
from utils.qat.core.log import quiet_upstream

if TYPE_CHECKING:
    import torch

    from utils.qat.core.upstream import Network

MAX_BYTES = 6_000_000  # a packed file is meant to be committed


def half(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a floating tensor to FP16; return others unchanged."""
    if not tensor.is_floating_point():
        return tensor
    if not tensor.half().isfinite().all():
        raise QatError('the checkpoint holds values that are not finite in FP16')
    return tensor.half()


def state_of(model: Network) -> dict[str, Any]:
    """Make the content of a packed file from an upstream model: only plain types and FP16 tensors."""
    names = model.names if isinstance(model.names, dict) else dict(enumerate(model.names))
    return {
        'state_dict': {key: half(value).clone() for key, value in model.state_dict().items()},
        # a ClassificationModel has none: it is cut from the demo's detector
        'yaml': getattr(model, 'yaml', None) or {'cutoff': len(model.model)},
        'names': {int(key): str(name) for key, name in names.items()},
    }


def classifier_from(state: dict[str, Any]) -> Network:
    """Build upstream's ClassificationModel in FP16, cut from the demo's detector as classify/train.py does; see `model_from`."""
    from models.yolo import ClassificationModel, DetectionModel

    names, cutoff = state['names'], state['yaml']['cutoff']
    detector = DetectionModel(str(Path(__file__).parent / 'yolov9-demo.yaml'))
    model = ClassificationModel(model=detector, nc=len(names), cutoff=cutoff)
    with reporting('tensors are missing, left over or of another shape', RuntimeError):
        model.load_state_dict(state['state_dict'], strict=True)
    model.names = names
    return model.half().eval().requires_grad_(False)


def model_from(state: dict[str, Any]) -> Network:
    """Build upstream's model in FP16 from the content of a packed file, see `state_of`, which must match exactly.

    It has the attributes that upstream's training adds. The head, the last layer of the config, determines its class.
    """
    from models.yolo import DetectionModel, SegmentationModel

    from models.quantize.reparameterize import parameter_shapes, require_small_maps

    if 'cutoff' in state['yaml']:
        return classifier_from(state)
    content = {**state['yaml'], 'nc': len(state['names'])}
    needed = parameter_shapes(content, 'its config')
    given = {key: tuple(value.shape) for key, value in state['state_dict'].items()}
    if needed != given:
        wrong = [key for key in {**needed, **given} if needed.get(key) != given.get(key)]
        raise QatError(f'{len(wrong)} tensors are missing, left over or of another shape, the first is {wrong[0]}')
    require_small_maps(content, 'its config')
    model = (SegmentationModel if content['head'][-1][2].endswith('Segment') else DetectionModel)(content)
    model.load_state_dict(state['state_dict'], strict=True)
    model.names, model.nc = state['names'], len(state['names'])
    return model.half().eval().requires_grad_(False)


def pack(checkpoint: Path, out: Path) -> None:
    """Convert an upstream checkpoint to a packed file; as in upstream, the averaged weights (`ema`) take precedence."""
    from models.quantize.checkpoint import CheckpointFile

    _, model = CheckpointFile(checkpoint).load_dual_or_float()
    if not hasattr(model, 'yaml') and type(model).__name__ != 'ClassificationModel':
        raise QatError(f'{checkpoint}: not an upstream checkpoint (its model has no yaml)')
    state = state_of(model)
    size = sum(value.numel() * value.element_size() for value in state['state_dict'].values())
    if size > MAX_BYTES:
        raise QatError(
            f'{checkpoint}: {size / 1e6:.1f} MB of weights in FP16; at most {MAX_BYTES / 1e6:.0f} MB are packed'
        )
    write_torch(out, state)


def build(packed: Path, out: Path) -> None:
    """Convert a packed file to an upstream checkpoint, like one of a finished training (epoch -1, no optimizer)."""
    from utils.qat.untrusted.plain_values import read_values

    state = read_values(packed, 'STATE.pt')
    missing = {'state_dict', 'yaml', 'names'} - set(state if isinstance(state, dict) else ())
    if missing:
        raise QatError(f'{packed}: not a packed file (no {", ".join(sorted(missing))})')
    try:
        model = model_from(state)
    except (QatError, TypeError, AttributeError) as error:  # TypeError, AttributeError: content of other types
        raise QatError(f'{packed}: {error}') from None
    left_out = 'ema', 'optimizer', 'best_fitness', 'updates', 'opt', 'git', 'date'
    write_torch(out, {'model': model, 'epoch': -1, **dict.fromkeys(left_out)})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the verb on the command line."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('verb', choices=('pack', 'build'))
    parser.add_argument('source', type=Path, help='pack: upstream checkpoint; build: packed file')
    parser.add_argument('out', type=Path, help='pack: packed file; build: upstream checkpoint')
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with quiet_upstream():  # it prints a table of the layers
        (pack if args.verb == 'pack' else build)(args.source, args.out)
    print(f'{args.out}: {args.out.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    sys.exit(run_command(main))
