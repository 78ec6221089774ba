"""README and docs against the code: every option of every command that they show exists, and every link leads somewhere."""
import re
import subprocess
from functools import cache

import pytest
from conftest import REPO, TREE
from zoo import python

PAGES = sorted([REPO / 'README.md', *(REPO / 'docs').glob('*.md')])
BLOCK = re.compile(r'^```bash\n(.*?)^```', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r'(?:^|[\s(])(?:python3? (?P<python>(?:scripts/)?\w+\.py)|(?P<shell>[\w./-]*\.sh))(?P<rest>[^#|;&)\n]*)')
VERBS = {'quantize', 'sensitive', 'eval'}
each_page = pytest.mark.parametrize('page', PAGES, ids=lambda p: p.relative_to(REPO).as_posix())


@cache
def help_of(command, verb):
    """What `command -h` prints; None if it is not ours."""
    if command.endswith('.py'):
        return python(command, *verb, '-h') if (REPO / command).is_file() else None
    script = next((REPO / place / command.split('/')[-1] for place in ('', 'scripts', 'demo') if (REPO / place / command.split('/')[-1]).is_file()), None)
    return script and subprocess.run([script, '-h'], capture_output=True, text=True, cwd=TREE).stdout + script.read_text()


def shown(page):
    """(command, verb or nothing, its options) of each of our commands in the code blocks of a page."""
    for block in BLOCK.findall(page.read_text(encoding='utf-8')):
        for found in COMMAND.finditer(re.sub(r'\\\n\s*', ' ', block)):
            words = found['rest'].split()
            verb = tuple(words[:1]) if found['python'] and words and words[0] in VERBS else ()
            yield found['python'] or found['shell'], verb, [w.split('=')[0] for w in words if w.startswith('--')]


def test_commands_are_found():
    found = {(command, verb) for page in PAGES for command, verb, _ in shown(page)}
    assert {('qat.py', ('quantize',)), ('qat.py', ('eval',)), ('val_trt.py', ()), ('benchmark_trt.py', ()), ('scripts/val_trt.sh', ()),
            ('scripts/build_engine.py', ())} <= found


@each_page
def test_options_exist(page):
    for command, verb, options in shown(page):
        text = help_of(command, verb)
        assert text is not None, f'{page.name}: no {command}'
        for option in options:
            assert re.search(rf'(?<![\w-]){option}(?![\w-])', text), f'{page.name}: {command} {" ".join(verb)} has no {option}'


@each_page
def test_links_lead_somewhere(page):
    text = page.read_text(encoding='utf-8')
    for target in re.findall(r'\]\(([^)]+)\)', text):
        if target.startswith('https://'):
            continue
        file, _, anchor = target.partition('#')
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f'{page.name}: {target}'
        if anchor:
            titles = re.findall(r'^#+ (.+)$', path.read_text(encoding='utf-8'), re.MULTILINE)
            assert anchor in {re.sub(r'[^\w -]', '', t).lower().replace(' ', '-') for t in titles}, f'{page.name}: {target}'
    for name in re.findall(r'\]\[([^]]+)\]', text):
        assert f'[{name}]: ' in text, f'{page.name}: [{name}] is nowhere'
