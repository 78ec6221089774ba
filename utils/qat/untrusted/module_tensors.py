"""The tensors of a pickled module of any class, by the names that its state dict has. The module itself is not built."""

from typing import Any

import torch
from typing_extensions import override

from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import Call, Refused


class ModuleTensors(Values):
    """A builder of plain values that takes the tensors out of modules."""

    @override
    def other(self, record: Call) -> dict[str, torch.Tensor]:
        if not record.new or type(record.state) is not dict:
            return super().other(record)
        parameters, buffers, modules = (self._parts(record, part) for part in ('_parameters', '_buffers', '_modules'))
        found = {**parameters, **buffers}
        for name, inner in modules.items():
            if type(inner) is not dict:
                raise Refused('it has a module whose parts are damaged')
            found |= {f'{name}.{key}': tensor for key, tensor in inner.items()}
        if not all(type(name) is str and isinstance(tensor, torch.Tensor) for name, tensor in found.items()):
            raise Refused('it has a module whose parts are damaged')
        return found

    def _parts(self, record: Call, kind: str) -> dict[str, Any]:
        """Build the parts of a kind that a module has; None stands for a part that it lacks."""
        parts = self.value(record.state.get(kind))
        if not isinstance(parts, dict):
            raise Refused('it has a module whose parts are damaged')
        return {name: part for name, part in parts.items() if part is not None}
