"""The tables of vendors, and of their targets, formats and backends."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from utils.qat.core.errors import QatError
from utils.qat.vendors.vendor import GRAPH, NMS, Backend, FileKind, Target, Vendor

NAMES = (  # the folders of utils/qat/vendors/. The first that takes a file runs it, unless --backend says otherwise
    'tensorrt',
    'onnxruntime',
    'openvino',
    'edge',  # before litert, whose backend takes its files too
    'litert',
    'pytorch',
)
VENDORS: dict[str, Vendor] = {name: import_module(f'utils.qat.vendors.{name}').VENDOR for name in NAMES}
TARGETS = {vendor.target.name: vendor.target for vendor in VENDORS.values() if vendor.target}  # --target
DEFAULT_TARGET = 'tensorrt'  # also of checkpoints and files that name no target
BACKENDS: dict[str, Backend] = {k: v for vendor in VENDORS.values() for k, v in vendor.backends.items()}  # --backend
FORMATS: dict[str, FileKind] = {  # --include. The first two are of ONNX, which several vendors read
    'onnx': FileKind('.onnx', 'models.deploy.formats.onnx', GRAPH),
    'onnx_end2end': FileKind('-end2end.onnx', 'models.deploy.formats.onnx_end2end', GRAPH + NMS),
    **{name: kind for vendor in VENDORS.values() for name, kind in vendor.formats.items()},
}


def format_of(path: Path) -> str:
    """Return the format, a key of FORMATS, of files with the suffix of `path`. Raises QatError if there is none."""
    formats = {kind.suffix: name for name, kind in FORMATS.items() if kind.suffix.startswith('.')}
    if path.suffix not in formats:
        raise QatError(f'{path}: must end in {" or ".join(formats)}')
    return formats[path.suffix]


def formats_with(option: str) -> str:
    """Name the formats that read an option, as they are typed."""
    return ' or '.join(name for name, kind in FORMATS.items() if option in kind.options)


def load_target(name: object) -> Target:
    """Return a target. Raises QatError if `name`, which may come from a file, is no key of TARGETS."""
    if not isinstance(name, str) or name not in TARGETS:
        raise QatError(f'its target is {str(name)[:50]!r}, not {", ".join(TARGETS)}; quantize or export the model anew')
    return TARGETS[name]


def target_of_recipe(recipe: Mapping[str, object] | None) -> Target:
    """Return the target of a checkpoint by the settings of its quantization (None for a float model); see `load_target`."""
    return load_target((recipe or {}).get('target', DEFAULT_TARGET))


CHECKPOINTS = ('.pt', '.pth', '.ckpt')
EXPORTED = tuple(dict.fromkeys(suffix for backend in BACKENDS.values() for suffix in backend.predicts))
MEASURABLE = tuple(dict.fromkeys(suffix for backend in BACKENDS.values() for suffix in backend.measures))
PREDICTING = tuple(name for name, backend in BACKENDS.items() if backend.predicts)
ENGINES = tuple(name for name, backend in BACKENDS.items() if backend.builders)


def backends_for(files: Sequence[Path], given: Sequence[str] | None) -> list[str | None]:
    """Assign the backends of --backend to files; None = the first that takes the file.

    One backend applies to each file that it takes; several are one per file.
    """
    if given is None:
        return [None] * len(files)
    if len(given) == len(files):
        return list(given)
    if len(given) > 1:
        raise QatError(f'--backend {",".join(given)}: give one, or one for each of the {len(files)} models')
    (name,) = given
    takes = BACKENDS[name].predicts
    if not any(file.suffix.lower() in takes for file in files):
        raise QatError(
            f'--backend {name}: {BACKENDS[name].title} runs {" and ".join(takes)} files, and neither {" nor ".join(map(str, files))} is one'
        )
    return [name if file.suffix.lower() in takes else None for file in files]
