"""Draw the layers of a TensorRT engine from files of trtexec, and name the layers that cost too much; needs no GPU.

trtexec --loadEngine=model.engine --profilingVerbosity=detailed --exportLayerInfo=layers.json --exportProfile=profile.json
python scripts/draw_engine.py --layer layers.json --profile profile.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import DrawConfig
from utils.qat.config.settings import read
from utils.qat.core.command import command, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, finish, is_verbose

SHOWN = 10  # lines of a list without --verbose


def parse_args(argv: Sequence[str] | None) -> DrawConfig:
    """Parse the command line into settings."""
    return read(DrawConfig, argv, __doc__.splitlines()[0], verbose=f'whole lists, not the first {SHOWN} lines')


def next_commands(layer: Path) -> list[str]:
    """Return the benchmark of the engine, if it is beside its layers."""
    built = layer.with_name(f'{layer.name.removesuffix(".layer.json")}.engine')
    return [command('benchmark_trt.py', built)] if built.is_file() else []


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables and pictures of the engine, and print its findings."""
    args = parse_args(argv)

    from utils.qat.core.files import is_ours, require_ours, write_text
    from utils.qat.vendors.tensorrt.engine import layer_graph, layer_rules, layer_tables
    from utils.qat.vendors.tensorrt.engine.layers import read_engine

    engine = read_engine(args.layer, args.profile)
    prefix = args.output or args.layer.with_suffix('')
    prefix = prefix / args.layer.stem if prefix.is_dir() else prefix
    csv, dot, svg, png = (prefix.with_name(f'{prefix.name}.{suffix}') for suffix in ('csv', 'dot', 'svg', 'png'))
    if not is_ours(dot):  # the others cannot hold its mark
        require_ours([csv, dot, svg, png], 'rename it, or give another --output')
    findings = layer_rules.findings(engine)
    LOGGER.log(
        RESULT, f'{args.layer}\n{layer_tables.engine_report(engine, findings, None if is_verbose() else SHOWN)}\n'
    )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    layer_tables.write_csv(csv, engine, findings)
    write_text(dot, layer_graph.dot(engine, findings, args.layer.name))
    LOGGER.info('drawing: Graphviz takes a while for a large engine')
    pictures: dict[str, Path] = {'picture': svg, 'as PNG': png}
    try:
        layer_graph.draw(dot, pictures.values())
    except QatError as e:  # the tables, which are the purpose of the command, stay
        LOGGER.warning(e)
        pictures = {}
    finish(*next_commands(args.layer), layers=csv, graph=dot, **pictures)


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
