"""MODEL.xml and MODEL.bin replaced together: whenever the process is killed, an old pair or a new one lies there, and can be loaded.

Two files cannot be renamed at once, and OpenVINO looks for the weights under the name of the .xml only. But it reads of a .bin no more than
what its .xml points to, so one .bin can serve two .xml files. The pair goes through these states, one rename each:

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
    """Yield a temporary path of an .xml; if the block succeeds, the .xml and the .bin that it wrote there get their names.

    Args:
        path: the .xml to write; the .bin lies beside it.

    Raises:
        OSError: of the block, or of a file that cannot be written. A pair that can be loaded stays.
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
    """Write the content of files, each from a place on, to `weights`, by way of the file `step`."""
    with step.open('wb') as content:
        for place, part in parts:
            content.seek(place)
            with part.open('rb') as source:
                shutil.copyfileobj(source, content)
    os.replace(step, weights)


def _write_pointing_behind(new: Path, behind: int, step: Path, path: Path) -> None:
    """Write the .xml `new` to `path`, by way of the file `step`, with all its weights so many bytes behind."""
    tree = ElementTree.parse(new)
    for data in tree.iterfind(".//layer[@type='Const']/data"):
        data.set('offset', str(int(data.attrib['offset']) + behind))
    tree.write(step)
    os.replace(step, path)
