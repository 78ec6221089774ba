"""Export checkpoints to ONNX. A quantized checkpoint gets Q/DQ nodes; NMS goes inside the file on request.

    python export_qat.py --weights runs/qat/exp/weights/best.pt --include onnx onnx_end2end --dynamic --simplify

`onnx` writes MODEL.onnx, which returns predictions. `onnx_end2end` writes MODEL-end2end.onnx, which returns detections, and masks for a
segmentation model (docs/end2end.md). `openvino` and `openvino_end2end` write the same for OpenVINO: .xml and .bin (docs/cpu.md).
`pt2` writes MODEL.pt2, the exported program of torch.export, and `aoti` MODEL-aoti.pt2, a package of AOTInductor (docs/cpp.md).
`torch_tensorrt` writes MODEL.ep and MODEL-torch_tensorrt.engine, compiled by Torch-TensorRT on this GPU (docs/tensorrt.md).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.export import ExportConfig
from utils.qat.config.settings import read_each
from utils.qat.config.tables import CHECKPOINTS
from utils.qat.core.command import command, explain_out_of_memory, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import is_network, require_data, require_source
from utils.qat.core.log import LOGGER, finish, quiet_upstream

if TYPE_CHECKING:
    from models.deploy.formats.format import Export


def parse_args(argv: Sequence[str] | None) -> list[ExportConfig]:
    """Parse the command line into settings, one per checkpoint."""
    return read_each(ExportConfig, argv, __doc__.splitlines()[0])


def report(export: Export) -> None:
    """Log the written files and their agreement with PyTorch."""
    for about in filter(None, (each.about for each in export.written.values())):
        LOGGER.info(about)
    for written in (export.written[name] for name in export.config.files):
        LOGGER.info('\n'.join(written.lines))
        for warning in written.warnings:
            LOGGER.warning(warning)


def next_commands(export: Export) -> list[str]:
    """Return the commands to type next: a fair evaluation, or if it is done or impossible, the next step to an engine."""
    data = export.predict.task.data_of((export.predict.recipe or {}).get('data'), export.predict)
    written = {each: export.written[each.name] for each in export.formats}
    fair = [file for file in written.values() if file.backend and file.low_scores]
    if export.config.verify or not fair:
        return [line for each, file in written.items() for line in each.next_commands(export, file, data)]
    following = []
    for file in fair:
        by = ['--backend', file.named_backend] if file.named_backend else []
        following.append(command('qat.py', 'eval', '--weights', file.path, '--data', data, *by))
    return following


def export_one(config: ExportConfig) -> bool:
    """Export a checkpoint. Returns whether its files keep the limits of --verify."""
    from models.deploy.formats.format import open_export
    from models.deploy.load import load_format

    verification = None
    with explain_out_of_memory(config.batch_size):
        with quiet_upstream():
            export = open_export(config, list(map(load_format, config.files)))
            if config.verify:
                from models.deploy.verify import Verification

                verification = Verification(export, config.verify)
            written = export.write()
        report(export)
        kept = not verification or verification.keeps_limits()
    files = {kind: file for each in written for kind, file in each.files.items()}
    finish(*(next_commands(export) if kept else ()), **files)
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a file exceeds the limits of --verify."""
    configs = parse_args(argv)
    for config in configs:
        if not is_network(config.weights):
            require_source(config.weights, '--weights', CHECKPOINTS)
        if config.verify:
            require_data(config.verify, '--verify')
    files = Counter(file for config in configs for file in config.files.values())
    if twice := [file for file, number in files.items() if number > 1]:
        raise QatError(f'--weights: two of them would be written to {twice[0]}, one over the other; rename one')
    kept = [export_one(config) for config in configs]
    return 0 if all(kept) else 1


if __name__ == '__main__':
    sys.exit(run_command(main))
