"""The audit ends on every graph, with a report or one error line, in time proportional to the graph."""

import contextlib
import re
import signal

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers.commands import program, sampled
from helpers.graphs import behind_functions, dq, model_of, node, nodes_of, pair
from onnx import TensorProto, helper

from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_file import require_bounded
from utils.qat.graph.onnx_graph import Graph

MANY = 10_000
SECONDS = 20  # of the processor; what is walked as often as it is long takes hours
C = 4


VALUES = dict(
    scale=np.float32(0.1),
    zero=np.int8(0),
    w=np.ones((C, C, 1, 1), np.float32),
    starts=np.int64([0]),
    ends=np.int64([C]),
    axes=np.int64([1]),
    huge=np.int64([2**33]),
    trips=np.int64(2**40),
    true=np.bool_(True),
    zeros=np.int64([0, 0]),
)


def graph(nodes, outputs=('y',), constants=(), inputs=(('x', [1, C, 8, 8]),), opset=17, **metadata):
    """A model of a text, see graphs.nodes_of, or of a list of nodes."""
    model = model_of(nodes, dict(inputs), dict.fromkeys(outputs, [None] * 4), VALUES, opset, **metadata)
    model.graph.initializer.extend(constants)
    return model


def chain(n, step, end='y', first='x'):
    """step(i, given, out) n times in a row."""
    return ' '.join(step(i, f't{i}' if i else first, f't{i + 1}' if i < n - 1 else end) for i in range(n))


def doubled(i, x, y):
    return f'{y}_two = Concat<axis = 1>({x}, {x}) {y} = Slice({y}_two, starts, ends, axes)'


def relu(i, x, y):
    return f'{y} = Relu({x})'


def branch(op, given, out):
    """The body of an If that applies `op` to a tensor of the outer graph."""
    return helper.make_graph(
        nodes_of(f'{out} = {op}({given})'),
        'branch',
        [],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, C, 8, 8])],
    )


LOOP = onnx.parser.parse_graph("""
    body (int64 i, bool go, float[4, 4, 1, 1] before) => (bool going, float[4, 4, 1, 1] after) {
        going = Identity(go)
        after = Relu(before)
    }""")
NAMES = [f'y{i}' for i in range(MANY // 2)]
EACH = ', '.join(NAMES)
CONVS = ' '.join(f'{name} = Conv(x, w)' for name in NAMES)
CONV, RELU = 'y = Conv(x, w)', 'y = Relu(x)'
FINE = {  # name → a graph with a report
    'doubled 40 times': lambda: graph(chain(40, doubled)),
    'doubled, then quantized': lambda: graph(f'{chain(40, doubled, "d")} d1 = QDQ(d) y = Conv(d1, w)'),
    'doubled weights': lambda: graph(
        chain(40, lambda i, x, y: f'{y} = Concat<axis = 0>({x}, {x})', 'w40', 'w') + ' y = Identity(x) s = Shape(w40)'
    ),
    'transposed many times': lambda: graph(chain(MANY, lambda i, x, y: f'{y} = Transpose<perm = [0, 1, 3, 2]>({x})')),
    'many activations': lambda: graph(chain(MANY, relu)),
    'a sum of many': lambda: graph(
        f'a = QDQ(x) {chain(MANY, lambda i, x, y: f"{y} = Add({x}, a)", "s", "a")} s1 = QDQ(s) y = Conv(s1, w)'
    ),
    'a sum of many, each read once': lambda: graph(
        f'a = QDQ(x) {chain(MANY // 2, lambda i, x, y: f"a{i} = Identity(a) {y} = Add({x}, a{i})")}'
    ),
    'many Q and DQ': lambda: graph(chain(MANY // 2, lambda i, x, y: f'{y} = QDQ({x})')),
    'many Q and DQ, read by convolutions': lambda: graph(
        chain(MANY // 4, lambda i, x, y: f'{y} = QDQ({x}) c{i} = Conv({y}, w)')
    ),
    'many convolutions side by side': lambda: graph(f'{CONVS} y = Sum({EACH})'),
    'many convolutions in a row': lambda: graph(chain(MANY, lambda i, x, y: f'{y} = Conv({x}, w)')),
    'convolutions before a long tail': lambda: graph(f'{CONVS} t = Sum({EACH}) {chain(MANY // 2, relu, "y", "t")}'),
    'one concat of many': lambda: graph(f'{CONVS.replace("Conv(x, w)", "Relu(x)")} y = Concat<axis = 1>({EACH})'),
    'one concat of one, many times': lambda: graph(f'a = QDQ(x) y = Concat<axis = 1>({", ".join(["a"] * MANY)})'),
    'one sum of one, many times': lambda: graph(f'a = Relu(x) y = Sum({", ".join(["a"] * MANY)})'),
    'many outputs': lambda: graph([*pair('x', 'a'), *(dq('a int8', name) for name in NAMES)], NAMES),
    'much shape arithmetic': lambda: graph(
        f'x0 = Shape(x) {chain(MANY, lambda i, x, y: f"{y} = Add({x}, {x})", "end", "x0")} {RELU}'
    ),
    'a constant of 2^33 values': lambda: graph(f'c = ConstantOfShape(huge) d = Relu(c) {RELU}'),
    'an input of 2^60 values': lambda: graph(CONV, inputs=[('x', [1, C, 2**30, 2**30])]),
    'an input of negative size': lambda: graph(CONV, inputs=[('x', [1, C, -8, -8])]),
    'a loop of 2^40 rounds': lambda: graph(
        [helper.make_node('Loop', ['trips', 'true', 'w'], ['l'], body=LOOP), *nodes_of(CONV)]
    ),
    'an If of what is outside': lambda: graph(
        [
            *nodes_of('a = QDQ(x) r = Relu(a)'),
            helper.make_node(
                'If', ['true'], ['y'], then_branch=branch('Relu', 'r', 'y1'), else_branch=branch('Abs', 'r', 'y2')
            ),
        ]
    ),
    'no names of nodes': lambda: graph(
        [helper.make_node('Split', ['x', ''], ['', 'b'], axis=1, num_outputs=2), node('Relu', 'b', 'y')], opset=18
    ),
    'kept_float, a layer': lambda: graph(CONV, kept_float="['model.0']"),
    'division by zero in a shape': lambda: graph(f's = Shape(x) o = Sub(s, s) d = Div(s, o) {RELU}'),
}
KEPT_FLOAT = ['None', '3', '[1]', '{', '', "'model.0'", '[[]]', '(' * 5000, '[' * 100_000, '-' * 100_000 + '1']
KEPT_FLOAT += ["__import__('os')", '{}', "[b'a']", '1' * 10_000]
CONSTANT = {  # name → a tensor whose bytes are not those of its type and shape
    'no data': {'dims': [2**40]},
    'fewer data than its shape': {'dims': [2**40], 'raw_data': b'1234'},
    'a negative shape': {'dims': [-4], 'raw_data': b'1' * 16},
    'an unknown type': {'data_type': 99, 'dims': [1], 'raw_data': b'1234'},
}


def constant(**changes):
    return TensorProto(**{'name': 'c', 'data_type': TensorProto.FLOAT, **changes})


BROKEN = {  # name → a graph that is refused
    **{f'kept_float, {text[:12]}': lambda text=text: graph(CONV, kept_float=text) for text in KEPT_FLOAT},
    **{name: lambda of=of: graph(CONV, constants=[constant(**of)]) for name, of in CONSTANT.items()},
    'a constant of a negative shape': lambda: graph(
        [helper.make_node('Constant', [], ['c'], value=constant(dims=[-1], raw_data=b'1' * 4)), *nodes_of(CONV)]
    ),
    'too many ways': lambda: graph(chain(MANY, lambda i, x, y: f'r{i} = Relu(x) {y} = Concat<axis = 1>({x}, r{i})')),
    'a cycle': lambda: graph('a = Add(x, b) b = Relu(a) y = Relu(b)'),
    'itself': lambda: graph('y = Concat<axis = 1>(x, y)'),
    'one name twice': lambda: graph(f'{RELU} y = Abs(x)'),
    'no opset': lambda: without(graph(CONV), 'opset_import'),
    'inputs left out': lambda: foreign('QuantizeLinear', []),
    'outputs left out': lambda: foreign('Any', ['x'], []),
    'an operator without its inputs': lambda: graph('y = Conv(x)'),
    'an index out of range': lambda: graph(f's = Shape(x) i = Gather(s, ends) {RELU}'),
}


def without(model, field):
    model.ClearField(field)
    return model


def foreign(op, inputs, outputs=('o',)):
    """A graph with a custom operator, unknown to ONNX's checker."""
    model = graph([helper.make_node(op, inputs, outputs, domain='somebody'), *nodes_of(CONV)])
    model.opset_import.append(helper.make_opsetid('somebody', 1))
    return model


@pytest.fixture
def clock():
    """Ends a test after SECONDS of CPU time."""

    def over(*_):
        raise TimeoutError(f'not done after {SECONDS} s')

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize('name', sampled([*FINE, *BROKEN], 6))
def test_every_graph(tmp_path, capfd, clock, name):
    file = tmp_path / 'model.onnx'
    file.write_bytes({**FINE, **BROKEN}[name]().SerializeToString())
    code = run_command(program('scripts/audit_onnx.py').main, [str(file)])
    out, err = capfd.readouterr()
    if name in FINE:
        assert code == 0 and not err and re.search(r'\n(no|\d\d+|[02-9]) findings\n|\n1 finding\n', out), err
    else:
        assert code == 2 and len(err.splitlines()) == 1 and f'error: {file}' in err and len(err) < 1000, (code, err)


def test_ways_that_meet_again_count_once():
    """Each use and each origin is named once, in the order of the graph, even if many paths lead to it."""
    text = 'a = QDQ(x) k = Concat<axis = 1>(a, a) m = Transpose<perm = [0, 1, 3, 2]>(k) n = Concat<axis = 1>(k, m)'
    model = graph(f'{text} y = Relu(n) y2 = Abs(m)', ('y', 'y2'))
    onnx.checker.check_model(model)
    found = Graph(model)
    assert found.sources('n') == {'a'} and [(n.op_type, i) for n, i in found.uses('a')] == [('Relu', 0), ('Abs', 0)]


@pytest.mark.parametrize('calls, depth, says', [(2, 19, 'make more than'), (1, 21, 'deep'), (1, 2, None)])
def test_functions_that_call_each_other(tmp_path, calls, depth, says):
    """Other libraries inline all of them: 19 that call the next twice become 2^19 nodes."""
    model = graph(RELU)
    onnx.save(behind_functions(model, model.graph.node[0], calls, depth), tmp_path / 'model.onnx')
    with pytest.raises(QatError, match=f'its functions .*{says}') if says else contextlib.nullcontext():
        require_bounded(tmp_path / 'model.onnx')
