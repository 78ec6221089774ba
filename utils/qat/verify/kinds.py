"""The kinds of exported file: how each is exported, built by the Python package, and compared with ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.qat.config.export import INCLUDE, INT8_LIMITS
from utils.qat.core.next_command import typed_sides
from utils.qat.evaluation.compare import excess
from utils.qat.evaluation.compare_classes import excess_of_classes
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
    'classify': Kind('INT8, classifier, batch of 1 to 8', 'classify', ('--dynamic',), ('--batch', '1,4,8')),
    'segment-end2end': Kind('INT8, segmentation, NMS and masks inside', 'segment', INSIDE, include='onnx_end2end'),
}


def stem_of(name: str, batch: int | None = None) -> str:
    """Return the name of the files of a kind, without suffix; `batch`: see `export`."""
    return f'{name}-{batch}' if batch else name


def onnx_of(name: str, batch: int | None = None) -> str:
    """Return the file name of an exported kind; `batch`: see `export`."""
    include = KINDS[name].include
    return stem_of(name, batch) + (INCLUDE[include] if include else '.pt.onnx')


def engine_of(name: str) -> str:
    """Return the file name of the engine of a kind that the Python package built."""
    return f'{name}.engine'


def data_of(name: str) -> str:
    """Return the data of a kind: a YAML or a link to a folder, which scripts/verify_tensorrt.py has put into the folder."""
    return {'segment': 'segment.yaml', 'classify': 'classify'}.get(KINDS[name].weights, 'detect.yaml')


def export(bench: Bench, name: str, batch: int | None = None) -> None:
    """Export a kind.

    Args:
        bench: where.
        name: the kind.
        batch: another fixed batch than the kind's own; None = its own.
    """
    kind, config, major = KINDS[name], bench.config, bench.machine.major
    size = typed_sides(config.imgsz)
    sources: dict[str, Path | None] = {'int8': config.weights, 'float': config.float_weights}
    sources |= {'segment': config.segment, 'classify': config.classify}
    source = sources[kind.weights]
    if source is None:
        raise Skipped(f'no checkpoint of that task (--{kind.weights})')
    if '--trt' in kind.export and major < 10:
        raise Skipped(f'{bench.machine.product} has no strongly typed networks')
    weights = bench.folder / f'{stem_of(name, batch)}.pt'  # the file takes the name of its checkpoint
    weights.unlink(missing_ok=True)
    weights.symlink_to(source.resolve())
    trt = () if '--trt' in kind.export else ('--trt', major)
    if kind.include:
        sides = () if kind.weights == 'classify' else ('--imgsz', *size)  # a classifier has its own
        words = ('--include', kind.include, *sides, '--simplify', *trt, *kind.export)
        bench.run('export_qat.py', '--weights', weights.name, *words, *(('--batch-size', batch) if batch else ()))
    else:
        bench.run('export_yoloV9.py', '-w', weights.name, '-s', *size, '--simplify', *trt)


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
    """Check that the engine of a kind finds in the val images what ONNX Runtime finds with the file.

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
    return within_limits(bench.json(f'compared/{name}/compare.json')['comparisons'][0])


def within_limits(found: dict[str, Any]) -> str:
    """Put a comparison of compare_outputs.py into words.

    Raises:
        Failed: a difference is beyond INT8_LIMITS.
    """
    classes = 'matched' not in found  # of a classifier
    if beyond := (excess_of_classes if classes else excess)(found, INT8_LIMITS):
        raise Failed(f'beyond the limits of export_qat.py --verify: {"; ".join(beyond)}')
    if classes:
        return (
            f'top-1 {found["other"]["top1"]:.4f}, ONNX Runtime {found["reference"]["top1"]:.4f}; '
            f'the best class is the same in {1 - found["ranks"][0]["disagreement"]:.1%} of the images'
        )
    text = (
        f'AP {found["other"]["ap"]:.4f}, ONNX Runtime {found["reference"]["ap"]:.4f}; '
        f'{found["matched"]:.1%} of the detections matched, their scores {found["matched_score"]:.4f} apart'
    )
    return text if found['matched_mask'] is None else f'{text}; IoU of their masks {found["matched_mask"]:.3f}'
