"""Choose the training images that --val-split holds out of training, for any task."""

from collections.abc import Sequence

from utils.qat.core.errors import QatError


def held_out_files(names: Sequence[str], share: float) -> set[str]:
    """Choose the files that --val-split holds out: evenly spread over the names, whatever their order and the seed.

    So the share holds for each folder too, such as that of a class, up to rounding.
    """
    files = sorted(names)
    n = round(share * len(files))
    if not 0 < n < len(files):
        raise QatError(
            f'--val-split {share}: the training set has {len(files)} images, of which {n} would be held out and '
            f'{len(files) - n} trained on; use another share, or leave it out'
        )
    return {files[(2 * i + 1) * len(files) // (2 * n)] for i in range(n)}
