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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.common import LoaderConfig
from utils.qat.config.export import ExportConfig
from utils.qat.config.settings import read_each, require_multiples
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


def open_export(config: ExportConfig) -> Export:
    """Load the checkpoint, and raise QatError for anything a format refuses, so that errors surface early."""
    import torch

    from models.deploy.formats.format import Export, with_sources
    from models.quantize.checkpoint import CheckpointFile
    from utils.qat.backends.pytorch import TorchModel
    from utils.qat.core.machine import select_device
    from utils.qat.untrusted.torchvision_weights import fetched

    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    device, formats = select_device(config.device), with_sources(config.include)
    for each in formats:
        each.require(config, device)
    predict = TorchModel(*CheckpointFile(fetched(config.weights)).load_any(device))
    export = Export(replace(config, imgsz=config.imgsz or predict.quantized_for or predict.task.imgsz), predict)
    require_multiples(export.config.imgsz, predict.stride)
    for each in formats:
        each.require_model(export)
    return export


def images_of(export: Export) -> tuple[Any, Any] | None:
    """Open the data and images of --verify; None without it."""
    from utils.qat.data.loaders import val_loader

    config, predict = export.config, export.predict
    if not config.verify:
        return None
    data = predict.task.load_data(config.verify, predict, '--verify')
    settings = LoaderConfig(batch_size=config.batch_size, imgsz=config.imgsz)
    return data, val_loader(data, settings, predict.stride, square=True, limit=config.verify_images)


def report(export: Export) -> None:
    """Log the written files and their agreement with PyTorch."""
    for about in filter(None, (each.about for each in export.written.values())):
        LOGGER.info(about)
    for written in (export.written[name] for name in export.config.files):
        LOGGER.info('\n'.join(written.lines))
        for warning in written.warnings:
            LOGGER.warning(warning)


def verify_all(export: Export, images: tuple[Any, Any]) -> bool:
    """Compare each file that runs here with PyTorch. Returns whether all keep the limits."""
    from models.deploy.formats.format import verify

    backends = {each: each.backend(export) for each in export.formats}
    kept = [verify(export, each, backend, *images) for each, backend in backends.items() if backend]
    return all(kept)


def next_commands(export: Export) -> list[str]:
    """Return the commands to type next: a fair evaluation, or if it is done or impossible, the next step to an engine."""
    data = export.predict.task.data_of((export.predict.recipe or {}).get('data'), export.predict)
    fair = [each for each in export.formats if each.backend(export) and each.keeps_low_scores(export)]
    if export.config.verify or not fair:
        return [line for each in export.formats for line in each.next_commands(export, export.written[each.name], data)]
    following = []
    for each in fair:
        backend = each.typed_backend(export)
        by = ['--backend', backend] if backend else []
        following.append(command('qat.py', 'eval', '--weights', export.written[each.name].path, '--data', data, *by))
    return following


def export_one(config: ExportConfig) -> bool:
    """Export a checkpoint. Returns whether its files keep the limits of --verify."""
    with explain_out_of_memory(config.batch_size):
        with quiet_upstream():
            export = open_export(config)
            images = images_of(export)
            written = export.write()
        report(export)
        kept = not images or verify_all(export, images)
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
