"""Make text from a file, such as a name, safe to print."""

import unicodedata

JOINERS = '\u200c\u200d'  # between letters of Persian and Hindi, and in emoji
# Categories of Unicode: control, format (bidirectional among them), half a character, line and paragraph separators
CONTROLS = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
LONGEST = 2000  # characters of a message


def is_printable(character: str) -> bool:
    """Tell whether a character is visible text: no line break, control character or bidirectional character."""
    return character.isprintable() or character in JOINERS or unicodedata.category(character) not in CONTROLS


def visible(text: object, keep: str = '') -> str:
    r"""Replace each character of str(text) that is not printable by an escape, such as \x1b or \u202e; `keep` stays."""
    text = str(text)
    if text.isprintable():  # nearly always, and fast
        return text
    return ''.join(c if c in keep or is_printable(c) else c.encode('unicode_escape').decode() for c in text)


def cut(text: str) -> str:
    """Cut the middle of a text that is too long: its start tells where the mistake is, its end what to do."""
    return text if len(text) <= LONGEST else f'{text[: LONGEST * 3 // 4]} … {text[-LONGEST // 4 :]}'
