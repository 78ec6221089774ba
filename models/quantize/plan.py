"""From what was asked to what is done: each setting that was not typed gets its value here, once."""

from dataclasses import replace
from typing import TypeVar

from models.quantize.activations import activation_for
from utils.qat.config.qat import LEARNT, CalibrationConfig, QuantizeConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.upstream import Network
from utils.qat.data.dataset import Data
from utils.qat.data.image_folders import ImageFolders

Plan = TypeVar('Plan', bound=CalibrationConfig)


def resolve(asked: Plan, model: Network, device: str, data: Data | ImageFolders | None = None) -> Plan:
    """Return the settings with a value for everything, for a float model that they fit, a type of device ('cuda'), and data.

    `decided` has the names of the settings that were not typed. Without data it is taken to have labels. Raises QatError if the device
    or an activation function does not fit the settings.
    """
    plan = asked.decide(activation=activation_for(model, asked))
    if not isinstance(plan, QuantizeConfig):
        return plan
    gpu, learns = device == 'cuda', plan.activation in LEARNT
    plan = plan.decide(
        amp='fp16' if gpu else 'off', compile=gpu, lr=3e-4 if learns else 1e-5, task_loss=1.0 if learns else 0.0
    )
    again = 'leave out' if not plan.resume else 'start another run without'
    if plan.compile and not gpu:
        raise QatError(f'--compile: records a CUDA graph, and the device is {device}; {again} --compile')
    if plan.amp == 'fp16' and not gpu:
        raise QatError(f'--amp fp16: only on a GPU, and the device is {device}; {again} --amp, or use bf16')
    needs_labels = plan.epochs or plan.max_drop is not None or plan.exchanges
    if data and not needs_labels and (plan.eval_origin or plan.eval_ptq) and not data.labelled:
        LOGGER.warning(f'{data.flag} {data.file}: no image has a label, so nothing is scored')
        plan = replace(plan, eval_origin=False, eval_ptq=False)
    return plan
