"""Quantize a trained YOLOv9 detector or segmentation model to INT8 and evaluate the result.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml --name yolov9_qat
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/yolov9_qat/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

`torchrun --nproc_per_node N qat.py ...` does the same on N GPUs. All processes compute; the first one writes and prints.
"""

import sys
from dataclasses import asdict

from utils.qat.config.options import parse_args
from utils.qat.config.qat import EvalConfig, QuantizeConfig, SensitiveConfig
from utils.qat.core.command import explain_out_of_memory, require_file, resumable, run_command
from utils.qat.core.device import describe, select_device
from utils.qat.core.distributed import from_first, join, leave, on_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish, log_to, quiet_upstream
from utils.qat.core.next_command import command
from utils.qat.core.run_folder import run_folder
from utils.qat.run.resume import resumed


def choose_precision(config, device):
    """Choose the default of --amp; refuse --compile and FP16 without CUDA."""
    cuda = device.type == 'cuda'
    config.amp = config.amp or ('fp16' if cuda else 'off')
    again = 'leave out' if not config.resume else 'start another run without'
    if not cuda and config.compile:
        raise QatError(f'--compile: records a CUDA graph, and the device is {device.type}; {again} --compile')
    if not cuda and config.amp == 'fp16':
        raise QatError(f'--amp fp16: only on a GPU, and the device is {device.type}; {again} --amp, or use bf16')


def dry_run(config):
    """Print the plan of `quantize`; computes one blank image, writes nothing."""
    require_file(config.weights, '--weights', ('.pt', '.pth'))

    from models.quantize import checkpoint
    from models.quantize.calibration.ptq import Choice, prepare
    from utils.qat.config.defaults import options
    from utils.qat.prediction.pytorch import TorchModel
    from utils.qat.run.report import dry_run_tables

    with quiet_upstream():
        file = checkpoint.CheckpointFile(config.weights)
        model = file.load_float()
    loaded = TorchModel(model)
    config.check_model(loaded.segments, loaded.kind)
    layers = [(m.i, type(m).__name__) for m in model.model]
    conversion, groups = prepare(model, config, Choice.of(model, config, file.sha256).paths)
    LOGGER.log(
        RESULT, f'\n{dry_run_tables(layers, conversion.swapped, conversion.kept_float, groups)}\nnothing was written'
    )
    finish(command('qat.py', 'quantize', *options(vars(config), type(config))))


def calibrate_run(run, images, config, choice):
    """PTQ: score the float model, calibrate a quantized copy of it on `images`, save and score that.

    choice: what stays in float, see ptq.Choice; more of it where config.max_drop asks for a budget.
    """
    import time

    from models.quantize.calibration.ptq import calibrated, within_budget
    from utils.qat.evaluation.chance import parts, points_lost

    if config.eval_origin or config.max_drop is not None:
        run.report['origin'] = run.score_float()
    start = time.perf_counter()

    least = choice

    def attempt(choice):
        model, found = calibrated(run.model, images, config, bar, choice.paths)
        against = run.score_now(model, 'trial')['against_float']
        chance = 100 * max(part['chance'] for part in parts(against))
        if chance > config.max_drop and choice is least:
            LOGGER.warning(
                f'--max-drop {config.max_drop}: less than chance, which is {chance:.2f} points on these '
                f'{run.report["images"][run.chosen_on]} images: no layer is left in float for a loss within chance; to keep so '
                'small a budget use more images (val in --data)'
            )
        LOGGER.info(f'{points_lost(against):.2f} points lost beyond chance, at most {config.max_drop} allowed')
        return points_lost(against), (model, found)

    if config.max_drop is None:
        model, found = calibrated(run.model, images, config, bar, choice.paths)
    else:
        choice, (model, found) = within_budget(choice, config.max_drop, attempt)
    run.report['calibration'], run.report['kept_float'] = found, choice.paths
    LOGGER.info(f'calibration took {run.timed("calibrate", start):.1f} s')
    run.calibrated(model, config.eval_ptq)


def finetune_run(run, images, config):
    """QAT: fine-tune the calibrated model on `images`, from the last finished epoch on; save and score it after each."""
    from copy import deepcopy

    from models.quantize.finetuning.loop import finetune

    def progress(batches, epoch, steps):
        return bar(batches, f'epoch {epoch}/{config.epochs}', steps)

    student, last = run.load_calibrated(), run.last_epoch()
    images.epoch = last.number if last else 0
    for epoch in finetune(student, deepcopy(run.model), images, config, progress, last):
        run.learned(student, epoch)


def load(config, device):
    """What `quantize` and `sensitive` begin with: (the float model on `device`, the SHA-256 of its file, its stride, its data); config.imgsz
    is rounded up to the stride."""
    from utils.general import check_img_size

    from models.quantize import checkpoint
    from utils.qat.data.dataset import load_data
    from utils.qat.prediction.pytorch import TorchModel

    with quiet_upstream():
        file = checkpoint.CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device))
    config.check_model(model.segments, model.kind)
    config.imgsz = check_img_size(config.imgsz, model.stride)
    return model.model, file.sha256, model.stride, load_data(config.data, model.nc, segments=model.segments)


def open_folder(config, device, folder):
    """The last thing before the work: `folder` gets the log, and all that is random or rounds is set.

    folder: see run_folder.run_folder. Returns it, in every process of a torchrun.
    """
    import torch
    from utils.general import init_seeds

    init_seeds(config.seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # its 10-bit mantissa is coarser than the INT8 grid it would simulate
    folder = from_first(folder)
    on_first(log_to)(folder / 'log.txt')
    LOGGER.info(f'device {describe(device)}, results in {folder}')
    return folder


def quantize(config, folder):
    """The whole job: float evaluation, calibration, PTQ, fine-tuning. Everything finished stays on disk.

    folder: see run_folder.run_folder; if it is config.resume, of an interrupted run, the rest of that is done.
    """
    require_file(config.weights, '--weights', ('.pt', '.pth'))
    require_file(config.data, '--data', ('.yaml', '.yml'))
    if config.hyp:
        require_file(config.hyp, '--hyp', ('.yaml', '.yml'))

    from dataclasses import replace

    from models.quantize.calibration.ptq import Choice
    from models.quantize.run import Run
    from utils.qat.data.dataset import load_hyp
    from utils.qat.data.loaders import calibration_images, training_images, val_loader
    from utils.qat.run.report import delivered, export_command, run_table, verdicts

    device = select_device(config.device)
    choose_precision(config, device)
    join(device)
    model, sha256, stride, data = load(config, device)
    choice = None if config.resume else Choice.of(model, config, sha256)
    data = replace(data, val_split=config.val_split)
    hyp = load_hyp(config.hyp) if config.hyp else None
    shard = rank(), world_size()
    loaders = {'val': val_loader(data, config, stride, shard=shard)}
    if config.val_split:
        loaders['held out'] = val_loader(data, config, stride, split='held out', shard=shard)
    calibration = None if config.resume else calibration_images(data, config, stride, device, shard)
    training = training_images(data, config, stride, device, hyp, shard) if config.epochs else None
    if training:
        loaders['train'] = training.loader

    folder = open_folder(config, device, folder)
    run = Run(folder, config, model, sha256, data, loaders, LOGGER.info, bar)

    if not run.report['ptq']:
        calibrate_run(run, calibration, config, choice)
    if config.epochs:
        with resumable(command('qat.py', 'quantize', '--resume', folder)):
            finetune_run(run, training, config)
            run.finish()

    report = run.report
    final = delivered(folder, report)
    LOGGER.log(RESULT, '\n'.join(('', run_table(report), '', *verdicts(report), '')))
    finish(export_command(folder, report), report=folder / 'report.md', weights=final)


def sensitive(config, folder):
    """Measure the cost of INT8 in each part: each unit alone in INT8, and all units but one, from one calibration."""
    require_file(config.weights, '--weights', ('.pt', '.pth'))
    require_file(config.data, '--data', ('.yaml', '.yml'))

    import time

    from models.quantize.analysis.sensitivity import analyse
    from models.quantize.calibration.ptq import calibrated
    from models.quantize.head_outputs import require_known_head
    from utils.qat.core.files import write_json
    from utils.qat.core.versions import versions
    from utils.qat.data.loaders import calibration_images, val_loader
    from utils.qat.evaluation.chance import in_words
    from utils.qat.run.plots import plot_sensitivity
    from utils.qat.run.sensitivity_summary import FILE, KIND, VERSION, summary_table, write_markdown

    start = time.perf_counter()
    device = select_device(config.device)
    join(device)
    reference, sha256, stride, data = load(config, device)
    require_known_head(reference, 'sensitive', 'choose what stays in float with: python qat.py quantize --exclude')
    shard = rank(), world_size()
    calibration = calibration_images(data, config, stride, device, shard)
    loader = val_loader(data, config, stride, square=True, limit=config.num_image or None, shard=shard)

    folder = open_folder(config, device, folder)
    model, calibration = calibrated(reference, calibration, config, bar)
    times = {'calibrate': time.perf_counter() - start}
    found = analyse(model, reference, loader, data.names, config, calibration['biases'] != 'none', bar, times)
    summary = {
        'kind': KIND,
        'version': VERSION,
        'weights': config.weights.name,
        'weights_sha256': sha256,
        'settings': asdict(config),
        'versions': versions(),
        'device': describe(device),
        'images': len(loader.dataset),
        'calibration': calibration,
        'times': times,
        **found,
    }
    times['all'] = time.perf_counter() - start
    on_first(write_json)(folder / FILE, summary)
    following = command(
        'qat.py',
        'quantize',
        '--weights',
        config.weights,
        '--data',
        config.data,
        '--imgsz',
        config.imgsz,
        '--sensitive',
        folder / FILE,
        '--max-drop',
        0.2,
    )
    on_first(plot_sensitivity)(folder / 'sensitivity.png', summary)
    on_first(write_markdown)(folder / 'sensitivity.md', summary, following)
    LOGGER.info('  '.join(f'{k} {v:.1f} s' for k, v in times.items()))
    if 'against_float' in found['int8']:
        LOGGER.info(
            f'all in INT8 against float: {in_words(found["int8"]["against_float"])} on these {summary["images"]} images'
        )
    LOGGER.log(RESULT, f'\n{summary_table(summary, 10)}\n')
    finish(following, summary=folder / FILE, report=folder / 'sensitivity.md')


def eval_(config, folder):
    """Evaluate a quantized checkpoint, or an ONNX file in ONNX Runtime."""
    require_file(config.weights, '--weights', ('.pt', '.pth', '.onnx'))
    require_file(config.data, '--data', ('.yaml', '.yml'))

    import torch

    from models.quantize import checkpoint
    from utils.qat.evaluation.score_file import score_file
    from utils.qat.prediction.onnxruntime import OnnxModel
    from utils.qat.prediction.pytorch import TorchModel

    device = select_device(config.device)
    join(device)
    torch.backends.cudnn.allow_tf32 = False  # see quantize
    if config.weights.suffix == '.onnx':
        predict = OnnxModel(config.weights, device)
    else:
        with quiet_upstream():
            predict = TorchModel(checkpoint.load_quantized(config.weights, device)[0])
    score_file(predict, config, device, folder)


def main(argv=None, needs_masks=False):
    """needs_masks: refuse a model that gives none."""
    config = parse_args(argv, __doc__.splitlines()[0], resumed)
    config.needs_masks = needs_masks
    if isinstance(config, QuantizeConfig) and config.dry_run:
        return dry_run(config)
    verb = {EvalConfig: eval_, SensitiveConfig: sensitive, QuantizeConfig: quantize}[type(config)]
    with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
        verb(config, folder)
    leave()


if __name__ == '__main__':
    sys.exit(run_command(main))
