"""The sidecar of an engine, MODEL.engine.json: its source, the TensorRT that built it, and its GPU.

An engine runs only in the version of TensorRT that built it, and on the kind of GPU on which it was built. The engine
file shows these only after it is loaded, or not at all.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.core.command import command
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import MADE_BY, sha256, write_json
from utils.qat.untrusted.json_schema import INDEX, NONE, anything, first_wrong, items, misfit, read_json

if TYPE_CHECKING:
    import torch

    from utils.qat.vendors.tensorrt.engine.plan import Plan

VERSION = 1  # of the sidecar's content


CONTENT = {  # what is read of a sidecar
    'sidecar': int,
    'built_by': str,
    'gpu': (NONE, {'name': str, 'capability': str}),
    'bytes': INDEX,
    'inputs': {str: dict.fromkeys(('min', 'opt', 'max'), items(INDEX, 1))},
    'metadata': {str: str},
    'onnx?': str,
    'weights?': str,
    'precision?': str,
    'workspace_mib?': INDEX,
    str: anything,
}


def sidecar_of(engine: Path) -> Path:
    """Return the path of the sidecar of `engine`."""
    return engine.with_name(f'{engine.name}.json')


def this_gpu(device: torch.device | None = None) -> dict[str, str] | None:
    """Describe a CUDA device as {'name': 'NVIDIA H100 PCIe', 'capability': '9.0'}; None if PyTorch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        'name': torch.cuda.get_device_name(device),
        'capability': '.'.join(map(str, torch.cuda.get_device_capability(device))),
    }


def write_sidecar(plan: Plan, **more: object) -> dict[str, object]:
    """Write the sidecar of an engine that was built as planned, with `more` about the build; return its content."""
    config = plan.config
    return write_entries(
        config.engine,
        plan.product,
        onnx=config.onnx.name,
        onnx_sha256=sha256(config.onnx),
        precision=plan.precision,
        typed='STRONGLY_TYPED' in plan.network,
        inputs={name: dict(zip(('min', 'opt', 'max'), shapes)) for name, shapes in plan.shapes.items()},
        metadata=plan.metadata,
        workspace_mib=config.workspace,
        level=config.level,
        **more,
    )


def write_entries(engine: Path, product: str, **entries: object) -> dict[str, object]:
    """Write the sidecar of an engine: its source (`onnx`, or `weights` by Torch-TensorRT), inputs and settings."""
    content = {
        'sidecar': VERSION,
        'description': MADE_BY,
        'built_by': product,
        'gpu': this_gpu(),
        'bytes': engine.stat().st_size,
        **entries,
    }
    write_json(sidecar_of(engine), content)
    return content


def read_sidecar(engine: Path) -> dict[str, Any] | None:
    """Read the sidecar of `engine`; None if there is none."""
    file = sidecar_of(engine)
    if not file.exists():
        return None
    again = 'delete it, or build the engine again: scripts/generate_trt_engine.sh'
    with reporting(f'{file}: damaged', ValueError, remedy=again, most=150):
        content = read_json(file)
        if type(content) is not dict or content.get('sidecar') != VERSION:
            raise QatError(f'{file}: not written by this version of the tool; {again}')
        sourceless = content.keys().isdisjoint(('onnx', 'weights'))
        if wrong := misfit(content, CONTENT) or first_wrong({'onnx': sourceless, 'inputs': not content['inputs']}):
            raise ValueError(f'{wrong} is missing, or not what it writes')
    return content


def require_fit(engine: Path, content: dict[str, Any], product: str, gpu: dict[str, str] | None) -> None:
    """Raise QatError unless an engine is complete, and fits this TensorRT and, if it was built on a GPU, this GPU."""
    again = 'build it again here: ' + (
        shlex.join(['scripts/generate_trt_engine.sh', content['onnx']])
        if 'onnx' in content
        else command('export_qat.py', '--weights', content['weights'], '--include', 'torch_tensorrt')
    )
    size = engine.stat().st_size
    if size != content['bytes']:
        raise QatError(
            f'{engine}: {size} bytes, and {sidecar_of(engine).name} tells of {content["bytes"]}: not whole, or another engine; {again}'
        )
    if content['built_by'] != product:
        raise QatError(
            f'{engine}: built by {content["built_by"]}, and this is {product}; an engine runs only with the version that built it: {again}'
        )
    if content['gpu'] and content['gpu'] != gpu:
        here = f'{gpu["name"]} ({gpu["capability"]})' if gpu else 'no GPU'
        raise QatError(
            f'{engine}: built on {content["gpu"]["name"]} (compute capability {content["gpu"]["capability"]}), and this is {here}; '
            f'an engine runs only on the kind of GPU it was built on: {again}'
        )
