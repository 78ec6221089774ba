"""The parts of a model's predictions."""

import torch


def parts(outputs: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split predictions by meaning.

    Args:
        outputs: predictions, and of a segmentation model prototypes, see file_model.py.

    Returns:
        'boxes' [B, 4, N] and 'scores' [B, nc, N], and of a segmentation model 'coefficients' [B, nm, N] and
        'prototypes' [B, nm, h, w]. Of a classifier 'logits' [B, nc].
    """
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2:
        return {'logits': outputs}
    if not isinstance(outputs, (tuple, list)):
        return {'boxes': outputs[:, :4], 'scores': outputs[:, 4:]}
    predictions, prototypes = outputs
    nm = prototypes.shape[1]
    return {**parts(predictions[:, :-nm]), 'coefficients': predictions[:, -nm:], 'prototypes': prototypes}
