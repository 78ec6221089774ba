"""Export checkpoints to ONNX. A quantized checkpoint gets Q/DQ nodes; NMS goes inside the file on request.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --include onnx onnx_end2end --dynamic --simplify

`onnx` writes MODEL.onnx, which returns predictions. `onnx_end2end` writes MODEL-end2end.onnx, which returns detections, and masks for a
segmentation model (docs/end2end.md). `openvino` and `openvino_end2end` write the same for OpenVINO: .xml and .bin (docs/openvino.md).
`pt2` writes MODEL.pt2, the exported program of torch.export, and `aoti` MODEL-aoti.pt2, a package of AOTInductor (docs/cpp.md).
`torch_tensorrt` writes MODEL.ep and MODEL-torch_tensorrt.engine, compiled by Torch-TensorRT on this GPU (docs/tensorrt.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.qat.config.backends import BACKENDS, CHECKPOINTS
from utils.qat.config.common import LoaderConfig, seen_as, usual_size
from utils.qat.config.export import INCLUDE, PLUGIN, ExportConfig, Nms, Pooling
from utils.qat.config.options import read_each
from utils.qat.config.settings import require_multiples
from utils.qat.core.command import explain_out_of_memory, require_data, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish, quiet_upstream
from utils.qat.core.next_command import after_scoring, command, data_of

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from models.deploy.onnx_export import Agreement, Exported
    from utils.qat.data.dataset import Data
    from utils.qat.data.image_folders import ImageFolders
    from utils.qat.prediction.pytorch import TorchModel
    from utils.qat.targets.target import Target


def parse_args(argv: Sequence[str] | None) -> list[ExportConfig]:
    """Turn the command line into settings, for each checkpoint."""
    return read_each(ExportConfig, argv, __doc__.splitlines()[0])


class Job(NamedTuple):
    """A loaded checkpoint, and the files that are made of it."""

    config: ExportConfig
    predict: TorchModel
    recipe: dict[str, Any] | None  # settings of its quantization; None for a float model
    files: dict[str, Path]  # name in INCLUDE → file to write
    nms: Nms | None  # inside the end2end files; None without such a file
    pooling: Pooling  # of the masks in the end2end files
    images: tuple[Data | ImageFolders, DataLoader] | None  # of --verify

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
    def zero_points(self) -> bool:
        """Whether a zero point of the checkpoint is not 0."""
        from models.quantize.quantizers import has_zero_points

        return has_zero_points(self.predict.model)

    @property
    def kept_float(self) -> list[str]:
        """The blocks of a quantized checkpoint that are float by choice, of its user or of this toolkit."""
        from models.quantize.convert import float_blocks

        by_rule = float_blocks(self.predict.model) if self.int8 and self.predict.classifies else ()
        return [*(self.recipe or {}).get('kept_float', ()), *by_rule]

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
        """The files that can be run here: the files without the plugin, and not those of Torch-TensorRT."""
        plugin = self.nms and self.nms.kind == 'plugin'
        not_here = {'torch_tensorrt', *['onnx_end2end'] * bool(plugin)}  # the first was run when it was compiled
        return {what: path for what, path in self.files.items() if what not in not_here}


def load(config: ExportConfig) -> Job:
    """Load the checkpoint and, for --verify, the data: a mistake shall show before the work."""
    import torch

    from models.quantize.checkpoint import load_any
    from utils.qat.core.device import select_device
    from utils.qat.data.dataset import load_any as load_data_of
    from utils.qat.data.loaders import val_loader
    from utils.qat.graph.half import require_opset
    from utils.qat.graph.openvino_model import load_openvino
    from utils.qat.prediction.pytorch import TorchModel

    if config.fp32_scales:
        require_opset()
    if config.openvino:
        load_openvino(f'--include {" ".join(config.openvino)}')
    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    device = select_device(config.device)
    if 'torch_tensorrt' in config.include:
        from models.deploy.torch_tensorrt_export import load_torch_tensorrt

        load_torch_tensorrt(device)
    model, quant = load_any(config.weights, device)
    _require_pt2(config, device, quant is not None)
    if config.fp32_scales and not quant:
        raise QatError(
            f'--fp32-scales: {config.weights} is a float checkpoint, without scales; leave the flag out, or use --half'
        )
    predict = TorchModel(model, quant)
    config = replace(config, imgsz=config.imgsz or predict.quantized_for or usual_size(predict.classifies))
    require_multiples(config.imgsz, predict.stride)
    files = {what: config.weights.with_name(config.weights.stem + INCLUDE[what]) for what in config.include}
    if config.with_nms and predict.classifies:
        raise QatError(
            f'--include {" ".join(config.with_nms)}: NMS is for detectors, and {config.weights} is a classifier'
        )
    nms, pooling = config.end2end(predict.segments) if config.with_nms else (None, Pooling())
    images = None
    if config.verify:
        data = load_data_of(config.verify, predict, '--verify')
        settings = LoaderConfig(batch_size=config.batch_size, imgsz=config.imgsz)
        images = data, val_loader(data, settings, predict.stride, square=True, limit=config.verify_images)
    job = Job(config, predict, quant['recipe'] if quant else None, files, nms, pooling, images)
    for flag, given in (
        ('--half', config.half),
        ('--trt 11', config.trt == 11),
        ('--nms plugin', nms and nms.kind == 'plugin'),
    ):
        if given and config.onnx:
            job.target.require_tensorrt(flag, job.zero_points)
    if 'torch_tensorrt' in config.include:
        job.target.require_tensorrt('--include torch_tensorrt', job.zero_points)
    return job


def _require_pt2(config: ExportConfig, device: torch.device, quantized: bool) -> None:
    """Raise QatError if the .pt2 files of --include cannot be made here."""
    from models.deploy.aot_package import require_compiler

    if config.pt2 and config.half and quantized:
        raise QatError(
            f'--half: not with --include {" ".join(config.pt2)} and an INT8 checkpoint, whose float parts are FP32 there; leave it out'
        )
    if 'aoti' in config.include:
        require_compiler(device, quantized, config.half)


def export_onnx_files(job: Job) -> tuple[Exported, dict[str, list[str]]]:
    """Write the ONNX graph and the files that are made of it.

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
            kept_float=job.kept_float,
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


def export_pt2_files(job: Job) -> dict[str, tuple[Agreement, str]]:
    """Write the .pt2 files.

    Returns:
        Name in INCLUDE → how far the file is from PyTorch, and a line about INT8 ('' = nothing to say).
    """
    from models.deploy.aot_package import export_aoti
    from models.deploy.exported_program import export_pt2

    config, done = job.config, {}
    options = {
        'imgsz': config.imgsz,
        'batch': config.batch_size,
        'dynamic': config.dynamic,
        'half': config.half,
        'kept_float': (job.recipe or {}).get('kept_float', ()),
        'target': job.target.name,
    }
    if 'pt2' in job.files:
        done['pt2'] = export_pt2(job.predict.model, job.files['pt2'], **options), ''
    if 'aoti' in job.files:
        LOGGER.info('compiling with AOTInductor: half a minute to some minutes')
        done['aoti'] = export_aoti(job.predict.model, job.files['aoti'], **options)
    return done


def export_torch_tensorrt_files(job: Job) -> list[str]:
    """Write the files of Torch-TensorRT. Returns lines: what was written, and how far it is from PyTorch."""
    from models.deploy.torch_tensorrt_export import export_torch_tensorrt

    config, path = job.config, job.files['torch_tensorrt']
    LOGGER.info('compiling with Torch-TensorRT: some minutes')
    kept_float = (job.recipe or {}).get('kept_float', ())
    found = export_torch_tensorrt(
        job.predict.model,
        path,
        config.imgsz,
        config.batch_size,
        config.dynamic,
        config.torch_tensorrt,
        kept_float,
    )
    takes = f'batch {"of 1 to " * config.dynamic}{config.batch_size}'
    return [
        f'-> {path.with_name(name)}, {path.with_name(name).stat().st_size / 1e6:.1f} MB, {takes}; against PyTorch: {agreement}'
        for name, agreement in found.items()
    ]


def build_command(path: Path, job: Job) -> str:
    """Return the trtexec command for a file, with the precisions of its engine."""
    trt, int8 = job.config.trt, job.int8
    if job.zero_points:
        return f'{job.target.title}; {job.target.only_here} (--target tensorrt)'
    if trt == 11:
        return f'trtexec --onnx={path}  (TensorRT 11; {"INT8 and " * int8}{"FP16" if job.half else "FP32: --half exports FP16"})'
    return f'trtexec --onnx={path} --fp16{" --int8" * int8}  (TensorRT {"8.6" if trt == 8 else 10})'


def report_pt2(job: Job, done: dict[str, tuple[Agreement, str]]) -> None:
    """Log which .pt2 files were written, and how far they are from PyTorch. done: see `export_pt2_files`."""
    config = job.config
    for what, (agreement, int8) in done.items():
        path = job.files[what]
        kind = 'exported program' if what == 'pt2' else f'AOTInductor package for {job.predict.device.type}'
        takes = 'any batch' if config.dynamic else f'batch {config.batch_size}'
        size = ' x '.join(map(str, config.imgsz))
        LOGGER.info(
            '\n'.join(
                (
                    f'-> {path}, {path.stat().st_size / 1e6:.1f} MB: {kind}, {takes}, images of {size}',
                    *[int8] * bool(int8),
                    f'{BACKENDS[what].title} against PyTorch: {agreement}',
                )
            )
        )
    if 'aoti' in done:
        LOGGER.warning(
            f'{job.files["aoti"]}: a program for this kind of machine and this PyTorch; loading it runs it, so take such files from '
            'people you trust only'
        )


def report(job: Job, done: Exported, made: dict[str, list[str]]) -> None:
    """Log what was written, and how far it is from PyTorch. done, made: see `export_onnx_files`."""
    import onnx

    config, (height, width) = job.config, job.config.imgsz
    LOGGER.info(
        f'{config.weights} ({"INT8" if job.int8 else "float"}{", FP16" * job.half}{", FP32 scales" * config.fp32_scales}), '
        f'images [{"batch" if config.dynamic else config.batch_size}, 3, {height}, {width}], '
        f'opset {done.opset}, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}\n'
        f'ONNX Runtime{" (which wants the scales in FP16)" * config.fp32_scales} against PyTorch: '
        f'{done}'
    )
    for what, path in job.files.items():
        if what in config.from_model:
            continue
        if what in made:
            weights = path.with_suffix('.bin')
            size = path.stat().st_size + weights.stat().st_size
            takes = 'any batch' if config.dynamic else f'batch {config.batch_size} only; any with --dynamic'
            LOGGER.info('\n'.join((f'-> {path} and {weights.name}, {size / 1e6:.1f} MB, {takes}', *made[what])))
            if job.int8 and job.target.in_openvino:
                LOGGER.info(f'quantized for {job.target.title}: {job.target.in_openvino} (--target openvino)')
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


def verify(job: Job, what: str, data: Data | ImageFolders, loader: DataLoader) -> bool:
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
    from utils.qat.evaluation.compare import compare, excess
    from utils.qat.evaluation.compare_classes import compare_classes, excess_of_classes
    from utils.qat.evaluation.compare_report import class_comparison_tables, comparison_tables
    from utils.qat.prediction.registry import open_file

    nms = job.nms if 'end2end' in what else None

    def reference(images: torch.Tensor) -> Any:
        found = job.predict(images)
        return torch_detections(found, tuple(images.shape[2:]), nms, job.pooling) if nms else found

    config, path, device = job.config, job.files[what], job.predict.device
    backend = what if what in config.pt2 else 'openvino' if 'openvino' in what else config.backend
    limits = config.limits(job.int8)
    model = open_file(path, device, backend)
    result: Any
    if job.predict.classifies:
        [result] = compare_classes(reference, [model], bar(loader, 'verifying'), device, config.rtol, config.atol)
        tables, kept = (
            class_comparison_tables,
            f'limits: top-1 within {limits.ap:g}, the best class the same in at least {limits.matched:.0%}',
        )
    else:
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
        tables = comparison_tables
        kept = (
            f'limits: AP within {limits.ap:g}, at least {limits.matched:.0%} matched, their scores within {limits.score:g}'
            f'{f", the IoU of their masks at least {limits.mask:g}" * (result.matched_mask is not None)}'
        )
    plain = result.plain()
    beyond = (excess_of_classes if job.predict.classifies else excess)(plain, limits)
    # MODEL.verify.json, but MODEL.xml.verify.json: both files may be verified
    file = path.with_name(f'{path.stem if path.suffix == ".onnx" else path.name}.verify.json')
    title, notes = BACKENDS[backend].title, ''.join(f'{line}\n' for line in model.notes)
    write_json(
        file,
        {
            'settings': {**config.plain(), 'opset': config.onnx_opset},
            'versions': {
                **versions(),
                **({} if what in config.pt2 else {backend: import_module(backend).__version__}),
            },
            'onnx': {'file': path, 'sha256': sha256(path)},
            'limits': asdict(limits),
            'above_limits': beyond,
            **plain,
        },
    )
    LOGGER.log(
        RESULT,
        f'\nPyTorch and {title} ({path.name}) on {result.images} images of {config.verify}, {seen_as(config.imgsz, True, job.predict.classifies)}\n\n'
        f'{tables(plain, ("PyTorch", title))}\n{notes}{kept}: '
        f'{"exceeded" if beyond else "kept"}\nresults {file}\n',
    )
    if beyond:
        LOGGER.error(
            f'{path}: above the limits of --verify: {"; ".join(beyond)}. The file stays. AP is uncertain on few images: '
            'use more (--verify-images 0 takes all), or set its limit with --max-ap-diff'
        )
    return not beyond


def next_commands(job: Job) -> list[str]:
    """Return the commands to type next: a fair evaluation, or if that was done or cannot be, the next step to an engine.

    The AP of a file whose own NMS drops low scores compares with no other: score_file.warn_of_threshold.
    """
    config = job.config
    data = data_of((job.recipe or {}).get('data'), job.predict.classifies)
    fair = [path for what, path in job.runnable.items() if 'end2end' not in what or config.conf_thres <= 0.001]
    if not config.verify and fair and not config.fp32_scales:
        return [command('qat.py', 'eval', '--weights', path, '--data', data) for path in fair]
    files = written(job)
    return [
        *(
            after_scoring(path, config.imgsz)
            for what, path in files.items()
            if what not in ('ep', 'ts', 'engine', 'triton')
        ),
        *(
            command('val_trt.py', '--engine-file', path, '--data', data)
            for what, path in files.items()
            if what == 'engine'
        ),
    ]


def written(job: Job) -> dict[str, Path]:
    """Return the files that were written: a name of INCLUDE or of TORCH_TENSORRT_FILES → file, and the configuration of Triton."""
    files = dict(job.files)
    if path := files.pop('torch_tensorrt', None):
        files |= job.config.torch_tensorrt.files(path)
    return {**files, **({'triton': job.serving} if job.serving else {})}


def export_one(config: ExportConfig) -> bool:
    """Export a checkpoint. Returns whether its files keep the limits of --verify."""
    with explain_out_of_memory(config.batch_size):
        with quiet_upstream():
            job = load(config)
            graph = export_onnx_files(job) if config.onnx else None
            programs = export_pt2_files(job)
            compiled = export_torch_tensorrt_files(job) if 'torch_tensorrt' in job.files else []
        if graph:
            report(job, *graph)
        report_pt2(job, programs)
        for line in compiled:
            LOGGER.info(line)
        kept = [verify(job, what, *job.images) for what in job.runnable] if job.images else []
    finish(*(next_commands(job) if all(kept) else ()), **written(job))
    return all(kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a file exceeds the limits of --verify."""
    configs = parse_args(argv)
    for config in configs:
        require_file(config.weights, '--weights', CHECKPOINTS)
        if config.verify:
            require_data(config.verify, '--verify')
    kept = [export_one(config) for config in configs]
    return 0 if all(kept) else 1


if __name__ == '__main__':
    sys.exit(run_command(main))
