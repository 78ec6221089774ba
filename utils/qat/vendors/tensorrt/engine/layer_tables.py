"""An engine in tables: a row for each layer (CSV), and sums and findings to read (Markdown)."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from os.path import commonprefix
from pathlib import Path

from utils.qat.core.files import atomic
from utils.qat.core.text import markdown_table
from utils.qat.graph.onnx_graph import module_path
from utils.qat.vendors.tensorrt.engine.layer_rules import (
    COSTS,
    LayerFinding,
    is_convolution,
    is_qdq,
    is_reformat,
    tensor_cores,
)
from utils.qat.vendors.tensorrt.engine.layers import Engine, Layer, Tensor

NODE = re.compile(r'(?<![\w.])/[\w./]+')  # a node's path by PyTorch's exporter: /model.2/cv1/conv/Conv
WIDTH = 44  # characters of a short name


def shape_text(tensor: Tensor) -> str:
    """Write the shape of `tensor` as 1×64×80×80; '?' if it is unknown."""
    return '?' if tensor.shape is None else '×'.join(map(str, tensor.shape)) or 'scalar'


def short_name(layer: Layer) -> str:
    """Name `layer` in at most WIDTH characters: the common module of its ONNX nodes, and their operators."""
    paths = [p for name in layer.nodes or [layer.name] for p in NODE.findall(name)]
    paths = [p for p in paths if not p.endswith(('QuantizeLinear', 'DequantizeLinear'))] or paths
    name = layer.name
    if paths:
        scopes, operators = zip(*(p.rsplit('/', 1) for p in paths))
        module = module_path(commonprefix([s.strip('/').split('/') for s in scopes]))
        name = f'{module} {"+".join(dict.fromkeys(o.split("_")[0] for o in operators))}'.strip()
    return name if len(name) <= WIDTH else f'{name[: WIDTH // 2]}…{name[1 - WIDTH // 2 :]}'


def _cells(engine: Engine, index: int, findings: Sequence[LayerFinding]) -> dict[str, object]:
    """Describe a layer of an engine: column → cell. Lists are joined by '; '; '' where there is nothing."""
    layer = engine.layers[index]
    share = None if layer.ms is None else engine.share([layer])
    return {
        'index': index,
        'name': layer.name,
        'short name': short_name(layer),
        'kind': layer.kind,
        'type in': layer.types[0],
        'type out': layer.types[1],
        'weights': layer.weights,
        'shapes in': '; '.join(map(shape_text, layer.inputs)),
        'shapes out': '; '.join(map(shape_text, layer.outputs)),
        'formats in': '; '.join(t.format for t in layer.inputs),
        'formats out': '; '.join(t.format for t in layer.outputs),
        'ms': layer.ms,
        'share': '' if share is None else f'{share:.6f}',
        'tensor cores': tensor_cores(layer) if is_convolution(layer) else '',
        'kernel': layer.tactic,
        'onnx nodes': '; '.join(layer.nodes),
        'findings': '; '.join(f.kind for f in findings if f.layer is layer),
    }


def write_csv(path: Path, engine: Engine, findings: Sequence[LayerFinding]) -> None:
    """Write a row for each layer, in the order in which they run."""
    rows = [_cells(engine, index, findings) for index in range(len(engine.layers))]
    with atomic(path) as tmp, open(tmp, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _sums(engine: Engine, what: str, key: Callable[[Layer], str]) -> str:
    """Make a table of the layers with each value of `key`: their number, time and share; `what` is its first title."""
    groups: dict[str, list[Layer]] = {}
    for layer in engine.layers:
        groups.setdefault(key(layer), []).append(layer)
    ordered = sorted(groups.items(), key=lambda item: (-sum(layer.ms or 0 for layer in item[1]), -len(item[1])))
    return markdown_table((what, 'layers', 'ms', 'share'), [[name, *_time(engine, layers)] for name, layers in ordered])


def _time(engine: Engine, layers: list[Layer]) -> list[int | str]:
    """Return three cells: the number of `layers`, their time in ms and their share; '-' without a profile."""
    share = engine.share(layers)
    times = ['-', '-'] if share is None else [f'{sum(layer.ms or 0 for layer in layers):.4f}', f'{share:.1%}']
    return [len(layers), *times]


def _role(layer: Layer) -> str:
    """Name the kind of `layer`, with a remark if it only quantizes, dequantizes or reformats."""
    if is_qdq(layer):
        return f'{layer.kind} (Q/DQ)'
    return f'{layer.kind} (reformat)' if is_reformat(layer) and layer.kind != 'Reformat' else layer.kind


def engine_report(engine: Engine, findings: Sequence[LayerFinding], limit: int | None = None) -> str:
    """Describe an engine and its findings in tables, as `draw_engine.py` prints them, of at most `limit` rows each."""
    convs = [layer for layer in engine.layers if is_convolution(layer)]
    on = Counter(map(tensor_cores, convs))
    time = f', {engine.ms:.3f} ms (sum over the layers, which is more than one inference takes)' if engine.ms else ''
    lines = [
        f'{len(engine.layers)} layers{time}',
        f'{len(convs)} with a convolution: {on["yes"]} on tensor cores, {on["no"]} not, '
        f'{on["unknown"]} unknown (the name of the kernel does not tell)',
    ]
    for what, names in (('layers without a time', engine.untimed), ('times without a layer', engine.unknown)):
        if names:
            lines.append(f'{len(names)} {what}: {"; ".join(names[:3])}{" ..." if len(names) > 3 else ""}')
    lines += ['', _sums(engine, 'computes in', lambda layer: layer.precision), '', _sums(engine, 'kind', _role)]
    if engine.ms:
        slowest = [
            [short_name(layer), layer.kind, ' → '.join(t or '?' for t in layer.types), *_time(engine, [layer])[1:]]
            for layer in sorted(engine.layers, key=lambda layer: -(layer.ms or 0))[:limit]
        ]
        lines += ['', markdown_table(('slowest', 'kind', 'types', 'ms', 'share'), slowest)]
    of = {kind: [f for f in findings if f.kind == kind] for kind in COSTS}
    lines += [
        '',
        markdown_table(
            ('finding', 'layers', 'ms', 'share'),
            [[COSTS[kind], *_time(engine, [f.layer for f in of_kind])] for kind, of_kind in of.items()],
        ),
    ]
    for kind, of_kind in of.items():
        for advice in dict.fromkeys(f.advice for f in of_kind):
            alike = [f for f in of_kind if f.advice == advice]
            lines += [
                '',
                f'{COSTS[kind]}: {len(alike)}. What to do: {advice}.',
                markdown_table(
                    ('layer', 'ms', 'share', 'what'),
                    [[short_name(f.layer), *_time(engine, [f.layer])[1:], f.detail] for f in alike[:limit]],
                ),
            ]
            lines += [f'... and {len(alike) - limit} more'] if limit and len(alike) > limit else []
    return '\n'.join([*lines, '', f'{len(findings) or "no"} findings'])
