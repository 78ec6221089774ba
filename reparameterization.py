"""Convert a dual-branch YOLOv9 checkpoint to a single-branch checkpoint, for quantization and deployment.

python reparameterization.py --weights yolov9-c.pt --save yolov9-c-converted.pt

`qat.py` and the exports do the same in memory with a dual-branch checkpoint. This command writes the file.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.tables import CHECKPOINTS
from utils.qat.core.command import Parser, command, converted, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY, TREE, in_tree, require_ours, require_source, require_yaml
from utils.qat.core.log import LOGGER, finish, quiet_upstream

if TYPE_CHECKING:
    from utils.qat.core.upstream import Network


def parse_args(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line, and check its files."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', type=Path, required=True, help='dual-branch checkpoint (train_dual.py)')
    parser.add_argument('--save', type=Path, help='file to write; default: WEIGHTS-converted.pt beside the checkpoint')
    parser.add_argument(
        '--fold-pools',
        action='store_true',
        help='of t, s and m: let convolutions compute the average pools before them, for TensorRT; outputs change at borders of maps',
    )
    # options of earlier tools, not needed; all but --device are checked against the checkpoint
    parser.add_argument('--device', help=SUPPRESS)
    parser.add_argument('--cfg', type=in_tree, help=SUPPRESS)
    parser.add_argument('--model', choices=list('tsmce'), help=SUPPRESS)
    parser.add_argument('--classes_num', type=int, help=SUPPRESS)
    args = parser.parse_args(argv)
    require_source(args.weights, '--weights', CHECKPOINTS)
    if args.cfg:
        require_yaml(args.cfg, '--cfg')
    args.save = args.save or converted(args.weights)
    if args.save.suffix not in CHECKPOINTS:
        raise QatError(f'--save {args.save}: expected a file ending in .pt')
    if args.save.resolve() == args.weights.resolve():
        raise QatError('--save names the file of --weights; choose another')
    require_ours([args.save], 'rename it, or choose another --save')
    return args


def require_match(args: Namespace, model: Network, single: Network) -> None:
    """Compare --cfg, --model and --classes_num with the checkpoint's `model`, and `single`, converted from it.

    Raises QatError that names both sides of a mismatch.
    """
    from models.quantize.reparameterize import parameter_shapes
    from utils.qat.untrusted.yaml_file import read_yaml

    nc = model.model[-1].nc
    if args.classes_num is not None and args.classes_num != nc:
        raise QatError(f'--classes_num {args.classes_num}: the checkpoint has {nc} classes')
    wanted = {'--cfg': args.cfg, '--model': args.model and TREE / 'models/detect' / f'gelan-{args.model}.yaml'}
    for flag, cfg in wanted.items():
        if cfg is None:
            continue
        if not cfg.exists():  # only with --model: the reduced upstream tree has no YAML files
            LOGGER.warning(f'{flag} {args.model} is not checked: this tree has no {cfg}')
            continue
        content = read_yaml(cfg, flag)
        claimed = parameter_shapes({**content, 'nc': nc} if isinstance(content, dict) else content, f'{flag} {cfg}')
        actual = {k: tuple(v.shape) for k, v in single.state_dict().items()}
        either = claimed.keys() | actual.keys()
        differ = sum(claimed.get(k) != actual.get(k) for k in either)
        if differ:
            raise QatError(
                f'{flag} {getattr(args, flag[2:])}: {cfg.name} is another model than that of {args.weights}: {differ} of '
                f'{len(either)} parameters differ; leave {flag} out'
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    args = parse_args(argv)

    from models.quantize.checkpoint import CheckpointFile
    from models.quantize.network import head_of
    from models.quantize.reparameterize import HEADS, fold_pools, main_branch
    from utils.qat.backends.pytorch import TorchModel
    from utils.qat.core.files import write_torch

    with quiet_upstream():
        ckpt, model = CheckpointFile(args.weights).load_dual_or_float()
        has_two = type(head_of(model)).__name__ in HEADS
        go_on = f'go on with: {command("qat.py", "quantize", "--weights", args.weights, "--data", "DATA.yaml")}'
        none_to_fold = f'--fold-pools: the model has no AConv; {"leave it out" if has_two else go_on}'
        if args.fold_pools and not TorchModel(model).task.boxes:
            raise QatError(none_to_fold)
        if not has_two and not args.fold_pools:
            raise QatError(
                f'--weights {args.weights}: has one branch (its head is {type(head_of(model)).__name__}), so there is none to remove; '
                f'{go_on}'
            )
        parameters = sum(p.numel() for p in model.parameters())
        single, difference = main_branch(model, f'--weights {args.weights}') if has_two else (model, None)
        require_match(args, model, single)
        folded = fold_pools(single) if args.fold_pools else 0
        if args.fold_pools and not folded:
            raise QatError(none_to_fold)

    remaining = sum(p.numel() for p in single.parameters())
    args.save.parent.mkdir(parents=True, exist_ok=True)
    content = {'model': single.half(), 'ema': None, 'updates': None, 'optimizer': None, 'epoch': -1}
    write_torch(args.save, {'description': MADE_BY, **{k: ckpt[k] for k in ('date', 'git') if k in ckpt}, **content})
    LOGGER.info(
        f'{args.weights} ({type(model.model[-1]).__name__}) -> {args.save} ({type(head_of(single)).__name__})\n'
        f'layers      {len(model.model)} -> {len(single.model)} ({len(model.model) - len(single.model)} dropped)\n'
        f'parameters  {parameters:,} -> {remaining:,}\n'
        f'classes     {single.model[-1].nc}'
    )
    if difference is not None:
        LOGGER.info(f'largest difference from the main branch on a random image: {difference:.2g}')
    if folded:
        compare = command('qat.py', 'eval', '--weights', args.save, '--baseline', args.weights, '--data', 'DATA.yaml')
        LOGGER.info(f'pools       {folded} computed by the convolutions behind them; what it changes: {compare}')
    options = ckpt.get('opt')  # of the training, if stored
    loaded = TorchModel(single)
    trained_on = loaded.task.data_of(options.get('data') if isinstance(options, dict) else None, loaded)
    finish(command('qat.py', 'quantize', '--weights', args.save, '--data', trained_on), weights=args.save)


if __name__ == '__main__':
    sys.exit(run_command(main))
