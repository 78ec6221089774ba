"""The rows of scripts/verify_tensorrt.py, in their order: each is a function that returns its figures, or raises Failed or Skipped."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from utils.qat.config.export import INT8_LIMITS
from utils.qat.verify.bench import Bench, Failed, Skipped
from utils.qat.verify.kinds import (
    KINDS,
    build,
    compare_with_onnx,
    data_of,
    engine_of,
    export,
    export_and_build,
    onnx_of,
    within_limits,
)

LEAST_SQNR = 20.0  # dB, of DeepStream's raw outputs: two runtimes that round INT8 otherwise are 25 to 40 dB apart
SPEED_BATCHES = 1, 8
PRECISIONS = 'fp32', 'fp16', 'int8'


@dataclass(frozen=True)
class Row:
    """A row of the table: something that is checked."""

    name: str  # other rows name it by `Bench.need`
    title: str
    check: Callable[[Bench], str]  # returns its figures in words


# ---- engines --------------------------------------------------------------------------------------------------------------


def trtexec(bench: Bench, name: str) -> str:
    """Check that trtexec knows our flags and builds an engine of a kind."""
    if bench.config.backend == 'rtx':
        raise Skipped('trtexec is a program of TensorRT, not of TensorRT-RTX')
    if bench.machine.trtexec is None:
        raise Skipped('no trtexec here; the wheels of pip do not contain it, containers do')
    bench.need(f'build {name}')
    built = build(bench, name, f'{name}-trtexec.engine')
    return f'{built["precision"]}, {built["bytes"] / 1e6:.1f} MB, by trtexec of {built["built_by"]}'


def timing_cache(bench: Bench) -> str:
    """Check that a second build of a file uses the timings of the first."""
    bench.need('build plain')
    first = bench.json('plain.engine.json')['seconds']
    built = build(bench, 'plain', 'again.engine', '--no-trtexec')
    if not built['timing_cache_reused']:
        raise Failed('the timing cache of the first build was not used')
    if bench.config.backend == 'rtx':
        return 'read again; TensorRT-RTX keeps no timings in it'
    if built['seconds'] >= first:
        raise Failed(f'the second build took {built["seconds"]:g} s, the first {first:g} s')
    return f'{first:g} s without it, {built["seconds"]:g} s with it'


# ---- results --------------------------------------------------------------------------------------------------------------


def trtexec_outputs(bench: Bench) -> str:
    """Check that the engine of trtexec detects what ONNX Runtime detects."""
    bench.need('trtexec plain')
    bench.need_gpu()
    if bench.machine.trtexec != bench.machine.product:
        raise Skipped(f'trtexec is of {bench.machine.trtexec}, the Python package is {bench.machine.product}')
    words = ('--data', data_of('plain'), '--images', bench.config.images, '--batch-size', 8)
    folder = ('--project', 'compared', '--name', 'trtexec', '--exist-ok')
    bench.run('compare_outputs.py', onnx_of('plain'), 'plain-trtexec.engine', *words, *folder)
    return within_limits(bench.json('compared/trtexec/compare.json')['comparisons'][0])


def torch_tensorrt(bench: Bench) -> str:
    """Check that Torch-TensorRT compiles the model, that its engine detects what ONNX Runtime detects, and measure it."""
    if bench.config.backend == 'rtx':
        raise Skipped('Torch-TensorRT for TensorRT-RTX is another package, which is not supported')
    if find_spec('torch_tensorrt') is None:
        raise Skipped(
            "no package torch_tensorrt; python export_qat.py --include torch_tensorrt says how to get this torch's"
        )
    bench.need('build plain')
    bench.need_gpu()
    weights = bench.folder / 'compiled.pt'
    weights.unlink(missing_ok=True)
    weights.symlink_to(bench.config.weights.resolve())
    options = ('--formats', 'ep', 'ts', 'engine', '--imgsz', bench.config.imgsz, '--device', 0)
    bench.run('export_qat.py', '--weights', weights.name, '--include', 'torch_tensorrt', *options)
    engine = 'compiled-torch_tensorrt.engine'
    words = ('--data', data_of('plain'), '--images', bench.config.images, '--batch-size', 8)
    folder = ('--project', 'compared', '--name', 'torch_tensorrt', '--exist-ok')
    bench.run('compare_outputs.py', onnx_of('plain'), engine, *words, *folder)
    text = within_limits(bench.json('compared/torch_tensorrt/compare.json')['comparisons'][0])
    ms = [
        benchmark(bench, f'torch_tensorrt-{name}', file, '--backend', bench.config.backend)[0]['compute']['median']
        for name, file in (('own', engine), ('onnx', engine_of('plain')))
    ]
    return f'{text}; {ms[0]:.3f} ms, by way of ONNX {ms[1]:.3f} ms'


def deepstream_outputs(bench: Bench) -> str:
    """Check the raw outputs of DeepStream's file: an evaluation does not take it, because it has the best class of a box only."""
    bench.need('build deepstream')
    found = raw_outputs(bench, onnx_of('deepstream'), engine_of('deepstream'))
    if found['sqnr'] is not None and found['sqnr'] < LEAST_SQNR:
        raise Failed(f'SQNR {found["sqnr"]:.1f} dB against ONNX Runtime, wanted {LEAST_SQNR:g}')
    return 'equal to ONNX Runtime' if found['sqnr'] is None else f'SQNR {found["sqnr"]:.1f} dB against ONNX Runtime'


def cuda_graph(bench: Bench) -> str:
    """Check that a CUDA graph gives the same outputs, bit for bit, and measure both."""
    bench.need('build plain')
    found = raw_outputs(bench, engine_of('plain'), engine_of('plain'))
    if not found['equal']:
        raise Failed(f'other outputs than without a graph, SQNR {found["sqnr"]:.1f} dB')
    median = {}
    for name, option in (('with', ()), ('without', ('--no-cuda-graph',))):
        results = benchmark(bench, f'graph-{name}', engine_of('plain'), '--backend', bench.config.backend, *option)
        median[name] = results[0]['compute']['median']
    return f'same bits; {median["with"]:.3f} ms with it, {median["without"]:.3f} ms without'


def raw_outputs(bench: Bench, a: str, b: str) -> dict[str, Any]:
    """Run two files on the same images, see raw_outputs.py."""
    bench.need_gpu()
    bench.run('-m utils.qat.verify.raw_outputs', a, b, data_of('plain'), bench.config.backend, 'outputs.json')
    return bench.json('outputs.json')


def val_trt(bench: Bench) -> str:
    """Check the AP of val_trt.py, whose batches of 10 an engine of at most 8 gets in parts."""
    bench.need('build dynamic')
    bench.need_gpu()
    ap = {}
    for name, file, options in (
        ('engine', engine_of('dynamic'), ('--backend', bench.config.backend)),
        ('onnx', onnx_of('dynamic'), ('--device', 'cpu')),
    ):
        words = ('--data', data_of('dynamic'), '--batch-size', 10)
        bench.run(
            'val_trt.py', '--weights', file, *words, '--project', 'scored', '--name', name, '--exist-ok', *options
        )
        ap[name] = bench.json(f'scored/{name}/metrics.json')['ap']
    text = f'AP {ap["engine"]:.4f}, ONNX Runtime {ap["onnx"]:.4f}'
    if abs(ap['engine'] - ap['onnx']) > INT8_LIMITS.ap:
        raise Failed(f'{text}: more than {INT8_LIMITS.ap:g} apart')
    return text


# ---- refusals -------------------------------------------------------------------------------------------------------------


def refused(bench: Bench, name: str, engine: bytes, sidecar: dict[str, Any] | None, message: str) -> str:
    """Check that an engine is refused with one line and exit code 2.

    Args:
        bench: where.
        name: of the engine that is made.
        engine: its content.
        sidecar: content of its sidecar; None = it has none.
        message: part of the line.
    """
    file = bench.folder / f'{name}.engine'
    file.write_bytes(engine)
    if sidecar:
        (bench.folder / f'{name}.engine.json').write_text(json.dumps(sidecar), encoding='utf-8')
    words = ('--data', data_of('plain'), '--backend', bench.config.backend)
    said = bench.run('val_trt.py', '--weights', file.name, *words, code=2)
    (line,) = [line for line in said.splitlines() if 'error: ' in line] or ['no line with an error']
    if message not in line:
        raise Failed(f'the line does not say "{message}": {line}')
    return line.partition('error: ')[2]


def other_gpu(bench: Bench) -> str:
    """Check that an engine of another GPU is refused before TensorRT reads it; the sidecar says which GPU it is of."""
    engine, sidecar = plain_engine(bench)
    other = {'name': 'NVIDIA Another', 'capability': '1.0'}
    return refused(bench, 'other-gpu', engine, {**sidecar, 'gpu': other}, 'built on NVIDIA Another')


def other_version(bench: Bench) -> str:
    """Check that an engine of another TensorRT is refused before TensorRT reads it."""
    engine, sidecar = plain_engine(bench)
    return refused(bench, 'other-version', engine, {**sidecar, 'built_by': 'TensorRT 8.0.0'}, 'built by TensorRT 8.0.0')


def cut_short(bench: Bench) -> str:
    """Check that an engine that was cut short is refused by its sidecar."""
    engine, sidecar = plain_engine(bench)
    return refused(bench, 'cut', engine[: len(engine) // 2], sidecar, 'not whole')


def cut_short_alone(bench: Bench) -> str:
    """Check that an engine that was cut short, without a sidecar, is refused with TensorRT's own reason."""
    engine, _ = plain_engine(bench)
    return refused(bench, 'cut-alone', engine[: len(engine) // 2], None, 'cannot load it')


def plain_engine(bench: Bench) -> tuple[bytes, dict[str, Any]]:
    """Return the content of the engine of a plain file, and of its sidecar."""
    bench.need('build plain')
    bench.need_gpu()
    return (bench.folder / 'plain.engine').read_bytes(), bench.json('plain.engine.json')


# ---- speed ----------------------------------------------------------------------------------------------------------------


def benchmark(bench: Bench, name: str, *words: object) -> list[dict[str, Any]]:
    """Run benchmark_trt.py and return its results, see timing.Result."""
    options = ('--duration', bench.config.duration, '--project', 'measured', '--name', name, '--exist-ok')
    bench.run('benchmark_trt.py', *words, *options)
    return bench.json(f'measured/{name}/benchmark.json')['results']


def layers(bench: Bench) -> str:
    """Check that every layer is measured on the GPU and drawn, and count the findings on the engine."""
    bench.need('build plain')
    bench.need_gpu()
    build(bench, 'plain', 'drawn.engine', '--generate-graph', '--no-trtexec')
    words = ('--layer', 'drawn.layer.json', '--profile', 'drawn.profile.json', '--output', 'drawn')
    bench.run('scripts/draw_engine.py', *words)
    with (bench.folder / 'drawn.csv').open(newline='', encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    times = [float(row['ms']) for row in rows if row['ms']]
    if not times or sum(times) <= 0:
        raise Failed('no layer has a time')
    found = Counter(kind for row in rows for kind in row['findings'].split('; ') if kind)
    findings = ', '.join(f'{kind} {count}' for kind, count in found.items()) or 'none'
    return f'{len(rows)} layers, {sum(times):.3f} ms in all; findings: {findings}'


def speed(bench: Bench) -> str:
    """Measure INT8 against FP16 and FP32, with the samples of NVML beside them."""
    kinds = ['plain', 'float', *['half'] * (bench.machine.major >= 11)]
    bench.need(*(f'build {name}' for name in kinds))
    bench.need_gpu()
    found = []
    for batch in SPEED_BATCHES:
        for name in kinds:  # their batch is fixed
            export(bench, name, batch)
        files = [onnx_of(name, batch) for name in kinds]
        words = ('--batch', batch, '--precision', ','.join(PRECISIONS), '--backend', bench.config.backend)
        results = benchmark(bench, f'speed-{batch}', *files, *words)
        ms = {result['precision']: result['compute']['median'] for result in results}
        missing = [p for p in PRECISIONS if p not in ms]
        if missing:
            raise Failed(f'batch {batch}: no measurement of {", ".join(missing)}')
        found.append(
            f'batch {batch}: '
            + ', '.join(f'{p.upper()} {ms[p]:.3f} ms' for p in PRECISIONS)
            + f', INT8 {ms["fp16"] / ms["int8"]:.2f} times as fast as FP16'
        )
    busy = [percent for *_, percent in bench.json(f'measured/speed-{batch}/benchmark.json')['usage']]
    return '; '.join([*found, f'GPU busy up to {max(busy):.0f} % by NVML' if busy else 'no samples of NVML'])


def onnxruntime_cuda(bench: Bench) -> str:
    """Measure the plain file in ONNX Runtime on the GPU."""
    bench.need('build plain')
    bench.need_gpu()
    from importlib.metadata import distributions

    if 'onnxruntime-gpu' not in {d.name for d in distributions()}:
        raise Skipped('no package onnxruntime-gpu')
    (result,) = benchmark(bench, 'onnxruntime', onnx_of('plain'), '--backend', 'onnxruntime')
    if result['h2d'] is None:
        raise Failed('ONNX Runtime ran it on the CPU')
    return f'{result["compute"]["median"]:.3f} ms at batch 1'


ROWS = (
    *(
        Row(
            f'build {name}',
            f'{kind.title}: exported, built by the Python package',
            partial(export_and_build, name=name),
        )
        for name, kind in KINDS.items()
    ),
    Row('timing cache', 'the second build of a file uses the timings of the first', timing_cache),
    *(
        Row(f'trtexec {name}', f'{KINDS[name].title}: built by trtexec', partial(trtexec, name=name))
        for name in ('plain', 'dynamic', 'typed')
    ),
    *(
        Row(
            f'outputs {name}',
            f'{kind.title}: {"classes and top-1" if kind.weights == "classify" else "detections and AP"} as in ONNX Runtime',
            partial(compare_with_onnx, name=name),
        )
        for name, kind in KINDS.items()
        if kind.include and kind.weights != 'float'
    ),
    Row('outputs deepstream', f'{KINDS["deepstream"].title}: outputs as in ONNX Runtime', deepstream_outputs),
    Row('outputs trtexec', 'the engine of trtexec: detections and AP as in ONNX Runtime', trtexec_outputs),
    Row('torch_tensorrt', '--include torch_tensorrt: compiled, detections as in ONNX Runtime', torch_tensorrt),
    Row('val_trt.py', 'val_trt.py in batches of 10, engine of 1 to 8', val_trt),
    Row('other GPU', 'the engine of another GPU is refused', other_gpu),
    Row('other version', 'the engine of another TensorRT is refused', other_version),
    Row('cut', 'an engine that was cut short is refused', cut_short),
    Row('cut alone', 'the same without a sidecar', cut_short_alone),
    Row('CUDA graph', 'a CUDA graph gives the same outputs', cuda_graph),
    Row('layers', 'each layer is measured and drawn', layers),
    Row('speed', 'INT8 is measured against FP16 and FP32', speed),
    Row('ONNX Runtime', 'ONNX Runtime with CUDA measures the plain file', onnxruntime_cuda),
)
