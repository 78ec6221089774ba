"""Units of a network: layers, blocks or convolutions that are measured, and kept in float, as a whole.

The name of a unit is its path. It contains the quantized twins at that path and below (see blocks.py).
"""

import re
from collections.abc import Callable, Collection, Sequence

import torch.nn as nn

from models.quantize.network import layers
from utils.qat.core.errors import QatError

CONTAINERS = (nn.Sequential, nn.ModuleList)


def within(path: str, unit: str) -> bool:
    """Tell whether `path` is the unit `unit` or lies inside it."""
    return path == unit or path.startswith(f'{unit}.')


def layer_of(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Find the path and module of the layer (see network.layers) that is or contains `path`."""
    return next((at, layer) for at, layer in layers(model).items() if within(path, at))


def _block(model: nn.Module, path: str) -> str:
    """Find the path of the block that the twin at `path` belongs to.

    A layer that is built of blocks (ELAN, the head) keeps them in containers: its blocks are the parts that are no
    containers. Any other layer is one block, and so is each layer of a torchvision classifier.
    """
    unit, module = layer_of(model, path)
    names = path[len(unit) + 1 :].split('.') if path != unit else []
    if not hasattr(model, 'model') or not any(isinstance(m, CONTAINERS) for m in module.modules()):
        return unit
    for name in names:
        module, unit = getattr(module, name), f'{unit}.{name}'
        if not isinstance(module, CONTAINERS):
            break
    return unit


def find_units(model: nn.Module, twins: Collection[str], granularity: str) -> dict[str, list[str]]:
    """Group twins (paths) into units, by one of GRANULARITIES: unit → paths of its twins, in the order of the network."""
    unit_of: dict[str, Callable[[str], str]] = {  # granularity → (path of a twin → its unit)
        'layer': lambda path: layer_of(model, path)[0],
        'block': lambda path: _block(model, path),
        'conv': lambda path: path.removesuffix('act') + 'conv' if path.endswith('.act') else path,
    }
    units: dict[str, list[str]] = {}
    for path, _ in model.named_modules(remove_duplicate=False):  # upstream's blocks share one activation function
        if path in twins:
            units.setdefault(unit_of[granularity](path), []).append(path)
    return units


def _matching(paths: Sequence[str], regex: str, flag: str) -> set[str]:
    """Select the paths that `regex`, given with `flag`, matches from their start up to their end or a dot."""
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


def left_out(paths: Sequence[str], exclude: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    """Select the twins, of `paths`, that stay in float by the regular expressions of --exclude and --only.

    They are matched from the start of a path: 'model.2' is layer 2 and everything in it, and not layer 22. With `only`,
    a twin that none of them matches stays in float. Raises QatError if an expression is invalid or matches nothing, or
    if no twin is left to quantize.
    """
    chosen: set[str] = set().union(*(_matching(paths, regex, '--only') for regex in only)) if only else set(paths)
    chosen -= set().union(*(_matching(paths, regex, '--exclude') for regex in exclude))
    if not chosen:
        raise QatError('--exclude, --only: nothing is left to quantize')
    return [path for path in paths if path not in chosen]
