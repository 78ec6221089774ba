"""The same quantized model with pytorch-quantization's own TensorQuantizer in it, to compare with."""

from copy import deepcopy

from pytorch_quantization.nn import TensorQuantizer
from pytorch_quantization.tensor_quant import QuantDescriptor

from models.quantize.quantizers import Quantizer


def with_stock_quantizers(model):
    """A copy of `model` (calibrated) whose quantizers are the library's, with the same ranges and as much shared."""
    model, stock = deepcopy(model), {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                if child not in stock:
                    amax = child._amax if child._axis is None else child._amax.view(-1, 1, 1, 1)
                    stock[child] = TensorQuantizer(
                        QuantDescriptor(num_bits=8, axis=child._axis, fake_quant=True, amax=amax.cpu().numpy())
                    )
                    stock[child].to(amax.device)
                module._modules[name] = stock[child]
    return model
