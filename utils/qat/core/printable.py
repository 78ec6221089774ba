"""Text out of a file, such as a name, made safe to show.

It moves no cursor, sets no colours and does not turn the direction of the writing.
"""

import unicodedata

JOINERS = '\u200c\u200d'  # between letters of Persian and Hindi, and in emoji
# Categories of Unicode: control, format (bidirectional among them), half a character, line and paragraph separators
CONTROLS = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
LONGEST = 2000  # characters of a message


def is_printable(character: str) -> bool:
    """Tell whether a character only shows: letters, signs and spaces do.

    Line breaks, control characters and bidirectional characters do more.
    """
    return character.isprintable() or character in JOINERS or unicodedata.category(character) not in CONTROLS


def visible(text: object, keep: str = '') -> str:
    r"""Replace each character that is not printable by an escape, such as \x1b or \u202e.

    Args:
        text: anything; its str() is taken.
        keep: characters that stay as they are.
    """
    text = str(text)
    if text.isprintable():  # nearly always, and fast
        return text
    return ''.join(c if c in keep or is_printable(c) else c.encode('unicode_escape').decode() for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    """Leave out the middle of a text that is too long: the begin tells where the mistake is, the end what to do.

    Args:
        text: the text.
        longest: the most characters.
    """
    return text if len(text) <= longest else f'{text[: longest * 3 // 4]} … {text[-longest // 4 :]}'
