"""Export a checkpoint to ONNX for DeepStream-Yolo or -Seg, with labels.txt and config_infer_primary_yoloV9.txt.

    python export_yoloV9.py -w runs/qat/exp/weights/best.pt --dynamic

The options are those of DeepStream-Yolo's script of the same name (parser: NvDsInferParseYolo, of a
segmentation model NvDsInferParseYoloSeg). Quantized checkpoints are exported too. See docs/deploy.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.export import DeepStreamConfig
from utils.qat.config.settings import read
from utils.qat.config.tables import CHECKPOINTS
from utils.qat.core.command import run_command
from utils.qat.core.files import require_source
from utils.qat.core.log import LOGGER, finish, quiet_upstream


def parse_args(argv: Sequence[str] | None) -> DeepStreamConfig:
    """Parse the command line into settings."""
    return read(
        DeepStreamConfig,
        argv,
        __doc__.splitlines()[0],
        epilog='Writes WEIGHTS.onnx, labels.txt and config_infer_primary_yoloV9.txt beside the checkpoint or into --project. '
        'Others of the last two names are not replaced.',
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)
    require_source(config.weights, '--weights', CHECKPOINTS)

    from models.deploy.formats.deepstream import FORMAT
    from models.deploy.formats.format import open_export

    with quiet_upstream():
        export = open_export(config.export(), [FORMAT], '--size')
        path = (config.project or config.weights.parent) / f'{config.weights.name}.onnx'
        path.parent.mkdir(parents=True, exist_ok=True)
        export.require_ours(FORMAT, path)
        written = FORMAT.write(export, path)
    LOGGER.info('\n'.join(written.lines))
    finish(*FORMAT.next_commands(export, written, ''), **written.files)


if __name__ == '__main__':
    sys.exit(run_command(main))
