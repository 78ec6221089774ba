"""Checkpoint files: load a float or a quantized model, and save a quantized model with its provenance.

A file is read once. The names in its pickle tell its kind. pickled_modules.py builds its model from records and runs no
code of the file. Its SHA-256 is the hash of the bytes that were read.
"""

import datetime
from collections.abc import Iterable
from copy import deepcopy
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from models.common import RepConvN

from models.quantize.blocks import is_quantized
from models.quantize.network import fold_batch_norms, head_of
from models.quantize.pickled_modules import OURS, TORCHVISION, TWINS, build
from models.quantize.quantizers import require_ranges
from models.quantize.reparameterize import main_branch
from models.quantize.scales import shared_scales
from utils.qat.backends.pytorch import stride_of, task_of
from utils.qat.config.tables import CHECKPOINTS
from utils.qat.core.command import command
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import require_file, sha256, write_torch
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import versions
from utils.qat.core.upstream import Network
from utils.qat.untrusted.names import require_colours, require_names
from utils.qat.untrusted.torch_archive import Refused, read_archive
from utils.qat.untrusted.torchvision_weights import network_of, network_with, old_state

NEEDED = 'give a checkpoint of upstream train.py or train_dual.py'
TRAINERS = 'ultralytics', 'mit'  # files in trainers/, loaded because few checkpoints are of another training
# module → kind
WRAPPED = {'torch.nn.parallel.': 'parallel', 'torch._dynamo.': 'compiled', 'torch.nn.utils.prune.': 'masked'}
AGAIN_AS = "torch.save({{'model': {}}}, 'NEW.pt')"
FORMAT = 2  # since 2 every scale is an FP16 number
LARGEST_STRIDE = 1024  # pixels; YOLOv9 has 64 at most


class CheckpointFile:
    """A checkpoint file in memory; its `load_*` build the model: FP32, in eval mode, on `device`.

    Attributes:
        kind: 'quantized' (by this toolkit), 'foreign' (of another yolov9-qat tool), 'float' (a YOLOv9 model of any of
            TRAINERS, or weights of a network of torchvision), 'state_dict' (tensors without a network), one of WRAPPED (advice
            follows) or 'other'.

    Raises:
        QatError: the file is no torch.save archive (the zip format of PyTorch 1.6 and later). By `load_*`: it has another
            kind or format, or its model cannot be built or run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = require_file(path, '--weights', CHECKPOINTS)
        of_network = self.path.suffix == '.pth' and bool(network_of(self.path))
        self.state = old_state(self.path) if of_network else None
        self.kind, self.trainer = 'state_dict', None
        if self.state is None:
            self.archive = read_archive(self.path)
            self.digest = self.archive.digest
            self.kind = _kind(self.archive.names)
        self.of_torchvision = of_network and self.kind == 'state_dict'
        if self.kind in ('state_dict', 'other') and not self.of_torchvision:
            known = (import_module(f'models.quantize.trainers.{name}').TRAINER for name in TRAINERS)
            self.trainer = next((trainer for trainer in known if trainer.wrote(self.archive)), None)
        if self.of_torchvision or self.trainer:
            self.kind = 'float'

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file as it was read, hex digits."""
        return sha256(self.path) if self.state is not None else self.digest.result()

    def load_dual_or_float(self, device: torch.device | str = 'cpu') -> tuple[dict[str, object], Network]:
        """Build the checkpoint dict and its float model, not fused, with any head."""
        self._expect('float')
        return self._load(device)

    def load_float(self, device: torch.device | str = 'cpu') -> Network:
        """Build the model of a float checkpoint, fused; convert a dual-branch model as reparameterization.py does."""
        _, model = self.load_dual_or_float()
        head = type(head_of(model)).__name__
        if head.startswith(('Dual', 'Triple')):
            single, _ = main_branch(model, f'--weights {self.path}')
            LOGGER.info(
                f'{self.path}: {head} -> {type(head_of(single)).__name__} in memory, as reparameterization.py does: '
                f'{len(model.model) - len(single.model)} layers of the auxiliary branch dropped'
            )
            model = single
        return fuse(model).to(device)

    def load_quantized(self, device: torch.device | str = 'cpu') -> tuple[Network, dict[str, object]]:
        """Build a quantized model that `save_model` wrote, and its `quant` dict."""
        self._expect('quantized')
        ckpt, model = self._load(device)
        quant = ckpt.get('quant') or {}
        if quant.get('format') != FORMAT or not isinstance(quant.get('recipe'), dict) or not is_quantized(model):
            raise QatError(
                f'--weights {self.path}: quantized checkpoint of format {quant.get("format")}, this version reads '
                f'format {FORMAT}; quantize the float model again'
            )
        return model, quant

    def load_any(self, device: torch.device | str = 'cpu') -> tuple[Network, dict[str, object] | None]:
        """Build a quantized model and its `quant` dict, or a float model, fused, and None."""
        return self.load_quantized(device) if self.kind == 'quantized' else (self.load_float(device), None)

    def _expect(self, wanted: str) -> None:
        """Refuse a file of another kind than `wanted`, with advice."""
        if self.kind != wanted:
            raise QatError(
                f'--weights {self.path}: '
                + {
                    'foreign': 'made by another yolov9-qat tool, whose checkpoints lose their quantizers in a fresh process; '
                    'start again from its float model: python qat.py quantize --weights FLOAT.pt --data DATA.yaml',
                    'quantized': 'is already quantized; evaluate it with: python qat.py eval, export it with: python export_qat.py',
                    'float': f'is not quantized; quantize it first: {command("qat.py", "quantize", "--weights", self.path)}',
                    'state_dict': 'has weights without their network (a state_dict); if they are of a network of torchvision, rename the '
                    f'file to its name and .pth, such as resnet50-mine.pth, else {NEEDED}',
                    'parallel': f'was saved inside DataParallel; take the model out: {AGAIN_AS.format("model.module")}',
                    'compiled': f'was saved compiled; take the model out: {AGAIN_AS.format("model._orig_mod")}',
                    'masked': 'has pruning masks; make them permanent, torch.nn.utils.prune.remove(layer, "weight") for each pruned layer, and save it again',
                    'other': f'holds no YOLOv9 model; {NEEDED}',
                }[self.kind]
            )

    def _load(self, device: torch.device | str) -> tuple[dict[str, Any], Network]:
        """Build the checkpoint dict and the model: FP32, in eval mode, with EMA weights if the file has any."""
        ckpt: Any = self._built() if self.state is None else self.state
        if self.of_torchvision:
            ckpt = {'model': network_with(ckpt, self.path, TORCHVISION)}
        if isinstance(ckpt, nn.Module):  # torch.save(model)
            ckpt = {'model': ckpt}
        model: Any = (ckpt.get('ema') or ckpt.get('model')) if isinstance(ckpt, dict) else None
        if not isinstance(getattr(model, 'model', None), torch.nn.Sequential) and not _of_torchvision(model):
            raise QatError(f'--weights {self.path}: holds no model (neither "ema" nor "model")')
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
        require_colours(channels, f'--weights {self.path}')
        self._require_running(model.float().eval())
        require_names(model, f'--weights {self.path}')
        return ckpt, model.to(device)

    def _built(self) -> object:
        """Build the content of the archive."""
        archive = self.archive
        del self.archive  # free its bytes as soon as the model does not need them
        source = f'--weights {self.path}'
        with reporting(f'{source}: damaged', Exception):  # damaged attributes raise errors of any kind
            try:
                ckpt = {'model': self.trainer.model(archive, source)} if self.trainer else build(archive)
            except Refused as e:
                raise QatError(f'{source}: not loaded: {e}') from e
        self.digest.result()  # FP32 weights share the bytes that are hashed: wait before anything changes them
        return ckpt

    @torch.no_grad()
    def _require_running(self, model: Network) -> None:
        """Run the model once: only a run shows whether its layers, built without their constructors, are complete and fit this tree."""
        problem = f'--weights {self.path}: its model does not run with the layers of this YOLOv9 tree'
        remedy = "use the tree it was trained with, or a checkpoint of upstream's training"
        with reporting(problem, Exception, remedy=remedy):  # a layer with other attributes raises errors of any kind
            task_of(model).prepare(model)
            stride = stride_of(model)
            if not 0 < max(model.stride) <= LARGEST_STRIDE:
                raise ValueError(f'stride {stride}')
            model(torch.zeros(1, 3, 2 * stride, 2 * stride))


def _of_torchvision(model: object) -> bool:
    """Tell whether a model is a classifier of torchvision."""
    return isinstance(model, nn.Module) and type(model).__name__ in TORCHVISION.get(type(model).__module__, ())


def _kind(names: Iterable[str]) -> str:
    """Tell the kind of a checkpoint by the names in its pickle, see CheckpointFile."""
    for module, kind in WRAPPED.items():
        if any(n.startswith(module) for n in names):
            return kind
    if any(n.startswith(TWINS) for n in names):
        return 'quantized'
    if any(n.startswith(('pytorch_quantization.', 'models.quantize')) and not n.startswith(OURS) for n in names):
        return 'foreign'
    if any(n.startswith(('models.yolo.', 'torchvision.models.')) for n in names):
        return 'float'
    tensors = any(n.startswith('torch._utils._rebuild_') for n in names)
    return 'state_dict' if tensors and not any(n.startswith(('torch.nn.', 'models.')) for n in names) else 'other'


@torch.no_grad()  # with gradients the folded weights would be results of a graph, which cannot be trained
def fuse(model: Network) -> Network:
    """Fold batch norms into convolutions and each RepConvN into one 3x3 convolution, in place, and return the model."""
    for m in model.modules():
        if isinstance(m, RepConvN) and hasattr(m, 'conv1'):  # older upstream trees do not fuse these by themselves
            for branch in (m.conv1, m.conv2):
                if not hasattr(branch, 'bn'):  # fused by such a tree before it was saved; `fuse_convs` needs one
                    branch.bn = nn.BatchNorm2d(branch.conv.out_channels, eps=0)
                    branch.bn.bias = branch.conv.bias
            m.fuse_convs()
            m.forward = m.forward_fuse
    return model.fuse() if hasattr(model, 'fuse') else fold_batch_norms(model)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is saved: contiguous, on the CPU, without a gradient. It may share memory."""
    plain = tensor.detach().to('cpu', memory_format=torch.contiguous_format)
    return nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain


def save_model(path: Path, model: Network, recipe: dict[str, object], source: str) -> None:
    """Write a checkpoint of a calibrated model, or of a float one, which has no recipe; upstream's val.py and detect.py can load it too.

    `recipe` has the settings as plain values, with the policies; `source` is the SHA-256 of the float checkpoint that it was made of,
    in hex digits. The model is in FP32: half precision would round the weights, so the file would differ from the measured model.
    Raises QatError if a quantized model is not calibrated.
    """
    beside: dict[str, object] = {'source_sha256': source}
    if is_quantized(model):
        require_ranges(model)
        kept = {'recipe': recipe, **beside, 'versions': versions(), 'scale_groups': shared_scales(model)}
        beside = {'quant': {'format': FORMAT, **kept}}
    stored = {id(t): _stored(t) for t in chain(model.parameters(), model.buffers())}
    model = deepcopy(model, stored).cpu().eval()  # deepcopy takes these tensors instead of copying
    vars(model).pop('quant', None)  # what yolov9_qat.py knows of a model is beside it
    content = {'model': model, 'ema': None, 'epoch': -1, 'optimizer': None, **beside}
    write_torch(path, {**content, 'date': datetime.datetime.now().isoformat()})
