"""One code path for TensorRT 8.6, 10 and 11: each name that our source uses exists in every version.

tests/data/tensorrt_api.json lists the names that the Python interface of each version binds, by class.
"""

import ast
import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from conftest import REPO

from utils.qat.core.errors import QatError
from utils.qat.vendors.tensorrt.engine.api import VERSIONS, Capability, capabilities, load_tensorrt

SURFACES = json.loads((REPO / 'tests/data/tensorrt_api.json').read_text())
del SURFACES['source']
FILES = [
    REPO / 'utils/qat/vendors/tensorrt/engine/api.py',
    REPO / 'utils/qat/vendors/tensorrt/engine/build.py',
    REPO / 'utils/qat/vendors/tensorrt/session.py',
    REPO / 'examples/infer_engine.py',
]
# An expression in these files → the class whose attributes are asked of it
CLASS_OF = {
    'self.builder': 'Builder',
    'settings': 'IBuilderConfig',
    'profile': 'IOptimizationProfile',
    'cache': 'ITimingCache',
    'settings.get_timing_cache()': 'ITimingCache',
    'parser': 'OnnxParser',
    'error': 'ParserError',
    'self.runtime': 'Runtime',
    'self.engine': 'ICudaEngine',
    'self.context': 'IExecutionContext',
    'inspector': 'EngineInspector',
}
ENUMS = 'BuilderFlag', 'MemoryPoolType', 'ProfilingVerbosity', 'TensorIOMode', 'LayerInformationFormat'
ENUMS += ('NetworkDefinitionCreationFlag',)
CLASS_OF |= {f'{trt}.{name}': name for trt in ('trt', 'self.trt') for name in ENUMS}
# Asked for only where `capabilities` says that it is there
GUARDED = {
    ('IBuilderConfig', 'progress_monitor'): Capability.PROGRESS,
    ('ParserError', 'node_name'): Capability.NODE_NAMES,
    ('ParserError', 'node_operator'): Capability.NODE_NAMES,
}


def asked():
    """{(class, attribute)} of TensorRT's objects in our source."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in CLASS_OF:
                found.add((CLASS_OF[ast.unparse(node.value)], node.attr))
    return found


def module_of(surface):
    """A module with just the names of `surface`: anything else is an AttributeError."""
    return SimpleNamespace(**{name: SimpleNamespace(**dict.fromkeys(names)) for name, names in surface.items()})


def test_the_source_is_read():
    """The walk finds what the session and the builder are known to call, of every class."""
    assert {*GUARDED, ('IExecutionContext', 'execute_async_v3'), ('OnnxParser', 'parse_from_file')} <= asked()
    by_getattr = {'BuilderFlag', 'NetworkDefinitionCreationFlag'}
    assert {name for name, _ in asked()} >= set(CLASS_OF.values()) - by_getattr


def called_by(can):
    """{(class, attribute)} that our source asks of a TensorRT that `can` do this."""
    return {name for name in asked() if name not in GUARDED or GUARDED[name] in can}


@pytest.mark.parametrize('version', SURFACES)
def test_every_version_has_what_is_called(version):
    surface, can = SURFACES[version], capabilities(module_of(SURFACES[version]))
    assert can == VERSIONS[int(version.split('.')[0])]
    assert [(name, attribute) for name, attribute in called_by(can) if attribute not in surface[name]] == []


def test_versions_differ_in_every_capability():
    """A capability of all versions, or of none, would need no check."""
    assert set.union(*VERSIONS.values()) - set.intersection(*VERSIONS.values()) == set(Capability)


def test_tensorrt_rtx_is_as_tensorrt_11():
    trt = pytest.importorskip(
        'tensorrt_rtx_bindings', reason='no TensorRT-RTX: ./install_dependencies.sh --tests (Linux x86_64 only)'
    )
    can = capabilities(trt)
    assert can == VERSIONS[11]
    assert [name for name in called_by(can) if not hasattr(getattr(trt, name[0]), name[1])] == []


@pytest.mark.parametrize(
    'content, says',
    [
        (None, ['no TensorRT here', '--tensorrt 10', 'ONNX Runtime', 'val_trt.py']),
        ('', ['only a placeholder']),
        ('raise OSError("libnvinfer.so.10: cannot open")', ['libnvinfer.so.10']),
        ('__version__ = "8.5.3.1"\nclass Builder: pass', ['8.5.3.1', 'at least 8.6']),
    ],
)
def test_a_missing_tensorrt_says_what_to_do(tmp_path, monkeypatch, content, says):
    monkeypatch.setitem(sys.modules, 'tensorrt', None)
    if content is not None:
        (tmp_path / 'tensorrt.py').write_text(content)
        monkeypatch.delitem(sys.modules, 'tensorrt')
        monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
        importlib.invalidate_caches()
    with pytest.raises(QatError) as refused:
        load_tensorrt('tensorrt', '--backend tensorrt')
    assert str(refused.value).startswith('--backend tensorrt: ') and all(text in str(refused.value) for text in says)
