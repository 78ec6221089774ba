"""The audit ends on every graph, with a report or one error line, in time proportional to the graph."""

import signal

import numpy as np
import onnx
import pytest
from faults import sampled
from graphs import dq, node, pair
from onnx import TensorProto, helper, numpy_helper
from zoo import program

from utils.qat.core.command import run_command
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
    used = {name for n in nodes for name in n.input} | {'w'}
    model = helper.make_model(
        helper.make_graph(
            nodes,
            'g',
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in outputs],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in VALUES.items() if k in used] + list(constants),
        ),
        opset_imports=[helper.make_opsetid('', opset)],
        ir_version=9,
    )
    helper.set_model_props(model, metadata)
    return model


def chain(n, step, end='y'):
    """step(i, given, out) n times in a row; each call returns a node or several."""
    nodes = []
    for i in range(n):
        made = step(i, f't{i}' if i else 'x', f't{i + 1}' if i < n - 1 else end)
        nodes += made if isinstance(made, list) else [made]
    return nodes


NAMES = [f'y{i}' for i in range(MANY // 2)]


def many(make):
    """make(given, out) of x for each of NAMES."""
    return [make('x', name) for name in NAMES]


def doubled(i, given, out):
    return [
        node('Concat', given, given, f'{out} two', axis=1),
        node('Slice', f'{out} two', 'starts', 'ends', 'axes', out),
    ]


def branch(op, given, out):
    """The body of an If that applies `op` to a tensor of the outer graph."""
    return helper.make_graph(
        [node(op, given, out)], 'branch', [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, C, 8, 8])]
    )


LOOP = helper.make_graph(
    [node('Identity', 'go', 'going'), node('Relu', 'before', 'after')],
    'body',
    [
        helper.make_tensor_value_info('i', TensorProto.INT64, []),
        helper.make_tensor_value_info('go', TensorProto.BOOL, []),
        helper.make_tensor_value_info('before', TensorProto.FLOAT, [C, C, 1, 1]),
    ],
    [
        helper.make_tensor_value_info('going', TensorProto.BOOL, []),
        helper.make_tensor_value_info('after', TensorProto.FLOAT, [C, C, 1, 1]),
    ],
)


def sum_of(names, out='y'):
    return node('Sum', *names, out)


def conv(given, out='y'):
    return node('Conv', given, 'w', out)


RELU = node('Relu', 'x', 'y')
FINE = {  # name → a graph with a report
    'doubled 40 times': lambda: graph(chain(40, doubled)),
    'doubled, then quantized': lambda: graph([*chain(40, doubled, 'd'), *pair('d', 'd1'), conv('d1')]),
    'doubled weights': lambda: graph(
        [
            node('Concat', 'w', 'w', 'w0', axis=0),
            *(node('Concat', f'w{i}', f'w{i}', f'w{i + 1}', axis=0) for i in range(40)),
            *(node('Identity', 'x', 'y'), node('Shape', 'w40', 's')),
        ]
    ),
    'transposed many times': lambda: graph(chain(MANY, lambda i, x, y: node('Transpose', x, y, perm=[0, 1, 3, 2]))),
    'many activations': lambda: graph(chain(MANY, lambda i, x, y: node('Relu', x, y))),
    'a sum of many': lambda: graph(
        [
            *pair('x', 'a'),
            *chain(MANY, lambda i, x, y: node('Add', 'a' if x == 'x' else x, 'a', y), 's'),
            *(*pair('s', 's1'), conv('s1')),
        ]
    ),
    'a sum of many, each read once': lambda: graph(
        [
            *(*pair('x', 'a'), *(node('Identity', 'a', f'a{i}') for i in range(MANY // 2))),
            *chain(MANY // 2, lambda i, x, y: node('Add', x, f'a{i}', y)),
        ]
    ),
    'many Q and DQ': lambda: graph(chain(MANY // 2, lambda i, x, y: pair(x, y))),
    'many Q and DQ, read by convolutions': lambda: graph(
        chain(MANY // 4, lambda i, x, y: [*pair(x, y), conv(y, f'c{i}')])
    ),
    'many convolutions side by side': lambda: graph([*many(conv), sum_of(NAMES)]),
    'many convolutions in a row': lambda: graph(chain(MANY, lambda i, x, y: conv(x, y))),
    'convolutions before a long tail': lambda: graph(
        [
            *(*many(conv), sum_of(NAMES, 't')),
            *chain(MANY // 2, lambda i, x, y: node('Relu', 't' if x == 'x' else x, y)),
        ]
    ),
    'one concat of many': lambda: graph([*many(lambda x, y: node('Relu', x, y)), node('Concat', *NAMES, 'y', axis=1)]),
    'one concat of one, many times': lambda: graph([*pair('x', 'a'), node('Concat', *(['a'] * MANY), 'y', axis=1)]),
    'one sum of one, many times': lambda: graph([node('Relu', 'x', 'a'), sum_of(['a'] * MANY)]),
    'many outputs': lambda: graph([*pair('x', 'a'), *(dq('a int8', name) for name in NAMES)], NAMES),
    'much shape arithmetic': lambda: graph(
        [node('Shape', 'x', 'x0'), *(node('Add', f'x{i}', f'x{i}', f'x{i + 1}') for i in range(MANY)), RELU]
    ),
    'a constant of 2^33 values': lambda: graph([node('ConstantOfShape', 'huge', 'c'), node('Relu', 'c', 'd'), RELU]),
    'an input of 2^60 values': lambda: graph([conv('x')], inputs=[('x', [1, C, 2**30, 2**30])]),
    'an input of negative size': lambda: graph([conv('x')], inputs=[('x', [1, C, -8, -8])]),
    'a loop of 2^40 rounds': lambda: graph(
        [helper.make_node('Loop', ['trips', 'true', 'w'], ['l'], body=LOOP), conv('x')]
    ),
    'an If of what is outside': lambda: graph(
        [
            *(*pair('x', 'a'), node('Relu', 'a', 'r')),
            helper.make_node(
                'If', ['true'], ['y'], then_branch=branch('Relu', 'r', 'y1'), else_branch=branch('Abs', 'r', 'y2')
            ),
        ]
    ),
    'no names of nodes': lambda: graph(
        [helper.make_node('Split', ['x', ''], ['', 'b'], axis=1, num_outputs=2), node('Relu', 'b', 'y')], opset=18
    ),
    'kept_float, a layer': lambda: graph([conv('x')], kept_float="['model.0']"),
    'division by zero in a shape': lambda: graph(
        [node('Shape', 'x', 's'), node('Sub', 's', 's', 'o'), node('Div', 's', 'o', 'd'), RELU]
    ),
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
    **{f'kept_float, {text[:12]}': lambda text=text: graph([conv('x')], kept_float=text) for text in KEPT_FLOAT},
    **{name: lambda of=of: graph([conv('x')], constants=[constant(**of)]) for name, of in CONSTANT.items()},
    'a constant of a negative shape': lambda: graph(
        [helper.make_node('Constant', [], ['c'], value=constant(dims=[-1], raw_data=b'1' * 4)), conv('x')]
    ),
    'too many ways': lambda: graph(
        chain(MANY, lambda i, x, y: [node('Relu', 'x', f'r{i}'), node('Concat', x, f'r{i}', y, axis=1)])
    ),
    'a cycle': lambda: graph([node('Add', 'x', 'b', 'a'), node('Relu', 'a', 'b'), node('Relu', 'b', 'y')]),
    'itself': lambda: graph([node('Concat', 'x', 'y', 'y', axis=1)]),
    'one name twice': lambda: graph([RELU, node('Abs', 'x', 'y')]),
    'no opset': lambda: without(graph([conv('x')]), 'opset_import'),
    'inputs left out': lambda: foreign('QuantizeLinear', []),
    'outputs left out': lambda: foreign('Any', ['x'], []),
    'an operator without its inputs': lambda: graph([helper.make_node('Conv', ['x'], ['y'])]),
    'an index out of range': lambda: graph([node('Shape', 'x', 's'), node('Gather', 's', 'ends', 'i'), RELU]),
}


def without(model, field):
    model.ClearField(field)
    return model


def foreign(op, inputs, outputs=('o',)):
    """A graph with a custom operator, unknown to ONNX's checker."""
    model = graph([helper.make_node(op, inputs, outputs, domain='somebody'), conv('x')])
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
        assert code == 0 and not err and 'findings' in out, err
    else:
        assert code == 2 and len(err.splitlines()) == 1 and f'error: {file}' in err and len(err) < 1000, (code, err)


def test_ways_that_meet_again_count_once():
    """Each use and each origin is named once, in the order of the graph, even if many paths lead to it."""
    model = graph(
        [
            *pair('x', 'a'),
            node('Concat', 'a', 'a', 'k', axis=1),
            node('Transpose', 'k', 'm', perm=[0, 1, 3, 2]),
            node('Concat', 'k', 'm', 'n', axis=1),
            node('Relu', 'n', 'y'),
            node('Abs', 'm', 'y2'),
        ],
        ('y', 'y2'),
    )
    onnx.checker.check_model(model)
    found = Graph(model)
    assert found.origins('n') == {'a'} and [(n.op_type, i) for n, i in found.uses('a')] == [('Relu', 0), ('Abs', 0)]
