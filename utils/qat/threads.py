"""Has threads sleep while they wait for work.

Threads of OpenMP (PyTorch) and of ONNX Runtime otherwise spin, to be there at once. Beside any other busy process they then hold the
cores that the threads they wait for need: docs/troubleshooting.md#it-is-slow has the figures. Who sets one of `CHOSEN` has chosen already.
"""
import os
import sys

# GCC's library (PyTorch's wheels) looks for work a thousand times, some microseconds, before a thread sleeps. So short a wait costs little
# beside a busy process, and a passive policy alone makes small networks up to 1.4 times slower on an idle machine: docs/measured.md#threads.
ASLEEP = {'OMP_WAIT_POLICY': 'passive', 'GOMP_SPINCOUNT': '1000'}
CHOSEN = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME'  # of OpenMP, of GCC's library for it, of LLVM's and Intel's

too_late = False  # whether OpenMP had read its variables before `sleep_while_waiting` set one; see compat.openmp_sleeps


def sleep_while_waiting():
    """Set `ASLEEP` for this process and its children, unless one of `CHOSEN` is set. OpenMP reads it once, when torch is loaded."""
    global too_late
    if not any(name in os.environ for name in CHOSEN):
        os.environ.update(ASLEEP)
        too_late = 'torch' in sys.modules


def onnx_options(entries=None):
    """ONNX Runtime's options for any session: errors only, threads that sleep unless OMP_WAIT_POLICY is active, and the dict `entries`."""
    import onnxruntime as ort
    options = ort.SessionOptions()
    options.log_severity_level = 3
    spin = str(int(os.environ.get('OMP_WAIT_POLICY', '').strip().lower() == 'active'))
    for key, value in {'session.intra_op.allow_spinning': spin, 'session.inter_op.allow_spinning': spin, **(entries or {})}.items():
        options.add_session_config_entry(key, value)
    return options
