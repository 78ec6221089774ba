"""Audit an ONNX graph: the parts that TensorRT can run in INT8, and the Q/DQ that cost too much; nothing is built.

python scripts/audit_onnx.py runs/qat/exp/weights/qat_best_yolov9-c-converted.onnx --strict --json audit.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.log import LOGGER, RESULT, finish, is_verbose
from utils.qat.core.next_command import command

SHOWN = 10  # lines of a list without --verbose


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    parser = Parser(description=__doc__.splitlines()[0], verbose=f'whole lists, not the first {SHOWN} lines')
    parser.add_argument('model', type=Path, metavar='MODEL.onnx', help='exported graph')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the whole audit to FILE')
    parser.add_argument('--strict', action='store_true', help='exit with 1 if there is any finding')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the graph; return 1 if --strict is given and there is a finding, else 0."""
    args = parse_args(argv)
    require_file(args.model, 'MODEL', ('.onnx',))

    from utils.qat.core.files import write_json
    from utils.qat.graph import audit

    model = audit.load(args.model)
    with audit.naming(args.model):
        found = audit.audit(model)
    LOGGER.log(RESULT, f'{args.model}\n{audit.audit_text(found, None if is_verbose() else SHOWN)}\n')
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, {'file': str(args.model), **audit.plain_audit(found)})
    finish(command('scripts/build_engine.py', args.model), **({'json': args.json} if args.json else {}))
    return 1 if args.strict and found.findings else 0


if __name__ == '__main__':
    sys.exit(run_command(main))
