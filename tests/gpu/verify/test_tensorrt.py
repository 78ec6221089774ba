"""Everything that this toolkit does with TensorRT, row by row, in their order: scripts/verify_tensorrt.sh, or pytest -m tensorrt.

The first is for users: its rows take their model, or the demo, and it writes a report. A later row needs files of an earlier one. Each row
leaves its figures in words in `runner.found`.
"""

import csv
import json
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import classifiers

from builds import LEVEL, building
from command_runner import CommandRunner, engine_of
from kinds import KINDS, build, compare_with_onnx, data_of, export, link, onnx_of
from models.quantize import checkpoint
from utils.qat.config.common import LoaderConfig
from utils.qat.config.deploy import VerifyConfig
from utils.qat.config.export import INT8_LIMITS
from utils.qat.core.command import sides_words
from utils.qat.core.files import write_json, write_text
from utils.qat.core.run_folder import own_folder
from utils.qat.data.dataset import load_data, open_dataset
from verify_report import row_of, settings_of_the_command

HERE = Path(__file__).parent
STARTING = 300  # seconds to find the facts about the machine
STRIDE = 32  # of every model of YOLOv9
LEAST_SQNR = 20.0  # dB, of DeepStream's raw outputs: two runtimes that round INT8 otherwise are 25 to 40 dB apart
SPEED_BATCH = 8

row = pytest.mark.tensorrt  # (name, what it checks)


def rows(step, what, kinds=tuple(KINDS)):
    """Parametrize a test by the kinds of files: rows STEP KIND."""
    return pytest.mark.parametrize('kind', [pytest.param(k, marks=row(f'{step} {k}', what(KINDS[k]))) for k in kinds])


# ---- where commands run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def runner_of_all(request, tmp_path_factory):
    config, begin = settings_of_the_command(), time.monotonic()
    backend, stop = (config.backend, lambda why: pytest.exit(why, 2)) if config else ('tensorrt', pytest.skip)
    first = CommandRunner(config, {}, tmp_path_factory.mktemp('machine'), begin + STARTING, [])
    try:
        first.run(HERE / 'machine_facts.py', backend, 'machine.json')
    except pytest.fail.Exception as e:
        stop(e.msg.partition(': exit code 2, not 0: ')[2] or e.msg)
    config = config or demo_settings(request, tmp_path_factory.mktemp('rows'))
    with own_folder(config) as folder:
        for source, name in ((config.data, 'detect.yaml'), (config.segment_data, 'segment.yaml')):
            if source:
                write_subset(source, folder / name, config.images)
        if config.classify_data:
            link(folder / 'classify', config.classify_data)
        deadline = begin + 60 * config.minutes
        runner = replace(first, config=config, machine=first.json('machine.json'), folder=folder, deadline=deadline)
        with building(runner, {row_of(item)[0] for item in request.session.items}, speed_files):
            yield runner


@pytest.fixture
def runner(runner_of_all, request):
    request.node.runner = replace(runner_of_all, commands=[])
    skip_if_over(runner_of_all)
    return request.node.runner


@pytest.fixture
def alone(runner):
    """Begin a row that measures time when nothing is built any more."""
    wait([future for future, _ in runner.builds.values()])
    skip_if_over(runner)


def skip_if_over(runner):
    if time.monotonic() > runner.deadline:
        pytest.skip(f'the {runner.config.minutes:g} minutes were over (--minutes)')


def demo_settings(request, folder):
    """The settings without a command: the demo of the tests."""
    demo, masks = (request.getfixturevalue(name) for name in ('demo', 'demo_seg'))
    model = classifiers.quantized(classifiers.loaded('mobilenet_v2', folder))
    checkpoint.save_model(folder / 'class.pt', model, {'imgsz': [classifiers.SIZE] * 2}, '0' * 64)
    return VerifyConfig(
        demo.quantized,
        demo.single,
        demo.data,
        128,
        segment=masks.quantized,
        segment_data=masks.data,
        classify=folder / 'class.pt',
        classify_data=classifiers.write_images(folder / 'classes'),
        project=folder,
    )


def write_subset(source, file, images):
    """Write a data YAML of at most so many val images of another, evenly spread."""
    data = load_data(source)
    files = open_dataset(data, 'val', LoaderConfig(workers=0), STRIDE, None, rect=False, pad=0.5).im_files
    n = min(images, len(files))
    listed = file.with_suffix('.txt')
    write_text(listed, ''.join(f'{Path(files[i * len(files) // n]).resolve()}\n' for i in range(n)))
    names = [data.names[i] for i in sorted(data.names)]
    content = {'path': str(listed.parent.resolve()), 'train': listed.name, 'val': listed.name, 'names': names}
    write_json(file, content)  # JSON is YAML too


# ---- engines --------------------------------------------------------------------------------------------------------------


@rows('build', lambda kind: f'{kind.title}: exported, built by the Python package')
def test_build(runner, kind):
    future, runner.commands = runner.builds[f'build {kind}']
    runner.found = future.result()


@rows('trtexec', lambda kind: f'{kind.title}: built by trtexec', ('plain', 'dynamic', 'typed'))
def test_trtexec_knows_our_flags(runner, kind):
    future, runner.commands = runner.builds[f'trtexec {kind}']
    runner.found = future.result()


# ---- results --------------------------------------------------------------------------------------------------------------


@rows(
    'outputs',
    lambda kind: (
        f'{kind.title}: {"classes and top-1" if kind.weights == "classify" else "detections and AP"} as in ONNX Runtime'
    ),
    [name for name, kind in KINDS.items() if kind.include and (kind.weights != 'float' or kind.reference)],
)
def test_outputs_are_those_of_onnx_runtime(runner, kind):
    reference = KINDS[kind].reference or kind
    runner.need(f'build {kind}')
    runner.need(f'build {reference}')
    runner.need_gpu()
    # the reference on the CPU: ONNX Runtime falls back to it where it has no CUDA
    backend = '--backend', f'onnxruntime,{runner.config.backend}'
    runner.found = compare_with_onnx(runner, kind, onnx_of(reference), engine_of(kind), *backend)


@row('outputs deepstream', f'{KINDS["deepstream"].title}: outputs as in ONNX Runtime')
def test_raw_outputs_of_deepstream(runner):
    """An evaluation does not take the file, because it has the best class of a box only."""
    runner.need('build deepstream')
    sqnr = raw_outputs(runner, onnx_of('deepstream'), engine_of('deepstream'))['sqnr']
    runner.found = 'equal to ONNX Runtime' if sqnr is None else f'SQNR {sqnr:.1f} dB against ONNX Runtime'
    assert sqnr is None or sqnr >= LEAST_SQNR, runner.found


@row('outputs trtexec', 'the engine of trtexec: detections and AP as in ONNX Runtime')
def test_outputs_of_trtexec(runner):
    runner.need('trtexec plain')
    runner.need_gpu()
    machine = runner.machine
    if machine['trtexec'] != machine['product']:
        pytest.skip(f'trtexec is of {machine["trtexec"]}, the Python package is {machine["product"]}')
    runner.found = compare_with_onnx(runner, 'plain', onnx_of('plain'), engine_of('plain', 'trtexec'))


@row('val_trt.py', 'val_trt.py in batches of 10, engine of 1 to 8')
def test_val_trt(runner):
    runner.need('build dynamic')
    runner.need_gpu()
    ap = {}
    for name, file, options in (
        ('engine', engine_of('dynamic'), ('--backend', runner.config.backend)),
        ('onnx', onnx_of('dynamic'), ('--device', 'cpu')),
    ):
        words = '--data', data_of('dynamic'), '--batch-size', 10, *options
        runner.run('val_trt.py', '--weights', file, *words, '--project', 'scored', '--name', name, '--exist-ok')
        ap[name] = runner.json(f'scored/{name}/metrics.json')['ap']
    runner.found = f'AP {ap["engine"]:.4f}, ONNX Runtime {ap["onnx"]:.4f}'
    assert abs(ap['engine'] - ap['onnx']) <= INT8_LIMITS.ap, runner.found


# ---- refusals -------------------------------------------------------------------------------------------------------------


OTHER_GPU = {'gpu': {'name': 'NVIDIA Another', 'capability': '1.0'}}
OTHER_VERSION = {'built_by': 'TensorRT 8.0.0'}
REFUSED = {  # row → what it checks, part of the line, whether the engine is cut, what its sidecar says (None: it has none)
    'other GPU': ('the engine of another GPU is refused', 'built on NVIDIA Another', False, OTHER_GPU),
    'other version': ('the engine of another TensorRT is refused', 'built by TensorRT 8.0.0', False, OTHER_VERSION),
    'cut': ('an engine that was cut short is refused', 'not whole', True, {}),
    'cut alone': ('the same without a sidecar', 'cannot load it', True, None),
}


@pytest.mark.parametrize('name', [pytest.param(name, marks=row(name, what)) for name, (what, *_) in REFUSED.items()])
def test_engines_that_are_refused(runner, name):
    """One line and exit code 2."""
    _, says, cut, changes = REFUSED[name]
    runner.need('build plain')
    runner.need_gpu()
    engine = (runner.folder / 'plain.engine').read_bytes()
    file = runner.folder / f'{name.replace(" ", "-")}.engine'
    file.write_bytes(engine[: len(engine) // 2] if cut else engine)
    if changes is not None:
        sidecar = {**runner.json('plain.engine.json'), **changes}
        file.with_name(f'{file.name}.json').write_text(json.dumps(sidecar), encoding='utf-8')
    words = '--data', data_of('plain'), '--backend', runner.config.backend
    said = runner.run('val_trt.py', '--weights', file.name, *words, code=2)
    lines = [line for line in said.splitlines() if 'error: ' in line]
    assert len(lines) == 1 and says in lines[0], said
    runner.found = lines[0].partition('error: ')[2]


# ---- speed: when nothing is built any more --------------------------------------------------------------------------------


@row('timing cache', 'the second build of a file uses the timings of the first')
@pytest.mark.usefixtures('alone')
def test_timing_cache(runner):
    """The engine of the row speed, because a build of level 0 takes no times."""
    if runner.config.backend == 'rtx':
        runner.need('build plain')
        assert build(runner, 'plain', 'again.engine', '--timing-cache', 'plain.timing.cache')['timing_cache_reused']
        runner.found = 'read again; TensorRT-RTX keeps no timings in it'
        return
    file, engine = onnx_of('plain', SPEED_BATCH), measured_engine(runner)
    options = (
        '--timing-cache',
        engine.with_name('tensorrt.timing.cache'),
        '--engine',
        'again.engine',
        '--no-trtexec',
        *LEVEL,
    )
    runner.run('scripts/build_engine.py', file, *options)
    first, again = runner.json(f'{engine}.json'), runner.json('again.engine.json')
    assert again['timing_cache_reused'] and again['seconds'] < first['seconds']
    runner.found = f'{first["seconds"]:g} s without it, {again["seconds"]:g} s with it'


@row(
    'outputs measured',
    f'the INT8 engine of batch {SPEED_BATCH} and level {LEVEL[1]}: detections and AP as in ONNX Runtime',
)
@pytest.mark.usefixtures('alone')
def test_outputs_of_the_measured_engine(runner):
    """Engines of level 0 take other kernels: at level 3 TensorRT 10.6 computed INT8 convolutions with groups wrongly, at 0 rightly."""
    runner.need_gpu()
    runner.found = compare_with_onnx(runner, 'plain', onnx_of('plain', SPEED_BATCH), measured_engine(runner))


@row('torch_tensorrt', '--include torch_tensorrt: compiled, detections as in ONNX Runtime')
@pytest.mark.usefixtures('alone')
def test_torch_tensorrt(runner):
    if runner.config.backend == 'rtx':
        pytest.skip('Torch-TensorRT for TensorRT-RTX is another package, which is not supported')
    if find_spec('torch_tensorrt') is None:
        pytest.skip(
            "no package torch_tensorrt; python export_qat.py --include torch_tensorrt says how to get this torch's"
        )
    runner.need('build plain')
    runner.need_gpu()
    link(runner.folder / 'compiled.pt', runner.config.weights)
    options = '--formats', 'ep', 'ts', 'engine', '--imgsz', *sides_words(runner.config.imgsz), '--device', 0
    runner.run('export_qat.py', '--weights', 'compiled.pt', '--include', 'torch_tensorrt', *options)
    engine = 'compiled-torch_tensorrt.engine'
    text = compare_with_onnx(runner, 'plain', onnx_of('plain'), engine)
    ms = [
        median_ms(runner, f'torch_tensorrt-{name}', file, '--backend', runner.config.backend)
        for name, file in (('own', engine), ('onnx', engine_of('plain')))
    ]
    runner.found = f'{text}; {ms[0]:.3f} ms, by way of ONNX {ms[1]:.3f} ms'


@row('CUDA graph', 'a CUDA graph gives the same outputs')
@pytest.mark.usefixtures('alone')
def test_a_cuda_graph_gives_the_same_bits(runner):
    runner.need('build plain')
    found = raw_outputs(runner, engine_of('plain'), engine_of('plain'))
    assert found['equal'], f'other outputs than without a graph, SQNR {found["sqnr"]:.1f} dB'
    with_it, without = (
        median_ms(runner, f'graph-{name}', engine_of('plain'), '--backend', runner.config.backend, *option)
        for name, option in (('with', ()), ('without', ('--no-cuda-graph',)))
    )
    runner.found = f'same bits; {with_it:.3f} ms with it, {without:.3f} ms without'


@row('layers', 'each layer is measured and drawn')
@pytest.mark.usefixtures('alone')
def test_layers_are_measured_and_drawn(runner):
    runner.need('build plain')
    runner.need_gpu()
    build(runner, 'plain', 'drawn.engine', '--generate-graph', '--no-trtexec')
    words = '--layer', 'drawn.layer.json', '--profile', 'drawn.profile.json', '--output', 'drawn'
    runner.run('scripts/draw_engine.py', *words)
    with (runner.folder / 'drawn.csv').open(newline='', encoding='utf-8') as file:
        layers = list(csv.DictReader(file))
    ms = sum(float(layer['ms']) for layer in layers if layer['ms'])
    assert ms > 0, 'no layer has a time'
    kinds = Counter(kind for layer in layers for kind in layer['findings'].split('; ') if kind)
    findings = ', '.join(f'{kind} {count}' for kind, count in kinds.items()) or 'none'
    runner.found = f'{len(layers)} layers, {ms:.3f} ms in all; findings: {findings}'


def measured_engine(runner):
    """The INT8 engine that the row speed measures; skips without it."""
    engines = [*(runner.folder / 'measured' / 'engines').glob(f'{Path(onnx_of("plain", SPEED_BATCH)).stem}-*.engine')]
    return engines[0] if engines else pytest.skip('needs speed')


def speed_files(runner):
    """Export the files of the row speed: float, INT8, and INT8 with ReLU. Returns the arguments of benchmark_trt.py."""
    if runner.config.float_weights is None:
        pytest.skip('no float checkpoint (--float)')
    kinds = 'half' if runner.machine['major'] >= 10 else 'float', 'plain'
    for name in kinds:
        export(runner, name, SPEED_BATCH)
    files = [onnx_of(name, SPEED_BATCH) for name in kinds]
    return *files, relu_file(runner), '--precision', 'fp16,int8', '--backend', runner.config.backend


def relu_file(runner):
    """Quantize the float model with ReLU, of which nothing is learnt, and export it; returns the file."""
    size = '--imgsz', *sides_words(runner.config.imgsz)
    once = (
        '--activation-epochs 1 --iters 1 --epochs 0 --no-eval-origin --no-eval-ptq --calib-images 8 --calib-method mse'
    )
    link(runner.folder / 'silu.pt', runner.config.float_weights)
    words = '--data', data_of('plain'), *size, '--activation', 'relu', '--project', 'activations', '--exist-ok'
    runner.run('qat.py', 'quantize', '--weights', 'silu.pt', *words, '--name', 'relu', *once.split())
    link(runner.folder / 'relu.pt', runner.folder / 'activations' / 'relu' / 'weights' / 'best.pt')
    options = '--simplify', '--trt', runner.machine['major'], '--batch-size', SPEED_BATCH
    runner.run('export_qat.py', '--weights', 'relu.pt', '--include', 'onnx', *size, *options)
    return 'relu.onnx'


@row('speed', 'INT8, and INT8 with ReLU, is measured against FP16')
@pytest.mark.usefixtures('alone')
def test_speed(runner):
    runner.need_gpu()
    future, runner.commands = runner.builds['speed']
    results = benchmark(runner, 'speed', *future.result())
    assert [result['precision'] for result in results] == ['fp16', 'int8', 'int8'], 'a file was not measured'
    fp16, silu, relu = (result['compute']['median'] for result in results)
    busy = [percent for _, _, percent, *_ in runner.json('measured/speed/benchmark.json')['usage']]
    runner.found = (
        f'batch {SPEED_BATCH}, engines of level {LEVEL[1]}: FP16 {fp16:.3f} ms, INT8 {silu:.3f} ms, {fp16 / silu:.2f} times as fast; '
        f'with ReLU {relu:.3f} ms, {fp16 / relu:.2f} times; '
        f'{f"GPU busy up to {max(busy):.0f} % by NVML" if busy else "no samples of NVML"}'
    )


@row('ONNX Runtime', 'ONNX Runtime with CUDA measures the plain file')
@pytest.mark.usefixtures('alone')
def test_onnx_runtime_with_cuda(runner):
    runner.need('build plain')
    runner.need_gpu()
    if 'onnxruntime-gpu' not in {d.name for d in distributions()}:
        pytest.skip('no package onnxruntime-gpu')
    (result,) = benchmark(runner, 'onnxruntime', onnx_of('plain'), '--backend', 'onnxruntime')
    assert result['h2d'] is not None, 'ONNX Runtime ran it on the CPU'
    runner.found = f'{result["compute"]["median"]:.3f} ms at batch 1'


def raw_outputs(runner, a, b):
    runner.need_gpu()
    runner.run(HERE / 'raw_outputs.py', a, b, data_of('plain'), runner.config.backend, 'outputs.json')
    return runner.json('outputs.json')


def benchmark(runner, name, *words):
    options = '--duration', runner.config.duration, '--project', 'measured', '--name', name, '--exist-ok'
    runner.run('benchmark_trt.py', *words, *options)
    return runner.json(f'measured/{name}/benchmark.json')['results']


def median_ms(runner, name, *words):
    return benchmark(runner, name, *words)[0]['compute']['median']
