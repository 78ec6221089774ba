"""yolov9-qat as a library, for a training loop of your own: `import yolov9_qat as q`. docs/python.md has a whole program.

Images are FP32 [B, 3, H, W] in 0..1 on the model's device; of a classifier normalized. The import changes nothing in its process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.config.export import ExportConfig
from utils.qat.config.qat import LEARNT, EvalConfig, PtqConfig
from utils.qat.config.tables import CHECKPOINTS, format_of
from utils.qat.core.errors import QatError as QatError  # what mistakes raise
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import exact_convolutions, select_device

if TYPE_CHECKING:
    from torch import Tensor

    from models.deploy.formats.format import Written
    from utils.qat.core.upstream import Network
    from utils.qat.evaluation.metrics import Metrics
    from utils.qat.graph.audit import Audit
    from utils.qat.run.state import Calibration

    Batches = Sequence[Tensor]  # sized and re-iterable, as a DataLoader of images is


RANGES = 'calib_method', 'percentile', 'bias_correction', 'reduce_range', 'seed'  # settings of `calibrate`
SCORES = 'batch_size', 'workers', 'names_from', 'square', 'conf_thres', 'iou_thres'  # of `evaluate`
# of `export`: those of its command that tell how a file is written
NOT_OF_FILE = 'weights include project imgsz device verify names_from verify_images backend max_ap_diff'.split()
WRITING = tuple(f.name for f in fields(ExportConfig) if f.name not in NOT_OF_FILE)


def _only(settings: dict[str, Any], *allowed: str) -> dict[str, Any]:
    """Return settings. Raises QatError if one of them is not allowed."""
    for name in settings.keys() - {*allowed}:
        raise QatError(f'{name}: no setting of this function, which takes {", ".join(allowed)}')
    return settings


def _require_batches(images: Batches) -> None:
    if not hasattr(images, '__len__'):
        raise QatError('images: give batches that can be counted and read again, such as a list or a DataLoader')


def load(path: str | Path, device: str = 'cpu') -> Network:
    """Load a checkpoint: a float model, fused, or an INT8 model.

    >>> model = q.load('yolov9-t.pt')
    """
    from models.quantize.checkpoint import CheckpointFile

    file = CheckpointFile(path)
    with quiet_upstream():
        model, quant = file.load_any(device)
    model.quant = quant or {'source_sha256': file.sha256}
    return model.requires_grad_()


def adapt(model: Network, activation: str, target: str, images: Batches = (), epochs: int = 20) -> Network:
    """Make a float model with another activation function: 'polynomial', or 'relu' and 'relu6', which it learns on batches.

    >>> faster = q.adapt(model, 'polynomial', target='openvino')
    """
    from models.quantize import activations
    from models.quantize import adapt as learning
    from models.quantize.blocks import is_quantized

    _require_batches(images)
    if is_quantized(model):
        raise QatError('the model is quantized already; take the float model')
    activation = activations.activation_for(model, PtqConfig(activation=activation, target=target))
    if activation == 'keep':
        return model
    student = activations.exchanged(model, activation, activations.exchangeable(model, activation))
    if activation in LEARNT:
        how = learning.Learning(epochs, len(images), learning.RATE, boxes=True)
        with exact_convolutions():
            list(learning.adapt(student, model, images, how))
    return activations.finish_exchange(student).eval()


def prepare(
    model: Network, target: str, exclude: Sequence[str] = (), only: Sequence[str] = (), scale_policy: str = 'tied'
) -> None:
    """Quantize a float model for an engine, in place, yet without ranges; the options are those of `qat.py quantize`.

    >>> q.prepare(model, target='tensorrt')
    """
    from models.quantize import checkpoint, convert
    from models.quantize.calibration import ptq
    from models.quantize.kept import left_out

    exclude, only = ([given] if isinstance(given, str) else given for given in (exclude, only))
    config = PtqConfig(target=target, activation='keep', scale_policy=scale_policy)
    with quiet_upstream():
        checkpoint.fuse(model.eval()).requires_grad_()
    kept = left_out([*convert.find_twins(model, config.made_for)], exclude, only)
    ptq.prepare(model, config, kept)
    model.quant = {'source_sha256': '', **getattr(model, 'quant', {}), 'recipe': {**config.plain(), 'kept_float': kept}}


def calibrate(model: Network, forward_loop: Callable[[Network], object], **settings: Any) -> Calibration:
    """Find the ranges of a prepared model, by the images of a loop over batches; say how.

    settings: calib_method, percentile, bias_correction, reduce_range, seed, as in `qat.py quantize`.

    >>> how = q.calibrate(model, lambda model: [model(images) for images in batches], calib_method='mse')
    """
    from models.quantize.calibration import ptq

    config, sample = PtqConfig(**_only(settings, *RANGES)), ptq.Sample()
    with exact_convolutions():
        how = ptq.calibrate(model.eval(), forward_loop, sample, config)
    model.quant['recipe'] |= {**settings, 'imgsz': list(sample.kept[0].shape[1:])}
    return how


def finetune(model: Network, teacher: Network, images: Batches, epochs: int = 10, lr: float = 1e-5) -> list[float]:
    """Let a calibrated model learn to reproduce the float model on re-iterable batches; return the loss of each epoch.

    >>> losses = q.finetune(model, q.load('yolov9-t.pt'), batches, epochs=1)
    """
    from models.quantize.blocks import is_quantized
    from models.quantize.finetuning import loop

    _require_batches(images)
    if not is_quantized(model) or is_quantized(teacher):
        raise QatError('finetune(model, teacher, ...): a calibrated model learns from a float model')
    how = loop.Learning(epochs, len(images), lr, reduce_range=model.quant['recipe'].get('reduce_range', False))
    with exact_convolutions():
        return [epoch.loss for epoch in loop.finetune(model, teacher, images, how)]


def save(model: Network, path: str | Path) -> None:
    """Write a checkpoint of a model of these functions, INT8 or float, for `load` and the commands.

    >>> q.save(model, 'int8.pt')
    """
    from models.quantize.checkpoint import save_model

    quant = getattr(model, 'quant', None)
    if quant is None:
        raise QatError(
            f'{path}: the model is not of yolov9_qat.load, so nothing tells what it was made of; load it there'
        )
    save_model(Path(path), model, quant.get('recipe', {}), quant['source_sha256'])


def export(model: Network, path: str | Path, imgsz: Any = None, **settings: Any) -> Written:
    """Write a file for an engine, of the kind of its suffix, and compare it with the model.

    settings: those of `export_qat.py` that tell how a file is written.

    >>> written = q.export(model, 'int8.onnx', imgsz=64, dynamic=True)
    """
    from models.deploy.formats.format import export_of
    from models.deploy.load import load_format, predicting

    kind = format_of(path := Path(path))
    if not path.parent.is_dir():
        raise QatError(f'{path.parent}: no such folder')
    config = ExportConfig(path.with_suffix('.pt'), (kind,), imgsz=imgsz, **_only(settings, *WRITING))
    return export_of(predicting(model), config, [load_format(kind)]).write()[0]


def evaluate(model: Network | str | Path, data: str | Path, imgsz: Any = None, **settings: Any) -> Metrics:
    """Score a model, a checkpoint or an exported file on the val images of a data YAML.

    settings, as in `qat.py eval`: batch_size, workers, names_from, square, conf_thres and iou_thres. A path takes device too, and that of an
    exported file also backend.

    >>> ap = q.evaluate('int8.onnx', 'data.yaml', workers=0).ap
    """
    from models.deploy.load import open_file, predicting
    from utils.qat.data.loaders import Loaders
    from utils.qat.evaluation.evaluate import evaluate as scored

    path = Path(model) if isinstance(model, (str, Path)) else None
    exported = path is not None and path.suffix.lower() not in CHECKPOINTS
    allowed = *SCORES, *['device'] * (path is not None), *['backend'] * exported
    config = EvalConfig(path or Path('MODEL'), Path(data), imgsz=imgsz, **_only(settings, *allowed))
    with exact_convolutions():
        predict: Any
        if isinstance(model, (str, Path)):
            device = select_device(config.device)
            predict = (
                open_file(Path(model), device, config.backend) if exported else predicting(load(model, str(device)))
            )
        else:
            predict = predicting(model)
        config = config.for_model(predict)
        images = predict.task.load_data(config.data, predict, names_from=config.names_from)
        loader = Loaders(images, config, predict.stride).scored(config.square or exported)
        return scored(predict, loader, images.names, predict.device, config.conf_thres, config.iou_thres)


def audit(path: str | Path) -> Audit:
    """Find the parts of an ONNX file that its engine can run in INT8, and the places that break its rules.

    >>> q.audit('int8.onnx').findings
    []
    """
    from utils.qat.graph.onnx_file import load
    from utils.qat.vendors.graphs import audit_for_target

    return audit_for_target(load(path))[1]
