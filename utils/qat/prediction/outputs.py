"""What a model returns, taken apart."""


def parts(outputs):
    """{name: tensor} of predictions, see file_model.py: boxes [B, 4, N] and scores [B, nc, N], and of a segmentation model
    coefficients [B, nm, N] and prototypes [B, nm, h, w]."""
    if not isinstance(outputs, (tuple, list)):
        return {'boxes': outputs[:, :4], 'scores': outputs[:, 4:]}
    predictions, prototypes = outputs
    nm = prototypes.shape[1]
    return {**parts(predictions[:, :-nm]), 'coefficients': predictions[:, -nm:], 'prototypes': prototypes}
