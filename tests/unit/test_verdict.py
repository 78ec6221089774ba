"""Ship: INT8 is the verdict only if speed and accuracy allow it, what is said fits, and the page shows texts as texts;
and what comes after a good score."""

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from models.deploy.ship.verdict import Outcome, against_int8, sentence, would_change
from utils.qat.benchmark.baseline import Gain
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import TARGETS
from utils.qat.core.page import fold, write_page
from utils.qat.core.text import code, escaped, image, markdown_table
from utils.qat.evaluation.interval import UNKNOWN, within_interval
from utils.qat.vendors.next_step import after_scoring


def outcome(speedup=1.3, difference=-0.002, half_width=0.004):
    gain = Gain('', 'OpenVINO', '', 1, 'BF16', speedup)
    return Outcome(gain, 'AP', {'difference': difference, 'chance': half_width})


@pytest.mark.parametrize(
    'speedup, difference, max_drop, min_speedup, against',
    [
        (1.3, -0.002, 1, 1.05, []),
        (1.05, -0.01, 1, 1.05, []),  # both at their limits
        (1.049, -0.002, 1, 1.05, ['speed']),
        (0.72, -0.002, 1, 1.05, ['speed']),
        (1.3, -0.0101, 1, 1.05, ['accuracy']),
        (0.9, -0.2, 1, 1.05, ['speed', 'accuracy']),
        (1.3, 0.03, 0, 1.05, []),  # better than float
        (1.3, -0.0001, 0, 1.05, ['accuracy']),
        (0.5, -0.5, 100, 0, []),
        (math.nan, 0.0, 1, 1.05, ['speed']),
        (1.3, math.nan, 1, 1.05, ['accuracy']),
        (1.3, 0.29 - 0.3, 1, 1.05, []),  # -0.010000000000000009
    ],
)
def test_int8_needs_both(speedup, difference, max_drop, min_speedup, against):
    assert [*against_int8(outcome(speedup, difference), max_drop, min_speedup)] == against


def test_blocks_return_to_float_only_for_a_loss_beyond_its_interval():
    """`quantize --max-drop` counts no other, so the file would be the same; and a gain is none."""
    parts = [outcome(difference=lost, half_width=0.004).against_float for lost in (-0.005, -0.004)]
    assert [within_interval(part) for part in parts] == [False, True]
    assert not against_int8(outcome(difference=0.01, half_width=0.004), 0, 1)


def test_the_sentence_names_file_speed_cost_and_size():
    found = outcome()
    said = sentence(found, {}, 'best.xml', 2_500_000, 10_000_000)
    for part in 'Ship best.xml', '1.30 times as fast as BF16', '-0.20 ± 0.40 points', '2.5 MB', '10.0 MB':
        assert part in said
    assert '± ?' in outcome(half_width=UNKNOWN).cost


@pytest.mark.parametrize('speedup, difference', [(0.72, -0.002), (1.3, -0.03), (0.72, -0.03)])
def test_a_float_verdict_has_both_figures_and_the_limit_that_was_missed(speedup, difference):
    found = outcome(speedup, difference)
    said = sentence(found, against_int8(found, 1, 1.05), 'float.xml', 1e6, 2e6)
    assert 'Ship the float file, float.xml' in said and 'in BF16' in said
    assert said.count(f'{speedup:.2f} times') == 1 and said.count(f'{100 * difference:+.2f} ±') == 1
    assert ('--min-speedup is 1.05' in said) == (speedup < 1.05) and ('--max-drop is 1' in said) == (difference < -0.01)


def test_only_what_can_still_be_done_is_advised():
    def advised(reasons, taken, epochs=0, amx=False, engine='openvino'):
        config = ShipConfig(Path('w.pt'), activation=taken, epochs=epochs, imgsz=640, for_=engine)
        return ' '.join(would_change(reasons, config, ('polynomial', 'relu'), amx))

    assert not advised([], 'keep')
    slow = advised(['speed'], 'polynomial')
    assert '--activation relu' in slow and '--activation polynomial' not in slow and '--batch 8' in slow
    assert '--activation' not in advised(['speed'], 'relu')
    assert '--activation relu --epochs 10. INT8 took 0.5 to 0.74 of' in slow, 'it learns from labels in --epochs'
    other = advised(['speed'], 'keep', epochs=3, engine='onnxruntime')
    assert '--activation relu. INT8 took 0.75 of' in other and 'epochs 10' not in other, 'figures of the engine itself'
    assert 'AMX' in advised(['speed'], 'keep', amx=True) and 'AMX' not in slow
    assert '--epochs' in advised(['accuracy'], 'keep') and '--epochs' not in advised(['accuracy'], 'keep', epochs=3)


class Tags(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = (
    '<script>alert(1)</script>',
    '"><img src=x onerror=alert(1)>',
    '{{ 7*7 }}{% raw %}',
    '[a](javascript:alert(1))',
    'a\x1b[2J\u202eb',
)


@pytest.mark.parametrize('name', HOSTILE)
def test_a_text_is_only_shown(name, tmp_path):
    """Wherever it stands; the page loads nothing, and runs nothing."""
    Image.new('RGB', (8, 8)).save(tmp_path / 'a.png')
    inner = escaped(name), markdown_table((name, 'AP'), [(name, '0.5')]), code(name), image(escaped(name), 'a.png')
    write_page(tmp_path / 'ship', name, [f'**{escaped(name)}**', f'## {escaped(name)}', *inner, *fold(name, *inner)])
    html, plain = ((tmp_path / f'ship.{kind}').read_text(encoding='utf-8') for kind in ('html', 'md'))
    found = Tags(html)
    allowed = set('html head meta title style body h1 h2 p strong table tr th td pre div img details summary'.split())
    assert {tag for tag, _ in found.tags} <= allowed
    attributes = {(tag, key) for tag, of in found.tags for key in of}
    assert not [key for _, key in attributes if key.startswith('on') or key == 'href'] and ('img', 'src') in attributes
    sources = [of['src'] for tag, of in found.tags if tag == 'img']
    assert len(sources) == 2 and all(src.startswith('data:image/jpeg;base64,') for src in sources)
    assert base64.b64decode(sources[0].partition(',')[2]).startswith(b'\xff\xd8')
    shown = name if name.isprintable() else r'a\x1b[2J\u202eb'
    assert ''.join(found.text).count(shown) == 13 and '49' not in ''.join(found.text)
    assert '\x1b' not in plain + html and '\u202e' not in plain + html
    outside = re.sub(r'^```\n.*?\n```', '', plain, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r'<(?!/?(details|summary)>)', outside) and not re.search(r'(?<!\\)\]\(javascript', outside)


def test_both_pages_have_the_same_words(tmp_path):
    table = markdown_table(('model', 'AP'), [('float', '0.5')])
    parts = ['**Ship a.xml**', '## Table', table, *fold('More', code('python qat.py', '', '# a comment'))]
    write_page(tmp_path / 'ship', 'Title', parts)
    html, plain = (tmp_path / 'ship.html').read_text(), (tmp_path / 'ship.md').read_text()
    words = re.findall(r'[\w.]+', ' '.join(Tags(html[html.index('<body>') :]).text))
    assert words == re.findall(r'[\w.]+', re.sub('<.*?>', '', plain))
    assert 'python qat.py\n\n# a comment</pre>' in html


# ---- the command that follows a good score ------------------------------------------------------------------------------

FOLLOWING = {  # file, target, backend that scored it → the end of the command
    ('m.onnx', 'tensorrt', None): ('build_engine.py m.onnx', 'audit_onnx.py m.onnx'),
    ('m.onnx', 'tensorrt', 'openvino'): ('benchmark_trt.py m.onnx --backend openvino',),
    ('m.onnx', 'onnxruntime', None): ('benchmark_trt.py m.onnx --backend onnxruntime',),
    ('m.onnx', 'openvino', 'onnxruntime'): ('benchmark_trt.py m.onnx --backend openvino',),
    ('m-end2end.onnx', 'litert', None): ('export_qat.py --weights m.pt --include litert --imgsz 64',),
    ('m.pt', 'openvino', None): ('export_qat.py --weights m.pt --include openvino --imgsz 64',),
    ('m.xml', 'openvino', None): ('benchmark_trt.py m.xml',),
}


@pytest.mark.parametrize(('file', 'target', 'backend'), FOLLOWING)
def test_the_next_step_is_of_the_target(file, target, backend):
    said = after_scoring(Path(file), (64, 64), TARGETS[target], backend)
    assert said.endswith(FOLLOWING[file, target, backend]), said
