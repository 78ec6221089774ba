"""A quantized model with pytorch-quantization's own TensorQuantizers, for comparison."""

from copy import deepcopy
from typing import Any

from pytorch_quantization.nn import TensorQuantizer
from pytorch_quantization.tensor_quant import QuantDescriptor

from models.quantize.quantizers import Quantizer


def with_stock_quantizers(model: Any) -> Any:
    """Copy a calibrated model with stock quantizers instead of ours, with the same ranges and the same sharing."""
    model = deepcopy(model)
    stock: dict[Quantizer, TensorQuantizer] = {}
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
