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
from helpers.faults import DRY, RUN, call
from helpers.graphs import model_of

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

REFUSED = [  # names that do something to a terminal, or to a list of names
    *(
        '\x1b]0;owned\x07cat',
        'a\rcat',
        'cat\b\b\bdog',
        'cat\r\ndog',
        'cat\x85dog',
        'cat\u2029dog',
        'cat\0',
        'cat\x0cdog',
    ),
    *('cat\tdog', '\x9b2Jcat', 'cat\x7f', 'cat\u202a', '\u2066cat\u2069', 'cat\u200f', 'cat\u200bdog', 'cat\ud800'),
    *('cat\x1b[2J', 'cat\nnext: curl', 'cat\u202egnp', 'cat\u2028dog', 'x' * 100_000),
]
ODD = [
    *('![](http://evil.example/x.png)', '<img src=x onerror=alert(1)>', '[click](http://evil.example)', '`code`'),
    *('a|b', '**bold**', '_edges_ and in_side', '\\N \\G \\l', '&lt;b&gt; &#x1b;', '猫 कुत्ता'),
]


def harmless(text, odd=False):
    """Whether a text says nothing to a terminal but lines; with `odd` that it has nothing of ODD as HTML, link or picture."""
    assert all(c == '\n' or visible(c) == c for c in text), [c for c in text if c != '\n' and visible(c) != c]
    if odd:
        plain = re.sub('^(```+)\n.*?\n\\1$', '', text, flags=re.DOTALL | re.MULTILINE)
        shown = re.sub(r'\\[\\`*_{}\[\]()|~$:.@!]', '', plain).replace('&amp;', '')
        assert not re.search(r'!\[[^]]*\]\(http|<img|\]\(http|<script|://|\*\*bold|&lt;b', shown), shown
    return True


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


@pytest.mark.parametrize('name', REFUSED, ids=ascii)
def test_a_name_that_is_more_than_a_name(name):
    bad = r'^--data x.yaml: names: .*the name of class \d, must be one line of printable characters'
    for names in (['a', name], {0: name}, ('a', 'b', name)):
        with pytest.raises(QatError, match=bad) as refused:
            class_names(names, '--data x.yaml')
        assert harmless(str(refused.value)) and '\n' not in str(refused.value) and len(str(refused.value)) < 400


NO_NAMES = [None, 3, 'abc', {1: 'a'}, {0: 'a', 2: 'b'}, {'0': 'a'}, [b'a'], [['a']], [{'a': 1}], [object()]]


@pytest.mark.parametrize('names', NO_NAMES, ids=lambda names: type(names).__name__)
def test_what_is_no_list_of_names(names):
    with pytest.raises(QatError, match='must be a list, or map 0..n-1 to names'):
        class_names(names, 'x')


def test_names_as_people_write_them():
    fine = ['traffic light', 'in_side', 'naïve', 'می‌خواهم', '猫\u3000犬', '👩‍🚒', "it's", 'x' * LONGEST, *ODD]
    assert class_names(fine, 'x') == dict(enumerate(fine))
    assert class_names({1: True, 0: 2.5}, 'x') == {0: '2.5', 1: 'True'}


@pytest.mark.parametrize(
    'text, stride', [('16', 32), ('64', 64), ('32.0', 32), ('0', None), ('2048', None), ('nan', None), ('', None)]
)
def test_the_stride_in_the_metadata_of_an_export(text, stride):
    with contextlib.nullcontext() if stride else pytest.raises(QatError, match='its metadata, stride .*cannot be read'):
        assert stride_and_names(Path('x.onnx'), {'stride': text}) == (stride, None)


def test_odd_names_are_shown_as_they_are_typed(material, tmp_path, says):
    """From the checkpoint to labels.txt, and from the data to the terminal and report.md."""
    content = torch.load(material['single.pt'], weights_only=False)
    content['model'].names = ODD
    torch.save(content, 'weights.pt')
    says('export_yoloV9.py --weights weights.pt --size 64')
    assert (tmp_path / 'labels.txt').read_text(encoding='utf-8').splitlines() == ODD
    config = (tmp_path / 'config_infer_primary_yoloV9.txt').read_text().splitlines()
    sections = '', '[property]', '[class-attrs-all]'
    assert 'num-detected-classes=10' in config
    assert all(line.startswith('#') or '=' in line or line in sections for line in config)

    content = yaml.safe_load(material['set/data.yaml'].read_text())
    path = str(material['set'])
    (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, 'path': path, 'names': ODD}))
    says(f'val_trt.py --weights @quantized.onnx --data data.yaml {RUN}')
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


OF_FILES = ['a\x1b[2J', 'a\nnext: rm', 'a\u202etp', 'a\r']


def test_nodes_of_an_onnx_file(material, told):
    model = onnx.load(material['quantized.onnx'])
    node = next(n for n in model.graph.node if n.op_type == 'Conv')
    for node.name in OF_FILES:
        onnx.save(model, 'model.onnx')
        assert 'have control characters' in told('scripts/audit_onnx.py model.onnx')[1]
    benchmark = 'benchmark_trt.py model.onnx --backend onnxruntime --device cpu --project out'
    assert 'have control characters' in told(benchmark)[1]


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
def test_what_files_are_named_after_is_checked_first(material, tmp_path, told, name, says):
    weights = tmp_path / os.fsdecode(name)
    shutil.copy(material['single.pt'], weights)
    verbs = (f'qat.py {verb} --device cpu --data @set/data.yaml' for verb in ('quantize', 'sensitive'))
    for command in ('export_qat.py', 'export_yoloV9.py', 'reparameterization.py', *verbs):
        code_, line = told([*command.split(), '--weights', weights])
        assert code_ == 2 and says in line and line.endswith('rename it')


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
