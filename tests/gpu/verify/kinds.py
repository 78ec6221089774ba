"""The kinds of exported file: how each is exported, built, and compared with ONNX Runtime."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from utils.qat.config.export import INT8_LIMITS
from utils.qat.config.tables import FORMATS
from utils.qat.config.tasks import load_task
from utils.qat.core.command import sides_words
from utils.qat.evaluation.interval import boxes_and_masks

# thresholds at which AP of a file with NMS inside can be compared with another
INSIDE = '--conf-thres', '0.001', '--iou-thres', '0.7', '--topk-all', '300'
# parts of the reasons of TensorRT-RTX, which lacks them: NVIDIA/TensorRT-RTX issue 5, docs/end2end.md
RTX_LACKS = 'no runners that implement it', 'Plugin not found', 'plugin was not found'


@dataclass(frozen=True)
class Kind:
    title: str
    weights: str = 'int8'  # which checkpoint: int8, float, segment or classify
    export: tuple[str, ...] = ()  # options of export_qat.py
    build: tuple[str, ...] = ()  # options of scripts/build_engine.py
    include: str = 'onnx'  # its name in FORMATS; '' = DeepStream's, of export_yoloV9.py
    reference: str = ''  # the kind that ONNX Runtime runs in its place; '' = itself


KINDS = {
    'plain': Kind('INT8, batch 1'),
    'float': Kind('float, batch 1', 'float'),
    'batch-4': Kind('INT8, fixed batch of 4', export=('--batch-size', '4')),
    'dynamic': Kind('INT8, batch of 1 to 8', export=('--dynamic',), build=('--batch', '1,4,8')),
    'typed': Kind('INT8, strongly typed, FP16 outside Q/DQ', export=('--trt', '11')),
    'half': Kind('float, strongly typed FP16', 'float', ('--trt', '11', '--half'), reference='float'),
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


def onnx_of(name, batch=None):
    """File name of an exported kind; batch: another fixed one than the kind's own."""
    include = KINDS[name].include
    return stem_of(name, batch) + (FORMATS[include].suffix if include else '.pt.onnx')


def stem_of(name, batch=None):
    return f'{name}-{batch}' if batch else name


def data_of(name):
    """The data of a kind in the folder of the run: a YAML, or a link to a folder."""
    return {'segment': 'segment.yaml', 'classify': 'classify'}.get(KINDS[name].weights, 'detect.yaml')


def export(runner, name, batch=None):
    """Export a kind; batch: another fixed one than the kind's own."""
    kind, config, major = KINDS[name], runner.config, runner.machine['major']
    sources = {'int8': config.weights, 'float': config.float_weights}
    sources |= {'segment': config.segment, 'classify': config.classify}
    source = sources[kind.weights]
    if source is None:
        pytest.skip(f'no checkpoint of that task (--{kind.weights})')
    if '--trt' in kind.export and major < 10:
        pytest.skip(f'{runner.machine["product"]} has no strongly typed networks')
    weights = runner.folder / f'{stem_of(name, batch)}.pt'  # the file takes the name of its checkpoint
    link(weights, source)
    size = sides_words(config.imgsz)
    trt = () if '--trt' in kind.export else ('--trt', major)
    if kind.include:
        sides = () if kind.weights == 'classify' else ('--imgsz', *size)  # a classifier has its own
        words = ('--include', kind.include, *sides, '--simplify', *trt, *kind.export)
        runner.run('export_qat.py', '--weights', weights.name, *words, *(('--batch-size', batch) if batch else ()))
    else:
        runner.run('export_yoloV9.py', '-w', weights.name, '-s', *size, '--simplify', *trt)


def link(name, target):
    """Make a link, or put it in the place of another."""
    name.unlink(missing_ok=True)
    name.symlink_to(target.resolve())


def build(runner, name, engine, *words):
    """Build an engine of an exported kind with more options of scripts/build_engine.py; returns the content of its sidecar."""
    (runner.folder / engine).unlink(missing_ok=True)  # of an earlier run
    options = '--engine', engine, '--backend', runner.config.backend, '--level', runner.config.level
    try:
        runner.run('scripts/build_engine.py', onnx_of(name), *options, *KINDS[name].build, *words)
    except pytest.fail.Exception as e:
        if runner.config.backend == 'rtx' and any(part in str(e) for part in RTX_LACKS):
            pytest.skip(f'{runner.machine["product"]} cannot build it: {e}')
        raise
    return runner.json(f'{engine}.json')


def compare_with_onnx(runner, name, reference, engine, *words):
    """Check that an engine finds in the val images of a kind what ONNX Runtime finds with a file, within the limits of export_qat.py --verify."""
    words = ('--data', data_of(name), '--images', runner.config.images, '--batch-size', 8, *words)
    folder = Path(engine).name
    runner.run('compare_outputs.py', reference, engine, *words, '--project', 'compared', '--name', folder, '--exist-ok')
    return within_limits(runner.json(f'compared/{folder}/compare.json')['comparisons'][0])


def within_limits(found):
    """A comparison of compare_outputs.py in words; fails if a difference is beyond INT8_LIMITS, of AP by more than its confidence interval."""
    classes = 'matched' not in found  # of a classifier
    intervals = [d['chance'] or 0 for d in boxes_and_masks(found.get('against_reference') or {'chance': 0})]
    limits = replace(INT8_LIMITS, ap=INT8_LIMITS.ap + max(intervals))
    if beyond := load_task('classify' if classes else 'detect').comparing().beyond_limits(found, limits):
        pytest.fail(f'beyond the limits of export_qat.py --verify: {"; ".join(beyond)}', pytrace=False)
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
