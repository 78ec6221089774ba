"""Build a TensorRT engine from an ONNX file, by trtexec if it is found, else by the Python package.

    python scripts/build_engine.py yolov9-c-qat.onnx --batch 1,8,16 --generate-graph

It writes MODEL.engine and MODEL.engine.json, a description of the build. With --generate-graph, which needs the GPU, it also writes
MODEL.layer.json and MODEL.profile.json, for draw_engine.py.
"""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import BuildConfig
from utils.qat.config.settings import add_options
from utils.qat.config.tasks import task_named
from utils.qat.core.command import Parser, command, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_ours, require_source, write_json
from utils.qat.core.log import LOGGER, alive, bar, finish

if TYPE_CHECKING:
    from utils.qat.vendors.tensorrt.engine.plan import Plan

OLDEST_TUNER = 11, 1  # version of TensorRT whose trtexec has --tuneBuildRoutes


class Which(Action):
    """An option that prints TensorRT's major version and exits, like --version; for the shell scripts."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, SUPPRESS, nargs=0, default=SUPPRESS, help=help)

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        """Print the version and end the process."""
        from utils.qat.vendors.tensorrt.engine.api import find_trtexec, load_tensorrt, version_of

        trtexec = find_trtexec()
        print(version_of(trtexec)[0] if trtexec else load_tensorrt().__version__.split('.')[0])
        parser.exit()


def parse_args(argv: Sequence[str] | None) -> tuple[BuildConfig, bool]:
    """Read the command line; None = the arguments of this process. Returns the settings, and whether to draw the engine."""
    parser = Parser(description=__doc__.splitlines()[0], add_help=False)
    group = add_options(parser, BuildConfig)
    group.add_argument(
        '--generate-graph', action='store_true', help='measure every layer and draw the engine; needs the GPU'
    )
    group.add_argument(
        '--which',
        action=Which,
        help='print the major version of TensorRT here, for export_qat.py --trt, and stop',
    )
    typed = vars(parser.parse_args(argv))
    graph = typed.pop('generate_graph')
    return BuildConfig(**typed), graph


def measure_layers(config: BuildConfig, layer: Path, profile: Path) -> None:
    """Measure the layers of config.engine on random images of the best batch, and write the JSON files."""
    import torch

    from utils.qat.vendors.tensorrt.session import TensorRT

    if not torch.cuda.is_available():
        raise QatError(
            f'--generate-graph: measures the engine on an NVIDIA GPU, and PyTorch sees none here; {config.engine} is built'
        )
    with TensorRT(config.engine, backend=config.backend) as engine:
        images = {name: torch.rand(best) for name, (_, best, _) in engine.inputs.items()}
        write_json(layer, engine.layers())
        write_json(profile, engine.profile(images))


def require_tuner(config: BuildConfig, version: tuple[int, ...] | None) -> None:
    """Raise QatError if --tune-build-routes was given, and there is no trtexec that tunes. version: None = no trtexec."""
    if config.tune_build_routes and (version or (0,)) < OLDEST_TUNER:
        here = f'that of {".".join(map(str, version))} is here' if version else 'none is used here'
        oldest = '.'.join(map(str, OLDEST_TUNER))
        raise QatError(f'--tune-build-routes: needs trtexec of TensorRT {oldest} or later, and {here}')


def tuning_arguments(config: BuildConfig, plan: Plan, folder: Path) -> list[str]:
    """Return the arguments by which trtexec searches the build routes of --tune-build-routes; none without that option.

    For --accuracy-threshold an input and the outputs of ONNX Runtime are written into `folder`.
    """
    if config.tune_build_routes is None:
        return []
    cache = config.engine.with_suffix('.tuning.jsonl')
    arguments = [f'--tuneBuildRoutes={config.tune_build_routes}', f'--tuningCacheFile={cache}']
    if config.accuracy_threshold is None:
        return arguments

    import torch

    from utils.qat.vendors.onnxruntime.session import OnnxRuntime

    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.rand(best, generator=generator) for name, (_, best, _) in plan.shapes.items()}
    outputs = OnnxRuntime(config.onnx, torch.device('cpu')).run(inputs)
    for flag, tensors in (('--loadInputs', inputs), ('--loadRefOutputs', outputs)):
        for name, tensor in tensors.items():
            tensor.numpy().tofile(folder / name)
        arguments.append(f'{flag}={",".join(f"{name}:{folder / name}" for name in tensors)}')
    return [*arguments, '--accuracyAlgorithm=cos', f'--accuracyThreshold={config.accuracy_threshold:g}']


def build(
    config: BuildConfig, trtexec: str | None, seconds: object, layer: Path | None, profile: Path | None
) -> dict[str, Any]:
    """Build the engine by trtexec, or by the Python package (None), and return the content of its sidecar.

    seconds: of an earlier build, a number if it is known. layer, profile: JSON files for a measurement of its layers; None = none.
    """
    from utils.qat.vendors.tensorrt.engine.api import VERSIONS, version_of
    from utils.qat.vendors.tensorrt.engine.build import EngineFromOnnx, build_with_trtexec
    from utils.qat.vendors.tensorrt.engine.plan import Plan

    version = version_of(trtexec) if trtexec else None
    require_tuner(config, version)
    minutes = 'up to a minute' if config.level == 0 else '2 to 6 minutes'
    usual = f'INT8 engines of 640 pixels took {minutes} on an H100 or H200'
    timed = f'the last build took {seconds:g} s' if isinstance(seconds, int | float) else usual
    LOGGER.info(f'building {config.engine}; {timed}')
    if trtexec is None or version is None:
        built = EngineFromOnnx(config, lambda: bar(None, 'building', unit='steps')).build()
        if layer and profile:
            measure_layers(config, layer, profile)
        return built
    plan = Plan(config, VERSIONS[version[0]], f'TensorRT {".".join(map(str, version))}')
    with TemporaryDirectory() as folder:
        return build_with_trtexec(
            trtexec,
            version[0],
            plan,
            lambda lines: bar(lines, 'building', unit='lines of trtexec'),
            layer,
            profile,
            tuning_arguments(config, plan, Path(folder)),
        )


def earlier(config: BuildConfig) -> dict[str, Any]:
    """Return the sidecar of an earlier build of this engine; empty without one, or if it is damaged: it is written anew."""
    from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar

    try:
        return read_sidecar(config.engine) or {}
    except QatError:
        return {}


def main(argv: Sequence[str] | None = None) -> None:
    """Build the engine and, with --generate-graph, measure its layers."""
    config, graph = parse_args(argv)
    require_source(config.onnx, 'MODEL', ('.onnx',))

    from utils.qat.vendors.tensorrt.engine.api import find_trtexec
    from utils.qat.vendors.tensorrt.engine.sidecar import sidecar_of

    require_ours([config.engine, sidecar_of(config.engine)], 'rename it, or give another --engine')

    if graph and config.tune_build_routes:
        raise QatError(
            '--generate-graph: not with --tune-build-routes; draw the engine that it keeps: trtexec --loadEngine'
        )
    layer, profile = (config.engine.with_suffix(f'.{what}.json') for what in ('layer', 'profile'))
    before = earlier(config)
    drawn = bool(before.get('layers'))  # the sidecar tells that they are ours: TensorRT writes them
    if graph and not drawn:
        require_ours([layer, profile], 'rename it, or give another --engine')
    trtexec = find_trtexec() if config.trtexec and config.backend == 'tensorrt' else None
    with alive('still building'):
        built = build(config, trtexec, before.get('seconds'), layer if graph else None, profile if graph else None)
    shapes = '; '.join(
        f'{name} {" ".join(json.dumps(list(s)) for s in dict.fromkeys(map(tuple, bounds.values())))}'
        for name, bounds in built['inputs'].items()
    )
    LOGGER.info(
        f'{config.onnx} -> {config.engine}: {built["precision"]}, {built["built_by"]}, {shapes}, {built["bytes"] / 1e6:.1f} MB'
    )
    if graph or drawn:
        write_json(sidecar_of(config.engine), {**built, 'layers': layer.name})
    if graph:
        following = command('scripts/draw_engine.py', '--layer', layer, '--profile', profile)
    else:
        shape = next(iter(built['inputs'].values()))['opt']
        backend = [] if config.backend == BuildConfig.backend else ['--backend', config.backend]
        if 'names' in built['metadata'] and shape[-1] == shape[-2]:  # a YOLOv9 model, which val_trt.py can score
            data = task_named(built['metadata'].get('task')).placeholder
            following = command(
                'val_trt.py', '--engine-file', config.engine, '--data', data, '--imgsz', shape[-1], *backend
            )
        else:
            following = command('benchmark_trt.py', config.engine, *backend)
    finish(following, engine=config.engine)


if __name__ == '__main__':
    sys.exit(run_command(main))
