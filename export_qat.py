"""Export a checkpoint to ONNX. A quantized checkpoint gets Q/DQ nodes; NMS goes inside the file on request.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --include onnx onnx_end2end --dynamic --simplify

`onnx` writes MODEL.onnx, which returns predictions. `onnx_end2end` writes MODEL-end2end.onnx, which returns detections, and masks for a
segmentation model (docs/end2end.md). `openvino` and `openvino_end2end` write the same for OpenVINO: .xml and .bin (docs/openvino.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.qat.config.backends import BACKENDS, CHECKPOINTS
from utils.qat.config.common import LoaderConfig, seen_as
from utils.qat.config.export import INCLUDE, PLUGIN, ExportConfig, Nms, Pooling
from utils.qat.config.options import read
from utils.qat.config.settings import require_multiples
from utils.qat.core.command import explain_out_of_memory, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish, quiet_upstream
from utils.qat.core.next_command import after_scoring, command, data_yaml

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from models.deploy.onnx_export import Exported
    from utils.qat.data.dataset import Data
    from utils.qat.prediction.pytorch import TorchModel
    from utils.qat.targets.target import Target


def parse_args(argv: Sequence[str] | None) -> ExportConfig:
    """Turn the command line into settings."""
    return read(ExportConfig, argv, __doc__.splitlines()[0])


class Job(NamedTuple):
    """A loaded checkpoint, and the files that are made of it."""

    config: ExportConfig
    predict: TorchModel
    recipe: dict[str, Any] | None  # settings of its quantization; None for a float model
    files: dict[str, Path]  # name in INCLUDE → file to write
    nms: Nms | None  # inside the end2end files; None without such a file
    pooling: Pooling  # of the masks in the end2end files
    images: tuple[Data, DataLoader] | None  # of --verify

    @property
    def int8(self) -> bool:
        """Whether the checkpoint is quantized."""
        return self.recipe is not None

    @property
    def target(self) -> Target:
        """The engine that the checkpoint was quantized for."""
        from utils.qat.targets.target import target_of_recipe

        return target_of_recipe(self.recipe)

    @property
    def half(self) -> bool:
        """Whether the file is FP16 outside of Q/DQ."""
        return self.config.half or (self.config.trt == 11 and self.int8)

    @property
    def serving(self) -> Path | None:
        """The configuration of a Triton server for the ONNX file with NMS; None without such a file."""
        end2end = self.files.get('onnx_end2end')
        return end2end and end2end.with_suffix('.pbtxt')

    @property
    def runnable(self) -> dict[str, Path]:
        """The files that can be run here: the files without the plugin."""
        plugin = self.nms and self.nms.kind == 'plugin'
        return {what: path for what, path in self.files.items() if not (plugin and what == 'onnx_end2end')}


def load(config: ExportConfig) -> Job:
    """Load the checkpoint and, for --verify, the data: a mistake shall show before the work."""
    require_file(config.weights, '--weights', CHECKPOINTS)
    if config.verify:
        require_file(config.verify, '--verify', ('.yaml', '.yml'))

    import torch

    from models.quantize.checkpoint import load_any
    from utils.qat.core.device import select_device
    from utils.qat.data.dataset import load_data
    from utils.qat.data.loaders import val_loader
    from utils.qat.graph.half import require_opset
    from utils.qat.graph.openvino_model import load_openvino
    from utils.qat.prediction.pytorch import TorchModel

    if config.fp32_scales:
        require_opset()
    if config.openvino:
        load_openvino(f'--include {" ".join(config.openvino)}')
    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    model, quant = load_any(config.weights, select_device(config.device))
    if config.fp32_scales and not quant:
        raise QatError(
            f'--fp32-scales: {config.weights} is a float checkpoint, without scales; leave the flag out, or use --half'
        )
    predict = TorchModel(model)
    require_multiples(config.imgsz, predict.stride)
    files = {what: config.weights.with_name(config.weights.stem + INCLUDE[what]) for what in config.include}
    nms, pooling = config.end2end(predict.segments) if config.with_nms else (None, Pooling())
    images = None
    if config.verify:
        data = load_data(config.verify, predict.nc, '--verify', predict.segments)
        settings = LoaderConfig(batch_size=config.batch_size, imgsz=config.imgsz)
        images = data, val_loader(data, settings, predict.stride, square=True, limit=config.verify_images)
    job = Job(config, predict, quant['recipe'] if quant else None, files, nms, pooling, images)
    for flag, given in (
        ('--half', config.half),
        ('--trt 11', config.trt == 11),
        ('--nms plugin', nms and nms.kind == 'plugin'),
    ):
        if given:
            job.target.require_tensorrt(flag)
    return job


def export(job: Job) -> tuple[Exported, dict[str, list[str]]]:
    """Write the files.

    Returns:
        How far the ONNX graph is from PyTorch, and what OpenVINO made of its files: name in INCLUDE → lines.
    """
    import onnx

    from models.deploy.end2end import export_end2end
    from models.deploy.onnx_export import export_onnx
    from models.deploy.openvino_export import export_openvino, export_openvino_end2end
    from utils.qat.core.files import write_text
    from utils.qat.graph.triton_config import triton_config

    config, files, made = job.config, job.files, {}
    with TemporaryDirectory() as scratch:  # for graphs that are not written themselves, but others are made of
        plain = files.get('onnx') or Path(scratch, 'plain.onnx')
        end2end = files.get('onnx_end2end') or Path(scratch, 'end2end.onnx')
        done = export_onnx(
            job.predict.model,
            plain,
            imgsz=config.imgsz,
            batch=config.batch_size,
            dynamic=config.dynamic,
            simplify=config.simplify,
            opset=config.onnx_opset,
            inplace=config.inplace,
            half=job.half,
            fp32_scales=config.fp32_scales,
            progress=lambda steps: bar(steps, 'exporting', unit='steps'),
            kept_float=(job.recipe or {}).get('kept_float', ()),
            target=job.target,
        )
        if job.nms:
            export_end2end(plain, end2end, job.nms, job.pooling, runnable=not config.fp32_scales)
        if job.serving:
            write_text(job.serving, triton_config(onnx.load(end2end), end2end.stem, config.batch_size))
        if 'openvino' in files:
            made['openvino'] = export_openvino(plain, files['openvino'], done.limit)
        if job.nms and 'openvino_end2end' in files:
            made['openvino_end2end'] = export_openvino_end2end(
                end2end, plain, files['openvino_end2end'], job.nms, job.pooling
            )
    return done, made


def build_command(path: Path, job: Job) -> str:
    """Return the trtexec command for a file, with the precisions of its engine."""
    trt, int8 = job.config.trt, job.int8
    if job.target.only_here:
        return f'{job.target.title}; {job.target.only_here} (--target tensorrt)'
    if trt == 11:
        return f'trtexec --onnx={path}  (TensorRT 11; {"INT8 and " * int8}{"FP16" if job.half else "FP32: --half exports FP16"})'
    return f'trtexec --onnx={path} --fp16{" --int8" * int8}  (TensorRT {"8.6" if trt == 8 else 10})'


def report(job: Job, done: Exported, made: dict[str, list[str]]) -> None:
    """Log what was written, and how far it is from PyTorch. done, made: see `export`."""
    import onnx

    config, (height, width) = job.config, job.config.imgsz
    LOGGER.info(
        f'{config.weights} ({"INT8" if job.int8 else "float"}{", FP16" * job.half}{", FP32 scales" * config.fp32_scales}), '
        f'images [{"batch" if config.dynamic else config.batch_size}, 3, {height}, {width}], '
        f'opset {done.opset}, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}\n'
        f'ONNX Runtime{" (which wants the scales in FP16)" * config.fp32_scales} against PyTorch: '
        f'boxes {done.boxes:.3%} (at most {done.boxes_max:.3g} px), '
        f'scores {done.scores:.3%} (at most {done.scores_max:.3g})'
        + (
            f', mask coefficients {done.coefficients:.3%}, prototypes {done.prototypes:.3%}'
            if job.predict.segments
            else ''
        )
        + f'; allowed {done.limit:.1%}'
    )
    for what, path in job.files.items():
        if what in made:
            weights = path.with_suffix('.bin')
            size = path.stat().st_size + weights.stat().st_size
            takes = 'any batch' if config.dynamic else f'batch {config.batch_size} only; any with --dynamic'
            LOGGER.info('\n'.join((f'-> {path} and {weights.name}, {size / 1e6:.1f} MB, {takes}', *made[what])))
            continue
        outputs = ', '.join(o.name for o in onnx.load(path).graph.output)
        if job.nms and what == 'onnx_end2end':
            ran = what in job.runnable
            checked = 'in ONNX Runtime as by torchvision' if ran else 'not run here, only TensorRT has it'
            outputs += f' of up to {job.nms.topk_all} detections; NMS {job.nms.kind}, {checked}'
        LOGGER.info(f'-> {path}, {path.stat().st_size / 1e6:.1f} MB: {outputs}\nengine: {build_command(path, job)}')
    if job.nms and job.serving:
        name = job.serving.stem
        LOGGER.info(f'-> {job.serving}: copy it to MODELS/{name}/config.pbtxt of a Triton server, docs/deepstream.md')
        if job.nms.kind == 'plugin' and config.trt == 11:
            LOGGER.warning(
                f'{PLUGIN} is deprecated since TensorRT 10.12 and will be removed; --nms standard has the same outputs and needs no plugin'
            )


def verify(job: Job, what: str, data: Data, loader: DataLoader) -> bool:
    """Compare a written file with PyTorch: log the tables and write a .verify.json beside it.

    Args:
        job: the export.
        what: the file, a name in INCLUDE.
        data: of --verify.
        loader: images of `data`.

    Returns:
        Whether the limits are kept.
    """
    from importlib import import_module

    from models.deploy.end2end import torch_detections
    from utils.qat.core.files import sha256, write_json
    from utils.qat.core.machine import versions
    from utils.qat.evaluation.compare import compare
    from utils.qat.evaluation.compare_report import comparison_tables
    from utils.qat.prediction.registry import open_file

    nms = job.nms if 'end2end' in what else None

    def reference(images: torch.Tensor) -> Any:
        found = job.predict(images)
        return torch_detections(found, tuple(images.shape[2:]), nms, job.pooling) if nms else found

    config, path, device = job.config, job.files[what], job.predict.device
    backend, limits = 'openvino' if 'openvino' in what else config.backend, config.limits(job.int8)
    model = open_file(path, device, backend)
    result = compare(
        reference,
        model,
        loader,
        device,
        data.names,
        config.rtol,
        config.atol,
        progress=lambda it: bar(it, 'verifying'),
    )
    excess = result.excess(limits)
    # MODEL.verify.json, but MODEL.xml.verify.json: both files may be verified
    file = path.with_name(f'{path.stem if path.suffix == ".onnx" else path.name}.verify.json')
    title, notes = BACKENDS[backend].title, ''.join(f'{line}\n' for line in model.notes)
    write_json(
        file,
        {
            'settings': {**config.plain(), 'opset': config.onnx_opset},
            'versions': {**versions(), backend: import_module(backend).__version__},
            'onnx': {'file': path, 'sha256': sha256(path)},
            'limits': asdict(limits),
            'above_limits': excess,
            **result.plain(),
        },
    )
    LOGGER.log(
        RESULT,
        f'\nPyTorch and {title} ({path.name}) on {result.images} images of {config.verify}, {seen_as(config.imgsz, True)}\n\n'
        f'{comparison_tables(result.plain(), ("PyTorch", title))}\n{notes}'
        f'limits: AP within {limits.ap:g}, at least {limits.matched:.0%} matched, their scores within {limits.score:g}'
        f'{f", the IoU of their masks at least {limits.mask:g}" * (result.matched_mask is not None)}: '
        f'{"exceeded" if excess else "kept"}\nresults {file}\n',
    )
    if excess:
        LOGGER.error(
            f'{path}: above the limits of --verify: {"; ".join(excess)}. The file stays. AP is uncertain on few images: '
            'use more (--verify-images 0 takes all), or set its limit with --max-ap-diff'
        )
    return not excess


def next_commands(job: Job) -> list[str]:
    """Return the commands to type next: a fair evaluation, or if that was done or cannot be, the next step to an engine.

    The AP of a file whose own NMS drops low scores compares with no other: score_file.warn_of_threshold.
    """
    config = job.config
    fair = [path for what, path in job.runnable.items() if 'end2end' not in what or config.conf_thres <= 0.001]
    if not config.verify and fair and not config.fp32_scales:
        data = data_yaml((job.recipe or {}).get('data'))
        return [command('qat.py', 'eval', '--weights', path, '--data', data) for path in fair]
    return [after_scoring(path, config.imgsz) for path in job.files.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a file exceeds the limits of --verify."""
    config = parse_args(argv)
    with explain_out_of_memory(config.batch_size):
        with quiet_upstream():
            job = load(config)
            done, made = export(job)
        report(job, done, made)
        kept = [verify(job, what, *job.images) for what in job.runnable] if job.images else []
    written = {**job.files, **({'triton': job.serving} if job.serving else {})}
    finish(*(next_commands(job) if all(kept) else ()), **written)
    return 0 if all(kept) else 1


if __name__ == '__main__':
    sys.exit(run_command(main))
