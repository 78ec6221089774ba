"""Identify a .pt2 file (an exported program of torch.export or a package of AOTInductor), and check a program.

`torch.export.load` runs code from a file: it calls any function of torch that the graph names, evaluates shape expressions and guards as
Python, unpickles example inputs, weights and objects, and loads native code beside the graph. So it never reads the file itself, but a
new archive of the checked parts: a graph of OPERATORS, tensors as plain bytes, and our metadata. Pickles, guards and names of source files
are left out. No pickle is read.

A package is native code, so no check can make it data: see vendors/pytorch/aoti.py.
"""

import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.qat.core.errors import QatError, one_line
from utils.qat.core.files import require_file
from utils.qat.untrusted.torch_archive import DAMAGED, Refused, plain_archive

MEMBERS = re.compile(
    r'[^/]+/(archive_format|archive_version|version|byteorder|\.data/(version|serialization_id)|models/model\.json|'
    r'data/(weights/(weight_\d+|model_weights_config\.json)|constants/(tensor_\d+|model_constants_config\.json)|sample_inputs/model\.pt)|'
    r'extra/metadata\.json)'
)
GRAPH, METADATA, SAMPLES = 'models/model.json', 'extra/metadata.json', 'data/sample_inputs/model.pt'
TENSORS = 'data/weights/model_weights_config.json', 'data/constants/model_constants_config.json'
MOST_JSON = 64_000_000  # bytes; the graph of the largest YOLOv9 has 6 MB
ATEN = """
    _log_softmax _softmax add add_ adaptive_avg_pool2d alias arange avg_pool2d batch_norm cat chunk clamp clamp_ clamp_min clone
    constant_pad_nd contiguous conv2d conv_transpose2d detach detach_ div div_ dropout elu exp expand fake_quantize_per_channel_affine
    fake_quantize_per_tensor_affine flatten full gelu hardsigmoid hardswish hardswish_ hardtanh layer_norm leaky_relu leaky_relu_
    lift_fresh_copy linear lt matmul max_pool2d mean mish mul mul_ narrow ones pad permute pow prelu reciprocal relu relu6 relu_ reshape round round_
    select sigmoid sigmoid_ silu silu_ slice softmax softplus split split_with_sizes squeeze stack sub sub_ sum sym_size t tanh to
    _to_copy transpose unbind unflatten unsqueeze upsample_bilinear2d upsample_nearest2d view zeros zeros_like
    _assert_tensor_metadata
""".split()  # they compute, and touch neither files nor other processes
OTHERS = {
    '_operator.getitem',
    *(
        f'torch.ops.quantized_decomposed.{way}_{by}.default'
        for way in ('quantize', 'dequantize')
        for by in ('per_tensor', 'per_channel')
    ),
}
OPERATOR = re.compile(rf'torch\.ops\.aten\.({"|".join(ATEN)})\.\w+')
TEXT = re.compile(r'[\w.:+@-]{0,300}')  # names, never an expression
ATOM = r"(?:Symbol\('s\d+'(?:, (?:integer|positive|nonnegative)=True)*\)|Integer\(-?\d+\))"
# a size that depends on the batch
EXPRESSION = re.compile(rf'-?\d+|s\d+|{ATOM}|(?:Add|Mul)\({ATOM}(?:, {ATOM}){{1,4}}\)')
REFUSED = {'as_graph', 'as_custom_obj', 'as_operator', 'custom_obj', 'token'}
SPECS = 'in_spec', 'out_spec'
AGAIN = 'export it with export_qat.py --include pt2'


def is_package(path: str | Path) -> bool:
    """Tell whether a file is a package of AOTInductor, by the names in its archive; False if it is no archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any('/data/aotinductor/' in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError):
        return False


def read_program(path: str | Path, flag: str = '--weights') -> tuple[dict[str, bytes], dict[str, str]]:
    """Read an exported program, which `flag` named, and check it.

    Returns the members of an archive for torch.export.load, name → bytes, without example inputs; and the metadata of the export.
    Raises QatError if it is no such file, is damaged, or needs more than our programs do.
    """
    require_file(path, flag)
    try:
        members = {name: bytes(part) for name, part in plain_archive(path, MEMBERS, GRAPH).items()}
        metadata = read_metadata(members.get(METADATA, b'{}'))
        files = {name.rpartition('/')[2] for name in members}
        for name in TENSORS:
            config = _json(members.get(name, b'{"config": {}}'))
            for tensor in config['config'].values():  # each must be plain bytes in a member
                if tensor['use_pickle'] is not False or tensor['path_name'] not in files:
                    raise Refused('a tensor in it is a pickle, or is not there')
            _require_texts(config)
            members[name] = json.dumps(config).encode()
        members[GRAPH] = json.dumps(_checked_graph(_json(members[GRAPH]))).encode()
        return {name: part for name, part in members.items() if name not in (METADATA, SAMPLES)}, metadata
    except Refused as e:
        raise QatError(f'{flag} {path}: not loaded: {e}; {AGAIN}') from e
    # all errors that JSON of another form can raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as e:
        raise QatError(f'{flag} {path}: not loaded: its graph is damaged ({type(e).__name__}); {AGAIN}') from e
    except DAMAGED as e:
        raise QatError(f'{flag} {path}: no exported program (or cut short): {one_line(e, 500)}; {AGAIN}') from e


def read_metadata(text: bytes) -> dict[str, str]:
    """Read the metadata that export_qat.py stores in a .pt2 file: JSON of texts. Raises Refused for anything else."""
    content = _json(text)
    if type(content) is not dict or not all(type(value) is str for value in content.values()):
        raise Refused('its metadata are not a table of texts')
    return content


def _json(text: bytes) -> Any:
    """Parse JSON of a bounded size."""
    if len(text) > MOST_JSON:
        raise Refused(f'its graph has {len(text) / 1e6:.0f} MB, at most {MOST_JSON / 1e6:.0f} MB are read')
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Refused(f'it holds JSON that cannot be read ({type(e).__name__})') from e


def _checked_graph(program: Any) -> object:
    """Return a program without the parts that no computation needs, if all others are allowed.

    Raises Refused if it names another operator, or has text that is no name.
    """
    module = program['graph_module']
    graph = module['graph']
    program['guards_code'] = []  # Python, which torch.export would run
    module['metadata'], module['treespec_namedtuple_fields'] = {}, {}
    module['module_call_graph'] = module['module_call_graph'][:1]
    for node in graph['nodes']:
        node['metadata'] = {}
        name = node['target']
        if name not in OTHERS and not OPERATOR.fullmatch(name):
            raise Refused(f'its graph has {name[:80]!r}, which is not on the list of operators')
    if graph['custom_obj_values']:
        raise Refused('its graph has objects that are no tensors')
    _require_texts(program)
    return program


def _require_texts(value: object, key: str = '') -> None:
    """Check all text in a value of JSON, found under `key`; Refused for text that is no name."""
    if isinstance(value, dict):
        if refused := REFUSED & value.keys():
            raise Refused(f'it has {min(refused)}, which none of our programs has')
        for name, part in value.items():
            _require_texts(name)
            _require_texts(part, name)
    elif isinstance(value, list):
        for part in value:
            _require_texts(part, key)
    elif isinstance(value, str):
        known = _spec(value) if key in SPECS else (EXPRESSION if key == 'expr_str' else TEXT).fullmatch(value)
        if not known:
            raise Refused(f'it has {value[:80]!r} as a name or a size')


def _spec(text: str) -> bool:
    """Tell whether text describes the inputs and outputs of our programs: images, and one or two tensors."""
    from torch.utils import _pytree as pytree

    forms: list[object] = [((0,), {}), (0,), (0, 0)]
    return text in {pytree.treespec_dumps(pytree.tree_structure(form)) for form in forms}


def archive_of(members: dict[str, bytes], shape: Sequence[int]) -> io.BytesIO:
    """Write the members of `read_program` as an archive for torch.export.load. shape: of the images, as an example."""
    import torch
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    samples, buffer = io.BytesIO(), io.BytesIO()
    torch.save(((torch.zeros(*shape),), {}), samples)
    own = ('version', 'byteorder', '.data/version', '.data/serialization_id')  # the writer's
    with PT2ArchiveWriter(buffer) as writer:
        for name, part in {**members, SAMPLES: samples.getvalue()}.items():
            if name not in own:
                writer.write_bytes(name, part)
    buffer.seek(0)
    return buffer
