"""OpenVINO has the placement of TensorRT.

The Q/DQ that repeat a scale are dropped when a file is read or written for it (graph/openvino_model.py).
"""

from utils.qat.targets.target import Target

TARGET = Target('openvino')
