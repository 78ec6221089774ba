"""Replace MODEL.xml and MODEL.bin together: a process that is killed at any time leaves a pair that loads, old or new.

Two files cannot be renamed at once, and OpenVINO looks for the weights under the name of the .xml only. But it reads only those
parts of a .bin to which the .xml points, so one .bin can serve two .xml files. The pair goes through these states, one rename each:

    .xml                    .bin
    old                     old weights
    old                     old weights, behind them the new ones
    new, points behind      old weights, behind them the new ones
    new, points behind      new weights, and behind them once more
    new                     new weights, and behind them once more
    new                     new weights
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from utils.qat.core.files import atomic

ALIGNED = 4096  # bytes; weights begin at a multiple of it


@contextlib.contextmanager
def atomic_pair(path: Path) -> Iterator[Path]:
    """Yield a temporary .xml path; if the block succeeds, rename its .xml and .bin to their final names.

    Args:
        path: the .xml to write; the .bin lies beside it.

    Raises:
        OSError: from the block, or a file cannot be written. A pair that loads stays.
    """
    weights = path.with_suffix('.bin')
    with atomic(weights) as new_weights, atomic(path) as new:  # the .xml is renamed first
        yield new
        step = new.with_suffix('.step')
        try:
            if path.is_file() and weights.is_file():
                behind = -(-max(weights.stat().st_size, new_weights.stat().st_size) // ALIGNED) * ALIGNED
                _write_weights([(0, weights), (behind, new_weights)], step, weights)
                _write_pointing_behind(new, behind, step, path)
                _write_weights([(0, new_weights), (behind, new_weights)], step, weights)
            else:
                path.unlink(missing_ok=True)  # it lacks its .bin, and the new .bin does not fit it
                _write_weights([(0, new_weights)], step, weights)
        finally:
            step.unlink(missing_ok=True)


def _write_weights(parts: Sequence[tuple[int, Path]], step: Path, weights: Path) -> None:
    """Concatenate files, each from its offset on, into `weights`, through the temporary file `step`."""
    with step.open('wb') as content:
        for place, part in parts:
            content.seek(place)
            with part.open('rb') as source:
                shutil.copyfileobj(source, content)
    os.replace(step, weights)


def _write_pointing_behind(new: Path, behind: int, step: Path, path: Path) -> None:
    """Write the .xml `new` to `path`, with all weight offsets raised by `behind` bytes, through the temporary file `step`."""
    tree = ElementTree.parse(new)
    for data in tree.iterfind(".//layer[@type='Const']/data"):
        data.set('offset', str(int(data.attrib['offset']) + behind))
    tree.write(step)
    os.replace(step, path)
