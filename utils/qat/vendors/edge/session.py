"""Files for edge chips in LiteRT on the CPU: their integers, decoded here as a program does it (examples/edge/decode.py has it in NumPy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override
from utils.tal.anchor_generator import dist2bbox, make_anchors

from utils.qat.core.errors import QatError
from utils.qat.vendors.litert.session import LiteRT, MeasuredLiteRT, read_metadata, values_of
from utils.qat.vendors.session import Signature

STRIDES = 8, 16, 32
BINS = 16  # of the distribution of each side of a box
JOINED = 'boxes', 'scores'  # outputs of the layout coral; those of heads are box8, cls8, ...
LAYOUTS = {'coral': JOINED, 'heads': tuple(f'{part}{stride}' for stride in STRIDES for part in ('box', 'cls'))}
AGAIN = 'write it again with export_qat.py --include edge'


def decode(outputs: Mapping[str, torch.Tensor], size: Sequence[int], sigmoid: bool) -> torch.Tensor:
    """Decode the outputs of a file to predictions [B, 4 + nc, N], boxes as xywh in pixels.

    outputs: FP32, by the names of LAYOUTS: [B, N, C] or [B, h, w, C]. size: height and width of the images. sigmoid: whether classes have
    scores already, instead of logits.
    """
    if JOINED[0] not in outputs:
        maps = ([outputs[f'{part}{stride}'].flatten(1, 2) for stride in STRIDES] for part in ('box', 'cls'))
        outputs = dict(zip(JOINED, (torch.cat(each, 1) for each in maps)))
    logits, scores = (outputs[name] for name in JOINED)
    cells, strides = make_anchors([logits.new_empty(1, 1, *(side // s for side in size)) for s in STRIDES], STRIDES)
    sides = logits.unflatten(2, (4, BINS)).softmax(-1) @ torch.arange(float(BINS))  # left, top, right, bottom
    boxes = dist2bbox(sides, cells) * strides
    return torch.cat((boxes, scores if sigmoid else scores.sigmoid()), -1).transpose(1, 2)


class Edge(LiteRT):
    """A .tflite file of --include edge. Images and predictions are those of every session."""

    def __init__(self, file: Path, device: torch.device) -> None:
        super().__init__(file, device)
        self.names = LAYOUTS.get(self.metadata.get('layout', ''), ())
        by_name = {output['name']: output for output in self.outputs}
        spare = self.metadata.get('spare', '0')
        if by_name.keys() != {*self.names} or spare not in ('0', '1'):
            raise QatError(f'{file}: its outputs are {", ".join(by_name)}, not those of its layout; {AGAIN}')
        self.details, self.spare = by_name, int(spare)
        self.sigmoid = self.metadata.get('sigmoid') == 'True'

    @staticmethod
    @override
    def takes(file: Path) -> bool:
        return 'layout' in read_metadata(file)

    @override
    def signature(self) -> Signature:
        batch, height, width, _ = self.inputs[0]['shape'].tolist()
        classes = self.details[self.names[1]]['shape'].tolist()[-1] - self.spare
        number = sum((height // stride) * (width // stride) for stride in STRIDES)
        return Signature(
            {'images': [batch, 3, height, width]}, {'output0': [batch, 4 + classes, number]}, self.metadata
        )

    def integers(self) -> dict[str, torch.Tensor]:
        """Return the outputs as they are in the file, INT8, by the names of LAYOUTS."""
        return {name: torch.from_numpy(self.model.get_tensor(self.details[name]['index'])) for name in self.names}

    @override
    def compute(self) -> dict[str, torch.Tensor]:
        """Compute predictions for the images of `give`."""
        self.invoke()
        floats = {name: values_of(values.numpy(), self.details[name]) for name, values in self.integers().items()}
        predictions = decode(floats, self.size[::-1], self.sigmoid)
        return {'output0': predictions[:, : predictions.shape[1] - self.spare].to(self.device)}


class MeasuredEdge(MeasuredLiteRT):
    """Such a file, described as LiteRT's."""

    opens = Edge


MEASURED = MeasuredEdge
