"""The distinction between a user's mistake and a bug.

The user can correct a `QatError`: the command prints it as one line on stderr and ends with exit code 2. Every
other exception is a bug of ours or of a library, and keeps its traceback.
"""

from collections.abc import Iterable
from typing import Any

from utils.qat.core.printable import cut, visible


class QatError(Exception):
    """A user's mistake, in one printable line: the file or flag, the allowed values and the next step."""

    def __str__(self) -> str:
        text = super().__str__()
        if text.startswith('Caught QatError in DataLoader worker'):  # then a traceback precedes the message
            text = text.rpartition(f'\n{__name__}.{type(self).__name__}: ')[2].rstrip('\n')
        return cut(visible(text))


def check(problems: Iterable[tuple[Any, str]]) -> None:
    """Raise one QatError with the messages of all problems found. problems: pairs (whether it is one, its message)."""
    bad = [text for is_bad, text in problems if is_bad]
    if bad:
        raise QatError('; '.join(bad))
