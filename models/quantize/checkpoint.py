"""Checkpoint files ↔ models: load a float one, load a quantized one, save with provenance.

A file is read once: its kind is judged by the names in its pickle, its model is built from records by pickled_modules.py, which runs
nothing of the file, and its SHA-256 is that of the bytes that were read.
"""

import datetime
from copy import deepcopy

import torch
from models.common import RepConvN

from models.quantize.convert import is_quantized
from models.quantize.pickled_modules import TWINS, build
from models.quantize.scales import shared_scales
from utils.qat.core.command import require_file
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_torch
from utils.qat.core.versions import versions
from utils.qat.untrusted.names import require_names
from utils.qat.untrusted.pickle_records import Refused
from utils.qat.untrusted.torch_archive import read_archive

FORMAT = 2  # 2: every scale is an FP16 number
LARGEST_STRIDE = 1024  # pixels; YOLOv9's is 64


class CheckpointFile:
    """A checkpoint that was read and not built yet.

    path: a Path. sha256: hex digest of the file as it was read. kind: 'quantized' (ours), 'foreign' (of another yolov9-qat tool), 'float'
    (a YOLOv9 model) or 'other'.
    """

    def __init__(self, path):
        """Read the file given with --weights. Raises QatError if it is no torch.save archive (the zip format, PyTorch 1.6 and later)."""
        self.path = require_file(path, '--weights', ('.pt', '.pth'))
        self.archive = read_archive(self.path)
        self.digest, self.kind = self.archive.digest, _kind(self.archive.names)

    @property
    def sha256(self):
        return self.digest.result()

    def load_dual_or_float(self, device='cpu'):
        """Build a float model, whatever its head. Returns (checkpoint dict, unfused FP32 model in eval mode on `device`)."""
        self._expect('float')
        return self._load(device)

    def load_float(self, device='cpu'):
        """Build the model of a single-branch float checkpoint. Returns it fused, FP32, in eval mode on `device`."""
        _, model = self.load_dual_or_float(device)
        head = type(model.model[-1]).__name__
        if head.startswith(('Dual', 'Triple')):
            out = self.path.with_name(f'{self.path.stem}-converted.pt')
            raise QatError(
                f'--weights {self.path}: still has its auxiliary branch ({head}); remove it first: '
                f'python reparameterization.py --weights {self.path} --save {out}'
            )
        return fuse(model)

    def load_quantized(self, device='cpu'):
        """Build a model saved by `save_quantized`. Returns (quantized model in eval mode on `device`, its `quant` dict)."""
        self._expect('quantized')
        ckpt, model = self._load(device)
        quant = ckpt.get('quant') or {}
        if quant.get('format') != FORMAT or not is_quantized(model):
            raise QatError(
                f'--weights {self.path}: quantized checkpoint of format {quant.get("format")}, this version reads '
                f'format {FORMAT}; quantize the float model again'
            )
        return model, quant

    def load_any(self, device='cpu'):
        """Build a quantized model, or a float one, fused. Returns (model, `quant` dict or None)."""
        return self.load_quantized(device) if self.kind == 'quantized' else (self.load_float(device), None)

    def _expect(self, wanted):
        """Check that the file is of kind `wanted`; say what to do about any other."""
        if self.kind != wanted:
            raise QatError(
                f'--weights {self.path}: '
                + {
                    'foreign': 'made by another yolov9-qat tool, whose checkpoints lose their quantizers in a fresh process; '
                    'start again from its float model: python qat.py quantize --weights FLOAT.pt',
                    'quantized': 'is already quantized; evaluate it with: python qat.py eval, export it with: python export_qat.py',
                    'float': f'is not quantized; quantize it first: python qat.py quantize --weights {self.path} '
                    '(a float model is evaluated by upstream: python val.py)',
                    'other': 'holds no YOLOv9 model (a checkpoint of upstream train.py or train_dual.py has one)',
                }[self.kind]
            )

    def _load(self, device):
        """Build what is in the file. Returns (checkpoint dict, FP32 model in eval mode); prefers the EMA weights."""
        archive, self.archive = self.archive, None  # its bytes are freed as soon as the model needs them no more
        try:
            ckpt = build(archive)
        except Refused as e:
            raise QatError(f'--weights {self.path}: not loaded: {e}') from e
        except Exception as e:  # of damaged attributes, which fail in as many ways as there are layers
            raise QatError(
                f'--weights {self.path}: damaged: {type(e).__name__}: {" ".join(str(e).split())[:200]}'
            ) from e
        self.digest.result()  # FP32 weights lie in the very bytes that are hashed: nobody may change them before
        model = (ckpt.get('ema') or ckpt.get('model')) if isinstance(ckpt, dict) else None
        if not isinstance(getattr(model, 'model', None), torch.nn.Sequential):
            raise QatError(f'--weights {self.path}: holds no model (neither "ema" nor "model")')
        self._require_running(model.float().eval())
        require_names(model, f'--weights {self.path}')
        return ckpt, model.to(device)

    @torch.no_grad()
    def _require_running(self, model):
        """A model is built without a call of its layers: whether these are whole, and those of this tree, only a run tells."""
        try:
            len(model.names), model.model[-1].nc  # what upstream's training gives it
            stride = int(max(model.stride))
            if not 0 < stride <= LARGEST_STRIDE:
                raise ValueError(f'stride {stride}')
            model(torch.zeros(1, 3, 2 * stride, 2 * stride))
        except Exception as e:  # whatever a layer with other attributes meets
            raise QatError(
                f'--weights {self.path}: its model does not run with the layers of this YOLOv9 tree ({type(e).__name__}: '
                f"{' '.join(str(e).split())[:200]}); use the tree it was trained with, or a checkpoint of upstream's training"
            ) from e


def _kind(names):
    if any(n.startswith(TWINS) for n in names):
        return 'quantized'
    if any(n.startswith(('pytorch_quantization.', 'models.quantize')) for n in names):
        return 'foreign'
    return 'float' if any(n.startswith('models.yolo.') for n in names) else 'other'


def kind_of(path):
    """Tell the kind of a checkpoint, see CheckpointFile."""
    return CheckpointFile(path).kind


def load_dual_or_float(path, device='cpu'):
    """See CheckpointFile.load_dual_or_float."""
    return CheckpointFile(path).load_dual_or_float(device)


def load_float(path, device='cpu'):
    """See CheckpointFile.load_float."""
    return CheckpointFile(path).load_float(device)


def load_quantized(path, device='cpu'):
    """See CheckpointFile.load_quantized."""
    return CheckpointFile(path).load_quantized(device)


def load_any(path, device='cpu'):
    """See CheckpointFile.load_any."""
    return CheckpointFile(path).load_any(device)


@torch.no_grad()  # or the folded weights would hang on the graph of their making and could not be trained
def fuse(model):
    """Fold batch norms into convolutions and RepConvN into one 3x3 convolution, in place; returns the model."""
    for m in model.modules():
        if isinstance(m, RepConvN) and hasattr(m, 'conv1'):  # older upstream trees do not fuse these by themselves
            m.fuse_convs()
            m.forward = m.forward_fuse
    return model.fuse()


def save_quantized(path, model, recipe, source):
    """Write a checkpoint that `load_quantized`, upstream's val.py and detect.py load.

    The model is stored whole and in FP32: half precision would round weights and with them what was measured.
    recipe: settings as plain values, the policies among them. source: SHA-256 of the float checkpoint.
    """
    quant = {
        'format': FORMAT,
        'recipe': recipe,
        'source_sha256': source,
        'versions': versions(),
        'scale_groups': shared_scales(model),
    }
    model = deepcopy(model).cpu().to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    write_torch(
        path,
        {
            'model': model,
            'ema': None,
            'epoch': -1,
            'optimizer': None,
            'quant': quant,
            'date': datetime.datetime.now().isoformat(),
        },
    )
