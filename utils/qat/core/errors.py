"""The line between a user's mistake and a bug.

A `QatError` is something the user can mend: it prints as one line on stderr and ends the command with exit code 2.
Every other exception is a bug of ours (or of a library) and keeps its traceback.
"""

from utils.qat.core.printable import cut, visible


class QatError(Exception):
    """A mistake of the user's. The message names the file or flag, what is allowed, and what to do next, in one line whatever it repeats."""

    def __str__(self):
        text = super().__str__()
        if text.startswith('Caught QatError in DataLoader worker'):  # whose traceback stands before the message
            text = text.rpartition(f'\n{__name__}.{type(self).__name__}: ')[2].rstrip('\n')
        return cut(visible(text))


def check(problems):
    bad = [text for is_bad, text in problems if is_bad]
    if bad:
        raise QatError('; '.join(bad))
