"""Laws of the audit of real models: it finds what was quantized, and counts as PyTorch does."""

import json

import onnx
import pytest
import torch
from helpers.zoo import calibrated, image, python, reading_parts
from torch.utils.flop_counter import FlopCounterMode

from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d, without_groups
from utils.qat.graph import audit
from utils.qat.graph.onnx_file import load
from utils.qat.graph.tensor_types import infer

IMGSZ = (64, 64)  # as zoo.exports


def free_scales(small):
    model = small.float_model()
    calibrated(model, [image(batch=4)], tie=False)
    return model


@pytest.fixture(scope='module')
def files(small, exports, tmp_path_factory):
    """{name: file} of the small model: float; INT8 with tied scales, as traced and in FP16; INT8 with free scales."""
    free = tmp_path_factory.mktemp('free') / 'free.onnx'
    export_onnx(free_scales(small), free, IMGSZ)
    return {'float': exports / 'float.onnx', 'tied': exports / 'int8.onnx', 'half': exports / 'half.onnx', 'free': free}


@pytest.fixture(scope='module')
def audits(files):
    return {name: audit.audit(load(file)) for name, file in files.items()}


def test_coverage_is_what_was_quantized(small, audits):
    found = audits['free']
    share = audit.coverage(found)
    assert share['convs']['int8'] == sum(isinstance(m, QuantConv2d) for m in small.quantized_model().modules())
    assert all(c.int8 for c in found.convs) and share['flops']['ratio'] == 1, 'the decoding is a matrix product'


class Mean(torch.nn.Module):
    """In place of DFL, without a convolution."""

    def forward(self, x):
        return x.unflatten(1, (4, -1)).mean(2)


def test_flops_and_parameters_are_those_of_the_model(small, tmp_path):
    """Without the decoding, with dense convolutions in place of quantized ones with groups, and with readers of parts."""
    for model, options in (
        (small.float_model(), {}),
        (without_groups(small.quantized_model()), {}),
        (without_groups(small.quantized_model()), {'half': True, 'opset': 19}),
        (without_groups(free_scales(small)), {}),
    ):
        with reading_parts:
            export_onnx(model, tmp_path / 'model.onnx', IMGSZ, **options)
        found = audit.audit(load(tmp_path / 'model.onnx'))
        model.model[-1].dfl = Mean()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 3, *IMGSZ))
        assert sum(c.flops for c in found.convs) == counter.get_total_flops()
        assert found.parameters == sum(p.numel() for p in model.parameters())


def test_free_scales_conflict_and_tied_do_not(audits):
    free, tied = (audit.finding_counts(audits[name]) for name in ('free', 'tied'))
    assert free['two scales'] > 5
    assert set(tied.values()) == set(audit.finding_counts(audits['half']).values()) == {0}


def test_typing_is_what_is_in_the_file(audits):
    typed, half = audits['tied'], audits['half']
    assert set(typed.typing) - {'other'} == {'FP32'} and half.typing['FP16'] > 100 > half.typing['FP32'] > 0


@pytest.mark.faults
def test_simplified_or_not_open_batch_or_not_the_same_audit(small, audits, tmp_path):
    """Except for names, for nodes that slice, and for a few nodes of the box decoding."""
    export_onnx(free_scales(small), tmp_path / 'simplified.onnx', IMGSZ, dynamic=True, simplify=True)
    free, simplified = audits['free'], audit.audit(load(tmp_path / 'simplified.onnx'))
    assert sorted(free.convs, key=str) == sorted(simplified.convs, key=str)
    assert {**audit.finding_counts(free), 'unequal move': 0} == {**audit.finding_counts(simplified), 'unequal move': 0}


def test_a_float_export_is_found_not_quantized(audits):
    counts = audit.finding_counts(audits['float'])
    assert counts['not quantized'] == 1 and sum(counts.values()) == 1 + counts['float conv']


def test_shapes_are_those_that_onnx_infers(files):
    """Every shape that onnx.shape_inference finds is found here, with equal values."""
    for name in ('free', 'tied'):
        model = onnx.load(files[name])
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        theirs = {
            v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
            for v in inferred
            if all(d.HasField('dim_value') for d in v.type.tensor_type.shape.dim)
            and v.type.tensor_type.HasField('shape')
        }
        ours, _ = infer(model)
        assert len(theirs) > 100 and {k: ours[k][1] for k in theirs} == theirs
        assert {n for node in model.graph.node for n in node.output} <= ours.keys()


def test_the_command(files, tmp_path):
    out = python('scripts/audit_onnx.py', files['free'], '--json', tmp_path / 'audit.json')
    content = json.loads((tmp_path / 'audit.json').read_text())
    assert content['counts'] == audit.finding_counts(audit.audit(onnx.load(files['free'])))
    assert len(content['findings']) == sum(content['counts'].values()) and f'{len(content["findings"])} findings' in out
    assert '... and' in out and content['findings'][-1]['where'] not in out.split('... and')[0]
    whole = python('scripts/audit_onnx.py', files['free'], '--verbose')
    assert '... and' not in whole and all(f'{f["where"]}: {f["detail"]}' in whole for f in content['findings'])
