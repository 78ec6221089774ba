"""Audit an ONNX graph: the parts that TensorRT can run in INT8, and the Q/DQ that cost too much; nothing is built.

--openvino compiles the graph and reports what OpenVINO runs in INT8 on this CPU.

python scripts/audit_onnx.py runs/qat/exp/weights/best.onnx --strict --json audit.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import AuditConfig
from utils.qat.config.settings import read
from utils.qat.core.command import command, run_command
from utils.qat.core.errors import QatError, naming
from utils.qat.core.files import require_file
from utils.qat.core.log import LOGGER, RESULT, finish, is_verbose

SHOWN = 10  # lines of a list without --verbose


def parse_args(argv: Sequence[str] | None) -> AuditConfig:
    """Parse the command line into settings."""
    return read(AuditConfig, argv, __doc__.splitlines()[0], verbose=f'whole lists, not the first {SHOWN} lines')


def in_openvino(file: Path, reasons: dict[str, str], shown: int | None) -> tuple[str, dict[str, Any]]:
    """Compile and time a file in OpenVINO; return a report as text and as values. An open batch takes one image.

    `reasons` has why convolutions are in float in the file. The text has `shown` lines of each list, None = all.
    """
    import torch

    from utils.qat.core.machine import instruction_sets
    from utils.qat.vendors.openvino.layers import layers_text, plain_layers
    from utils.qat.vendors.openvino.session import OVERFLOW, OpenVINO

    session = OpenVINO(file, torch.device('cpu'))
    inputs = session.signature().inputs
    if any(None in shape[1:] for shape in inputs.values()):
        raise QatError(f'{file}: leaves the image size open; export with a fixed --imgsz for --openvino')
    layers = session.profile({name: tuple(n or 1 for n in shape) for name, shape in inputs.items()})
    head = f'{session.notes[0]}; {", ".join(instruction_sets()) or "instruction sets unknown"}'
    if session.saturates:
        LOGGER.warning(OVERFLOW)
    return f'{head}\n{layers_text(layers, reasons, shown)}', {'made by': head, **plain_layers(layers, reasons)}


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the graph; return 1 if --strict is given and there is a finding, else 0."""
    args = parse_args(argv)
    require_file(args.model, 'MODEL', ('.onnx',))

    from utils.qat.core.files import write_json
    from utils.qat.graph import audit
    from utils.qat.graph.onnx_file import load
    from utils.qat.graph.onnx_graph import has_zero_points
    from utils.qat.vendors.graphs import audit_for_target
    from utils.qat.vendors.tensorrt.engine.api import can_build

    model = load(args.model)
    with naming(args.model):
        target, findings = audit_for_target(model)
    shown, written = None if is_verbose() else SHOWN, {'file': str(args.model), **audit.plain_audit(findings)}
    LOGGER.log(RESULT, f'{args.model}, for {target.title}\n{audit.audit_text(findings, shown)}\n')
    if args.openvino:
        said, written['openvino'] = in_openvino(
            args.model, {c.name: c.reason for c in findings.convs if c.reason}, shown
        )
        LOGGER.log(RESULT, f'{said}\n')
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, written)
    for_cpu = has_zero_points(model) or not can_build()
    behind = ('benchmark_trt.py', args.model, '--device', 'cpu') if for_cpu else ('scripts/build_engine.py', args.model)
    finish(command(*behind), **({'json': args.json} if args.json else {}))
    return 1 if args.strict and findings.findings else 0


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
