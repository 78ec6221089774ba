"""Measure the time and memory to load a checkpoint, by our reader, which runs no code of the file, and by torch.load.

    python benchmarks/loading.py CHECKPOINT.pt [--times 7]

Run it in a patched YOLOv9 tree. Each load has its own process, from the file to the model in FP32. The two readers take turns.
Imports are not counted. Our reader also hashes the file and checks its CRC-32. Prints medians and their ratio.
"""

import argparse
import statistics
import subprocess
import sys

LOAD = """
import os, resource, sys, time
sys.path.insert(0, os.getcwd())
import models.yolo  # before torch: it says how threads wait
import torch
from models.quantize.pickled_modules import build
from utils.qat.untrusted.torch_archive import read_archive
torch.ones(8).half().float()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
if sys.argv[1] == 'ours':
    archive = read_archive(sys.argv[2])
    content = build(archive)
else:
    content = torch.load(sys.argv[2], map_location='cpu', weights_only=False)
model = (content.get('ema') or content['model']).float()
if sys.argv[1] == 'ours':
    archive.digest.result()
print(time.perf_counter() - start, time.process_time() - cpu, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def main() -> None:
    """Load the checkpoint in both ways, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('checkpoint')
    parser.add_argument('--times', type=int, default=7, help='loads of each kind (default: 7)')
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {'ours': [], 'torch.load': []}
    for _ in range(args.times):
        for kind, rows in found.items():
            done = subprocess.run(
                [sys.executable, '-c', LOAD, kind, args.checkpoint], check=True, capture_output=True, text=True
            )
            rows.append([float(figure) for figure in done.stdout.split()[-3:]])
    print(f'{"":12}{"seconds":>10}{"CPU s":>10}{"peak MiB":>10}')
    medians = {kind: [statistics.median(column) for column in zip(*rows)] for kind, rows in found.items()}
    for kind, (wall, cpu, memory) in medians.items():
        print(f'{kind:12}{wall:10.3f}{cpu:10.3f}{memory:10.0f}')
    print(f'{"ratio":12}' + ''.join(f'{ours / theirs:10.2f}' for ours, theirs in zip(*medians.values())))


if __name__ == '__main__':
    main()
