"""Check the YAML of a network before upstream's parse_model reads it.

parse_model runs `eval` on the strings of the file and calls the results. A row is [from, repeats, layer, [arguments]]. This
check allows only names of layers, numbers, and the few words of YOLOv9's own files.
"""

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NoReturn

from utils.qat.core.errors import QatError
from utils.qat.untrusted.json_schema import NONE, between, items, misfit

# The layers that upstream's parse_model knows, and the others of its files
LAYERS = frozenset(
    """
    Conv AConv ConvTranspose Bottleneck SPP SPPF DWConv BottleneckCSP DWConvTranspose2d SPPCSPC ADown ELAN1 RepNCSPELAN4 SPPELAN
    Concat Shortcut ReOrg CBLinear CBFuse Contract Expand Silence MP SP
    Detect DualDetect TripleDetect DDetect DualDDetect TripleDDetect Segment DSegment DualDSegment Panoptic""".split()
)
PYTORCH = frozenset(
    """
    nn.Upsample nn.MaxPool2d nn.AvgPool2d nn.ZeroPad2d nn.ConvTranspose2d nn.BatchNorm2d nn.Identity
    nn.Dropout""".split()
)
ACTIVATIONS = frozenset(
    """
    nn.ReLU nn.ReLU6 nn.LeakyReLU nn.PReLU nn.ELU nn.CELU nn.SELU nn.GELU nn.SiLU nn.Mish nn.Hardswish nn.Hardsigmoid
    nn.Sigmoid nn.Tanh nn.Softplus nn.Identity""".split()
)
# Words that parse_model turns into a number, None or a list of numbers
VALUES = frozenset(('None', 'True', 'False', 'nc', 'anchors'))
# Words of nn.Upsample. parse_model has no such names, so they stay text.
MODES = frozenset(('nearest', 'bilinear', 'bicubic'))
LARGEST = 100_000  # absolute value of a number
# Window of a pooling, factor of an upsampling: the cost of such a layer grows with it, although it has no weights
WINDOW = 64
WINDOWED = {  # layer → its first argument that WINDOW limits
    **dict.fromkeys(('nn.MaxPool2d', 'nn.AvgPool2d', 'nn.Upsample', 'nn.ZeroPad2d', 'MP', 'SP'), 0),
    **dict.fromkeys(('SPP', 'SPPF', 'SPPCSPC'), 1),
}
ROWS, REPEATS, LENGTH = 1000, 100, 100  # rows of the network, repeats of a row, values of a list: at most
NUMBER, LAYER = between(-LARGEST, LARGEST), between(-ROWS, ROWS, (int,))

# A layer of the user's own: the modules that may define it, the classes that it must not be a subclass of, and the
# functions that it must not use
TREE = 'models.common', 'models.experimental', 'models.yolo'
WHOLE_MODELS = frozenset(
    ('BaseModel', 'DetectMultiBackend', 'AutoShape', 'Ensemble', 'End2End', 'ONNX_ORT', 'ONNX_TRT')
)
NOT_CALLED = frozenset(
    """eval exec compile open __import__ import_module system popen Popen run load load_url safe_load yaml_load parse_model
    attempt_load attempt_download""".split()
)


def require_network(content: object, source: str) -> None:
    """Raise QatError unless upstream can build the network without running or opening anything that the file names.

    content: of a YAML file, or of the model in a checkpoint. source: the file or flag, for the message.
    """

    def fail(problem: str) -> NoReturn:
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
    for key, (kind, allowed) in SETTINGS.items():
        if misfit(content.get(key), kind):
            fail(f'{key}: must be {allowed}, not {repr(content.get(key))[:60]}')
    for number, row in enumerate(content['backbone'] + content['head']):
        problem = _wrong_row(*row)
        if problem:
            fail(f'layer {number}: {problem}, and upstream would run it as code or build no layer')


def _is_plain(content: object) -> bool:
    """Tell whether it has only plain values.

    A part that occurs twice, or inside itself, is checked once.
    """
    waiting, visited = [content], set()
    while waiting:
        value = waiting.pop()
        if type(value) is dict or type(value) is list:
            if id(value) not in visited:
                visited.add(id(value))
                waiting += [*value, *value.values()] if type(value) is dict else value
        elif type(value) not in (str, int, float, bool, type(None)):
            return False
    return True


def _is_activation(text: object) -> bool:
    """Tell whether it is an activation as YOLOv9 writes it: nn.SiLU(), nn.LeakyReLU(0.1), nn.ReLU(inplace=True)."""
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
        and all(isinstance(v, ast.Constant) and (type(v.value) is bool or NUMBER(v.value)) for v in values)
    )


FACTOR = between(1e-3, 10), 'a number from 0.001 to 10'
SETTINGS: dict[str, tuple[object, str]] = {  # key → (kind of the allowed values, see json_schema; the same in words)
    'nc': (between(1, LARGEST, (int,)), f'a number of classes from 1 to {LARGEST}'),
    'depth_multiple': FACTOR,
    'width_multiple': FACTOR,
    'anchors': (
        (between(1, 100, (int,)), items(items(NUMBER, 1, LENGTH), 1, LENGTH)),
        'a number from 1 to 100, or lists of numbers',
    ),
    'activation': (_is_activation, 'one such as nn.SiLU() or nn.LeakyReLU(0.1)'),
    'ch': ((NONE, between(1, 1000, (int,))), 'a number of channels from 1 to 1000'),
    'inplace': ((NONE, bool), 'true or false'),
}


def _wrong_row(source: object, repeats: object, name: object, arguments: list) -> str | None:
    """Return what is wrong with a row, in words; None if nothing is."""
    if not (LAYER(source) or items(LAYER, 1, LENGTH)(source)):
        return f'{_shown(source)} is no layer to read from, nor a list of such'
    if not between(1, REPEATS, (int,))(repeats):
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
            or items(between(-most, most), 0, LENGTH)(numbers)
        ):
            return (
                f'{_shown(value)} is no argument of {name}: these are numbers from -{most} to {most}, lists of them, '
                f'{", ".join(sorted(words))}'
            )
    return None if len(arguments) <= LENGTH else f'more than {LENGTH} arguments'


def _shown(value: object) -> str:
    return repr(value)[:60]


def _wrong_layer(name: str) -> str | None:
    """Return why `name` is no layer of this tree, in words; None if it is one."""
    import torch

    from models import yolo  # upstream's

    if not name.isidentifier():
        return f'{_shown(name)} is no name of a layer'
    cls = getattr(yolo, name, None)
    if cls is None:
        return f'this YOLOv9 tree has no layer {name[:60]}'
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module) and cls.__module__ in TREE):
        return f'{name} is no layer that is defined in {", ".join(TREE)}, nor one of {", ".join(sorted(PYTORCH))}'
    if name in LAYERS:
        return None
    if any(base.__name__ in WHOLE_MODELS for base in cls.__mro__):
        return f'{name} is a whole model'
    functions = [value for base in cls.__mro__ if base.__module__ in TREE for value in vars(base).values()]
    called = NOT_CALLED.intersection(used for function in functions for used in _names_used(function))
    return f'{name} calls {min(called)}, which no layer needs' if called else None


def _names_used(function: object) -> Iterator[str]:
    """Yield the names that a function, and the functions defined in it, use."""
    waiting = [getattr(function, '__code__', None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            waiting += code.co_consts
