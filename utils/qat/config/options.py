"""The command line of qat.py → the settings of one of its verbs."""

from argparse import BooleanOptionalAction
from pathlib import Path

from utils.qat.config.qat import (
    ADD_POLICIES,
    AMP,
    CALIB_METHODS,
    GRANULARITIES,
    METRICS,
    SCALE_POLICIES,
    WEIGHT_METHODS,
    EvalConfig,
    QuantizeConfig,
    SensitiveConfig,
)
from utils.qat.core.command import Parser


def parse_args(argv, description, resumed):
    """Command line → QuantizeConfig, SensitiveConfig or EvalConfig.

    resumed: folder of an interrupted run, {option typed beside --resume: value} → QuantizeConfig, see run/resume.py.
    """
    parser = Parser(description=description)
    verbs = parser.add_subparsers(dest='verb', required=True, parser_class=Parser)
    quantizing = _quantize(verbs)
    _sensitive(verbs)
    _eval(verbs)

    args, unknown = parser.parse_known_args(argv)
    args = vars(args)
    if unknown:  # said by the verb's own parser, which has the options
        verbs.choices[args['verb']].error(f'unrecognized arguments: {" ".join(unknown)}')
    if args.get('resume'):
        quantizing.set_defaults(**dict.fromkeys(args))  # None, for a second look: which options were typed?
        typed = {
            k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None and k not in ('verb', 'resume')
        }
        return resumed(args['resume'], typed)
    if args['weights'] is None:
        quantizing.error('the following arguments are required: --weights')
    config = args.pop('config')
    del args['verb']
    return config(**args)


def _verb(verbs, name, config, help):
    """A parser with the options that all verbs have."""
    p = verbs.add_parser(name, help=help, description=help)
    p.set_defaults(config=config)
    p.add_argument(
        '--weights', type=Path, required=name != 'quantize', help='checkpoint (.pt)' + ', or .onnx' * (name == 'eval')
    )
    p.add_argument('--data', type=Path, default=Path('data/coco.yaml'), help='data YAML: train, val, names')
    p.add_argument('--device', default=config.device, help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
    p.add_argument('--batch-size', type=int, default=config.batch_size, help='images per batch, of each process')
    p.add_argument('--imgsz', '--img', '--img-size', type=int, default=config.imgsz, help='image size in pixels')
    p.add_argument('--workers', type=int, default=config.workers, help='data loading processes, of each process')
    p.add_argument('--project', type=Path, default=config.project, help='results go to PROJECT/NAME')
    p.add_argument('--name', default=config.name, help='results go to PROJECT/NAME')
    p.add_argument('--exist-ok', action='store_true', help='write into PROJECT/NAME even if it exists')
    add_mask_options(p, config)
    return p


def add_mask_options(p, c):
    """The options of qat.MaskConfig."""
    masks = p.add_argument_group('segmentation models')
    masks.add_argument(
        '--overlap',
        action=BooleanOptionalAction,
        default=c.overlap,
        help='true masks as one map, in which the smaller of two objects is on top, as segment/train.py scores; default: one by '
        'one, as segment/val.py',
    )
    masks.add_argument(
        '--mask-ratio',
        '--mask-downsample-ratio',
        type=int,
        default=c.mask_ratio,
        help='true masks so many times smaller than the image: less memory, coarser',
    )


def _calibration(p, c):
    """The options of calibration, in what `quantize` and `sensitive` do alike."""
    p.add_argument('--seed', type=int, default=c.seed, help='of everything random')
    p.add_argument('--calib-images', type=int, default=c.calib_images, help='training images to calibrate on, at most')
    p.add_argument(
        '--calib-method',
        choices=CALIB_METHODS,
        default=c.calib_method,
        help='how the ranges are chosen: by least squared error, '
        'by that of another power, by what it does to the detections, ...; auto: that of mse, l1.5, l2.4, l3 and fisher which keeps these best',
    )
    p.add_argument('--percentile', type=float, default=c.percentile, help='for --calib-method percentile')
    p.add_argument(
        '--weight-calib',
        choices=WEIGHT_METHODS,
        default=c.weight_calib,
        help="range of a weight's output channel: its largest magnitude, or that of least squared error",
    )
    p.add_argument(
        '--no-bias-correction',
        dest='bias_correction',
        action='store_false',
        help='leave the biases as they are: do not try to take back what rounding moves the mean of a channel by',
    )
    p.add_argument(
        '--scale-policy',
        choices=SCALE_POLICIES,
        default=c.scale_policy,
        help='tied: tensors joined by Concat, MaxPool, split, nearest resize or Add share one scale; free: none do',
    )
    p.add_argument(
        '--add-policy',
        choices=ADD_POLICIES,
        default=c.add_policy,
        help='residual Add: quantize both addends, or only the shortcut',
    )


def _quantize(verbs):
    c = QuantizeConfig
    p = _verb(verbs, 'quantize', c, 'calibrate (PTQ) and fine-tune (QAT) a float checkpoint')
    p.add_argument(
        '--hyp', type=Path, default=c.hyp, help='fine-tune on images augmented as this file says; default: as they are'
    )
    p.add_argument('--epochs', type=int, default=c.epochs, help='fine-tuning epochs; 0 = calibration only')
    p.add_argument('--iters', type=int, default=c.iters, help='fine-tuning steps per epoch, at most')
    p.add_argument('--lr', type=float, default=c.lr, help='highest learning rate of the fine-tuning')
    p.add_argument(
        '--amp',
        choices=AMP,
        default=c.amp,
        help='precision of the fine-tuning: FP32 (off), or autocast; default: fp16 on a GPU, which it needs, else off',
    )
    p.add_argument('--compile', action='store_true', help='fine-tune by replaying a CUDA graph; needs a GPU')
    p.add_argument(
        '--task-loss',
        type=float,
        default=c.task_loss,
        metavar='W',
        help='add W times the detection loss on the labels to the loss of the fine-tuning; not with --compile',
    )
    p.add_argument('--learn-scales', action='store_true', help='scales of activations learn with the weights')
    p.add_argument(
        '--supervision-stride',
        type=int,
        default=c.supervision_stride,
        help='compare every n-th layer with the float model',
    )
    _calibration(p, c)
    p.add_argument(
        '--exclude',
        nargs='+',
        default=c.exclude,
        metavar='REGEX',
        help="layers that stay in float, by path: 'model.2' is layer 2 and all in it",
    )
    p.add_argument(
        '--only',
        nargs='+',
        default=c.only,
        metavar='REGEX',
        help='the layers that are quantized, by path; default: all',
    )
    p.add_argument(
        '--sensitive',
        type=Path,
        default=c.sensitive,
        metavar='SUMMARY',
        help='summary-sensitive-analysis.json of `qat.py sensitive`, which --keep-float and --max-drop choose by',
    )
    p.add_argument(
        '--keep-float',
        type=int,
        default=c.keep_float,
        metavar='N',
        help='leave the N most sensitive units of SUMMARY in float',
    )
    p.add_argument(
        '--max-drop',
        type=float,
        default=c.max_drop,
        metavar='POINTS',
        help='leave as many units of SUMMARY in float as calibration needs to lose at most so many points of AP, such as 0.2',
    )
    p.add_argument(
        '--dry-run',
        action='store_true',
        help='print what would be quantized, what shares a scale and what stays float, and stop; needs only --weights',
    )
    p.add_argument('--no-eval-origin', dest='eval_origin', action='store_false', help='do not evaluate the float model')
    p.add_argument('--no-eval-ptq', dest='eval_ptq', action='store_false', help='do not evaluate the calibrated model')
    p.add_argument(
        '--val-split',
        type=float,
        default=c.val_split,
        help='share of the training images to hold out of training and '
        'choose the best epoch on, such as 0.1; default: on val',
    )
    p.add_argument(
        '--resume', type=Path, metavar='FOLDER', help='go on with the interrupted run in FOLDER, with its settings'
    )
    return p


def _sensitive(verbs):
    c = SensitiveConfig
    p = _verb(verbs, 'sensitive', c, 'what the INT8 of each layer, block or convolution costs')
    p.add_argument('--hyp', type=Path, default=c.hyp, help='not needed: images are taken as they are')
    p.add_argument('--num-image', type=int, default=c.num_image, help='images of val, at most, evenly spread; 0 = all')
    p.add_argument('--granularity', choices=GRANULARITIES, default=c.granularity, help='what is judged as one')
    p.add_argument(
        '--metric',
        choices=METRICS,
        default=c.metric,
        help='distortion of the outputs; or AP, of all units; or both: distortion of all, and AP of the ten worst',
    )
    _calibration(p, c)


def _eval(verbs):
    c = EvalConfig
    p = _verb(verbs, 'eval', c, 'evaluate a quantized checkpoint or an ONNX file')
    p.add_argument('--conf-thres', type=float, default=c.conf_thres, help='lowest score that counts')
    p.add_argument('--iou-thres', type=float, default=c.iou_thres, help='IoU above which NMS drops a box')
    p.add_argument(
        '--square',
        action='store_true',
        help='letterbox to IMGSZ x IMGSZ, as a deployed model sees images '
        '(always so for .onnx); default: rectangles, as val.py',
    )
