"""Build a TensorRT engine from an ONNX file, by trtexec if it is found, else by the Python package.

    python scripts/build_engine.py yolov9-c-qat.onnx --batch 1,8,16 --generate-graph

It writes MODEL.engine and MODEL.engine.json, a description of the build. With --generate-graph, which needs the GPU, it also writes
MODEL.layer.json and MODEL.profile.json, for draw_engine.py.
"""

import json
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import BuildConfig
from utils.qat.config.settings import add_options
from utils.qat.config.tasks import task_named
from utils.qat.core.command import Parser, command, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_source
from utils.qat.core.log import LOGGER, bar, finish


class Which(Action):
    """An option that prints TensorRT's major version and exits, like --version; for the shell scripts."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, SUPPRESS, nargs=0, default=SUPPRESS, help=help)

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        """Print the version and end the process."""
        from utils.qat.engine.api import load_tensorrt
        from utils.qat.engine.trtexec import find_trtexec, version_of

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

    from utils.qat.core.files import write_json
    from utils.qat.engine.runner import EngineRunner

    if not torch.cuda.is_available():
        raise QatError(
            f'--generate-graph: measures the engine on an NVIDIA GPU, and PyTorch sees none here; {config.engine} is built'
        )
    with EngineRunner(config.engine, backend=config.backend) as runner:
        images = {name: torch.rand(best) for name, (_, best, _) in runner.inputs.items()}
        write_json(layer, runner.layers())
        write_json(profile, runner.profile(images))


def main(argv: Sequence[str] | None = None) -> None:
    """Build the engine and, with --generate-graph, measure its layers."""
    config, graph = parse_args(argv)
    require_source(config.onnx, 'MODEL', ('.onnx',))

    from utils.qat.engine.api import VERSIONS
    from utils.qat.engine.build import EngineFromOnnx
    from utils.qat.engine.plan import Plan
    from utils.qat.engine.trtexec import build_with_trtexec, find_trtexec, version_of

    layer, profile = (config.engine.with_suffix(f'.{what}.json') for what in ('layer', 'profile'))
    trtexec = find_trtexec() if config.trtexec and config.backend == 'tensorrt' else None
    if trtexec:
        version = version_of(trtexec)
        plan = Plan(config, VERSIONS[version[0]], f'TensorRT {".".join(map(str, version))}')
        built = build_with_trtexec(
            trtexec,
            version[0],
            plan,
            lambda lines: bar(lines, 'building', unit='lines of trtexec'),
            *((layer, profile) if graph else ()),
        )
    else:
        built = EngineFromOnnx(config, lambda: bar(None, 'building', unit='steps')).build()
        if graph:
            measure_layers(config, layer, profile)
    shapes = '; '.join(
        f'{name} {" ".join(json.dumps(list(s)) for s in dict.fromkeys(map(tuple, bounds.values())))}'
        for name, bounds in built['inputs'].items()
    )
    LOGGER.info(
        f'{config.onnx} -> {config.engine}: {built["precision"]}, {built["built_by"]}, {shapes}, {built["bytes"] / 1e6:.1f} MB'
    )
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
