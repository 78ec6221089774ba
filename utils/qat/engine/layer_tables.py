"""An engine in rows: one per layer (CSV), and sums and findings to read (Markdown)."""

import csv
import re
from collections import Counter
from os.path import commonprefix

from utils.qat.core.files import atomic
from utils.qat.core.markdown import markdown_table
from utils.qat.engine.layer_rules import FINDINGS, is_convolution, is_qdq, is_reformat, tensor_cores
from utils.qat.graph.onnx_graph import module_path

COLUMNS = (
    'index',
    'name',
    'short name',
    'kind',
    'type in',
    'type out',
    'weights',
    'shapes in',
    'shapes out',
    'formats in',
    'formats out',
    'ms',
    'share',
    'tensor cores',
    'kernel',
    'onnx nodes',
    'findings',
)
NODE = re.compile(r'(?<![\w.])/[\w./]+')  # a path that PyTorch's exporter gave: /model.2/cv1/conv/Conv
WIDTH = 44  # characters of a short name


def shape_text(tensor):
    """1×64×80×80; '?' if unknown."""
    return '?' if tensor.shape is None else '×'.join(map(str, tensor.shape)) or 'scalar'


def time_text(ms):
    return '-' if ms is None else f'{ms:.4f}'


def share_text(share):
    return '-' if share is None else f'{share:.1%}'


def short_name(layer):
    """A name that fits: the module that the layer's ONNX nodes have in common, and their operators; Q/DQ only if there is nothing else."""
    paths = [p for name in layer.nodes or [layer.name] for p in NODE.findall(name)]
    paths = [p for p in paths if not p.endswith(('QuantizeLinear', 'DequantizeLinear'))] or paths
    name = layer.name
    if paths:
        scopes, operators = zip(*(p.rsplit('/', 1) for p in paths))
        module = module_path(commonprefix([s.strip('/').split('/') for s in scopes]))
        name = f'{module} {"+".join(dict.fromkeys(o.split("_")[0] for o in operators))}'.strip()
    return name if len(name) <= WIDTH else f'{name[: WIDTH // 2]}…{name[1 - WIDTH // 2 :]}'


def write_csv(path, engine, findings):
    """A row per layer, in the order in which they run; lists are joined by '; '."""
    with atomic(path) as tmp, open(tmp, 'w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for i, layer in enumerate(engine.layers):
            described = [
                [f(t) for t in tensors]
                for f in (shape_text, lambda t: t.format)
                for tensors in (layer.inputs, layer.outputs)
            ]
            share = engine.share([layer])
            writer.writerow(
                [
                    i,
                    layer.name,
                    short_name(layer),
                    layer.kind,
                    *layer.types,
                    layer.weights,
                    *map('; '.join, described),
                    '' if layer.ms is None else layer.ms,
                    '' if share is None or layer.ms is None else f'{share:.6f}',
                    tensor_cores(layer) if is_convolution(layer) else '',
                    layer.tactic,
                    '; '.join(layer.nodes),
                    '; '.join(f.kind for f in findings if f.layer is layer),
                ]
            )


def _sums(engine, what, key):
    """Table of layers, time and share by `key(layer)`."""
    groups = {}
    for layer in engine.layers:
        groups.setdefault(key(layer), []).append(layer)
    ordered = sorted(groups.items(), key=lambda item: (-sum(layer.ms or 0 for layer in item[1]), -len(item[1])))
    return markdown_table((what, 'layers', 'ms', 'share'), [[name, *_time(engine, layers)] for name, layers in ordered])


def _time(engine, layers):
    return [
        len(layers),
        time_text(sum(layer.ms or 0 for layer in layers) if engine.ms else None),
        share_text(engine.share(layers)),
    ]


def _role(layer):
    if is_qdq(layer):
        return f'{layer.kind} (Q/DQ)'
    return f'{layer.kind} (reformat)' if is_reformat(layer) and layer.kind != 'Reformat' else layer.kind


def text(engine, findings, limit=None):
    """An engine and what was found in it, to read; lists end after `limit` lines (None = never)."""
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
    of = {kind: [f for f in findings if f.kind == kind] for kind in FINDINGS}
    lines += [
        '',
        markdown_table(
            ('finding', 'layers', 'ms', 'share'),
            [[FINDINGS[kind], *_time(engine, [f.layer for f in found])] for kind, found in of.items()],
        ),
    ]
    for kind, found in of.items():
        for advice in dict.fromkeys(f.advice for f in found):
            alike = [f for f in found if f.advice == advice]
            lines += [
                '',
                f'{FINDINGS[kind]}: {len(alike)}. What to do: {advice}.',
                markdown_table(
                    ('layer', 'ms', 'share', 'what'),
                    [[short_name(f.layer), *_time(engine, [f.layer])[1:], f.detail] for f in alike[:limit]],
                ),
            ]
            lines += [f'... and {len(alike) - limit} more'] if limit and len(alike) > limit else []
    return '\n'.join([*lines, '', f'{len(findings) or "no"} findings'])
