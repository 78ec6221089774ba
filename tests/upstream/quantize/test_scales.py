"""Laws of scale sharing: each quantizer is in one group, and a reload keeps it. That the graph needs no more is asked by test_targets.py."""

import math
from copy import deepcopy

import torch
from helpers.zoo import build, calibrated, fuse, image, output, same

from models.quantize.checkpoint import CheckpointFile, save_model
from models.quantize.convert import quantize_model
from models.quantize.quantizers import named_quantizers
from models.quantize.scales import scale_groups, tie_scales
from utils.qat.config.tables import load_target
from utils.qat.core.files import sha256


def quantized(name):
    model = fuse(build(name))
    quantize_model(model)
    return model


def activations(model):
    return [n for n, q in named_quantizers(model) if q._axis is None]


def test_what_is_known_of_the_blocks():
    groups = {path: set(g) for g in scale_groups(quantized('demo')) for path in g}
    elan = 'model.3.'  # RepNCSPELAN4: cv1 -> chunk -> (y0, y1, cv2(y1), cv3(...)) -> cat -> cv4
    assert groups[f'{elan}cv4.conv.input_quantizer'] >= {
        f'{elan}cv2.0.cv1.conv.input_quantizer',
        f'{elan}cv3.0.cv2.conv.input_quantizer',
    }
    assert f'{elan}cv1.conv.input_quantizer' not in groups[f'{elan}cv4.conv.input_quantizer'], 'a convolution computes'
    residual = f'{elan}cv2.0.m.0.'
    assert groups[f'{residual}add_quantizer'] == {f'{residual}add_quantizer', f'{residual}cv1.conv.input_quantizer'}
    down = 'model.6.'  # ADown: average pooling computes; then chunk, and MaxPool on one half
    assert f'{down}cv1.conv.input_quantizer' in groups[f'{down}cv2.conv.input_quantizer']
    assert f'{down}input_quantizer' not in groups[f'{down}cv2.conv.input_quantizer']


def test_wide_sums_share_their_scale_with_their_addends_if_only_a_concat_reads_them():
    model, inner = quantized('demo'), 'model.3.cv2.0.'  # RepNCSP: cv1 -> m -> cat with cv2 -> cv3
    addends, joined = (
        {f'{inner}m.0.add_quantizer', f'{inner}m.0.cv1.conv.input_quantizer'},
        f'{inner}cv3.conv.input_quantizer',
    )
    channels = model.get_submodule(f'{inner}m.0.cv2.conv').out_channels
    for widths, together in ((channels, True), (channels + 1, False), (math.inf, False)):
        groups = {path: set(g) for g in scale_groups(model, widths) for path in g}
        assert groups[f'{inner}m.0.add_quantizer'] == (addends | groups[joined] if together else addends)


def test_equal_poolings_of_one_tensor_share_a_scale(demo):
    """Layers 3 and 12 of the demo, both AConv, read layer 2; in the file they are one AveragePool."""
    model = demo.float_model()
    quantize_model(model)
    groups = {path: set(g) for g in scale_groups(model) for path in g}
    assert [model.model[i].f + i if model.model[i].f < 0 else model.model[i].f for i in (3, 12)] == [2, 2]
    assert groups['model.3.cv1.conv.input_quantizer'] == {
        'model.3.cv1.conv.input_quantizer',
        'model.12.cv1.conv.input_quantizer',
    }


def test_what_joins_a_tensor_with_negative_values_is_signed(small):
    """Layer 5 reads layer 4, behind a ReLU here; layer 9 reads it joined with the values of a SiLU."""
    model = small.float_model()
    model.model[4].cv1.act = torch.nn.ReLU()
    quantize_model(model, target=load_target('openvino'))
    unsigned = {path for path, q in named_quantizers(model) if q.shifts}
    mixed = [group for group in tie_scales(model) if 0 < len(unsigned.intersection(group)) < len(group)]
    assert mixed and not any(model.get_submodule(path).shifts for group in mixed for path in group)


def test_sharing_survives_a_reload(demo, tmp_path):
    tied = demo.float_model()
    calibrated(tied, [image(batch=4)])
    save_model(tmp_path / 'tied.pt', tied, {}, sha256(demo.single))
    again = CheckpointFile(tmp_path / 'tied.pt').load_quantized()[0]
    assert len(activations(again)) == len(activations(tied)) == len(activations(deepcopy(tied)))
    assert same(output(again, image()), output(tied, image()))
