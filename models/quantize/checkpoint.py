"""Checkpoint files ↔ models: load a float one, load a quantized one, save with provenance.

A file is judged by the class names in its pickle before anything in it runs, so that a wrong kind of checkpoint is
answered with one line; and the pickle is loaded by unpickle.py, which makes layers, tensors and plain values and calls nothing else.
"""
import datetime
import pickletools
import struct
import zipfile
import zlib
from copy import deepcopy
from pathlib import Path

import torch
from models.common import RepConvN

from models.quantize import unpickle
from models.quantize.convert import is_quantized
from models.quantize.scales import shared_scales
from utils.qat.errors import QatError, require_file
from utils.qat.files import sha256, write_torch
from utils.qat.report import versions

FORMAT = 2  # 2: every scale is an FP16 number
DAMAGED = (ValueError, OSError, EOFError, RuntimeError, struct.error, zlib.error)  # what unzipping bad bytes raises
TWIN_MODULES = ('models.quantize.blocks', 'models.quantize.quantizers')


def pickled_classes(path):
    """Names ('module.Class') that the pickle inside a torch file refers to; nothing is executed.

    Raises QatError if the file is no torch.save archive (the zip format, PyTorch 1.6 and later).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith('/data.pkl'))
            pickled = archive.read(name)
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f'{damaged} inside is damaged')
        return {arg.replace(' ', '.', 1) for op, arg, _ in pickletools.genops(pickled) if op.name == 'GLOBAL'}
    except (zipfile.BadZipFile, StopIteration, *DAMAGED) as e:
        raise QatError(f'--weights {path}: not a PyTorch checkpoint (or cut short): {e or "no pickled data inside"}') from e


def kind_of(path):
    """'quantized' (ours), 'foreign' (of another yolov9-qat tool), 'float' (a YOLOv9 model) or 'other'."""
    names = pickled_classes(path)
    if any(n.startswith(TWIN_MODULES) for n in names):
        return 'quantized'
    if any(n.startswith(('pytorch_quantization.', 'models.quantize')) for n in names):
        return 'foreign'
    return 'float' if any(n.startswith('models.yolo.') for n in names) else 'other'


def _load(path, device):
    """(checkpoint dict, FP32 model in eval mode) of a file that holds a YOLOv9 model; prefers the EMA weights."""
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=False, pickle_module=unpickle)
    except unpickle.Refused as e:
        raise QatError(f'--weights {path}: not loaded: {e}') from e
    except Exception as e:  # damaged pickles fail in as many ways as there are opcodes
        raise QatError(f"--weights {path}: damaged: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from e
    model = (ckpt.get('ema') or ckpt.get('model')) if isinstance(ckpt, dict) else None
    if not hasattr(model, 'model'):
        raise QatError(f'--weights {path}: holds no model (neither "ema" nor "model")')
    model = model.float().eval()
    _require_running(path, model)
    if isinstance(model.names, (list, tuple)):  # upstream's older checkpoints
        model.names = dict(enumerate(model.names))
    return ckpt, model.to(device)


@torch.no_grad()
def _require_running(path, model):
    """A model unpickles without a call of its layers: whether these are whole, and those of this tree, only a run tells."""
    try:
        len(model.names), model.model[-1].nc  # what upstream's training gives it
        model(torch.zeros(1, 3, *[2 * int(max(model.stride))] * 2))
    except Exception as e:  # whatever a layer with other attributes meets
        raise QatError(f"--weights {path}: its model does not run with the layers of this YOLOv9 tree ({type(e).__name__}: "
                       f"{' '.join(str(e).split())[:200]}); use the tree it was trained with, or a checkpoint of upstream's training") from e


def _expect(path, wanted):
    """Check that --weights names a file of kind `wanted`; says what to do about any other."""
    path = require_file(path, '--weights', ('.pt', '.pth'))
    kind = kind_of(path)
    if kind == wanted:
        return path
    raise QatError(f'--weights {path}: ' + {
        'foreign': 'made by another yolov9-qat tool, whose checkpoints lose their quantizers in a fresh process; '
                   "start again from its float model: python qat.py quantize --weights FLOAT.pt",
        'quantized': 'is already quantized; evaluate it with: python qat.py eval, export it with: python export_qat.py',
        'float': f'is not quantized; quantize it first: python qat.py quantize --weights {path} '
                 '(a float model is evaluated by upstream: python val.py)',
        'other': 'holds no YOLOv9 model (a checkpoint of upstream train.py or train_dual.py has one)',
    }[kind])


@torch.no_grad()  # or the folded weights would hang on the graph of their making and could not be trained
def fuse(model):
    """Fold batch norms into convolutions and RepConvN into one 3x3 convolution, in place; returns the model."""
    for m in model.modules():
        if isinstance(m, RepConvN) and hasattr(m, 'conv1'):  # older upstream trees do not fuse these by themselves
            m.fuse_convs()
            m.forward = m.forward_fuse
    return model.fuse()


def load_dual_or_float(path, device='cpu'):
    """(checkpoint dict, unfused FP32 model) of a float checkpoint, whatever its head."""
    return _load(_expect(path, 'float'), device)


def load_float(path, device='cpu'):
    """The fused FP32 model of a single-branch float checkpoint, in eval mode on `device`."""
    _, model = load_dual_or_float(path, device)
    head = type(model.model[-1]).__name__
    if head.startswith(('Dual', 'Triple')):
        out = Path(path).with_name(f'{Path(path).stem}-converted.pt')
        raise QatError(f'--weights {path}: still has its auxiliary branch ({head}); remove it first: '
                       f'python reparameterization.py --weights {path} --save {out}')
    return fuse(model)


def load_quantized(path, device='cpu'):
    """(quantized model in eval mode on `device`, its `quant` dict) of a checkpoint saved by `save_quantized`."""
    path = _expect(path, 'quantized')
    ckpt, model = _load(path, device)
    quant = ckpt.get('quant') or {}
    if quant.get('format') != FORMAT or not is_quantized(model):
        raise QatError(f"--weights {path}: quantized checkpoint of format {quant.get('format')}, this version reads "
                       f'format {FORMAT}; quantize the float model again')
    return model, quant


def load_any(path, device='cpu'):
    """(model, `quant` dict or None): a quantized checkpoint, or a float one, fused."""
    if kind_of(require_file(path, '--weights', ('.pt', '.pth'))) == 'quantized':
        return load_quantized(path, device)
    return load_float(path, device), None


def save_quantized(path, model, recipe, source):
    """Write a checkpoint that `load_quantized`, upstream's val.py and detect.py load.

    The model is stored whole and in FP32: half precision would round weights and with them what was measured.
    recipe: settings as plain values, the policies among them. source: path of the float checkpoint.
    """
    quant = {'format': FORMAT, 'recipe': recipe, 'source_sha256': sha256(source), 'versions': versions(),
             'scale_groups': shared_scales(model)}
    model = deepcopy(model).cpu().to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    write_torch(path, {'model': model, 'ema': None, 'epoch': -1, 'optimizer': None, 'quant': quant,
                       'date': datetime.datetime.now().isoformat()})
