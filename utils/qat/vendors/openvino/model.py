"""Load OpenVINO without its telemetry, read .onnx and .xml files, and write .xml files.

The Q/DQ of an .onnx file are rewritten on the way, see `for_openvino`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import onnx

from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError, naming, reporting
from utils.qat.graph.onnx_file import load
from utils.qat.graph.onnx_graph import count_qdq
from utils.qat.graph.passes import store_int8_weights
from utils.qat.vendors.openvino.graph import for_openvino

if TYPE_CHECKING:
    import openvino

METADATA = 'framework'  # where OpenVINO keeps the metadata of an .onnx file, and of an .xml file made from it
ROOT = re.compile(rb'\s*(<\?xml[^>]*\?>)?\s*<net\s')  # start of an .xml file
HEADER_BYTES = 4096  # that contain this start


def load_openvino(who: str = 'OpenVINO') -> ModuleType:
    """Import OpenVINO without its telemetry, which would write an id to the home folder and report each import."""
    sys.modules['openvino_telemetry'] = None  # type: ignore[assignment]  # makes it look uninstalled
    problem = f'{who}: no package openvino that can be loaded here'
    with reporting(problem, ImportError, remedy='./install_dependencies.sh'):
        import openvino
    return openvino


@cache
def one_core() -> openvino.Core:
    """Return the only OpenVINO `Core` of this process, which lives until its end.

    Destroying the last `Core` unloads the CPU plugin, which frees a signal stack. If another thread loaded the plugin, this
    stack is still in use, and the next signal ends the process (OpenVINO 2026.4.1).
    """
    return load_openvino().Core()


@contextlib.contextmanager
def refusing(file: Path, what: str, remedy: str = '') -> Iterator[None]:
    """Raise errors of OpenVINO in the block as a QatError, see `reporting`, without source locations. what: what it cannot do."""
    with reporting(f'{file}: OpenVINO cannot {what}', RuntimeError, remedy=remedy, most=300):
        try:
            yield
        except RuntimeError as e:
            raise RuntimeError(re.sub(r"(Exception from|Check '.*' failed at) src/\S+:\d+:?", '', str(e))) from e


def read_model(file: Path) -> openvino.Model:
    """Read an .onnx or .xml file."""
    load_openvino(str(file))
    if file.suffix.lower() == '.onnx':
        return _from_onnx(load(file), file)
    with refusing(file, 'read it', 'copy it and its .bin again, or write both with export_qat.py --include openvino'):
        model = one_core().read_model(_whole(file))
    for kind, ports in (('input', model.inputs), ('output', model.outputs)):
        for number, port in enumerate(ports):
            if not port.get_names():
                port.get_tensor().set_names({f'{kind}{number}'})
    return model


def _from_onnx(model: onnx.ModelProto, file: Path) -> openvino.Model:
    """Read a graph in the form of `for_openvino`. file: the file that messages name."""
    if any(node.op_type == PLUGIN for node in model.graph.node):
        raise QatError(
            f'{file}: its NMS is {PLUGIN}, which TensorRT alone has; for OpenVINO export it with --nms standard'
        )
    with naming(file):
        source = for_openvino(model).SerializeToString()
    with refusing(file, 'read it', 'export it with export_qat.py'):
        network = one_core().read_model(source)
    for port, output in zip(network.outputs, model.graph.output):
        port.get_tensor().set_names({output.name})  # drops other names, of nodes
    return network


def _whole(file: Path) -> Path:
    """Return `file`, an .xml; raise QatError unless it is OpenVINO's and its weights file is beside it."""
    with file.open('rb') as content:
        if not ROOT.match(content.read(HEADER_BYTES)):
            raise QatError(
                f"{file}: no model of OpenVINO's (it does not begin with <net>); write one with export_qat.py --include openvino"
            )
    with reporting(f'{file}: not UTF-8', UnicodeDecodeError, remedy='write it again with export_qat.py'):
        file.read_text(encoding='utf-8')
    weights = file.with_suffix('.bin')
    if not weights.is_file():
        raise QatError(
            f'{file}: {weights.name}, which has its weights, is not beside it; put both files into one folder'
        )
    return file


def metadata(model: openvino.Model) -> dict[str, str]:
    """Return the metadata that the export wrote."""
    written = model.rt_info[METADATA] if model.has_rt_info([METADATA]) else {}
    return {key: str(text.value) for key, text in written.items()} if isinstance(written, dict) else {}


def write_ir(model: onnx.ModelProto, file: Path) -> None:
    """Write an ONNX graph as OpenVINO's .xml, and a .bin beside it, with weights in INT8 where they are quantized.

    Raises OSError if the disk does not take them; OpenVINO's own error has no reason.
    """
    openvino = load_openvino(str(file))
    model = store_int8_weights(model) if any(count_qdq(model)) else model
    weights = file.with_suffix('.bin')
    try:
        openvino.serialize(_from_onnx(model, file), str(file), str(weights))
    except RuntimeError as e:
        if 'iostream' in str(e):
            # fails likewise, with the reason, unless only the .xml had no room
            weights.write_bytes(bytes(model.ByteSize()))
            raise QatError(f'{file}: OpenVINO could not write it; is the disk full?') from e
        raise
