"""The numbers of docs/faults.md and of its table are those of the tests."""

import csv

from conftest import REPO

import test_audit_ends as endless
import test_fault_checkpoints as checkpoints
import test_fault_data as data
import test_fault_exports as exports
import test_fault_names as names
import test_fault_yaml as any_yaml
import test_full_disk as disk
import test_hostile_checkpoints as hostile
import test_hostile_programs as programs
import test_killed as killed
import test_patch as patched
import test_runs as runs


def met(cases, commands):
    """Cases times commands, where the first command has all of them and each case meets one of the others."""
    return sum(len(data.share(cases, command)) for command in commands)


def counts():
    """What was spoilt → number of cases, each one call of a command or of the function that reads the file."""
    pictures, json = (*data.UNREAD, *data.READ), len(exports.NO_JSON)
    return {
        'killed': len(killed.POINTS),
        'no room': len(disk.LIMITS) + len(disk.OTHERS) + 3 + 2,
        'damaged checkpoints': len(checkpoints.DAMAGED) * checkpoints.PER_COMMAND,
        'hostile checkpoints': len(checkpoints.HOSTILE) * len(checkpoints.COMMANDS),
        'programs of pickles': len(hostile.payloads('x')) * len(hostile.routes(b'', b'')) + hostile.RANDOM,
        'attributes that hide code': len(hostile.attributes('x')) + 2,
        'tensors and arrays': len(hostile.TENSORS) + 1,
        'archives': hostile.ARCHIVES + 1,
        'caches of labels as programs': hostile.CACHES,
        'foreign checkpoints': len(checkpoints.FOREIGN) * len(checkpoints.COMMANDS),
        'rewritten pickles': 2 * checkpoints.REWRITTEN,
        'data YAML': met(data.YAMLS, data.COMMANDS) + len(data.HARMLESS),
        'damaged data YAML': data.DAMAGED_YAML,
        'augmentation YAML': len(data.HYPS),
        'YAML that costs much': len(any_yaml.DEAR),
        'network YAML': len(data.CFGS)
        + sum(map(len, (any_yaml.NETWORKS, any_yaml.COMMON, any_yaml.INSIDE, any_yaml.PACKED)))
        + 5 * len(any_yaml.THINGS),
        'names of classes': 3 * len(names.REFUSED)
        + len(names.NO_NAMES)
        + 3 * len(names.FOUR)
        + 2
        + 2 * (len(names.CHECKPOINTS) - 1),
        'names of layers, tensors and files': len(names.OF_LAYERS)
        + len(names.IN_PICKLES)
        + 5 * len(names.OF_FILES)
        + 1
        + 5
        + 2 * 5,
        'labels': met(data.LABELS, data.COMMANDS) + 1 + len(data.FINE_LABELS),
        'caches of labels': 3 + 1 + 9,
        'images': 2 * len(pictures),
        'names of images, folders, links': len(data.COMMANDS) + 2 + 1 + 2,
        'copies of pixels': len(data.COPIES) * len(data.COMMANDS) + 1,
        'pipes among the data': 3,
        'damaged images': 2 * data.DAMAGED_IMAGES,
        'exported programs': len(programs.NAMES) + len(programs.TARGETS) + len(programs.CUT) + programs.DAMAGED,
        'strange ONNX files': len(exports.strange()) * len(exports.COMMANDS),
        'damaged ONNX files': (exports.DAMAGED + 2) * len(exports.COMMANDS),
        'weights in another file': len(exports.ELSEWHERE) * len(exports.COMMANDS),
        'graphs to walk': len(endless.FINE) + len(endless.BROKEN),
        'manifest of a patched tree': len(patched.SPOILT) * len(patched.VERBS) + 3,
        'report.json': json + 6 * len(exports.PARTS['a run']),
        'summary of a sensitivity analysis': json + 6 * len(exports.PARTS['a summary']),
        'folders of runs that were tampered with': len(runs.VALUES) + len(runs.FILES) + len(runs.STATES) + 1,
        'summaries that were tampered with': len(runs.SUMMARIES) + 1,
        'two runs in one folder': 7 + 7 + 1 + 1 + 1 + 3 + 3 + 1,
        'what the system refuses': 1 + 1 + 4 + 4 + 1 + 1,
        'layers of an engine': 2 * (json + 6 * len(exports.PARTS['layers'])),
    }


def test_the_numbers_of_the_docs():
    with (REPO / 'docs/measured/fault_cases.csv').open(encoding='utf-8') as table:
        _, *rows = csv.reader(table)
    assert {name: int(number) for name, number in rows} == counts()
    assert f'{sum(counts().values())} cases' in (REPO / 'docs/faults.md').read_text(encoding='utf-8')


def test_the_points_of_the_docs():
    text = ' '.join((REPO / 'docs/faults.md').read_text(encoding='utf-8').split())
    assert f'after a time): {", ".join(killed.POINTS)}.' in text
