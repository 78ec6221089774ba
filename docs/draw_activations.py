#!/usr/bin/env python3
"""Draw the pictures of docs/activations.md from the CSV files in docs/measured.

    python docs/draw_activations.py

activations.svg has AP over time, a point for each model of frontier.csv; fod.svg what ReLU costs by the number of images, from fod.csv.
Needs matplotlib, neither torch nor YOLOv9.
"""

import csv
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / 'measured'
CHANCE = 0.7  # points, of a difference on the images of frontier.csv
STAGES = {  # model in fod.csv → its title, its colour, and how far its points stand aside, so that no interval hides another
    'float, exchanged': ('float with ReLU', '0.5', 0.94),
    'INT8, calibrated': ('INT8, calibrated', 'tab:orange', 1.0),
    'INT8, epoch 10': ('INT8, fine-tuned on labels', 'tab:blue', 1.06),
}


def rows_of(name: str) -> list[dict[str, str]]:
    """Read a CSV file."""
    with (FOLDER / name).open(newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def by_time(figure: Figure) -> None:
    """Draw AP over time."""
    axes = figure.subplots()
    for row in rows_of('frontier.csv'):
        x, y = float(row['CPU ms']), float(row['points'])
        axes.errorbar(x, y, CHANCE, fmt='o', color='tab:blue' if 'INT8' in row['model'] else '0.5', capsize=2)
        axes.annotate(row['model'], (x, y), (6, -12), textcoords='offset points', fontsize=8)
    axes.set(xlabel='CPU ms of an image in OpenVINO', ylabel='points of AP against float', xlim=(10, 52))
    axes.grid(alpha=0.3)


def by_images(figure: Figure) -> None:
    """Draw what ReLU costs over the number of images that the model learnt from, with confidence intervals."""
    axes = figure.subplots()
    rows = [row for row in rows_of('fod.csv') if row['activation'] == 'relu' and row['seed'] == '57']  # of one teacher
    for stage, (title, color, aside) in STAGES.items():
        own = [row for row in rows if row['model'] == stage]
        x, y = [aside * int(row['images']) for row in own], [float(row['difference in points']) for row in own]
        spread = [float(row['interval in points']) for row in own]
        axes.errorbar(x, y, spread, fmt='o-', color=color, capsize=3, label=title)
    axes.axhline(0, color='0.3', linewidth=0.8)
    numbers = sorted({int(row['images']) for row in rows})
    axes.set_xscale('log')
    axes.set_xticks(numbers, [f'{number:,}' for number in numbers], minor=False)
    axes.minorticks_off()
    axes.set(xlabel='images that it learnt from', ylabel='points of AP against float with SiLU')
    axes.grid(alpha=0.3)
    axes.legend(loc='upper left')


def main() -> None:
    """Write the pictures."""
    mpl.rcParams.update({'svg.hashsalt': 'activations', 'svg.fonttype': 'none'})  # the same bytes each time
    for name, draw in (('activations', by_time), ('fod', by_images)):
        figure = Figure(figsize=(8, 4.2), layout='constrained')
        draw(figure)
        figure.savefig(FOLDER / f'{name}.svg', metadata={'Date': None})


if __name__ == '__main__':
    main()
