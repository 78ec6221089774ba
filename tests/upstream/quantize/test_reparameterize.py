"""Laws of dual-branch → single-branch: equal main outputs, and exactly the parameters of the single model."""

from copy import deepcopy

import onnx
import pytest
import torch
from conftest import FULL_TREE, TREE
from helpers.faults import sampled
from helpers.zoo import build, command, config, config_file, full, image, output, program, same, state
from models.common import AConv

from models.quantize.checkpoint import CheckpointFile
from models.quantize.reparameterize import fold_pools, largest_difference, reparameterize
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.core.log import quiet_upstream

TWIN_OF = {**{f'yolov9-{size}': f'gelan-{size}' for size in 'tsmce'}, 'yolov9-cf': 'gelan-c'}
CUSTOM = config('demo')['head']
CUSTOM = {'nc': 1, 'head': [*CUSTOM[:13], [-1, 1, 'RepNCSPELAN4', [56, 80, 24, 2]], *CUSTOM[14:]]}  # another P3 output
MODELS = [
    pytest.param('demo', {'nc': 7}, id='demo'),
    pytest.param('demo', CUSTOM, id='custom'),
    pytest.param('yolov9-t', {'nc': 5, 'width_multiple': 0.5}, id='custom width', marks=pytest.mark.full_tree),
    *(
        pytest.param(p.values[0], {'nc': nc}, id=p.values[0], marks=p.marks)
        for p, nc in zip(full(*TWIN_OF, 'yolov9-c-dseg'), (1, 2, 3, 80, 11, 4, 5))
    ),
]
# (gelan-c-dseg.yaml is not the main branch of yolov9-c-dseg.yaml: their last blocks differ in depth)


def main_branch(dual_output):
    """The decoded predictions of the last branch, from the output of a Dual or Triple model in eval mode."""
    decoded = dual_output[0]
    return decoded if isinstance(decoded, torch.Tensor) else decoded[-1]


def shapes(model):
    return {k: tuple(v.shape) for k, v in model.state_dict().items()}


@pytest.mark.parametrize('name, changes', sampled(MODELS, 5))
def test_every_law_on_every_model(name, changes):
    dual = build(name, **changes)
    before = state(dual)
    with quiet_upstream():
        single = reparameterize(dual)
        rebuilt = type(single)(single.yaml).eval()

    # the main branch's outputs, and nothing of the auxiliary one
    with torch.no_grad():
        ours, theirs = single(image())[0], main_branch(dual(image()))
    assert torch.equal(ours, theirs) and ours.isfinite().all() and ours.std() > 0
    assert largest_difference(dual, single) == 0
    assert same(state(dual), before), 'the dual model is not changed'
    assert sum(p.numel() for p in single.parameters()) < sum(p.numel() for p in dual.parameters())

    # what came along
    assert single.names == dual.names and single.nc == single.yaml['nc'] == single.model[-1].nc == changes['nc']
    assert torch.equal(single.stride, dual.stride) and torch.equal(single.model[-1].stride, dual.stride)
    assert not single.training and type(single) is type(dual)

    # its layers are some of the dual model's, in their order
    assert [m.i for m in single.model] == list(range(len(single.model))) and len(single.model) < len(dual.model)
    layers = iter(dual.model)
    assert all(any(type(m) is type(layer) for layer in layers) for m in single.model[:-1])
    assert type(dual.model[-1]).__name__.endswith(type(single.model[-1]).__name__)

    # its YAML makes the same model
    rebuilt.load_state_dict(single.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(rebuilt(image())[0], ours)

    # upstream's own single model has the same parameters
    if name in TWIN_OF:
        with quiet_upstream():
            twin = type(single)(config(TWIN_OF[name], **changes)).eval()
        assert shapes(single) == shapes(twin)
        twin.load_state_dict(single.state_dict(), strict=True)
        with torch.no_grad():
            assert torch.equal(twin(image())[0], ours)


OTHER_HEADS = {'DualDetect': ('Detect', 2), 'TripleDetect': ('Detect', 3), 'TripleDDetect': ('DDetect', 3)}


@pytest.mark.parametrize('head', OTHER_HEADS)
def test_other_heads(head):
    single, branches = OTHER_HEADS[head]
    rows = config('demo')['head']
    inputs = [28, 25, 22, *[35, 38, 41] * (branches - 1)]  # of three branches, the last two share their inputs
    dual = build('demo', head=[*rows[:-1], [inputs, 1, head, ['nc']]])
    with quiet_upstream():
        made = reparameterize(dual)
    assert type(made.model[-1]).__name__ == single
    assert [type(m) for m in made.model[:-1]] == [type(m) for m in (*dual.model[1:22], *dual.model[29:-1])]
    with torch.no_grad():
        decoded, ours = dual(image())[0], made(image())[0]
    assert torch.equal(ours, main_branch([decoded]))
    if isinstance(decoded, list):  # TripleDDetect decodes its last branch only
        assert len(decoded) == branches and not any(torch.equal(ours, auxiliary) for auxiliary in decoded[:-1])


def test_a_single_model_has_nothing_to_remove():
    with quiet_upstream():
        single = reparameterize(build('demo'))
        with pytest.raises(QatError, match='the head is DDetect: only .*DualDDetect.* auxiliary branch'):
            reparameterize(single)


def test_parameters_that_do_not_fit_are_named():
    dual = build('demo')
    dual.model[-1].cv5[0].register_parameter('surplus', torch.nn.Parameter(torch.zeros(1)))
    with (
        quiet_upstream(),
        pytest.raises(QatError, match=r'1 tensors are no part of .*, the first is model\.\d+\.cv3\.0\.surplus'),
    ):
        reparameterize(dual)


def test_a_pool_in_its_convolution_changes_the_border_alone():
    with quiet_upstream():
        model = reparameterize(build('demo')).double()
        folded = deepcopy(model)
        pools = [layer for layer in model.model if isinstance(layer, AConv)]
        assert fold_pools(folded) == len(pools) > 0
    for pool in pools:
        x = torch.rand(1, pool.cv1.conv.in_channels, 16, 16, dtype=torch.double)
        with torch.no_grad():
            difference = (folded.model[pool.i](x) - pool(x)).abs()
        inner = difference[..., 1:-1, 1:-1].max()
        assert inner < 1e-12 < difference.max()
    rebuilt = type(model)(folded.yaml, ch=3).state_dict()
    assert shapes(folded) == {name: tuple(tensor.shape) for name, tensor in rebuilt.items()}


# ---- the command --------------------------------------------------------------------------------------------------------


def test_command_converts(small, tmp_path):
    before = sha256(small.dual)
    out = command('reparameterization.py', '--weights', small.dual, '--save', tmp_path / 'out.pt', '--classes_num', 10)
    assert sha256(small.dual) == before and [p.name for p in tmp_path.iterdir()] == ['out.pt']
    model = torch.load(tmp_path / 'out.pt', weights_only=False)['model']
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float16}
    assert same(output(CheckpointFile(tmp_path / 'out.pt').load_float(), image()), output(small.float_model(), image()))
    for word in (
        'DualDDetect',
        'DDetect',
        'layers',
        'parameters',
        f'{sum(p.numel() for p in model.parameters()):,}',
        'classes     10',
        f'python qat.py quantize --weights {tmp_path / "out.pt"}',
    ):
        assert word in out
    assert out.count('\n') <= 10 and 'model.0.' not in out, 'a summary, not a line per tensor'


def test_command_folds_pools_of_one_branch_or_two(small, tmp_path):
    files = {name: tmp_path / f'{name}.pt' for name in ('dual', 'single')}
    for name, file in files.items():
        out = command('reparameterization.py', '--weights', getattr(small, name), '--save', file, '--fold-pools')
        assert 'pools       1 computed by the convolution' in out
        assert ('largest difference from the main branch' in out) == (name == 'dual'), 'only what was measured'
    options = '--project', tmp_path / 'onnx', '--include', 'onnx', '--imgsz', 64
    command('export_qat.py', '--weights', small.single, files['dual'], *options)
    of = {file.stem: onnx.load(file).graph.node for file in (tmp_path / 'onnx').rglob('*.onnx')}
    pools = {name: sum(node.op_type == 'AveragePool' for node in nodes) for name, nodes in of.items()}
    assert pools['dual'] == pools[small.single.stem] - 1
    first, second = (CheckpointFile(file).load_float() for file in files.values())
    assert same(output(first, image()), output(second, image()))
    again = '--weights', files['dual'], '--save', tmp_path / 'again.pt', '--fold-pools'
    assert '--fold-pools: the model has no AConv' in command('reparameterization.py', *again, code=2)
    assert not (tmp_path / 'again.pt').exists()


@pytest.mark.skipif(FULL_TREE, reason='this tree has the configs that --model is checked against')
def test_model_goes_unchecked_where_the_tree_has_no_configs(demo, tmp_path):
    out = command('reparameterization.py', '--weights', demo.dual, '--save', tmp_path / 'out.pt', '--model', 'c')
    assert '--model c is not checked' in out and (tmp_path / 'out.pt').exists()


@pytest.mark.full_tree
def test_command_accepts_the_right_claims(tmp_path, monkeypatch):
    monkeypatch.chdir(TREE)
    torch.save({'model': build('yolov9-t', nc=3).half(), 'ema': None}, tmp_path / 'dual.pt')
    claims = *'--model t --classes_num 3 --device cpu'.split(), '--cfg', str(config_file('gelan-t'))
    files = '--weights', str(tmp_path / 'dual.pt'), '--save', str(tmp_path / 'out.pt')
    program('reparameterization.py').main([*files, *claims])
    assert CheckpointFile(tmp_path / 'out.pt').load_float().nc == 3
