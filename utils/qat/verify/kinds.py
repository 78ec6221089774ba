"""The kinds of exported file: how each is exported, built by the Python package, and compared with ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.qat.config.export import INCLUDE, INT8_LIMITS
from utils.qat.verify.bench import Bench, Failed, Skipped

# thresholds at which AP of a file with NMS inside can be compared with another
INSIDE = '--conf-thres', '0.001', '--iou-thres', '0.7', '--topk-all', '300'
# parts of the reasons of TensorRT-RTX, which lacks them: NVIDIA/TensorRT-RTX issue 5, docs/end2end.md
RTX_LACKS = 'no runners that implement it', 'Plugin not found', 'plugin was not found'


@dataclass(frozen=True)
class Kind:
    """A kind of exported file.

    Attributes:
        title: what it is, in words.
        weights: the link to a checkpoint that it is exported of, see `checkpoint`.
        export: options of export_qat.py.
        build: options of scripts/build_engine.py.
        include: its name in INCLUDE; '' = DeepStream's, of export_yoloV9.py.
        reference: the kind that ONNX Runtime runs in its place; '' = itself.
    """

    title: str
    weights: str = 'int8'
    export: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    include: str = 'onnx'
    reference: str = ''


KINDS = {
    'plain': Kind('INT8, batch 1'),
    'float': Kind('float, batch 1', 'float'),
    'batch-4': Kind('INT8, fixed batch of 4', export=('--batch-size', '4')),
    'dynamic': Kind('INT8, batch of 1 to 8', export=('--dynamic',), build=('--batch', '1,4,8')),
    'typed': Kind('INT8, strongly typed, FP16 outside Q/DQ', export=('--trt', '11')),
    'half': Kind('float, strongly typed FP16', 'float', ('--trt', '11', '--half')),
    'end2end': Kind('INT8, NMS of ONNX inside', export=('--nms', 'standard', *INSIDE), include='onnx_end2end'),
    'plugin': Kind(
        'INT8, NMS of EfficientNMS_TRT inside',
        export=('--nms', 'plugin', *INSIDE),
        include='onnx_end2end',
        reference='end2end',
    ),
    'deepstream': Kind('INT8, for DeepStream', include=''),
    'segment': Kind('INT8, segmentation', 'segment'),
    'segment-end2end': Kind('INT8, segmentation, NMS and masks inside', 'segment', INSIDE, include='onnx_end2end'),
}


def onnx_of(name: str) -> str:
    """Return the file name of an exported kind."""
    include = KINDS[name].include
    return f'{name}{INCLUDE[include]}' if include else f'{name}.pt.onnx'


def engine_of(name: str) -> str:
    """Return the file name of the engine of a kind that the Python package built."""
    return f'{name}.engine'


def data_of(name: str) -> str:
    """Return the data YAML of a kind, which scripts/verify_tensorrt.py has written to the folder."""
    return 'segment.yaml' if KINDS[name].weights == 'segment' else 'detect.yaml'


def export(bench: Bench, name: str) -> None:
    """Export a kind. The checkpoint gets the name of the kind, because the file takes the name of its checkpoint."""
    kind, config, major = KINDS[name], bench.config, bench.machine.major
    source = {'int8': config.weights, 'float': config.float_weights, 'segment': config.segment}[kind.weights]
    if source is None:
        raise Skipped('no segmentation model (--segment)')
    if '--trt' in kind.export and major < 10:
        raise Skipped(f'{bench.machine.product} has no strongly typed networks')
    weights = bench.folder / f'{name}.pt'
    weights.unlink(missing_ok=True)
    weights.symlink_to(source.resolve())
    trt = () if '--trt' in kind.export else ('--trt', major)
    if kind.include:
        words = ('--include', kind.include, '--imgsz', config.imgsz, '--simplify', *trt, *kind.export)
        bench.run('export_qat.py', '--weights', weights.name, *words)
    else:
        bench.run('export_yoloV9.py', '-w', weights.name, '-s', config.imgsz, '--simplify', *trt)


def build(bench: Bench, name: str, engine: str, *words: object) -> dict[str, Any]:
    """Build an engine of an exported kind.

    Args:
        bench: where.
        name: the kind.
        engine: file to write.
        *words: more options of scripts/build_engine.py.

    Returns:
        The content of the sidecar.
    """
    kind = KINDS[name]
    options = '--engine', engine, '--timing-cache', 'timing.cache', '--backend', bench.config.backend
    try:
        bench.run('scripts/build_engine.py', onnx_of(name), *options, *kind.build, *words)
    except Failed as e:
        lacks = bench.config.backend == 'rtx' and any(part in str(e) for part in RTX_LACKS)
        if not lacks:
            raise
        raise Skipped(f'{bench.machine.product} cannot build it: {e}') from e
    return bench.json(f'{engine}.json')


def export_and_build(bench: Bench, name: str) -> str:
    """Check that a kind is exported, and that the Python package builds an engine of it."""
    export(bench, name)
    built = build(bench, name, engine_of(name), '--no-trtexec')
    return f'{built["precision"]}, {built["bytes"] / 1e6:.1f} MB, built in {built["seconds"]:g} s'


def compare_with_onnx(bench: Bench, name: str) -> str:
    """Check that the engine of a kind detects in the val images what ONNX Runtime detects with the file.

    The limits are those of export_qat.py --verify.
    """
    reference = KINDS[name].reference or name
    bench.need(f'build {name}', *[f'build {reference}'] * (reference != name))
    bench.need_gpu()
    # the reference on the CPU: ONNX Runtime falls back to it where it has no CUDA
    words = ('--data', data_of(name), '--images', bench.config.images, '--batch-size', 8)
    backend = ('--backend', f'onnxruntime,{bench.config.backend}')
    folder = ('--project', 'compared', '--name', name, '--exist-ok')
    bench.run('compare_outputs.py', onnx_of(reference), engine_of(name), *words, *backend, *folder)
    return within_limits(bench.json(f'compared/{name}/compare.json'))


def within_limits(found: dict[str, Any]) -> str:
    """Put compare.json of compare_outputs.py into words.

    Raises:
        Failed: a difference is beyond INT8_LIMITS.
    """
    reference, other, limits = found['reference'], found['other'], INT8_LIMITS
    checks = [
        (f'AP {other["ap"]:.4f}, ONNX Runtime {reference["ap"]:.4f}', abs(found['ap_difference']) <= limits.ap),
        (f'{found["matched"]:.1%} of the detections matched', found['matched'] >= limits.matched),
        (f'their scores {found["matched_score"]:.4f} apart', found['matched_score'] <= limits.score),
    ]
    if found['matched_mask'] is not None:
        checks.append((f'IoU of their masks {found["matched_mask"]:.3f}', found['matched_mask'] >= limits.mask))
        checks.append(
            (f'mask AP apart by {abs(found["mask_ap_difference"]):.4f}', abs(found['mask_ap_difference']) <= limits.ap)
        )
    text = '; '.join(words for words, _ in checks)
    wrong = [words for words, right in checks if not right]
    if wrong:
        raise Failed(f'beyond the limits of export_qat.py --verify: {"; ".join(wrong)}')
    return text
