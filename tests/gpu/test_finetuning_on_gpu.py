"""Laws of fine-tuning that a GPU alone can break: graphs, streams, and steps that do not wait."""

import itertools
import math

import pytest
import torch
from helpers.zoo import image, recipe, same, state

from models.quantize.finetuning.loop import finetune, supervised_layers
from models.quantize.finetuning.training_step import GraphedStep, NotFinite, TrainingStep

pytestmark = pytest.mark.gpu
LOADER = [image(96, 2, seed) for seed in range(4)]


@pytest.mark.parametrize('task_loss', [0.0, 1.0])
@pytest.mark.parametrize('amp', ['off', 'bf16', 'fp16'])
def test_a_graph_learns_what_single_launches_learn(small, amp, task_loss):
    """Over several epochs, with a last batch of another size, which runs without the graphs."""
    batches = [b.cuda() for b in [*LOADER, *LOADER, image(96, 1, 9)]]
    if task_loss:  # as many objects in a batch as the number of the batch
        labels = (torch.tensor([[0, 0, 0.5, 0.5, 0.3, 0.4]] * number).view(-1, 6) for number in itertools.count())
        batches = [(b, of_one.cuda()) for b, of_one in zip(batches, labels)]
    torch.backends.cudnn.deterministic = True
    states = []
    for compile in (False, True):
        student = small.quantized_model().cuda()
        list(
            finetune(
                student,
                small.float_model().cuda(),
                batches,
                recipe(epochs=2, iters=9, amp=amp, compile=compile, task_loss=task_loss),
            )
        )
        states.append(state(student))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(states[0].values(), states[1].values()))


@pytest.mark.parametrize('amp', ['off', 'bf16', 'fp16'])
@pytest.mark.parametrize('compile', [False, True])
def test_no_step_waits_and_a_fault_is_named(small, amp, compile):
    student = small.quantized_model().cuda()
    step = TrainingStep(student, small.float_model().cuda(), supervised_layers(student, 1), 1e-5, amp, compile)
    step = GraphedStep(step) if compile else step
    batches = [b.cuda() for b in LOADER]
    for images in [*batches, *batches]:
        step(images)
    step.check()
    before = state(student)
    torch.cuda.set_sync_debug_mode('error')
    step(batches[0].fill_(math.nan))
    step(batches[1])
    torch.cuda.set_sync_debug_mode('default')
    with pytest.raises(NotFinite, match=r'layer model\.0 on'):
        step.check()
    assert same(state(student), before), 'neither the bad step nor the good one after it was taken'


@pytest.mark.parametrize('amp', ['off', 'bf16', 'fp16'])
@pytest.mark.parametrize('compile', [False, True])
def test_fine_tuning_goes_on_with_gpu_and_graph(small, amp, compile):
    torch.backends.cudnn.deterministic = True
    config, batches = recipe(epochs=3, iters=8, lr=1e-4, amp=amp, compile=compile), [b.cuda() for b in LOADER * 2]
    student, finished = small.quantized_model().cuda(), []
    for epoch in finetune(student, small.float_model().cuda(), batches, config):
        finished.append(epoch)
    whole, other = state(student), small.quantized_model().cuda()
    again = list(finetune(other, small.float_model().cuda(), batches, config, after=finished[0]))
    assert [e.number for e in again] == [1, 2, 3] and ('loss_scale' in finished[0].state['tensors']) == (amp == 'fp16')
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(whole.values(), state(other).values()))
