"""Dual-branch model → single-branch model with the same main outputs.

YOLOv9 trains with an auxiliary branch that inference does not need. What it is follows from the graph: the layers that
the main inputs of the head do not reach. They are dropped, the rest is renumbered, and the Dual head becomes its
single twin. Nothing depends on the model's size, so custom widths and class counts work as well.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn as nn
from models.common import Silence

from models import yolo
from models.quantize.weightless import parameter_shapes
from utils.qat.core.errors import QatError
from utils.qat.untrusted.model_yaml import require_network

# Dual head → its single twin, and the submodules of the main branch under their new names. Upstream evaluates the first
# half of a Dual head's inputs with cv2/cv3 (auxiliary) and the second half with cv4/cv5/dfl2 (main). A Triple head
# (yolov9-cf) has two auxiliary branches; val_triple.py evaluates the last third, with cv6/cv7/dfl3.
HEADS = {
    'TripleDetect': ('Detect', {'cv6': 'cv2', 'cv7': 'cv3', 'dfl3': 'dfl'}),
    'TripleDDetect': ('DDetect', {'cv6': 'cv2', 'cv7': 'cv3', 'dfl3': 'dfl'}),
    'DualDetect': ('Detect', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl'}),
    'DualDDetect': ('DDetect', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl'}),
    'DualDSegment': ('DSegment', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl', 'cv7': 'cv4', 'proto2': 'proto'}),
}


@dataclass
class Reparameterized:
    """The result: the model and what happened to the layers."""

    model: nn.Module
    kept: list  # old indices, in order
    dropped: list
    head: str  # class of the new head


def _sources(layer):
    """Indices of the layers that `layer` reads; -1 is the image."""
    froms = [layer.f] if isinstance(layer.f, int) else layer.f
    return [layer.i - 1 if f == -1 else f for f in froms]


def _main_inputs(head):
    """The inputs of a Dual or Triple head that its main branch reads: the last `nl` maps, and the last prototype map."""
    f = list(head.f)
    if type(head).__name__ == 'DualDSegment':
        return f[:-2][-head.nl :] + f[-1:]
    return f[-head.nl :]


def _reached(model, inputs):
    """Indices of the layers needed to compute the layers `inputs`, in order."""
    needed, waiting = set(), list(inputs)
    while waiting:
        i = waiting.pop()
        if i >= 0 and i not in needed:
            needed.add(i)
            waiting += _sources(model.model[i])
    kept = sorted(needed)
    # A leading Silence names the image for layers further down. If only the next layer reads it, it is not needed.
    readers = [i for i in kept if 0 in _sources(model.model[i])]
    if kept and kept[0] == 0 and isinstance(model.model[0], Silence) and readers == [1]:
        kept = kept[1:]
    return kept


def _single_yaml(model, kept, inputs, head):
    """The model's YAML with only the layers `kept`, renumbered, and `head` on the layers `inputs`."""
    rows = model.yaml['backbone'] + model.yaml['head']
    new_index = {-1: -1, **{old: new for new, old in enumerate(kept)}}

    def renumber(old, reader):  # to the index the YAML format wants: -1 for the layer before
        new = new_index.get(old, -1)  # a dropped Silence is the image, which is "before" the first layer
        return -1 if new == reader - 1 else new

    layers = []
    for i, old in enumerate(kept):
        f = [renumber(s, i) for s in _sources(model.model[old])]
        layers.append([f[0] if isinstance(model.model[old].f, int) else f, *deepcopy(rows[old][1:])])
    layers.append([[new_index[i] for i in inputs], 1, head, deepcopy(rows[-1][3])])
    in_backbone = sum(old < len(model.yaml['backbone']) for old in kept)
    return {**deepcopy(model.yaml), 'backbone': layers[:in_backbone], 'head': layers[in_backbone:]}


def _single_state(model, kept, renames):
    """State dict of the single model: kept layers renumbered, main-branch parts of the head renamed."""
    new_index = {old: new for new, old in enumerate(kept)}
    head_index, state = len(model.model) - 1, {}
    for key, value in model.state_dict().items():
        _, layer, rest = key.split('.', 2)
        if int(layer) in new_index:
            state[f'model.{new_index[int(layer)]}.{rest}'] = value
        elif int(layer) == head_index:
            part, _, tail = rest.partition('.')
            if part in renames:
                state[f'model.{len(kept)}.{renames[part]}.{tail}'] = value
    return state


def reparameterize(model):
    """A new single-branch model (FP32, eval mode, CPU) that computes what the main branch of `model` computes.

    Raises QatError if the head has no single twin in this upstream tree, or if any parameter is missing or left over.
    """
    old_head = model.model[-1]
    if type(old_head).__name__ not in HEADS:
        raise QatError(
            f'the head is {type(old_head).__name__}: only {", ".join(HEADS)} have an auxiliary branch to remove'
        )
    head, renames = HEADS[type(old_head).__name__]
    if not hasattr(yolo, head):
        raise QatError(f'this upstream tree has no {head}; use a full clone of WongKinYiu/yolov9')
    source, content = 'the YAML inside the checkpoint', getattr(model, 'yaml', None)
    require_network(content, source)
    if not isinstance(model, yolo.DetectionModel) or len(content['backbone'] + content['head']) != len(model.model):
        raise QatError(f"{source}: is not that of its model; use a checkpoint of upstream's training")
    inputs = _main_inputs(old_head)
    kept = _reached(model, inputs)

    content = _single_yaml(model, kept, inputs, head)
    ours, state = parameter_shapes(content, source), _single_state(model.float(), kept, renames)
    wrong = sorted(set(ours) ^ set(state)) or [k for k in ours if ours[k] != state[k].shape]
    if wrong:
        raise QatError(
            f'reparameterization: {len(wrong)} parameters do not match, the first is {wrong[0]}; '
            'please report this model'
        )
    single = type(model)(content, ch=content.get('ch') or 3)
    single.load_state_dict(state, strict=True)
    for attribute in ('names', 'nc', 'hyp', 'args', 'task'):
        if hasattr(model, attribute):
            setattr(single, attribute, deepcopy(getattr(model, attribute)))
    dropped = [i for i in range(len(model.model) - 1) if i not in kept]
    return Reparameterized(single.eval(), kept, dropped, head)


@torch.no_grad()
def largest_difference(dual, single, size=64):
    """Largest absolute difference between the main outputs of `dual` and the outputs of `single` on a random image."""
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    ours, theirs = (m.eval()(image)[0] for m in (single, dual))
    return (ours - (theirs[-1] if isinstance(theirs, (list, tuple)) else theirs)).abs().max().item()
