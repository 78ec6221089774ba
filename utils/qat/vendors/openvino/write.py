"""ONNX file → OpenVINO's own files, MODEL.xml and MODEL.bin, renamed into place after a check in OpenVINO.

A process that is killed at any time leaves a pair that loads, old or new. Two files cannot be renamed at once, and OpenVINO
looks for the weights under the name of the .xml only. But it reads only those parts of a .bin to which the .xml points, so
one .bin can serve two .xml files. The pair goes through these states, one rename each:

    .xml                    .bin
    old                     old weights
    old                     old weights, behind them the new ones
    new, points behind      old weights, behind them the new ones
    new, points behind      new weights, and behind them once more
    new                     new weights, and behind them once more
    new                     new weights

MODEL_openvino_model/ has a copy of them, and metadata.yaml: the form that Ultralytics' package loads.
"""

import ast
import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import onnx
import torch
import yaml
from typing_extensions import override

from models.deploy.agreement import Reference, made_images
from models.deploy.formats.format import Export, Format, Written, size_of
from models.deploy.formats.onnx import FORMAT as ONNX
from models.deploy.formats.onnx import typed_half
from models.deploy.formats.onnx_end2end import FORMAT as ONNX_END2END
from models.deploy.formats.onnx_end2end import made_predictions, nms_part, require_detections
from utils.qat.backends.file_model import FileModel
from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY, atomic, write_text
from utils.qat.core.log import LOGGER
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.vendors.openvino.model import load_openvino, one_core, write_ir
from utils.qat.vendors.openvino.session import OVERFLOW, OpenVINO

ALIGNED = 4096  # bytes; weights begin at a multiple of it
CPU = torch.device('cpu')
METADATA = 'metadata.yaml'
OPEN_BATCH = (  # docs/cpu.md#in-your-program
    'any batch; a program is up to 2.7 times as fast if it sets the batch before it compiles: model.reshape([N, 3, H, W])'
)


@contextlib.contextmanager
def atomic_pair(path: Path) -> Iterator[Path]:
    """Yield a temporary .xml path; if the block succeeds, rename its .xml and .bin to their final names, those of `path`.

    After an error of the block, or if a file cannot be written, a pair that loads stays.
    """
    weights = path.with_suffix('.bin')
    with atomic(weights) as new_weights, atomic(path) as new:  # the .xml is renamed first
        yield new
        step = new.with_suffix('.step')
        try:
            if path.is_file() and weights.is_file():
                behind = -(-max(weights.stat().st_size, new_weights.stat().st_size) // ALIGNED) * ALIGNED
                _write_weights([(0, weights), (behind, new_weights)], step, weights)
                _write_pointing_behind(new, behind, step, path)
                _write_weights([(0, new_weights), (behind, new_weights)], step, weights)
            else:
                path.unlink(missing_ok=True)  # it lacks its .bin, and the new .bin does not fit it
                _write_weights([(0, new_weights)], step, weights)
        finally:
            step.unlink(missing_ok=True)


def _write_weights(parts: Sequence[tuple[int, Path]], step: Path, weights: Path) -> None:
    """Concatenate files, each from its offset on, into `weights`, through the temporary file `step`."""
    with step.open('wb') as content:
        for offset, part in parts:
            content.seek(offset)
            with part.open('rb') as source:
                shutil.copyfileobj(source, content)
    os.replace(step, weights)


def _write_pointing_behind(new: Path, behind: int, step: Path, path: Path) -> None:
    """Write the .xml `new` to `path`, with all weight offsets raised by `behind` bytes, through the temporary file `step`."""
    tree = ElementTree.parse(new)
    for data in tree.iterfind(".//layer[@type='Const']/data"):
        data.set('offset', str(int(data.attrib['offset']) + behind))
    tree.write(step)
    os.replace(step, path)


def write_folder(path: Path, metadata: str) -> Path:
    """Copy an .xml and its .bin into MODEL_openvino_model/ beside them, with metadata.yaml; return the folder.

    metadata: text of metadata.yaml.
    """
    folder = folder_of(path)
    folder.mkdir(exist_ok=True)
    with atomic_pair(folder / path.name) as tmp:
        for suffix in ('.xml', '.bin'):
            shutil.copy(path.with_suffix(suffix), tmp.with_suffix(suffix))
    write_text(folder / METADATA, metadata)
    return folder


def folder_of(path: Path) -> Path:
    """Return the folder beside an .xml."""
    return path.with_name(f'{path.stem}_openvino_model')


def metadata_yaml(source: Path, model: str) -> str:
    """Write the metadata of an .onnx file as YAML; the first line tells whose file it is, by the name of the model."""

    def value(text: str) -> object:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text

    entries = onnx.load(source, load_external_data=False).metadata_props
    return f'# {model}, by yolov9-qat\n' + yaml.safe_dump({p.key: value(p.value) for p in entries}, allow_unicode=True)


class OpenVINOFormat(Format):
    """MODEL.xml and MODEL.bin, which return predictions."""

    name = 'openvino'
    source: Format = ONNX
    runs_in = 'openvino'

    @override
    def require(self, export: Export) -> None:
        load_openvino(f'--include {self.name}')

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        folder = folder_of(path)
        return [path, path.with_suffix('.bin'), folder / path.name, folder / f'{path.stem}.bin', folder / METADATA]

    @override
    def write(self, export: Export, path: Path) -> Written:
        metadata = metadata_yaml(export.written['onnx'].path, path.stem)
        written = self.converted(export, path)
        images = '' if export.predict.task.boxes else ', which normalizes no images: for it take onnx_end2end'
        line = f'-> {write_folder(path, metadata)}, the same for Ultralytics{images}'
        return replace(written, lines=[*written.lines, line])

    def converted(self, export: Export, path: Path) -> Written:
        """Write the .xml and .bin of the ONNX file that is their source, if OpenVINO computes what it shall."""
        config, target = export.config, export.target
        weights, source = path.with_suffix('.bin'), export.written[self.source.name]
        graph = onnx.load(source.path)
        with atomic_pair(path) as tmp:
            write_ir(graph, tmp)  # which rewrites its Q/DQ; inputs, and NMS behind the predictions, stay
            with tmp.with_suffix('.bin').open('ab') as made:
                made.write(MADE_BY.encode())  # behind the weights, where nothing points to
            session = OpenVINO(tmp, CPU)
            self.compare(session, export, graph)
        takes = OPEN_BATCH if config.dynamic else f'batch {config.batch_size} only; any with --dynamic'
        lines = [f'-> {path} and {weights.name}, {size_of(path, weights)}, {takes}', *session.notes]
        loses = target.in_openvino if export.predict.task.boxes else target.in_openvino_classes
        if export.int8 and loses:
            lines.append(f'quantized for {target.title}: {loses} (--target openvino)')
        return Written({self.name: path}, lines, low_scores=source.low_scores)

    def compare(self, session: OpenVINO, export: Export, source: onnx.ModelProto) -> None:
        """Raise QatError unless the outputs of the new files are PyTorch's, on made images. source: the ONNX graph."""
        batch, _, *imgsz = shape_of(source.graph.input[0])
        reference = Reference(export.predict.model, batch, imgsz)
        computed = FileModel(session)(reference.images)
        if session.saturates:
            LOGGER.warning(f'{OVERFLOW}; so the file is written without a comparison with PyTorch')
            return
        reference.require_agreement(computed, 'OpenVINO', 'FP16' if typed_half(export) else 'FP32')


class OpenVINOEnd2end(OpenVINOFormat):
    """MODEL-end2end.xml and MODEL-end2end.bin, which return detections: they run once, and NMS on made predictions is torchvision's."""

    name = 'openvino_end2end'
    source = ONNX_END2END

    @override
    def require(self, export: Export) -> None:
        config, task = export.config, export.predict.task
        if config.nms == 'plugin':
            raise QatError(f'--nms plugin: {PLUGIN}, which TensorRT alone has; OpenVINO takes --nms standard')
        if not task.boxes:
            raise QatError(f'--include {self.name}: NMS is for detectors, and {config.weights} is {task.title}')
        super().require(export)

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        return [path, path.with_suffix('.bin')]

    @override
    def write(self, export: Export, path: Path) -> Written:
        return self.converted(export, path)

    @override
    def compare(self, session: OpenVINO, export: Export, source: onnx.ModelProto) -> None:
        nms, pooling = export.nms
        outputs = onnx.load(export.written['onnx'].path, load_external_data=False).graph.output
        batch, _, *imgsz = shape_of(source.graph.input[0])
        FileModel(session)(made_images(batch, imgsz))
        made = made_predictions(nms, max(imgsz), *map(shape_of, outputs))
        names = [o.name for o in outputs]
        part = one_core().read_model(nms_part(source, names).SerializeToString())
        compiled = one_core().compile_model(part, 'CPU', session.settings)
        computed = compiled(dict(zip(names, (t.numpy() for t in made))))
        require_detections(
            [torch.from_numpy(computed[port]) for port in compiled.outputs], made, nms, pooling, 'OpenVINO'
        )


FORMAT, END2END = OpenVINOFormat(), OpenVINOEnd2end()
