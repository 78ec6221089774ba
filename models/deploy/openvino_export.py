"""ONNX file → OpenVINO's own files, MODEL.xml and MODEL.bin, checked in OpenVINO before they get their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import torch

from models.deploy.end2end import check_detections, made_predictions, nms_part, shape_of
from models.deploy.onnx_export import RELATIVE, made_images, output_differences
from utils.qat.config.export import Nms, Pooling
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.data.image_folders import normalized
from utils.qat.graph.openvino_model import one_core, write_ir
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.openvino import OVERFLOW, OpenVINO
from utils.qat.prediction.registry import open_file

CPU = torch.device('cpu')


def export_openvino(source: Path, path: Path, limit: float) -> list[str]:
    """Write the model in an .onnx file as OpenVINO's files.

    Args:
        source: a file of export_onnx, which was compared with PyTorch.
        path: the .xml; the .bin is written beside it.
        limit: relative error that was allowed between ONNX Runtime and PyTorch, see onnx_export.Exported. Twice as much is allowed
            here, between two engines that each round.

    Returns:
        Lines about what OpenVINO made of the model.

    Raises:
        QatError: OpenVINO is missing, cannot read the graph, or computes something else. No file is written.
    """
    session = _written(source, path, lambda session: _compare(session, source, 2 * limit))
    return list(session.notes)


def export_openvino_end2end(source: Path, plain: Path, path: Path, nms: Nms, pooling: Pooling = Pooling()) -> list[str]:
    """Write the model with NMS in an .onnx file as OpenVINO's files, and compare its NMS in OpenVINO with torchvision's.

    Args:
        source: a file of export_end2end, of the kind `standard`.
        plain: the file of export_onnx that it was made of.
        path: the .xml; the .bin is written beside it.
        nms: that is inside.
        pooling: of the masks that are inside.

    Returns:
        Lines about what OpenVINO made of the model.

    Raises:
        QatError: as export_openvino.
    """
    session = _written(source, path, lambda session: _compare_nms(session, source, plain, nms, pooling))
    return list(session.notes)


def _written(source: Path, path: Path, check: Callable[[OpenVINO], None]) -> OpenVINO:
    """Write the graph in `source` to `path`, if `check` of a session of what was written finds nothing. Returns the session."""
    with atomic(path) as tmp, atomic(path.with_suffix('.bin')):  # write_ir names the .bin after the .xml
        write_ir(onnx.load(source), tmp)
        session = OpenVINO(tmp, CPU)
        check(session)
    return session


def _compare(session: OpenVINO, source: Path, limit: float) -> None:
    """Compare the outputs on made images with the outputs in ONNX Runtime. limit: largest relative error."""
    batch, _, *imgsz = shape_of(onnx.load(source, load_external_data=False).graph.input[0])
    images, model = made_images(batch, imgsz), FileModel(session)
    images = normalized(images) if model.classifies else images
    figures = output_differences(model(images), open_file(source, CPU, 'onnxruntime')(images))
    errors = {name: figures[name] for name in RELATIVE if name in figures}
    if session.saturates:
        LOGGER.warning(f'{OVERFLOW}; so the file is written without a comparison with ONNX Runtime')
    elif max(errors.values()) > limit:
        raise QatError(
            f'OpenVINO differs from ONNX Runtime by {", ".join(f"{e:.2%} ({name})" for name, e in errors.items())}, '
            f'more than {limit:.1%}; no file was written'
        )


def _compare_nms(session: OpenVINO, source: Path, plain: Path, nms: Nms, pooling: Pooling) -> None:
    """Run the whole file once, and compare its NMS on made predictions with torchvision's."""
    model, outputs = onnx.load(source), list(onnx.load(plain).graph.output)
    batch, _, *imgsz = shape_of(model.graph.input[0])
    FileModel(session)(made_images(batch, imgsz))
    made = made_predictions(nms, max(imgsz), *map(shape_of, outputs))
    names = [o.name for o in outputs]
    part = one_core().read_model(nms_part(model, names).SerializeToString())
    compiled = one_core().compile_model(part, 'CPU', session.settings)
    found = compiled(dict(zip(names, (t.numpy() for t in made))))
    check_detections([torch.from_numpy(found[port]) for port in compiled.outputs], made, nms, pooling, 'OpenVINO')
