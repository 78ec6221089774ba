"""Export a checkpoint to ONNX. A quantized checkpoint gets Q/DQ nodes; NMS goes inside the file on request.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --include onnx onnx_end2end --dynamic --simplify

`onnx` writes MODEL.onnx, which returns predictions. `onnx_end2end` writes MODEL-end2end.onnx, which returns detections, and masks for a
segmentation model (docs/end2end.md).
"""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from utils.qat.config.export import FLOAT_LIMITS, INCLUDE, INT8_LIMITS, OPSETS, PLUGIN, ExportConfig
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import Parser, explain_out_of_memory, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER, RESULT, bar, finish, quiet_upstream
from utils.qat.core.next_command import after_scoring, command, data_yaml


def parse_args(argv):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', type=Path, required=True, help='quantized or float checkpoint (.pt)')
    parser.add_argument('--include', nargs='+', default=['onnx'], help=f'files to write: {", ".join(INCLUDE)}')
    parser.add_argument(
        '--imgsz', '--img', '--img-size', nargs='+', type=int, default=[640, 640], help='height and width in pixels'
    )
    parser.add_argument('--batch-size', type=int, default=1, help='images per run of a graph with a fixed batch')
    parser.add_argument('--dynamic', action='store_true', help='leave the batch axis open')
    parser.add_argument('--simplify', action='store_true', help='simplify the graph (onnxslim)')
    parser.add_argument('--inplace', action='store_true', help="set the head's inplace flag, as upstream's export does")
    parser.add_argument(
        '--trt',
        type=int,
        default=ExportConfig.trt,
        help='TensorRT version for the file. 8 (8.6) and 10: FP32 with Q/DQ, '
        'and the builder chooses FP16. 11: strongly typed, FP16 outside Q/DQ',
    )
    parser.add_argument(
        '--half', action='store_true', help='with --trt 11: FP16 for a float checkpoint too (INT8 always has it)'
    )
    parser.add_argument(
        '--fp32-scales',
        action='store_true',
        help='with --trt 11 and an INT8 checkpoint: scales in FP32. Sets '
        'opset 23 (leave out --opset). ONNX Runtime cannot run the file (leave out --verify)',
    )
    parser.add_argument(
        '--opset', type=int, help='ONNX opset; default: ' + ', '.join(f'{d} for {v}' for v, (*_, d) in OPSETS.items())
    )
    parser.add_argument('--device', default='cpu', help="device for tracing: 'cpu' or a GPU number")
    parser.add_argument(
        '--verify',
        type=Path,
        metavar='DATA.yaml',
        help='compare the file in ONNX Runtime with PyTorch, on the '
        'val: images of this data; exit code 1 if a difference is above its limit',
    )
    parser.add_argument(
        '--verify-images',
        type=int,
        default=ExportConfig.verify_images,
        help='number of images for --verify, at most, evenly spread over val:; 0 = all',
    )
    parser.add_argument(
        '--rtol', type=float, default=ExportConfig.rtol, help='relative tolerance of --verify, as in numpy.isclose'
    )
    parser.add_argument('--atol', type=float, default=ExportConfig.atol, help='absolute tolerance; for boxes in pixels')
    parser.add_argument(
        '--max-ap-diff',
        type=float,
        help=f'largest difference of AP, in 0..1; default: '
        f'{FLOAT_LIMITS.ap} for a float checkpoint, {INT8_LIMITS.ap} for INT8',
    )
    end2end = parser.add_argument_group('NMS inside the file (--include onnx_end2end)')
    end2end.add_argument(
        '--nms',
        help=f'plugin: {PLUGIN}, only for TensorRT. standard: operators of ONNX, for ONNX Runtime too. '
        'Default: plugin; with --trt 11 and for a segmentation model: standard',
    )
    end2end.add_argument('--topk-all', type=int, default=ExportConfig.topk_all, help='detections per image, at most')
    end2end.add_argument(
        '--iou-thres', type=float, default=ExportConfig.iou_thres, help='IoU above which a box is dropped'
    )
    end2end.add_argument(
        '--conf-thres', type=float, default=ExportConfig.conf_thres, help='boxes with this score or less are dropped'
    )
    end2end.add_argument('--class-agnostic', action='store_true', help='boxes of different classes drop each other too')
    masks = parser.add_argument_group('masks inside the file (--include onnx_end2end, segmentation models)')
    masks.add_argument(
        '--mask-resolution',
        type=int,
        default=ExportConfig.mask_resolution,
        help='R: a mask has R x R values, which cover the box of its detection',
    )
    masks.add_argument(
        '--pooler-scale',
        type=float,
        default=ExportConfig.pooler_scale,
        help='side of the prototypes / side of the image',
    )
    masks.add_argument(
        '--sampling-ratio',
        type=int,
        default=ExportConfig.sampling_ratio,
        help='RoiAlign: points per value and axis; a '
        'value is their mean. 0: one point for each prototype cell under a value',
    )
    return ExportConfig(**vars(parser.parse_args(argv)))


def require_multiples(imgsz, stride):
    """Raise QatError unless the sides are multiples of the model's largest stride: its feature maps would not fit each other."""
    if any(side % stride for side in imgsz):
        near = [side // stride * stride for side in imgsz]
        raise QatError(
            f'--imgsz {" ".join(map(str, imgsz))}: must be multiples of {stride}, the stride of the model, such as '
            f'{" ".join(map(str, near))} or {" ".join(str(side + stride * (side != given)) for side, given in zip(near, imgsz))}'
        )


def build_command(path, config, int8, half):
    """Return the trtexec command for the file, and the precision of the engine."""
    if config.trt == 11:
        return f'trtexec --onnx={path}  (TensorRT 11; {"INT8 and " * int8}{"FP16" if half else "FP32: --half exports FP16"})'
    return f'trtexec --onnx={path} --fp16{" --int8" * int8}  (TensorRT {"8.6" if config.trt == 8 else 10})'


def verify(config, reference, device, limits, path, data, loader):
    """Compare the written file with `reference`: log the tables, write `<stem>.verify.json`. Returns the exit status."""
    import onnxruntime

    from utils.qat.core.files import sha256, write_json
    from utils.qat.core.versions import versions
    from utils.qat.evaluation.compare import compare
    from utils.qat.evaluation.compare_report import comparison_tables
    from utils.qat.prediction.onnxruntime import OnnxModel

    result = compare(
        reference,
        OnnxModel(path, device),
        loader,
        device,
        data.names,
        config.rtol,
        config.atol,
        progress=lambda it: bar(it, 'verifying'),
    )
    excess, file = result.excess(limits), path.with_suffix('.verify.json')
    write_json(
        file,
        {
            'settings': asdict(config),
            'versions': {**versions(), 'onnxruntime': onnxruntime.__version__},
            'onnx': {'file': path, 'sha256': sha256(path)},
            'limits': asdict(limits),
            'above_limits': excess,
            **result.plain(),
        },
    )
    LOGGER.log(
        RESULT,
        f'\nPyTorch and ONNX Runtime ({path.name}) on {result.images} images of {config.verify}\n\n'
        f'{comparison_tables(result.plain(), ("PyTorch", "ONNX Runtime"))}\n'
        f'limits: AP within {limits.ap:g}, at least {limits.matched:.0%} matched, their scores within {limits.score:g}'
        f'{f", the IoU of their masks at least {limits.mask:g}" * (result.matched_mask is not None)}: '
        f'{"exceeded" if excess else "kept"}\nresults {file}\n',
    )
    if excess:
        LOGGER.error(
            f'{path}: above the limits of --verify: {"; ".join(excess)}. The file stays. AP is uncertain on few images: '
            'use more (--verify-images 0 takes all), or set its limit with --max-ap-diff'
        )
    return 1 if excess else 0


def main(argv=None):
    config = parse_args(argv)
    require_file(config.weights, '--weights', ('.pt', '.pth'))
    if config.verify:
        require_file(config.verify, '--verify', ('.yaml', '.yml'))

    import onnx
    import torch

    from models.deploy.end2end import export_end2end, torch_detections
    from models.deploy.onnx_export import export_onnx
    from models.quantize.checkpoint import load_any
    from utils.qat.core.device import select_device
    from utils.qat.core.files import write_text
    from utils.qat.data.dataset import load_data
    from utils.qat.data.loaders import val_loader
    from utils.qat.graph.half import require_opset
    from utils.qat.graph.triton_config import triton_config
    from utils.qat.prediction.pytorch import TorchModel

    if config.fp32_scales:
        require_opset()
    torch.backends.cudnn.allow_tf32 = False  # its mantissa is coarser than the INT8 grid
    with quiet_upstream(), explain_out_of_memory(config.batch_size):
        model, quant = load_any(config.weights, select_device(config.device))
        if config.fp32_scales and not quant:
            raise QatError(
                f'--fp32-scales: {config.weights} is a float checkpoint, without scales; leave the flag out, or use --half'
            )
        predict, imgsz = TorchModel(model), config.imgsz
        require_multiples(imgsz, predict.stride)
        files = {what: config.weights.with_name(config.weights.stem + INCLUDE[what]) for what in config.include}
        plain, end2end = files.get('onnx'), files.get('onnx_end2end')
        nms, pooling = config.end2end(predict.segments) if end2end else (None, None)
        if config.verify:  # a mistake in the data shall show before the work
            data = load_data(config.verify, predict.nc, '--verify', predict.segments)
            settings = EvalConfig(config.weights, config.verify, config.batch_size, imgsz[0])
            loader = val_loader(data, settings, predict.stride, square=True, limit=config.verify_images)
        half = config.half or (config.trt == 11 and quant is not None)
        export = partial(
            export_onnx,
            model,
            imgsz=imgsz,
            batch=config.batch_size,
            dynamic=config.dynamic,
            simplify=config.simplify,
            opset=config.opset,
            inplace=config.inplace,
            half=half,
            fp32_scales=config.fp32_scales,
            progress=lambda steps: bar(steps, 'exporting', unit='steps'),
            kept_float=quant['recipe'].get('kept_float', ()) if quant else (),
        )
        done = export(plain) if plain else None
        if end2end:
            with atomic(end2end) as tmp:
                done = done or export(tmp)
                export_end2end(plain or tmp, tmp, nms, pooling, runnable=not config.fp32_scales)
            serving = end2end.with_suffix('.pbtxt')
            write_text(serving, triton_config(onnx.load(end2end), end2end.stem, config.batch_size))
    LOGGER.info(
        f'{config.weights} ({"INT8" if quant else "float"}{", FP16" * half}{", FP32 scales" * config.fp32_scales}), '
        f'images [{"batch" if config.dynamic else config.batch_size}, 3, {imgsz[0]}, {imgsz[1]}], '
        f'opset {done.opset}, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}\n'
        f'ONNX Runtime{" (which wants the scales in FP16)" * config.fp32_scales} against PyTorch: '
        f'boxes {done.boxes:.3%} (at most {done.boxes_max:.3g} px), '
        f'scores {done.scores:.3%} (at most {done.scores_max:.3g})'
        + (f', mask coefficients {done.coefficients:.3%}, prototypes {done.prototypes:.3%}' if predict.segments else '')
        + f'; allowed {done.limit:.1%}'
    )
    for path in files.values():
        outputs = ', '.join(o.name for o in onnx.load(path).graph.output)
        if path == end2end:
            checked = (
                'in ONNX Runtime as by torchvision' if nms.kind == 'standard' else 'not run here, only TensorRT has it'
            )
            outputs += f' of up to {nms.topk_all} detections; NMS {nms.kind}, {checked}'
        LOGGER.info(
            f'-> {path}, {path.stat().st_size / 1e6:.1f} MB: {outputs}\n'
            f'engine: {build_command(path, config, quant is not None, half)}'
        )
    written = dict(files)
    if end2end:
        written['triton'] = serving
        LOGGER.info(
            f'-> {serving}: copy it to MODELS/{end2end.stem}/config.pbtxt of a Triton server, docs/deepstream.md'
        )
    in_onnxruntime = {what: path for what, path in files.items() if path != end2end or nms.kind == 'standard'}
    if end2end and nms.kind == 'plugin' and config.trt == 11:
        LOGGER.warning(
            f'{PLUGIN} is deprecated since TensorRT 10.12 and will be removed; --nms standard has the same outputs and needs no plugin'
        )
    if config.verify:
        references = {
            'onnx': predict,
            'onnx_end2end': lambda images: torch_detections(predict(images), tuple(images.shape[2:]), nms, pooling),
        }
        with explain_out_of_memory(config.batch_size):
            status = max(
                verify(config, references[what], predict.device, config.limits(bool(quant)), path, data, loader)
                for what, path in in_onnxruntime.items()
            )
        following = [after_scoring(path, imgsz[0]) for path in files.values()] * (not status)
    elif in_onnxruntime and not config.fp32_scales and len(set(imgsz)) == 1:  # images are scored as squares
        status, calibrated_on = 0, data_yaml(quant['recipe'].get('data') if quant else None)
        following = [
            command('qat.py', 'eval', '--weights', path, '--data', calibrated_on, '--imgsz', imgsz[0])
            for path in in_onnxruntime.values()
        ]
    else:
        status, following = 0, [after_scoring(path, imgsz[0]) for path in files.values()]
    finish(*following, **written)
    return status


if __name__ == '__main__':
    sys.exit(run_command(main))
