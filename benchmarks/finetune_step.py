"""What a step of fine-tuning costs, as ratios against the float step in the same run. Run it inside a patched YOLOv9 tree:

    python TOOLKIT/benchmarks/finetune_step.py --weights yolov9-t-converted.pt --batch-size 10 --imgsz 640 --amp fp16 bf16 off

The float step is what any distillation must pay: student forward and backward, teacher forward, in the same precision. The
stock step distils too, layer by layer into a student with pytorch-quantization's own TensorQuantizers, written as one would by
the book: autocast and GradScaler where they apply, Adam. Images are random and on the device already; loading them is not
measured.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from copy import deepcopy
from pathlib import Path

sys.path.insert(0, os.getcwd())
import torch
import torch.nn.functional as F

import utils.qat  # noqa: F401  before torch, whose threads it has sleep while they wait
from models.quantize import checkpoint
from models.quantize.calibration.calibrate import calibrate
from models.quantize.convert import quantize_model
from models.quantize.finetuning.loop import supervised_layers
from models.quantize.finetuning.losses import relative_error
from models.quantize.finetuning.training_step import DTYPES, GraphedStep, TrainingStep, head_emits_raw_maps
from models.quantize.scales import tie_scales
from stock import with_stock_quantizers
from utils.qat.config.qat import AMP, QuantizeConfig
from utils.qat.core.device import describe, select_device
from utils.qat.core.log import quiet_upstream


def float_step(student, teacher, amp):
    """Callable: images → loss of a float student, with gradients; nothing is updated."""
    head_emits_raw_maps(student.requires_grad_())
    head_emits_raw_maps(teacher)

    def step(images):
        student.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, DTYPES[amp], enabled=amp != 'off'):
            with torch.no_grad():
                teacher(images)
            loss = sum(x.float().square().mean() for x in student(images))
        loss.backward()
        return loss

    return step


def stock_step(student, teacher, layers, amp):
    """Callable: images → loss, of a student with stock quantizers; its weights are updated."""
    head_emits_raw_maps(student.requires_grad_())
    head_emits_raw_maps(teacher)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler(next(student.parameters()).device.type, enabled=amp == 'fp16')
    outputs = []
    for model in (student, teacher):
        for index in layers[:-1]:
            model.model[index].register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def step(images):
        optimizer.zero_grad(set_to_none=True)
        outputs.clear()
        with torch.autocast(images.device.type, DTYPES[amp], enabled=amp != 'off'):
            with torch.no_grad():
                targets = [*teacher(images), *outputs]
            outputs.clear()
            outputs[:0] = student(images)
            loss = sum(F.mse_loss(s.float(), t.float()) for s, t in zip(outputs, targets, strict=True)) / len(layers)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def measure(step, images, steps, repeats, may_wait=False):
    """(median over `repeats` of the milliseconds per step, peak MiB: allocated, reserved); 0 MiB without a GPU."""
    cuda = images.device.type == 'cuda'
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(5 if cuda else 1):
        step(images)
    wait()
    if cuda and not may_wait:
        torch.cuda.set_sync_debug_mode('error')  # a step that waits for the device is a mistake
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            step(images)
        if cuda:
            torch.cuda.set_sync_debug_mode('default')
        wait()
        times.append((time.perf_counter() - start) / steps * 1e3)
    memory = [torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20] if cuda else [0, 0]
    return statistics.median(times), *memory


def prepare(args, device, seed):
    """(random images, float teacher, calibrated model, layers to compare), with PyTorch set as qat.py sets it."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(seed)
    images = torch.rand(args.batch_size, 3, args.imgsz, args.imgsz, device=device)
    with quiet_upstream():
        teacher = checkpoint.load_float(args.weights, device)
    quantized = deepcopy(teacher)
    quantize_model(quantized)
    tie_scales(quantized)
    calibrate(quantized, [images], QuantizeConfig(weights=args.weights, data=Path(), calib_method='mse'))
    return images, teacher, quantized, supervised_layers(quantized, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', type=Path, required=True, help='float checkpoint, reparameterized')
    parser.add_argument('--device', default='')
    parser.add_argument('--batch-size', type=int, default=10)
    parser.add_argument('--imgsz', type=int, default=640)
    parser.add_argument('--amp', nargs='+', choices=AMP, default=['off'])
    parser.add_argument('--steps', type=int, default=30, help='per repeat')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--stock', action='store_true', help="also with pytorch-quantization's own quantizers")
    parser.add_argument('--json', type=Path, default=Path('finetune_step.json'))
    args = parser.parse_args()

    device = select_device(args.device)
    cuda = device.type == 'cuda'
    images, teacher, quantized, layers = prepare(args, device, seed=0)

    rows = []
    for amp in args.amp:
        kinds = {
            'float pair': lambda: float_step(deepcopy(teacher), teacher, amp),
            'step': lambda: TrainingStep(deepcopy(quantized), teacher, layers, relative_error, 1e-5, amp),
        }
        if args.stock:
            kinds['stock quantizers'] = lambda: stock_step(
                with_stock_quantizers(quantized), deepcopy(teacher), layers, amp
            )
        if cuda:
            kinds['step --compile'] = lambda: GraphedStep(
                TrainingStep(deepcopy(quantized), teacher, layers, relative_error, 1e-5, amp, capturable=True)
            )
        for kind, make in kinds.items():
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step = make()
            ms, allocated, reserved = measure(
                step, images, args.steps, args.repeats, may_wait=kind == 'stock quantizers'
            )
            if kind.startswith('step'):
                step.check()
            del step
            rows.append({'amp': amp, 'kind': kind, 'ms': ms, 'allocated_mib': allocated, 'reserved_mib': reserved})
            base = next(r for r in rows if r['amp'] == amp)
            rows[-1]['times_float'] = ms / base['ms']
            rows[-1]['memory_times_float'] = reserved / base['reserved_mib'] if cuda else None

    print(
        f'\n{args.weights.stem}, batch {args.batch_size}, {args.imgsz} px, {describe(device)}, torch {torch.__version__}\n\n'
        '| --amp | | ms | x float pair | peak MiB (allocated / reserved) | x float pair (reserved) |\n|---|---|---|---|---|---|'
    )
    for r in rows:
        memory = (
            f'{r["allocated_mib"]:.0f} / {r["reserved_mib"]:.0f} | {r["memory_times_float"]:.2f}' if cuda else '- | -'
        )
        print(f'| {r["amp"]} | {r["kind"]} | {r["ms"]:.1f} | {r["times_float"]:.2f} | {memory} |')
    args.json.write_text(
        json.dumps(
            {
                'device': describe(device),
                'torch': torch.__version__,
                'python': platform.python_version(),
                'settings': {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
                'rows': rows,
            },
            indent=1,
        )
    )


if __name__ == '__main__':
    main()
