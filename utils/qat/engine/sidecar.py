"""The sidecar of an engine, MODEL.engine.json: its source, the TensorRT that built it, and its GPU.

An engine runs only in the version of TensorRT that built it, and on the kind of GPU on which it was built. The engine file
tells this only after it is loaded, or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256, write_json

if TYPE_CHECKING:
    import torch

    from utils.qat.engine.plan import Plan, Source

VERSION = 1  # of the sidecar's content


def sidecar_of(engine: Path) -> Path:
    """Return the path of the sidecar of `engine`."""
    return engine.with_name(f'{engine.name}.json')


def this_gpu(device: torch.device | None = None) -> dict[str, str] | None:
    """Describe a CUDA device, by default the current one.

    Returns:
        {'name', 'capability'}, such as 'NVIDIA H100 PCIe' and '9.0'; None if PyTorch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        'name': torch.cuda.get_device_name(device),
        'capability': '.'.join(map(str, torch.cuda.get_device_capability(device))),
    }


def write_sidecar(source: Source, plan: Plan, product: str, more: dict[str, Any]) -> dict[str, Any]:
    """Write the sidecar of the engine source.config.engine, which is already built.

    Args:
        source: facts about the ONNX file.
        plan: flags of the build.
        product: name and version of the TensorRT that built the engine, such as 'TensorRT 10.13.3'.
        more: entries for the sidecar besides.

    Returns:
        The content of the sidecar.
    """
    config = source.config
    return write_entries(
        config.engine,
        product,
        onnx=config.onnx.name,
        onnx_sha256=sha256(config.onnx),
        precision=plan.precision,
        typed='STRONGLY_TYPED' in plan.network,
        inputs={name: dict(zip(('min', 'opt', 'max'), shapes)) for name, shapes in source.shapes.items()},
        metadata=source.metadata,
        workspace_mib=config.workspace,
        level=config.level,
        **more,
    )


def write_entries(engine: Path, product: str, **entries: Any) -> dict[str, Any]:
    """Write the sidecar of an engine that is already built.

    Args:
        engine: file of the engine.
        product: see `write_sidecar`.
        entries: its source (`onnx`, or `weights` of an engine by Torch-TensorRT), inputs and settings.

    Returns:
        The content of the sidecar.
    """
    content = {
        'sidecar': VERSION,
        'built_by': product,
        'gpu': this_gpu(),
        'bytes': engine.stat().st_size,
        **entries,
    }
    write_json(sidecar_of(engine), content)
    return content


def read_sidecar(engine: Path) -> dict[str, Any] | None:
    """Read the sidecar of `engine`.

    Returns:
        Its content, see `write_sidecar`; None if there is no sidecar.

    Raises:
        QatError: the file is damaged, or another version of the toolkit wrote it.
    """
    file = sidecar_of(engine)
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as e:
        raise QatError(
            f'{file}: damaged ({e}); delete it, or build the engine again: scripts/generate_trt_engine.sh'
        ) from e
    if not isinstance(content, dict) or content.get('sidecar') != VERSION:
        raise QatError(
            f'{file}: not written by this version of the tool; delete it, or build the engine again: '
            'scripts/generate_trt_engine.sh'
        )
    return content


def require_fit(engine: Path, content: dict[str, Any], product: str, gpu: dict[str, str] | None) -> None:
    """Require that an engine is whole, and runs with this TensorRT on this GPU.

    Args:
        engine: file of the engine.
        content: content of its sidecar, see `read_sidecar`.
        product: name and version of the installed TensorRT, such as 'TensorRT 10.13.3'.
        gpu: the GPU at hand, see `this_gpu`. An engine that was built without a GPU (by TensorRT-RTX) fits every GPU.

    Raises:
        QatError: the size of the file, the TensorRT or the GPU is not the one in the sidecar.
    """
    again = 'build it again here: ' + (
        f'scripts/generate_trt_engine.sh {content["onnx"]}'
        if 'onnx' in content
        else f'python export_qat.py --weights {content["weights"]} --include torch_tensorrt'
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
        found = f'{gpu["name"]} ({gpu["capability"]})' if gpu else 'no GPU'
        raise QatError(
            f'{engine}: built on {content["gpu"]["name"]} (compute capability {content["gpu"]["capability"]}), and this is {found}; '
            f'an engine runs only on the kind of GPU it was built on: {again}'
        )
