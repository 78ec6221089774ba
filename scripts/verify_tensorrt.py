"""Check everything that this toolkit does with TensorRT on this machine, row by row, and report it.

    python scripts/verify_tensorrt.py --weights INT8.pt --float FLOAT.pt --data DATA.yaml --imgsz 640

The rows are tests (tests/gpu/verify/test_tensorrt.py), so it runs in the toolkit's own folder, on the tree of $YOLOV9_DIR or .work/yolov9.
scripts/verify_tensorrt.sh does the same with the included demo and its set-up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import VerifyConfig
from utils.qat.config.settings import read, require_multiples
from utils.qat.core.command import ALONE, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_data, require_file

ROWS = Path(__file__).resolve().parents[1] / 'tests' / 'gpu' / 'verify' / 'test_tensorrt.py'
PYTEST = (  # the limit of time is --minutes
    *('-m', 'tensorrt', '-v', '--no-header', '--tb', 'short', '-o', 'timeout=0'),
    *('-p', 'no:warnings', '-p', 'no:cacheprovider'),
)
STRIDE = 32  # of every model of YOLOv9
USAGE_ERROR = 4  # of pytest


def parse_args(argv: Sequence[str] | None) -> VerifyConfig:
    """Parse the command line into settings."""
    return read(VerifyConfig, argv, __doc__.splitlines()[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Check all rows. Returns the exit code: 1 if a row failed."""
    argv = sys.argv[1:] if argv is None else argv
    config = parse_args(argv)
    require_multiples(config.imgsz, STRIDE)
    checkpoints: dict[str, Path | None] = {'weights': config.weights, 'float': config.float_weights}
    checkpoints |= {'segment': config.segment, 'classify': config.classify}
    for flag, path in checkpoints.items():
        if path:
            require_file(path, f'--{flag}', ('.pt', '.pth'))
    for path, flag in ((config.data, '--data'), (config.segment_data, '--segment-data')):
        if path:
            require_file(path, flag, ('.yaml', '.yml'))
    if config.classify_data:
        require_data(config.classify_data, '--classify-data')
    if find_spec('pytest') is None:
        raise QatError('no pytest here, and the rows are tests: pip install pytest')
    done = subprocess.run(
        # not -m pytest, which would take a pytest.py of the current folder
        [sys.executable, '-c', ALONE + 'import pytest; sys.exit(pytest.main(sys.argv[1:]))', str(ROWS), *PYTEST],
        env={**os.environ, 'VERIFY_TENSORRT': json.dumps(list(argv))},
    )
    return 2 if done.returncode == USAGE_ERROR else done.returncode


if __name__ == '__main__':
    sys.exit(run_command(main))
