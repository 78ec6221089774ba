"""Units of a network: what is judged, and kept in float, as one: a layer, a block or a convolution.

A unit is named by its path. It holds the quantized twins at that path and below it (see blocks.py).
"""

import re

import torch.nn as nn

from utils.qat.core.errors import QatError

CONTAINERS = (nn.Sequential, nn.ModuleList)


def within(path, unit):
    """Whether `path` is that of `unit` or of something inside it."""
    return path == unit or path.startswith(f'{unit}.')


def _block(model, path):
    """The block that the twin at `path` belongs to: of layers that are built of blocks (ELAN, the head), which hold them in
    containers, a part that is no container itself; any other layer is one block."""
    layer, *names = path.split('.')[1:]
    module, unit = model.model[int(layer)], f'model.{layer}'
    if not any(isinstance(m, CONTAINERS) for m in module.modules()):
        return unit
    for name in names:
        module, unit = getattr(module, name), f'{unit}.{name}'
        if not isinstance(module, CONTAINERS):
            break
    return unit


def find_units(model, twins, granularity):
    """{unit: paths of its twins}, in the order of the network. model: quantized or float. twins: paths, as in
    Conversion.swapped. granularity: see config.qat.GRANULARITIES."""
    of_twin = {
        'layer': lambda path: '.'.join(path.split('.')[:2]),
        'block': lambda path: _block(model, path),
        'conv': str,
    }[granularity]
    units = {}
    for path, _ in model.named_modules():
        if path in twins:
            units.setdefault(of_twin(path), []).append(path)
    return units


def _matching(paths, regex, flag):
    """Those of `paths` that `regex` matches: from their start to their end or to a dot."""
    try:
        pattern = re.compile(f'(?:{regex})(?:\\.|$)')
    except re.error as e:
        raise QatError(f'{flag} {regex}: no regular expression ({e})') from e
    found = {path for path in paths if pattern.match(path)}
    if not found:
        raise QatError(
            f'{flag} {regex}: matches no quantized layer; their paths start like {min(paths)}, and '
            'sensitive --granularity conv lists them all'
        )
    return found


def left_out(paths, exclude=(), only=()):
    """Of `paths`, of twins, those that stay in float: that one of `exclude` matches or, where there is any in `only`, that none of
    these matches. Both are regular expressions over a path from its start on: 'model.2' is layer 2 and all in it, and not layer 22.

    Raises QatError for one that matches nothing, and if nothing is left to quantize.
    """
    chosen = set().union(*(_matching(paths, regex, '--only') for regex in only)) if only else set(paths)
    chosen -= set().union(*(_matching(paths, regex, '--exclude') for regex in exclude))
    if not chosen:
        raise QatError('--exclude, --only: nothing is left to quantize')
    return [path for path in paths if path not in chosen]
