"""README and docs against the code: options, commands and messages exist, every page is linked, the walkthrough runs."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
import yaml
from conftest import REPO, TREE
from helpers.zoo import program

import utils.qat

DOCS = sorted((REPO / 'docs').glob('*.md'))
PAGES = [REPO / 'README.md', REPO / 'CONTRIBUTING.md', REPO / 'CHANGELOG.md', *DOCS]
BLOCK = re.compile(r'^ *```(bash|console)\n(.*?)^ *```', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r'(?:^|[\s("])(?:python3? (?P<python>(?:scripts/|segment/|classify/)?\w+\.py)|(?P<shell>[\w./-]*\.sh))(?P<rest>[^#|;&)"\n]*)'
)
TORCHRUN = re.compile(r'torchrun (?:--\w+ \S+ )*')
VERBS = {'ship', 'quantize', 'sensitive', 'eval'}


def name_of(page):
    return page.relative_to(REPO).as_posix()


each_page = pytest.mark.parametrize('page', PAGES, ids=name_of)


def text_of(page):
    return page.read_text(encoding='utf-8')


def blocks(page):
    """The blocks of commands on a page, each with its lines joined where a backslash breaks them; of a console what was typed."""
    found = [(kind, re.sub(r'\\\n\s*', ' ', block)) for kind, block in BLOCK.findall(text_of(page))]
    return [block if kind == 'bash' else '\n'.join(typed(block)) for kind, block in found]


def typed(block):
    return re.findall(r'^\$ (.*)$', block, re.MULTILINE)


# ---- commands and options -----------------------------------------------------------------------------------------------


@cache
def accepted(command, *verb):
    """All options that a Python command of ours accepts, those that -h does not show too."""
    file = 'qat.py' if command in ('segment/qat_seg.py', 'classify/qat_cls.py') else command
    asked, parse = [], argparse.ArgumentParser.parse_known_args
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            argparse.ArgumentParser, 'parse_known_args', lambda self, *args: asked.append(self) or parse(self, *args)
        )
        program(file).main([*verb, '-h'])
    return set(asked[-1]._option_string_actions)


@cache
def help_of(command, verb):
    """Text with the options and words that a command of ours accepts; None for another program."""
    if command.endswith('.py'):
        return ' '.join(accepted(command, *verb)) if (REPO / command).is_file() else None
    name = command.split('/')[-1]
    script = next((REPO / place / name for place in ('', 'scripts', 'demo') if (REPO / place / name).is_file()), None)
    if script is None:
        return None
    text = text_of(script)
    # run_tests.sh hands -h to pytest, after its set-up
    return (
        text
        if '--help' not in text
        else subprocess.run([script, '-h'], capture_output=True, text=True, cwd=TREE).stdout + text
    )


def commands(text):
    """(command, verb or nothing, its options) of each of our commands in a text."""
    for found in COMMAND.finditer(TORCHRUN.sub('python ', text)):
        words = found['rest'].split()
        verb = tuple(words[:1]) if found['python'] and words and words[0] in VERBS else ()
        yield found['python'] or found['shell'], verb, [w.split('=')[0] for w in words if w.startswith('--')]


def shown(page):
    for block in blocks(page):
        yield from commands(block)


def test_commands_are_found():
    found = {' '.join([command, *verb]) for page in PAGES for command, verb, _ in shown(page)}
    assert {*THEIRS, 'benchmark_trt.py', 'scripts/val_trt.sh', 'scripts/build_engine.py'} - found <= {
        'segment/qat_seg.py quantize',
        'scripts/draw_engine.py',
    }


@each_page
def test_options_exist(page):
    for command, verb, options in shown(page):
        text = help_of(command, verb)
        assert text is not None, f'{page.name}: no {command}'
        for option in options:
            assert re.search(rf'(?<![\w-]){option}(?![\w-])', text), (
                f'{page.name}: {command} {" ".join(verb)} has no {option}'
            )


CONTAINERS = [
    (page, line)
    for page in PAGES
    for block in blocks(page)
    for line in block.splitlines()
    if re.match(r'docker run .*(\$IMAGE|/pytorch:)', line)  # others serve others' programs
]


@pytest.mark.parametrize(
    'page, line', CONTAINERS, ids=[f'{name_of(page)} {n}' for n, (page, _) in enumerate(CONTAINERS)]
)
def test_a_container_is_complete(page, line):
    """The image comes last: it starts a shell, in which the page goes on."""
    *words, image = shlex.split(line)
    assert {'--gpus', '--rm', '-v', '-w', '-it'} <= set(words) and image.startswith(('nvcr.io/', '$IMAGE'))


@each_page
def test_blocks_are_shell_that_parses(page):
    for block in blocks(page):
        run = subprocess.run(['bash', '-n'], input=block, capture_output=True, text=True)
        assert run.returncode == 0, f'{page.name}: {run.stderr}\n{block}'


# ---- messages ------------------------------------------------------------------------------------------------------------


def written(node):
    """A string constant, or an f-string with … for what it fills in; None for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def code():
    """All strings of the Python files, a line each, and the shell scripts."""
    files = [
        *REPO.glob('*.py'),
        *(f for folder in ('models', 'utils', 'scripts') for f in (REPO / folder).rglob('*.py')),
    ]
    strings = filter(None, (written(node) for file in files for node in ast.walk(ast.parse(text_of(file)))))
    return '\n'.join(
        [*strings, *(text_of(f) for f in (*REPO.glob('*.sh'), *REPO.glob('scripts/*.sh'), REPO / 'demo' / 'setup.sh'))]
    )


def section(page, title):
    """A section of a page, from its heading to the next of that rank."""
    return re.search(rf'^## {re.escape(title)}\n(.*?)(?=^## |\Z)', text_of(page), re.DOTALL | re.MULTILINE)[1]


@cache
def troubles():
    """Title of a table's first column → its cells, over all tables of the page of troubles."""
    found = {}
    for table in re.findall(r'(?:^\|.*\n)+', text_of(REPO / 'docs' / 'troubleshooting.md'), re.MULTILINE):
        [title, _, *cells] = [re.split(r' \| ', row)[0].removeprefix('| ') for row in table.splitlines()]
        found.setdefault(title, []).extend(cells)
    return found


def messages(cells):
    return [message for cell in cells for message in re.findall(r'`([^`]+)`', cell)]


def is_ours(message):
    """Between the … of a message, which stand for what changes, it is the code's, word for word and in one string."""
    return re.search('.*'.join(re.escape(part.strip(' ;,:')) for part in message.split('…')), code()) is not None


@pytest.mark.parametrize('message', messages(troubles()['message']))
def test_messages_are_those_of_the_code(message):
    assert sum(len(part.strip(' ;,:')) for part in message.split('…')) > 8, 'nothing to search for'
    assert is_ours(message), 'no string of the code is like that'


# ---- links ---------------------------------------------------------------------------------------------------------------


def links(page):
    """(target as written, file or None, anchor) of the links on a page that stay in this tree."""
    for target in re.findall(
        r'\]\(([^)\s]+)\)', re.sub(r'^ *```.*?^ *```', '', text_of(page), flags=re.DOTALL | re.MULTILINE)
    ):
        if not target.startswith('https://'):
            file, _, anchor = target.partition('#')
            yield target, (page.parent / file).resolve() if file else page, anchor


@each_page
def test_links_lead_somewhere(page):
    for target, path, anchor in links(page):
        assert path.exists(), f'{page.name}: {target}'
        if anchor:
            titles = re.findall(r'^#+ (.+)$', text_of(path), re.MULTILINE)
            assert anchor in {re.sub(r'[^\w -]', '', t).lower().replace(' ', '-') for t in titles}, (
                f'{page.name}: {target}'
            )
    text = text_of(page)
    for name in re.findall(r'\]\[([^]]+)\]', text):
        assert f'[{name}]: ' in text, f'{page.name}: [{name}] is nowhere'


def test_every_page_can_be_reached():
    """Links lead from the README to every page, in any number of steps."""
    reached, waiting = set(), [REPO / 'README.md']
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [path for _, path, _ in links(page) if path.suffix == '.md']
    assert set(PAGES) <= reached


# ---- generated pages, versions -------------------------------------------------------------------------------------------


def test_the_version_is_the_newest_of_the_changelog():
    citation, version = yaml.safe_load(text_of(REPO / 'CITATION.cff')), text_of(REPO / 'VERSION').strip()
    [newest, *_] = re.findall(r'^## (\S+) - (\d{4}-\d\d-\d\d)$', text_of(REPO / 'CHANGELOG.md'), re.MULTILINE)
    assert newest == (citation['version'], citation['date-released'].isoformat())
    assert newest[0] == version == utils.qat.__version__


def test_every_requirement_has_a_licence():
    named = re.findall(r'^([A-Za-z][\w-]*)[=><]', text_of(REPO / 'requirements.txt'), re.MULTILINE)
    page = text_of(REPO / 'docs' / 'licences.md')
    assert named and not [name for name in named if name not in page and not name.startswith('tensorrt-rtx')]


def test_the_page_of_options_is_that_of_its_script():
    again = 'python docs/write_options.py'
    assert text_of(REPO / 'docs' / 'options.md') == program('docs/write_options.py').page(), again


# ---- the walkthrough's commands, run -------------------------------------------------------------------------------------


WALKTHROUGH = REPO / 'docs' / 'walkthrough.md'
# so that the demo takes seconds: fewer images and steps
SMALL = {
    'qat.py quantize': '--epochs 1 --iters 2 --calib-images 8',
    'qat.py sensitive': '--num-image 4 --calib-images 8',
    'benchmark_trt.py': '--duration 0.2',
    '../../demo/make_data.py': '--train 12 --val 6',
}
# what a reader has → what the demo has
NAMES = {'data.yaml': 'demo-data/data.yaml', 'images/val': 'demo-data/images/val'}


def walkthrough():
    """The commands of docs/walkthrough.md, each as a list of words."""
    text = re.sub(r'\\\n\s*', ' ', section(WALKTHROUGH, 'Every main command, with its output'))
    return [shlex.split(line) for line in typed(text)]


def demo():
    """The commands there that make the demo's checkpoint and data."""
    return [
        shlex.split(line) for line in section(WALKTHROUGH, 'The same on the demo').splitlines() if 'python ' in line
    ]


@pytest.mark.slow
def test_the_walkthrough_is_run(tmp_path):
    """Each command of the walkthrough, in its order, on the demo in a tree of its own."""
    from conftest import copy_upstream

    tree = copy_upstream(tmp_path / 'yolov9')
    subprocess.run([REPO / 'patch_yolov9.sh', tree, '--link'], check=True, stdout=subprocess.DEVNULL)
    ran = []
    for python, command, *words in [*demo(), *walkthrough()]:
        assert python == 'python'
        less = SMALL.get(f'{command} {words[0]}', SMALL.get(command, '')).split()
        words = [NAMES.get(word, word).replace('../../demo/', f'{REPO}/demo/') for word in [*words, *less]]
        command = command.replace('../../demo/', f'{REPO}/demo/')
        run = subprocess.run([sys.executable, command, *words], cwd=tree, capture_output=True, text=True)
        assert run.returncode in (0, 1 if '--verify' in words else 0), (
            f'{command} {" ".join(words)}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}'
        )
        ran.append(command)
    commands_of_ours = {f.name for f in REPO.glob('*.py') if f.name != 'yolov9_qat.py'} | {
        'scripts/audit_onnx.py',
        'scripts/infer_onnx.py',
    }
    assert commands_of_ours <= set(ran)
    assert list(tree.glob('runs/qat/*/weights/best.onnx')) and list(tree.glob('runs/benchmark/*/benchmark.md'))


# ---- migration ----------------------------------------------------------------------------------------------------------

THEIRS = {  # options of levipereira/yolov9-qat (59542f9) and HenryPDT/yolov9-qat-deepstream (ba2ce8a)
    'qat.py quantize': '--weights --data --hyp --device --batch-size --imgsz --img --img-size --project --name --exist-ok --iters --seed '
    '--supervision-stride --no-eval-origin --no-eval-ptq',
    'qat.py sensitive': '--weights --device --data --batch-size --imgsz --img --img-size --hyp --project --name --exist-ok --num-image',
    'qat.py eval': '--weights --data --batch-size --imgsz --img --img-size --device --conf-thres --iou-thres --project --name --exist-ok',
    'segment/qat_seg.py quantize': '--mask-ratio --no-overlap',
    'export_qat.py': '--data --weights --imgsz --img --img-size --batch-size --device --half --inplace --keras --optimize --int8 --dynamic '
    '--simplify --opset --verbose --workspace --nms --agnostic-nms --topk-per-class --topk-all --iou-thres --conf-thres --class-agnostic '
    '--mask-resolution --pooler-scale --sampling-ratio --include',
    'val_trt.py': '--data --engine-file --conf-thres --iou-thres --max-det --task --device --workers --single-cls --verbose --save-txt '
    '--save-hybrid --save-conf --save-json --project --name --exist-ok',
    'scripts/draw_engine.py': '--layer --profile',
    'export_yoloV9.py': '-w --weights -s --size --opset --simplify --dynamic --batch',
    'reparameterization.py': '--cfg --model --weights --device --classes_num --save',
}
FLAG = re.compile(r'(?<![\w-])--?[a-z][\w-]*')


def migration(title):
    """(command, options there, options here) of each row of a table of docs/migration.md; the third is None for gone options."""
    for row in re.findall(
        r'(?m)^\| `([^`]+)`[^|]* \| ([^|]*) \| ([^|]*) \|$', section(REPO / 'docs' / 'migration.md', title)
    ):
        quoted = [FLAG.findall(' '.join(re.findall('`([^`]*)`', cell))) for cell in row[1:]]
        yield row[0], quoted[0], None if row[2].startswith('gone') else quoted[1] if quoted[1] else quoted[0]


def test_every_option_of_the_other_tools_has_its_row_and_is_what_the_row_says():
    found = {}
    for command, theirs, ours in migration('Options, flag by flag'):
        found.setdefault(command, set()).update(theirs)
        options = accepted(*command.split())
        assert set(ours or ()) <= options, (command, ours)
        assert ours is not None or not set(theirs) & options, (command, theirs, 'is not gone')
    assert found == {command: set(flags.split()) for command, flags in THEIRS.items()}


def test_what_help_does_not_show_is_an_option_of_the_other_tools():
    kinds = program('docs/write_options.py').COMMANDS
    theirs = {
        'qat.py quantize': THEIRS['segment/qat_seg.py quantize'],
        'qat.py sensitive': THEIRS['segment/qat_seg.py quantize'],
    }
    for command, kind in kinds.items():
        flags = f'{THEIRS.get(command, "")} {theirs.get(command, "")}'.split()
        for name in kind.HIDDEN:
            spelled = name.replace('_', '-')
            assert {f'--{spelled}', f'--no-{spelled}'} & set(flags), (command, name)


def test_the_options_for_people_from_ultralytics_exist():
    rows = list(migration('From Ultralytics'))
    assert len(rows) > 10
    for command, _, ours in rows:
        assert set(ours) <= accepted(*command.split()), (command, ours)
