"""The law of placement: the audit has no finding in the exported graph of any network.

The judge is the audit (see test_audit.py), which reads the ONNX file and knows nothing of how scales were shared.
"""

import onnx
import pytest
from faults import sampled
from zoo import DUAL, SEGMENT, SINGLE, SMALL, build, full, fuse, image, settings

from models.deploy.formats.onnx import export_onnx
from models.quantize.calibration.calibrate import calibrate
from models.quantize.convert import quantize_model
from models.quantize.reparameterize import reparameterize
from models.quantize.scales import tie_scales
from utils.qat.graph.audit import audit, finding_counts
from utils.qat.graph.audit_rules import DFL, HEAD


def exported(name, file, tie=True, **changes):
    """(Conversion, graph) of a model with random weights, quantized and exported to `file`."""
    model = build(name, **changes)
    if type(model.model[-1]).__name__.startswith(('Dual', 'Triple')):
        model = reparameterize(model).model
    done = quantize_model(fuse(model))
    if tie:
        tie_scales(model)
    calibrate(model, [image(batch=2)], settings())
    export_onnx(model, file, (64, 64), simplify=True)
    return done, onnx.load(file)


def assert_all_int8(done, graph, ends=6):
    found = audit(graph)
    assert found.findings == [] and set(finding_counts(found).values()) == {0}
    int8 = [c for c in found.convs if c.int8]
    assert len(int8) == list(done.swapped.values()).count('Conv2d')
    assert sorted(c.reason for c in found.convs if not c.int8) == sorted([HEAD] * ends + [DFL])
    assert done.unknown == {}


@pytest.mark.parametrize('name', sampled([*DUAL, *SINGLE, *full('yolov9', 'gelan')], 14))
def test_nothing_is_left_to_improve(name, tmp_path):
    assert_all_int8(*exported(name, tmp_path / 'model.onnx'))


@pytest.mark.parametrize('name', sampled(SEGMENT, 4))
def test_nor_in_what_masks_are_made_of(name, tmp_path):
    assert_all_int8(*exported(name, tmp_path / 'model.onnx'), ends=9)


@pytest.mark.parametrize('activation, op', sampled([('nn.ReLU()', 'Relu'), ('nn.LeakyReLU(0.1)', 'LeakyRelu')], 2, 1))
def test_other_activations(activation, op, tmp_path):
    done, graph = exported('demo', tmp_path / 'model.onnx', **SMALL, activation=activation)
    assert_all_int8(done, graph)
    assert {n.op_type for n in graph.graph.node} & {'Relu', 'LeakyRelu'} == {op}


def test_free_scales_do_leave_something(tmp_path):
    found = finding_counts(audit(exported('demo', tmp_path / 'model.onnx', tie=False, **SMALL)[1]))
    assert found['two scales'] > 2 and sum(found.values()) > found['two scales']
