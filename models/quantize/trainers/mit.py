"""MultimediaTechLab/YOLO, YOLOv9 under the MIT licence: a state dict, or a checkpoint of Lightning that has one.

The layers are upstream's under other names. Those behind the main head are the auxiliary branch.
"""

import re

from typing_extensions import override

from models.quantize.trainers.trainer import Trainer, Weights
from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import Archive, Call

MODELS = 'ema.model.', 'model.model.', ''  # prefixes of a model's names; the first that a file has is taken
HEAD = re.compile(r'(\d+)\.heads\.0\.class_conv\.2\.weight')
RENAMED = (
    (r'^(\d+)\.conv\.(conv|bn)\.', r'\1.cv1.\2.'),  # AConv
    (r'(?<!\bconv\d\.)\bconv(\d)\.', r'cv\1.'),  # all but the two branches of a RepConv
    (r'\bbottleneck\.', 'm.'),
    (r'\bheads\.(\d+)\.anchor_conv\.', r'cv2.\1.'),
    (r'\bheads\.(\d+)\.class_conv\.', r'cv3.\1.'),
    (r'\bheads\.0\.anc2vec\.anc2vec\.', 'dfl.conv.'),
)
REPEATED = re.compile(r'\.heads\.[1-9]\.anc2vec\.')  # the constants of heads.0 again


class Mit(Trainer):
    """MultimediaTechLab/YOLO."""

    title = 'MultimediaTechLab/YOLO'
    head = 'DDetect'

    @override
    def wrote(self, archive: Archive) -> bool:
        return bool(_model_in(archive.content))

    @override
    def weights(self, archive: Archive) -> Weights:
        records, values, tensors = _model_in(archive.content), Values(archive.members), {}
        head = min(int(match[1]) for name in records if (match := HEAD.fullmatch(name)))
        for name, record in records.items():
            if int(name.partition('.')[0]) <= head and not REPEATED.search(name):
                for of_mit, of_upstream in RENAMED:
                    name = re.sub(of_mit, of_upstream, name)
                tensors[f'model.{name}'] = values.value(record)
        dfl = f'model.{head}.dfl.conv.weight'
        tensors[dfl] = tensors[dfl][..., 0]  # of a Conv3d
        return Weights(tensors)


def _model_in(content: object) -> dict[str, object]:
    """Find the model of a checkpoint: name without prefix → record of the tensor; empty if it has none of this trainer."""
    state = content.get('state_dict', content) if type(content) is dict else content
    items = state.items if type(state) is Call else state.items() if type(state) is dict else ()
    for prefix in MODELS:
        tensors = {
            key.removeprefix(prefix): record
            for key, record in items
            if type(key) is str and re.match(rf'{prefix}\d+\.', key)
        }
        if any(map(HEAD.fullmatch, tensors)):
            return tensors
    return {}


TRAINER = Mit()
