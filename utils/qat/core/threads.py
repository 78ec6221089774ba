"""Threads that sleep while they wait for work.

By default the threads of OpenMP (PyTorch) and of ONNX Runtime spin, to start without delay. Beside any other busy process
they hold the cores that the working threads need; docs/measured.md#threads has the figures. If the user sets one of
`CHOSEN`, it stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort

# A thread spins for about the time that a wake-up takes, then sleeps. So it loses little on an idle machine, and delays
# little on a busy one. GCC's library (PyTorch's wheels) counts spins, of 0.03 to 0.05 us each.
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

    With OMP_WAIT_POLICY=active the threads spin by ONNX Runtime's default. `entries` go to the session's configuration.
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
