"""MODEL.engine.json: what an engine was built of, by and for. An engine itself does not say it before it is loaded, or not at all.

An engine runs only in the version of TensorRT that built it, on the kind of GPU it was built on.
"""

import json

from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256, write_json

VERSION = 1


def sidecar_of(engine):
    """Path of the JSON beside `engine`."""
    return engine.with_name(f'{engine.name}.json')


def this_gpu(device=None):
    """{'name', 'capability'} of a CUDA device, by default the current one; None where PyTorch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        'name': torch.cuda.get_device_name(device),
        'capability': '.'.join(map(str, torch.cuda.get_device_capability(device))),
    }


def write_sidecar(source, plan, product, more):
    """Write what the engine of source.config was built of (plan.Source), how (plan.Plan) and by; returns the content."""
    config = source.config
    content = {
        'sidecar': VERSION,
        'built_by': product,
        'gpu': this_gpu(),
        'bytes': config.engine.stat().st_size,
        'onnx': config.onnx.name,
        'onnx_sha256': sha256(config.onnx),
        'precision': plan.precision,
        'typed': 'STRONGLY_TYPED' in plan.network,
        'inputs': {name: dict(zip(('min', 'opt', 'max'), shapes)) for name, shapes in source.shapes.items()},
        'metadata': source.metadata,
        'workspace_mib': config.workspace,
        'level': config.level,
        **more,
    }
    write_json(sidecar_of(config.engine), content)
    return content


def read_sidecar(engine):
    """The content, None if there is no such file. Raises QatError if it is none of ours."""
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


def require_fit(engine, content, product, gpu):
    """Raise QatError if `engine` was not built by `product` for `gpu`, or is not whole.

    content: see read_sidecar. product: such as 'TensorRT 10.13.3'. gpu: see this_gpu; built without one (TensorRT-RTX), an
    engine is for any.
    """
    again = f'build it again here: scripts/generate_trt_engine.sh {content["onnx"]}'
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
