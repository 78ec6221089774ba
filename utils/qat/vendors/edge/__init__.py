"""Chips of cameras, such as Coral's Edge TPU and Arm's Ethos-U: integers in, integers out; what they cannot compute, the program does.

The kernels are LiteRT's. A file takes pixels (UINT8) and returns the raw outputs of the head, so nothing in it is float. The scales of both
outputs are for all strides, because one file joins the strides; scores below 0.0003 are all the same integer, and so are those above 0.9997. A ReLU6, and a ReLU, is the
end of the range of its convolution.
"""

from dataclasses import replace

from utils.qat.vendors import litert
from utils.qat.vendors.vendor import Backend, FileKind, Vendor

TARGET = replace(
    litert.TARGET,
    name='edge',
    title='edge chips',
    placement='as litert, and images and the outputs of the head are integers',
    include='edge',
    stand_in='litert',
    graph=f'{__name__}.graph',
    int8_outputs=frozenset({'box', 'class'}),
    integers=True,
    gains_by=('relu', 'relu6'),
    clients={'The compilers of the chips, and Frigate: docs/edge.md': '', **litert.TARGET.clients},
)
VENDOR = Vendor(
    TARGET,
    {'edge': Backend('LiteRT', f'{__name__}.session', litert.FILES, ())},  # the benchmark takes that of litert
    {'edge': FileKind('-coral.tflite', f'{__name__}.write', ('layout', 'sigmoid', 'per_tensor', 'opset'))},
)
