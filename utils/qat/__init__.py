"""Parts of yolov9-qat that do not define an nn.Module."""

import os

from utils.qat.core import machine

__version__ = '0.1.0'  # the same as VERSION beside patch_yolov9.sh; a test compares them

# ONNX Runtime 1.31 sends telemetry and keeps an identifier in ~/.cache/Microsoft. It reads this variable at its import; its own
# disable_telemetry_events() comes too late for the identifier. Set the variable to 0 to allow telemetry.
os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')

# Pictures go to files. The import of Matplotlib fails if the variable names a backend that it does not know.
os.environ['MPLBACKEND'] = 'Agg'

machine.sleep_while_waiting()  # here, because it must run before torch is loaded
