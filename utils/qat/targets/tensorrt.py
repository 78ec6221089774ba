"""TensorRT takes signed INT8 with zero point 0, and fuses the activation function into the convolution."""

from utils.qat.targets.target import Target

TARGET = Target('tensorrt')
