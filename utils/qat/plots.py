"""Pictures of a run. Matplotlib without pyplot: no global state, no display needed."""
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.errors import atomic


def plot_ap(path, report):
    """AP of every fine-tuning epoch, with the float and the PTQ model as lines to compare with."""
    figure = Figure(figsize=(7, 4), layout='constrained')
    axes = figure.subplots()
    for key, label, style in (('origin', 'float', '-'), ('ptq', 'PTQ', '--')):
        if report[key] and 'ap' in report[key]:  # not with --no-eval-origin, --no-eval-ptq
            axes.axhline(report[key]['ap'], linestyle=style, color='0.4', label=f"{label} {report[key]['ap']:.4f}")
    epochs = [e['epoch'] for e in report['epochs']]
    axes.plot(epochs, [e['ap'] for e in report['epochs']], 'o-', color='tab:blue', label='QAT')
    if report['best']:
        axes.plot(report['best']['epoch'], report['best']['ap'], 'o', markersize=11, markerfacecolor='none', color='tab:green',
                  label=f"best {report['best']['ap']:.4f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel='epoch', ylabel='AP (IoU 0.50:0.95)',
             title=f"Fine-tuning with quantization, scored on {report['images'][report['chosen_on']]} images ({report['chosen_on']})")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic(path) as tmp:
        figure.savefig(tmp, dpi=120)
