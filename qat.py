"""Quantize a trained YOLOv9 detector to INT8 and evaluate the result.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml --name yolov9_qat
    python qat.py eval --weights runs/qat/yolov9_qat/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

`torchrun --nproc_per_node N qat.py ...` does the same on N GPUs: the first process writes and talks, all compute.
"""
import sys
from dataclasses import asdict
from pathlib import Path

from utils.qat.config import ADD_POLICIES, AMP, CALIB_METHODS, SCALE_POLICIES, WEIGHT_METHODS, EvalConfig, QuantizeConfig
from utils.qat.distributed import describe, from_first, is_first, join, leave, on_first, rank, select_device, world_size
from utils.qat.errors import Parser, QatError, explain_out_of_memory, require_file, resumable, run_command
from utils.qat.log import LOGGER, bar, log_to, quiet_upstream
from utils.qat.resume import resumed

COMPARED = 32  # calibration images that biases are corrected on, and calibrations compared


def parse_args(argv):
    """Command line → QuantizeConfig or EvalConfig."""
    parser = Parser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest='verb', required=True, parser_class=Parser)

    def verb(name, config, help):
        p = verbs.add_parser(name, help=help, description=help)
        p.set_defaults(config=config)
        p.add_argument('--weights', type=Path, required=name == 'eval', help='checkpoint (.pt)' + ', or .onnx' * (name == 'eval'))
        p.add_argument('--data', type=Path, default=Path('data/coco.yaml'), help='data YAML: train, val, names')
        p.add_argument('--device', default=config.device, help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
        p.add_argument('--batch-size', type=int, default=config.batch_size, help='images per batch, of each process')
        p.add_argument('--imgsz', '--img', '--img-size', type=int, default=config.imgsz, help='image size in pixels')
        p.add_argument('--workers', type=int, default=config.workers, help='data loading processes, of each process')
        p.add_argument('--project', type=Path, default=config.project, help='results go to PROJECT/NAME')
        p.add_argument('--name', default=config.name, help='results go to PROJECT/NAME')
        p.add_argument('--exist-ok', action='store_true', help='write into PROJECT/NAME even if it exists')
        return p

    c = QuantizeConfig
    p = verb('quantize', c, 'calibrate (PTQ) and fine-tune (QAT) a float checkpoint')
    p.add_argument('--hyp', type=Path, default=c.hyp, help='fine-tune on images augmented as this file says; default: as they are')
    p.add_argument('--epochs', type=int, default=c.epochs, help='fine-tuning epochs; 0 = calibration only')
    p.add_argument('--iters', type=int, default=c.iters, help='fine-tuning steps per epoch, at most')
    p.add_argument('--lr', type=float, default=c.lr, help='highest learning rate of the fine-tuning')
    p.add_argument('--amp', choices=AMP, default=c.amp, help='precision of the fine-tuning: FP32 (off), or autocast; default: fp16 on a '
                                                               'GPU, which it needs, else off')
    p.add_argument('--compile', action='store_true', help='fine-tune by replaying a CUDA graph; needs a GPU')
    p.add_argument('--task-loss', type=float, default=c.task_loss, metavar='W',
                   help='add W times the detection loss on the labels to the loss of the fine-tuning; not with --compile')
    p.add_argument('--learn-scales', action='store_true', help='scales of activations learn with the weights')
    p.add_argument('--seed', type=int, default=c.seed, help='of everything random')
    p.add_argument('--supervision-stride', type=int, default=c.supervision_stride, help='compare every n-th layer with the float model')
    p.add_argument('--calib-images', type=int, default=c.calib_images, help='training images to calibrate on, at most')
    p.add_argument('--calib-method', choices=CALIB_METHODS, default=c.calib_method, help='how the ranges are chosen: by least squared error, '
                   'by that of another power, by what it does to the detections, ...; auto: that of mse, l2.4, l3 and fisher which keeps these best')
    p.add_argument('--percentile', type=float, default=c.percentile, help='for --calib-method percentile')
    p.add_argument('--weight-calib', choices=WEIGHT_METHODS, default=c.weight_calib,
                   help="range of a weight's output channel: its largest magnitude, or that of least squared error")
    p.add_argument('--no-bias-correction', dest='bias_correction', action='store_false',
                   help="leave the biases as they are: do not move them by what quantization moved the mean of a channel's outputs")
    p.add_argument('--scale-policy', choices=SCALE_POLICIES, default=c.scale_policy,
                   help='tied: tensors joined by Concat, MaxPool, split, nearest resize or Add share one scale; free: none do')
    p.add_argument('--add-policy', choices=ADD_POLICIES, default=c.add_policy,
                   help='residual Add: quantize both addends, or only the shortcut')
    p.add_argument('--dry-run', action='store_true', help='print what would be quantized, what shares a scale and what stays '
                                                          'float, and stop; needs only --weights')
    p.add_argument('--no-eval-origin', dest='eval_origin', action='store_false', help='do not evaluate the float model')
    p.add_argument('--no-eval-ptq', dest='eval_ptq', action='store_false', help='do not evaluate the calibrated model')
    p.add_argument('--val-split', type=float, default=c.val_split, help='share of the training images to hold out of training and '
                                                                        'choose the best epoch on, such as 0.1; default: on val')
    p.add_argument('--resume', type=Path, metavar='FOLDER', help='go on with the interrupted run in FOLDER, with its settings')
    quantizing = p

    c = EvalConfig
    p = verb('eval', c, 'evaluate a quantized checkpoint or an ONNX file')
    p.add_argument('--conf-thres', type=float, default=c.conf_thres, help='lowest score that counts')
    p.add_argument('--iou-thres', type=float, default=c.iou_thres, help='IoU above which NMS drops a box')
    p.add_argument('--square', action='store_true', help='letterbox to IMGSZ x IMGSZ, as a deployed model sees images '
                                                         '(always so for .onnx); default: rectangles, as val.py')

    args = vars(parser.parse_args(argv))
    if args.get('resume'):
        quantizing.set_defaults(**dict.fromkeys(args))  # None, for a second look: which options were typed?
        typed = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None and k not in ('verb', 'resume')}
        return resumed(args['resume'], typed)
    if args['weights'] is None:
        quantizing.error('the following arguments are required: --weights')
    config = args.pop('config')
    del args['verb']
    return config(**args)


def choose_precision(config, device):
    """Decide what --amp leaves open; refuse the ways to fine-tune that only CUDA has."""
    cuda = device.type == 'cuda'
    config.amp = config.amp or ('fp16' if cuda else 'off')
    again = 'leave out' if not config.resume else 'start another run without'
    if not cuda and config.compile:
        raise QatError(f'--compile: records a CUDA graph, and the device is {device.type}; {again} --compile')
    if not cuda and config.amp == 'fp16':
        raise QatError(f'--amp fp16: only on a GPU, and the device is {device.type}; {again} --amp, or use bf16')


def new_folder(config):
    """Create and return PROJECT/NAME (numbered if it exists and --exist-ok is not given)."""
    from utils.general import increment_path
    folder = from_first(increment_path(config.project / config.name, exist_ok=config.exist_ok))
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepare(model, config):
    """Quantize `model` in place as `config` says, not calibrated yet; returns (Conversion, groups that share a scale)."""
    from models.quantize.convert import quantize_model
    from models.quantize.scales import shared_scales, tie_scales
    conversion = quantize_model(model, config.add_policy)
    if conversion.unknown:
        unknown = ', '.join(f'{path} ({name})' for path, name in conversion.unknown.items())
        LOGGER.warning(f'not known to this toolkit: {unknown}; their convolutions are quantized, their other operations are '
                       'not looked at: export, then check with scripts/audit_onnx.py')
    if config.scale_policy == 'tied':
        tie_scales(model)
    groups = shared_scales(model)
    LOGGER.info(f'{conversion.summary()}\n{sum(map(len, groups))} activation quantizers, {len(groups)} scales ({config.scale_policy})')
    return conversion, groups


def dry_run(config):
    """Print the plan of `quantize`; computes one blank image, writes nothing."""
    require_file(config.weights, '--weights', ('.pt', '.pth'))

    from models.quantize import checkpoint
    from utils.qat.report import plan

    with quiet_upstream():
        model = checkpoint.load_float(config.weights)
    layers = [(m.i, type(m).__name__) for m in model.model]
    conversion, groups = prepare(model, config)
    LOGGER.info(f'\n{plan(layers, conversion.swapped, conversion.kept_float, groups)}\nnothing was written')


def calibrate_run(run, images, config):
    """PTQ: score the float model, calibrate a quantized copy of it on `images`, save and score that."""
    import time
    from copy import deepcopy

    from models.quantize.calibrate import observe
    from models.quantize.choose import choose
    from utils.qat.loaders import few

    if config.eval_origin:
        run.report['origin'] = run.score_float('float')
    start = time.perf_counter()
    model = deepcopy(run.model)
    prepare(model, config)
    histograms = observe(model, bar(images, 'calibrating'))
    found, method, raised = choose(model, run.model, histograms, list(few(images, COMPARED, config)), config,
                                   lambda methods: bar(methods, 'comparing calibrations'))
    for layer, channels in raised.items():
        LOGGER.warning(f'{layer}: {channels} range(s) raised to the smallest that an FP16 scale covers')
    run.report['calibration'] = {'method': method, 'divergence': found}
    compared = ', '.join(f'{name} {value:.4f}' for name, value in found.items())
    LOGGER.info(f"calibrated on {min(config.calib_images, len(images.loader.dataset))} images, {method}"
                f"{f' (divergence of the detections: {compared})' if found else ''}, weights {config.weight_calib}"
                f"{', biases corrected' if config.bias_correction else ''} ({run.timed('calibrate', start):.1f} s)")
    run.calibrated(model, config.eval_ptq)


def finetune_run(run, images, config):
    """QAT: fine-tune the calibrated model on `images`, from the last finished epoch on; save and score it after each."""
    from copy import deepcopy

    from models.quantize.finetune import finetune

    def progress(batches, epoch, steps):
        return bar(batches, f'epoch {epoch}/{config.epochs}', steps)

    student, last = run.load_calibrated(), run.last_epoch()
    images.epoch = last.number if last else 0
    for epoch in finetune(student, deepcopy(run.model), images, config, progress, last):
        run.learned(student, epoch)


def quantize(config):
    """The whole job: float evaluation, calibration, PTQ, fine-tuning. Everything finished stays on disk.

    config.resume: the folder of an interrupted run, whose rest is done.
    """
    require_file(config.weights, '--weights', ('.pt', '.pth'))
    require_file(config.data, '--data', ('.yaml', '.yml'))
    if config.hyp:
        require_file(config.hyp, '--hyp', ('.yaml', '.yml'))

    import shlex
    from dataclasses import replace

    import torch
    from models.quantize import checkpoint
    from models.quantize.losses import require_detector
    from models.quantize.run import Run
    from utils.general import check_img_size, init_seeds
    from utils.qat.data import load_data, load_hyp
    from utils.qat.loaders import calibration_images, training_images, val_loader
    from utils.qat.report import run_table

    device = select_device(config.device)
    choose_precision(config, device)
    join(device)
    with quiet_upstream():
        model = checkpoint.load_float(config.weights, device)
    if config.task_loss:
        require_detector(model, '--task-loss')
    stride = int(max(model.stride))
    config.imgsz = check_img_size(config.imgsz, stride)
    data = replace(load_data(config.data, model.model[-1].nc), val_split=config.val_split)
    hyp = load_hyp(config.hyp) if config.hyp else None
    shard = rank(), world_size()
    loaders = {'val': val_loader(data, config, stride, shard=shard)}
    if config.val_split:
        loaders['held out'] = val_loader(data, config, stride, split='held out', shard=shard)
    calibration = None if config.resume else calibration_images(data, config, stride, device, shard)
    training = training_images(data, config, stride, device, hyp, shard) if config.epochs else None
    if training:
        loaders['train'] = training.loader

    init_seeds(config.seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # its 10-bit mantissa is coarser than the INT8 grid it would simulate
    folder = config.resume or new_folder(config)
    on_first(log_to)(folder / 'log.txt')
    run = Run(folder, config, model, data, loaders, LOGGER.info, bar)
    LOGGER.info(f'device {describe(device)}, results in {folder}')

    if not run.report['ptq']:
        calibrate_run(run, calibration, config)
    if config.epochs:
        with resumable(f'python qat.py quantize --resume {shlex.quote(str(folder))}'):
            finetune_run(run, training, config)
            run.finish()

    report = run.report
    final = folder / (report['best'] or report['ptq'])['file']
    if report['best'] and report['best']['ap'] < report['ptq'].get('ap', 0):
        LOGGER.info(f"note: the calibrated model scores higher than every epoch: {folder / report['ptq']['file']}")
    LOGGER.info(f'\n{run_table(report)}\n\nreport  {folder / "report.json"}\nweights {final}\n'
                f'next: python export_qat.py --weights {final} --include onnx --imgsz {config.imgsz}')


def eval_(config):
    """Metrics of a quantized checkpoint, or of an ONNX file in ONNX Runtime."""
    require_file(config.weights, '--weights', ('.pt', '.pth', '.onnx'))
    require_file(config.data, '--data', ('.yaml', '.yml'))

    import torch
    from models.quantize import checkpoint
    from utils.general import check_img_size
    from utils.qat.backends import OnnxModel, TorchModel
    from utils.qat.data import load_data
    from utils.qat.evaluate import evaluate
    from utils.qat.loaders import val_loader
    from utils.qat.report import class_table, write_json

    device = select_device(config.device)
    join(device)
    torch.backends.cudnn.allow_tf32 = False  # see quantize
    is_onnx = config.weights.suffix == '.onnx'
    if is_onnx:
        predict = OnnxModel(config.weights, device)
        if set(predict.imgsz) != {config.imgsz}:
            raise QatError(f"--imgsz {config.imgsz}: {config.weights} takes {' x '.join(map(str, predict.imgsz))}; "
                           f'give that size, or export again with --imgsz {config.imgsz}')
    else:
        with quiet_upstream():
            predict = TorchModel(checkpoint.load_quantized(config.weights, device)[0])
    config.imgsz = check_img_size(config.imgsz, predict.stride)
    data = load_data(config.data, predict.nc)
    loader = val_loader(data, config, predict.stride, square=config.square or is_onnx, shard=(rank(), world_size()))

    folder = new_folder(config)
    on_first(log_to)(folder / 'log.txt')
    LOGGER.info(f'{config.weights} on {describe(device)}')
    metrics = evaluate(predict, loader, data.names, device, config.conf_thres, config.iou_thres, annotations=data.annotations,
                       progress=lambda it: bar(it, 'evaluating'), predictions_file=folder / 'predictions.json')
    on_first(write_json)(folder / 'metrics.json', {
        'settings': asdict(config), 'versions': checkpoint.versions(), 'device': describe(device), **metrics.plain(),
        'times': {'ms_per_image': metrics.ms_per_image}})
    LOGGER.info(f'{class_table(metrics.plain())}\n')
    if metrics.coco:
        LOGGER.info('pycocotools: ' + '  '.join(f'{k} {v:.4f}' for k, v in metrics.coco.items()))
    LOGGER.info('  '.join(f'{k} {v} ms' for k, v in metrics.ms_per_image.items()) + f' per image\nresults {folder}')


def main(argv=None):
    config = parse_args(argv)
    with explain_out_of_memory(config.batch_size):
        if isinstance(config, EvalConfig):
            eval_(config)
        else:
            (dry_run if config.dry_run else quantize)(config)
    leave()


if __name__ == '__main__':
    sys.exit(run_command(main))
