"""Compare the integers of a file for edge chips with PyTorch's simulation, and with those of LiteRT's reference kernels, on images.

Run it in a patched tree, with the packages of requirements-litert.txt, on a checkpoint, a file that was made of it without --per-tensor, and a folder of images:

    cd yolov9
    python ../yolov9-qat/benchmarks/edge_integers.py best.pt best-coral.tflite images/val --images 8

LiteRT computes with XNNPACK otherwise. Prints how many of the integers are equal, and within one step, in percent.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, os.getcwd())
from utils.qat.core.machine import set_environment

set_environment()  # before torch: waiting threads sleep

# isort: split
import cv2
import torch
from utils.augmentations import letterbox

from models.quantize.checkpoint import CheckpointFile
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.data.image_folders import images_in
from utils.qat.vendors.edge.session import Edge
from utils.qat.vendors.edge.write import EdgeProgram, for_layout, raw_model

CPU = torch.device('cpu')


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('checkpoint', type=Path, help='quantized with --target edge')
    p.add_argument('file', type=Path, help='.tflite of export_qat.py --include edge')
    p.add_argument('folder', type=Path, help='images')
    p.add_argument('--images', type=int, default=8, help='images of the folder, the first ones')
    return p.parse_args(argv)


def reference_of(session: Edge) -> Edge:
    """Open the file of a session with LiteRT's reference kernels."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    other = Edge(session.file, CPU)
    other.model = Interpreter(str(session.file), experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    other.model.allocate_tensors()
    return other


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Compare them."""
    args = parse_args(argv)
    require_file(args.file, 'file')
    session = Edge(args.file, CPU)
    reference, layout = reference_of(session), session.metadata['layout']
    model = for_layout(CheckpointFile(args.checkpoint).load_quantized()[0], layout)
    program = EdgeProgram(raw_model(model, session.sigmoid, bool(session.spare)), layout == 'coral')
    size = session.signature().inputs['images'][2:]
    steps: dict[str, list[torch.Tensor]] = {'simulation': [], 'reference kernels': []}
    paths = images_in(args.folder)[: args.images]
    if not paths:
        raise QatError(f'{args.folder}: no images in it; give a folder that has some')
    for path in paths:
        image = letterbox(cv2.imread(path), size, auto=False)[0][..., ::-1].copy()
        images = torch.from_numpy(image)[None] / 255
        for each in (session, reference):
            each.give(images.permute(0, 3, 1, 2))
            each.invoke()
        kernels = reference.integers()
        for (name, integers), simulated in zip(session.integers().items(), program(images)):
            scale, zero = session.details[name]['quantization']
            for other, values in (('simulation', simulated / scale + zero), ('reference kernels', kernels[name])):
                steps[other].append((integers.float() - values).round().abs().flatten())
    for other, parts in steps.items():
        all_steps = torch.cat(parts)
        equal, near = (100 * (all_steps <= most).float().mean().item() for most in (0, 1))
        print(
            f'{layout}, XNNPACK against {other}: {near:.2f} % within one step, {equal:.2f} % equal, most {all_steps.max():.0f}'
        )


if __name__ == '__main__':
    sys.exit(run_command(main))
