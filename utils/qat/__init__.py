"""Parts of yolov9-qat that do not define an nn.Module."""

import os

from utils.qat.core import threads

__version__ = '0.1.0'  # the same as VERSION beside patch_yolov9.sh; a test compares them

# ONNX Runtime 1.31 reports to its maker over the network and keeps an identifier in ~/.cache/Microsoft. It asks for this variable
# when it is imported; its own disable_telemetry_events() comes too late for the identifier. Set it to 0 to have that back.
os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')

# Pictures go to files. Matplotlib raises an error when it is imported if the variable names a backend that it does not know.
os.environ['MPLBACKEND'] = 'Agg'

threads.sleep_while_waiting()  # here, because torch must not be loaded before it
