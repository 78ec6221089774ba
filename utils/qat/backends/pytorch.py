"""PyTorch: models of checkpoints, float or quantized."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from utils.qat.config.settings import Sides
from utils.qat.config.tables import target_of_recipe
from utils.qat.config.tasks import Task, load_task
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import channels_last

SMALLEST_STRIDE = 32  # pixels
LARGEST = 8192  # pixels; a larger size in a file is ignored


def task_of(model: Network) -> Task:
    """Return the task of a network: classification for torchvision's; upstream's last layer tells it."""
    layers = getattr(model, 'model', None)
    if layers is None or type(layers[-1]).__name__ == 'Classify':
        return load_task('classify')
    return load_task('segment' if hasattr(layers[-1], 'nm') else 'detect')


def stride_of(model: Network) -> int:
    """Return the number of pixels of which the sides of images must be multiples: the largest stride, at least 32 as for upstream.

    A head without P5 has a smaller one, and the layers before it may still halve the image five times.
    """
    return max(SMALLEST_STRIDE, int(max(model.stride)))


def sides_in(recipe: dict[str, object] | None) -> Sides | None:
    """Read the image size from the recipe of a checkpoint, which is untrusted; None if there is none.

    It has two numbers, or one in files of earlier versions.
    """
    imgsz = (recipe or {}).get('imgsz')
    sides = imgsz if isinstance(imgsz, (list, tuple)) else (imgsz, imgsz)
    return (
        (sides[0], sides[1]) if len(sides) == 2 and all(type(n) is int and 32 <= n <= LARGEST for n in sides) else None
    )


class TorchModel:
    """A model of PyTorch, float or with fake quantization, in eval mode.

    Attributes:
        names: class index → name.
        stride: the largest of the head, in pixels.
        nc: number of classes.
        task: see config.tasks.
        kind: how the task was recognized, in words.
        target: the engine that it was quantized for.
        by_toolkit: whether images are prepared as in `qat.py eval`; see file_model.FileModel.
        recipe: settings of the quantization; None for a float model.
        quantized_for: height and width of the images that it was quantized for, in pixels; None for a float model.
        imgsz, end2end, conf_thres, notes: as for a file that takes any size and has no NMS inside, see file_model.FileModel.
    """

    by_toolkit = True
    imgsz = conf_thres = None
    end2end = False
    notes = ()

    def __init__(
        self,
        model: Network,
        quant: dict[str, Any] | None = None,
        context: AbstractContextManager[None] | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: the model.
            quant: of a quantized checkpoint, see checkpoint.CheckpointFile.load_any.
            context: entered for each pass, such as quantizers.RoundedOnce.
        """
        self.model, self.recipe = model.eval(), quant and quant['recipe']
        self.context = context or nullcontext()
        self.names, self.stride, self.nc = model.names, stride_of(model), len(model.names)
        self.task, head = task_of(model), model.model[-1] if hasattr(model, 'model') else model
        self.nc, self.kind = getattr(head, 'nc', self.nc), f'its head is {type(head).__name__}'
        self.device = next(model.parameters()).device
        self.quantized_for, self.target = sides_in(self.recipe), target_of_recipe(self.recipe)

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict for images FP32 [B, 3, H, W] in 0..1: see file_model.py."""
        return self.task.predictions(self.outputs(images))

    def outputs(self, images: torch.Tensor) -> torch.Tensor | tuple:
        """Run the model: return its predictions, and the outputs for training."""
        with self.context:
            return self.model(channels_last(images))


def split_outputs(outputs: torch.Tensor | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split predictions, and of a segmentation model prototypes, by meaning.

    Returns 'boxes' [B, 4, N] and 'scores' [B, nc, N], and of a segmentation model 'coefficients' [B, nm, N] and 'prototypes'
    [B, nm, h, w]. Of a classifier 'logits' [B, nc].
    """
    predictions, *prototypes = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    if predictions.dim() == 2:
        return {'logits': predictions}
    if not prototypes:
        return {'boxes': predictions[:, :4], 'scores': predictions[:, 4:]}
    nm = prototypes[0].shape[1]
    return {**split_outputs(predictions[:, :-nm]), 'coefficients': predictions[:, -nm:], 'prototypes': prototypes[0]}
