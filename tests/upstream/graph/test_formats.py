"""Laws of the registry of formats: a format is one file and one line, and formats that are made of another share it."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
from conftest import REPO

from models.deploy.formats.format import Export, Format, Written, with_sources
from models.deploy.load import load_format
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import ExportConfig
from utils.qat.config.tables import FORMATS, FileKind

FILES = [*REPO.glob('*.py'), *(REPO / 'models').rglob('*.py'), *(REPO / 'utils/qat').rglob('*.py')]


def test_each_line_has_its_file():
    for name in FORMATS:
        assert load_format(name).name == name and (
            load_format(name).source is None or load_format(name).source.name in FORMATS
        )
    assert [each.name for each in with_sources([load_format('openvino_end2end'), load_format('onnx')])] == [
        'onnx',
        'onnx_end2end',
        'openvino_end2end',
    ]
    assert not [name for name, kind in FORMATS.items() for field in kind.options if not hasattr(ExportConfig, field)]


def test_nothing_else_branches_on_a_format():
    own = {
        *(REPO / 'models/deploy/formats').glob('*.py'),
        *(REPO / 'utils/qat/vendors').rglob('*.py'),
        REPO / 'utils/qat/config/tables.py',
    }
    by_name = re.compile(r"""['"]\w+['"] (?:not )?in \w+\.(?:include|files)\b|['"](?:onnx|openvino)_end2end['"]""")
    places = {file.name: by_name.findall(file.read_text()) for file in FILES if file not in own}
    assert not {name: found for name, found in places.items() if found}


class Outputs(Format):
    """MODEL.txt, the names of the outputs: the smallest format that is made of another."""

    name = 'outputs'
    source = load_format('onnx')

    def write(self, export, path):
        graph = export.written['onnx']
        path.write_text('\n'.join(o.name for o in onnx.load(graph.path).graph.output))
        return Written({self.name: path}, [f'{path.read_text()}, of {graph.path.name}'])


def test_a_new_format_is_one_file_and_one_line(small, tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, 'outputs', FileKind('.txt', 'models.deploy.formats.outputs'))
    monkeypatch.setitem(sys.modules, 'models.deploy.formats.outputs', SimpleNamespace(FORMAT=Outputs()))
    weights = Path(shutil.copy(small.quantized, tmp_path))
    export = Export(ExportConfig(weights, imgsz=64), TorchModel(small.quantized_model()), [load_format('outputs')])
    [made] = export.write()
    assert made.lines == ['output0, of quantized.onnx'] and made.path.name == 'model.txt'  # not asked for by --include
    assert list(export.written) == ['onnx', 'outputs'] and weights.with_suffix('.onnx').is_file()
