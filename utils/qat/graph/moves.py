"""Operators f with f(Q(x)) = Q(f(x)): they move or select values and compute none. Around them Q/DQ may stand before or behind."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

MOVES = {  # operator of ONNX → names of its functions and operators in PyTorch
    'Concat': 'cat',
    'Flatten': 'flatten',
    'Gather': '__getitem__',
    'MaxPool': 'max_pool2d',
    'Reshape': 'reshape view contiguous',
    'Resize': 'upsample_nearest2d',  # the nearest one alone
    'Slice': '__getitem__ slice',
    'Split': 'chunk split split_with_sizes',
    'Squeeze': 'squeeze',
    'Transpose': 'permute transpose',
    'Unsqueeze': 'unsqueeze',
}
IN_PYTORCH = {name for names in MOVES.values() for name in names.split()}

Move = TypeVar('Move')
Where = TypeVar('Where')
Q = TypeVar('Q')


def quantize_moves(
    moves: Iterable[Move],
    demanded: Callable[[Move], Mapping[Hashable, Q]],
    given: Callable[[Move], Mapping[Where, Hashable]],
    put: Callable[[Move, Where, Q], None],
) -> None:
    """Put Q/DQ on the inputs of moves whose outputs are quantized with one scale, in a graph of any library.

    With Q/DQ a move runs in INT8, so a Concat does not read a tensor in float that a convolution beside it reads in INT8. No value
    changes: quantizing with one scale before and after a move equals quantizing once. A move is not changed if its readers need
    several scales, or a scale and float.

    Args:
        moves: against the order of the graph, because a move further up must see what was put below it.
        demanded: scale and zero point → a Q of them that reads the move; None → a reader in float.
        given: input of the move that is no constant → scale and zero point of the DQ that it comes from; None from another operator.
        put: puts the like of a Q, and its DQ, on an input.
    """
    for move in moves:
        wanted = demanded(move)
        if len(wanted) != 1 or None in wanted:
            continue
        [(grid, q)] = wanted.items()
        for where, own in given(move).items():
            if own != grid:
                put(move, where, q)
