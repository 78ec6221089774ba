"""Checkpoints of other trainings, written for the tests from upstream's models, without the packages that write them."""

import re
import sys
import types
from unittest import mock

import torch
from models.common import Conv, DWConv
from torch import nn

from helpers.zoo import build, config

PACKAGE = 'ultralytics.nn'


def gelan(size, nc, head, **how):
    """Upstream's gelan model of a size with another head, random weights that are FP16 numbers."""
    *body, (inputs, *_) = config(f'gelan-{size}')['head']
    model = build(f'gelan-{size}', nc=nc, head=[*body, [inputs, 1, head, ['nc']]])
    if head == 'Detect':
        model.model[-1].cv3 = class_branch(model.model[-1], nc, **how)
    return model.half().float()


def class_branch(head, nc, depthwise=False):
    """The class branch of a head as Ultralytics builds it."""
    inputs = [branch[0].conv.in_channels for branch in head.cv3]
    width = max(inputs[0], min(nc, 100))

    def block(channels):
        return (
            nn.Sequential(DWConv(channels, channels, 3), Conv(channels, width, 1))
            if depthwise
            else Conv(channels, width, 3)
        )

    made = nn.ModuleList(nn.Sequential(block(c), block(width), nn.Conv2d(width, nc, 1)) for c in inputs)
    for norm in (m for m in made.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.eps = 1e-3
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return made.eval()


def ultralytics_file(path, model, kind='DetectionModel', **attributes):
    """Write a model as that package does: pickled, in FP16, its classes of other names, as the average `ema`."""
    names = ('tasks', kind), ('modules.block', 'Block')
    made = {
        name: types.ModuleType(name) for name in (PACKAGE.split('.')[0], PACKAGE, *(f'{PACKAGE}.{m}' for m, _ in names))
    }
    top, block = (type(cls, (nn.Module,), {'__module__': f'{PACKAGE}.{module}'}) for module, cls in names)
    setattr(made[f'{PACKAGE}.tasks'], kind, top)
    made[f'{PACKAGE}.modules.block'].Block = block

    def copied(module, cls):
        new = cls()
        vars(new).update(_parameters=module._parameters, _buffers=module._buffers, training=False)
        for name, child in module.named_children():
            new.add_module(name, copied(child, block))
        return new

    with mock.patch.dict(sys.modules, made):
        averaged = copied(model.half(), top)
        vars(averaged).update(
            {'names': model.names, 'stride': model.stride, 'yaml': {'yaml_file': 'yolov9x.yaml'}} | attributes
        )
        torch.save(
            {'epoch': -1, 'model': None, 'ema': averaged, 'train_args': {'imgsz': 640}, 'version': '8.3.0'}, path
        )
    model.float()
    return path


BACK = (  # upstream's names → those of MultimediaTechLab/YOLO
    (r'^model\.', ''),
    (r'^(\d+)\.cv2\.(\d)\.(\d)', r'\1.heads.\2.anchor_conv.\3'),
    (r'^(\d+)\.cv3\.(\d)\.(\d)', r'\1.heads.\2.class_conv.\3'),
)


def mit_state(model):
    """The state dict of a model as MultimediaTechLab/YOLO names it, with an auxiliary branch."""
    types_of = {f'{name}.': type(module).__name__ for name, module in model.named_modules()}
    last, state = len(model.model) - 1, {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f'model.{last}.'):
            if 'dfl' in name:
                state |= {f'{last}.heads.{i}.anc2vec.anc2vec.weight': tensor[..., None] for i in range(3)}
                continue
            for ours, theirs in BACK:
                name = re.sub(ours, theirs, name)
        else:
            parts, made = name.split('.'), []
            for i, part in enumerate(parts):
                owner = types_of.get('.'.join(parts[:i]) + '.', '')
                part = re.sub(r'^cv(\d)$', 'conv' if owner == 'AConv' else r'conv\1', part)
                made.append('bottleneck' if part == 'm' else part)
            name = '.'.join(made[1:])
        state[name] = tensor
    auxiliary = {
        f'{last + 1}.conv.weight': torch.zeros(2, 3, 1, 1),
        f'{last + 2}.heads.0.class_conv.2.weight': torch.zeros(7, 3, 1, 1),
    }
    return {**state, **auxiliary}
