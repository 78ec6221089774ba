"""The YAML of a network, looked at before upstream's parse_model, which runs `eval` on its strings and calls what they name.

A row is [from, repeats, layer, [arguments]]. It may name a layer; it may say numbers, and the few words of YOLOv9's files.
"""

import ast
from types import CodeType

from utils.qat.core.errors import QatError

# What upstream's parse_model knows, and what else its files have
LAYERS = frozenset(
    """
    Conv AConv ConvTranspose Bottleneck SPP SPPF DWConv BottleneckCSP DWConvTranspose2d SPPCSPC ADown ELAN1 RepNCSPELAN4 SPPELAN
    Concat Shortcut ReOrg CBLinear CBFuse Contract Expand Silence MP SP
    Detect DualDetect TripleDetect DDetect DualDDetect TripleDDetect Segment DSegment DualDSegment Panoptic""".split()
)
PYTORCH = frozenset(
    f'nn.{name}'
    for name in (
        'Upsample',
        'MaxPool2d',
        'AvgPool2d',
        'ZeroPad2d',
        'ConvTranspose2d',
        'BatchNorm2d',
        'Identity',
        'Dropout',
    )
)
ACTIVATIONS = frozenset(
    f'nn.{name}'
    for name in (
        'ReLU',
        'ReLU6',
        'LeakyReLU',
        'PReLU',
        'ELU',
        'CELU',
        'SELU',
        'GELU',
        'SiLU',
        'Mish',
        'Hardswish',
        'Hardsigmoid',
        'Sigmoid',
        'Tanh',
        'Softplus',
        'Identity',
    )
)
VALUES = frozenset(
    ('None', 'True', 'False', 'nc', 'anchors')
)  # what parse_model makes a number, None or a list of numbers of
MODES = frozenset(
    ('nearest', 'bilinear', 'bicubic')
)  # of nn.Upsample; no names that parse_model knows, so that they stay text
LARGEST = 100_000  # number
WINDOW = 64  # of a pooling, and factor of an upsampling: their work grows with it and is in no weights
WINDOWED = {
    'nn.MaxPool2d': 0,
    'nn.AvgPool2d': 0,
    'nn.Upsample': 0,
    'nn.ZeroPad2d': 0,
    'MP': 0,
    'SP': 0,
    'SPP': 1,
    'SPPF': 1,
    'SPPCSPC': 1,
}  # layer → from which argument on
ROWS, REPEATS, LENGTH = 1000, 100, 100  # at most: of the network, of a row, of a list

# A layer of the user's own: where it is defined, what it must not be, and what its functions must not use
TREE = 'models.common', 'models.experimental', 'models.yolo'
NO_LAYERS = frozenset(
    ('BaseModel', 'DetectMultiBackend', 'AutoShape', 'Ensemble', 'End2End', 'ONNX_ORT', 'ONNX_TRT')
)  # nor their subclasses
NOT_CALLED = frozenset(
    """eval exec compile open __import__ import_module system popen Popen run load load_url safe_load yaml_load parse_model
    attempt_load attempt_download""".split()
)


def require_network(content, source):
    """Check that upstream builds `content` without running or opening what the file says; raises QatError, naming `source`, if not.

    content: of a YAML file, or what a checkpoint holds as the YAML of its model.
    """

    def fail(problem):
        raise QatError(f'{source}: {problem}')

    if type(content) is not dict or not all(type(key) is str for key in content):
        fail('describes no network')
    if not _is_plain(content):
        fail('has other values than numbers, text, lists and maps')
    for key in ('backbone', 'head'):
        rows = content.get(key)
        is_row = lambda row: type(row) is list and len(row) == 4 and type(row[3]) is list  # noqa: E731
        if type(rows) is not list or not 1 <= len(rows) <= ROWS or not all(map(is_row, rows)):
            fail(
                f'needs backbone: and head:, each a list of layers [from, number, module, [arguments]], at most {ROWS}'
            )
    for key, (fits, allowed) in SETTINGS.items():
        if not fits(content.get(key)):
            fail(f'{key}: must be {allowed}, not {repr(content.get(key))[:60]}')
    for number, row in enumerate(content['backbone'] + content['head']):
        problem = _wrong_row(*row)
        if problem:
            fail(f'layer {number}: {problem}, and upstream would run it as code or build no layer')


def _is_plain(content):
    """Whether nothing but plain values is in it. A part that is there twice, or in itself, is looked at once."""
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if id(value) not in seen and type(value) in (dict, list):
            seen.add(id(value))
            waiting += [*value, *value.values()] if type(value) is dict else value
        elif type(value) not in (dict, list, str, int, float, bool, type(None)):
            return False
    return True


def _is_number(value, least=-LARGEST, most=LARGEST):
    return type(value) in (int, float) and least <= value <= most  # NaN does not


def _is_list_of(fits, value):
    return type(value) is list and len(value) <= LENGTH and all(map(fits, value))


def _is_int(value, least, most):
    return type(value) is int and least <= value <= most


def _is_anchors(value):
    return _is_int(value, 1, 100) or (
        _is_list_of(lambda row: _is_list_of(_is_number, row) and row, value) and bool(value)
    )


def _is_activation(text):
    """An activation as YOLOv9 writes it: nn.SiLU(), nn.LeakyReLU(0.1), nn.ReLU(inplace=True)."""
    if not text:
        return text is None
    if type(text) is not str or len(text) > 60:
        return False
    try:
        call = ast.parse(text, mode='eval').body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    values = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) else [None]
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in ACTIVATIONS
        and all(k.arg for k in call.keywords)
        and all(isinstance(v, ast.Constant) and (type(v.value) is bool or _is_number(v.value)) for v in values)
    )


FACTOR = lambda value: _is_number(value, 1e-3, 10), 'a number from 0.001 to 10'
SETTINGS = {  # key → (what it may be, in words)
    'nc': (lambda value: _is_int(value, 1, LARGEST), f'a number of classes from 1 to {LARGEST}'),
    'depth_multiple': FACTOR,
    'width_multiple': FACTOR,
    'anchors': (_is_anchors, 'a number from 1 to 100, or lists of numbers'),
    'activation': (_is_activation, 'one such as nn.SiLU() or nn.LeakyReLU(0.1)'),
    'ch': (lambda value: value is None or _is_int(value, 1, 1000), 'a number of channels from 1 to 1000'),
    'inplace': (lambda value: type(value) in (bool, type(None)), 'true or false'),
}


def _wrong_row(source, repeats, name, arguments):
    """What is wrong with a row, in words; None if nothing is."""
    if not (_is_int(source, -ROWS, ROWS) or (source and _is_list_of(lambda i: _is_int(i, -ROWS, ROWS), source))):
        return f'{_shown(source)} is no layer to read from, nor a list of such'
    if not _is_int(repeats, 1, REPEATS):
        return f'{_shown(repeats)} is no number of repeats from 1 to {REPEATS}'
    if type(name) is not str:
        return f'{_shown(name)} is no name of a layer'
    problem = None if name in PYTORCH else _wrong_layer(name)
    if problem:
        return problem
    words = VALUES | MODES if name == 'nn.Upsample' else VALUES
    for i, value in enumerate(arguments):
        most = WINDOW if i >= WINDOWED.get(name, LENGTH) else LARGEST
        numbers = value if type(value) is list else [value]
        if not (
            value is None
            or type(value) is bool
            or (type(value) is str and value in words)
            or _is_list_of(lambda n: _is_number(n, -most, most), numbers)
        ):
            return (
                f'{_shown(value)} is no argument of {name}: these are numbers from -{most} to {most}, lists of them, '
                f'{", ".join(sorted(words))}'
            )
    return None if len(arguments) <= LENGTH else f'more than {LENGTH} arguments'


def _shown(value):
    return repr(value)[:60]


def _wrong_layer(name):
    """Why `name` is no layer of this tree, in words; None if it is one."""
    import torch

    from models import yolo

    if not name.isidentifier():
        return f'{_shown(name)} is no name of a layer'
    found = getattr(yolo, name, None)
    if found is None:
        return f'this YOLOv9 tree has no layer {name[:60]}'
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module) and found.__module__ in TREE):
        return f'{name} is no layer that is defined in {", ".join(TREE)}, nor one of {", ".join(sorted(PYTORCH))}'
    if name in LAYERS:
        return None
    if any(base.__name__ in NO_LAYERS for base in found.__mro__):
        return f'{name} is a whole model'
    functions = [value for base in found.__mro__ if base.__module__ in TREE for value in vars(base).values()]
    called = NOT_CALLED.intersection(used for function in functions for used in _names_used(function))
    return f'{name} calls {min(called)}, which no layer needs' if called else None


def _names_used(function):
    """Names that a function, and what is defined in it, uses."""
    waiting = [getattr(function, '__code__', None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            waiting += code.co_consts
