"""Threads that sleep while they wait for work.

Threads of OpenMP (PyTorch) and of ONNX Runtime otherwise spin, to be there at once. Beside any other busy process they
hold the cores that the working threads need; docs/troubleshooting.md#it-is-slow has the figures. A user who sets one of
`CHOSEN` keeps that choice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort

# A thread looks for work for about the time that it takes to wake it, and then sleeps. So it loses little on an idle
# machine, and delays little on a busy one: docs/measured.md#threads. GCC's library (PyTorch's wheels) counts its looks,
# of 0.03 to 0.05 us each.
ASLEEP = {'OMP_WAIT_POLICY': 'passive', 'GOMP_SPINCOUNT': '3000'}
ONNX_RUNTIME_SPINS = '100'  # us
CHOSEN = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME'  # of OpenMP, of GCC's library, of LLVM's and Intel's

too_late = False  # OpenMP had read its variables before `sleep_while_waiting` set one; see compat.openmp_sleeps


def sleep_while_waiting() -> None:
    """Set `ASLEEP` for this process and its children, unless one of `CHOSEN` is set.

    OpenMP reads these variables once, when torch is loaded.
    """
    global too_late
    if not any(name in os.environ for name in CHOSEN):
        os.environ.update(ASLEEP)
        too_late = 'torch' in sys.modules


def onnx_options(entries: Mapping[str, str] | None = None) -> ort.SessionOptions:
    """Make ONNX Runtime's options for any session: it logs errors only, and its threads sleep.

    With OMP_WAIT_POLICY=active the threads spin as ONNX Runtime has it. `entries` go to the session's configuration.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    waits = {}
    if os.environ.get('OMP_WAIT_POLICY', '').strip().lower() != 'active':
        # 1.26 is the first that bounds the time. Before, threads spin for 50 ms and more, or not at all.
        bounded = tuple(int(n) for n in ort.__version__.split('.')[:2]) >= (1, 26)
        waits = (
            {'session.intra_op.spin_duration_us': ONNX_RUNTIME_SPINS}
            if bounded
            else {'session.intra_op.allow_spinning': '0'}
        )
        waits['session.inter_op.allow_spinning'] = '0'
    for key, value in {**waits, **(entries or {})}.items():
        options.add_session_config_entry(key, value)
    return options
