"""An engine as a picture: its layers in DOT, the language of Graphviz, drawn as SVG and PNG.

The colour of a box shows the type in which the layer computes. The width of its border shows its share of the time, and red
marks a finding. A layer that only reformats, quantizes or dequantizes has a double border and the colours of both
types. Graphviz is inside the wheels of pygraphviz since 2.0, which need only SYSTEM.
"""

import importlib.util
import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from utils.qat.core.command import run_apart
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY, atomic
from utils.qat.core.text import visible
from utils.qat.vendors.tensorrt.engine.layer_rules import LayerFinding, is_qdq, is_reformat
from utils.qat.vendors.tensorrt.engine.layer_tables import shape_text, short_name
from utils.qat.vendors.tensorrt.engine.layers import Engine, Layer, Tensor

FILL = {'INT8': '#cdebbd', 'FP16': '#ffe2a8', 'BF16': '#ffe2a8', 'FP32': '#f7b9ac'}
LINE = {'INT8': '#4a9a2b', 'FP16': '#d98a00', 'BF16': '#d98a00', 'FP32': '#cf3f26'}
OTHER_FILL, OTHER_LINE, FOUND = '#e6e6e6', '#8a8a8a', '#c40000'
FONT = 'DejaVu Sans,Verdana,sans-serif'
TYPES = ('INT8', 'FP16', 'FP32', 'other')


def _quoted(text: object, read: int = 1) -> str:
    """Quote `text` as a string of DOT, for a Graphviz that resolves escapes in it `read` times; line breaks stay."""
    text = visible(text, keep='\n').replace('&', '&amp;')
    return '"' + text.replace('\\', '\\' * 2**read).replace('"', '\\"').replace('\n', '\\n') + '"'


def _line(what: object, **values: object) -> str:
    """Write a statement of DOT: a node, an edge or a default, with its attributes."""
    return (
        f'{what} ['
        + ', '.join(f'{key}={_quoted(value, 2 if "tooltip" in key else 1)}' for key, value in values.items())
        + '];'
    )


def _label(engine: Engine, layer: Layer, findings: Sequence[LayerFinding]) -> str:
    """Write the text of a box: kind and time, module, types and shapes, findings, a line for each."""
    share = engine.share([layer])
    time = '' if layer.ms is None else f'   {layer.ms:.4f} ms' + ('' if share is None else f'   {share:.1%}')
    ends = [
        f'{t[0].dtype or "?"} {shape_text(t[0])}' + f' … ({len(t)})' * (len(t) > 1)
        for t in (layer.inputs, layer.outputs)
        if t
    ]
    return '\n'.join(
        filter(
            None,
            (
                layer.kind + time,
                short_name(layer),
                ' → '.join(dict.fromkeys(ends)),
                '! ' * bool(findings) + ', '.join(f.kind for f in findings),
            ),
        )
    )


def _node(engine: Engine, i: int, findings: Sequence[LayerFinding]) -> str:
    layer = engine.layers[i]
    copies = is_reformat(layer) or is_qdq(layer)
    share = engine.share([layer]) or 0
    fill = [FILL.get(t, OTHER_FILL) for t in (layer.types if copies else (layer.precision,))]
    return _line(
        i,
        label=_label(engine, layer, findings),
        tooltip='\n'.join(filter(None, (layer.name, layer.tactic))),
        shape='box',
        style='filled' if copies else 'filled,rounded',
        peripheries=2 if copies else 1,
        fillcolor=':'.join(dict.fromkeys(fill)),
        gradientangle=270,
        color=FOUND if findings else '#555555',
        penwidth=f'{1 + min(1 if copies else 6, 60 * share):.1f}',
    )


def _edge(engine: Engine, writer: int | None, reader: int | None, tensor: Tensor) -> str:
    source = _quoted(f'in {tensor.name}') if writer is None else writer
    # the box of a layer shows the shape of its first input only
    label = (
        f'{tensor.dtype} {shape_text(tensor)}' if reader is not None and len(engine.layers[reader].inputs) > 1 else ''
    )
    return _line(
        f'{source} -> {_quoted(f"out {tensor.name}") if reader is None else reader}',
        label=label,
        color=LINE.get(tensor.dtype, OTHER_LINE),
        edgetooltip=f'{tensor.name}\n{tensor.format}',
    )


def dot(engine: Engine, findings: Sequence[LayerFinding], title: str) -> str:
    """Write an engine and the findings in it (layer_rules.py) as DOT text, without layers that read and write nothing, as shape calls."""
    lines = [
        _line('graph', label=title, labelloc='t', fontname=FONT, fontsize=16, nodesep=0.2, ranksep=0.25),
        _line('node', fontname=FONT, fontsize=10, margin='0.12,0.06'),
        _line('edge', fontname=FONT, fontsize=8, arrowsize=0.6, penwidth=1.6),
    ]
    for side, tensors in (('in', engine.inputs), ('out', engine.outputs)):
        lines += [
            _line(
                _quoted(f'{side} {t.name}'),
                label=f'{t.name}\n{t.dtype or "?"}  {shape_text(t)}',
                shape='oval',
                penwidth=2,
            )
            for t in tensors
        ]
    lines += [
        _node(engine, i, [f for f in findings if f.layer is layer])
        for i, layer in enumerate(engine.layers)
        if layer.inputs or layer.outputs
    ]
    lines += [_edge(engine, *edge) for edge in engine.edges()]
    return '\n'.join([f'// {MADE_BY}', 'digraph engine {', *lines, _legend(), '}', ''])


def _legend() -> str:
    rows = ''.join(f'<tr><td bgcolor="{FILL.get(kind, OTHER_FILL)}">computes in {kind}</td></tr>' for kind in TYPES)
    return (
        'legend [shape=plain, label=<<table border="0" cellborder="1" cellspacing="0" cellpadding="4">'
        + rows
        + '<tr><td>double border: reformats,<br/>quantizes or dequantizes, no more</td></tr><tr><td>thick border: much time</td></tr>'
        f'<tr><td color="{FOUND}"><font color="{FOUND}">red border: a finding</font></td></tr></table>>];'
    )


# packages of Debian and Ubuntu; slim containers lack some of them
SYSTEM = 'libglib2.0-0 libexpat1 libx11-6 libxext6 libxrender1'

# The drawing runs in a subprocess: Graphviz and fontconfig write to stderr at any time, and read their settings only once.
# pygraphviz returns bytes here: it writes to a path through fileinput, which opens no binary file in Python 3.11.2 (Debian 12).
RENDER = """import pathlib, pygraphviz
graph = pygraphviz.AGraph(sys.argv[1])
graph.layout(prog='dot')
for path in map(pathlib.Path, sys.argv[2:]):
    path.write_bytes(graph.draw(format=path.suffix[1:]))
"""


def draw(dot_file: Path, paths: Iterable[Path]) -> None:
    """Draw a DOT file as pictures; the suffix of each path is its format.

    The font is matplotlib's, so that a machine without fonts draws the same picture.
    """
    by_hand = shlex.join(['dot', '-Tsvg', '-O', str(dot_file)])
    if importlib.util.find_spec('pygraphviz') is None:
        raise QatError(
            'no picture without pygraphviz: pip install "pygraphviz>=2.0.1", or ./install_dependencies.sh --trex; any Graphviz '
            f'can draw it as well: {by_hand}'
        )
    import matplotlib

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        fonts = Path(folder) / 'fonts.conf'
        fonts.write_text(
            f'<?xml version="1.0"?><fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir>'
            f'<cachedir>{folder}</cachedir></fontconfig>'
        )
        made = [str(stack.enter_context(atomic(path))) for path in paths]
        done = run_apart(RENDER, dot_file, *made, env={**os.environ, 'FONTCONFIG_FILE': str(fonts)})
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]
            missing = f'apt-get install {SYSTEM}, or ' if 'cannot open shared object' in reason else ''
            raise QatError(
                f'pygraphviz cannot draw {dot_file} ({reason}); {missing}with a Graphviz of your own: {by_hand}'
            )
