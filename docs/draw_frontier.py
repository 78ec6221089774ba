#!/usr/bin/env python3
"""Draw docs/measured/activations.svg, the picture of docs/activations.md, from frontier.csv beside it: AP over time, a point for each model.

    python docs/draw_frontier.py

Needs matplotlib, neither torch nor YOLOv9.
"""

import csv
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / 'measured'
CHANCE = 0.7  # points, of a difference on these images


def main() -> None:
    """Write the picture."""
    mpl.rcParams.update({'svg.hashsalt': 'activations', 'svg.fonttype': 'none'})  # the same bytes each time
    with (FOLDER / 'frontier.csv').open(newline='', encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(8, 4.2), layout='constrained')
    axes = figure.subplots()
    for row in rows:
        x, y = float(row['CPU ms']), float(row['points'])
        axes.errorbar(x, y, CHANCE, fmt='o', color='tab:blue' if 'INT8' in row['model'] else '0.5', capsize=2)
        axes.annotate(row['model'], (x, y), (6, -12), textcoords='offset points', fontsize=8)
    axes.set(xlabel='CPU ms of an image in OpenVINO', ylabel='points of AP against float', xlim=(10, 52))
    axes.grid(alpha=0.3)
    figure.savefig(FOLDER / 'activations.svg', metadata={'Date': None})


if __name__ == '__main__':
    main()
