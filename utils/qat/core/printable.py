"""Text that a file wrote, such as a name, made safe to show: nothing in it moves the cursor, colours the screen or turns the writing around."""

import unicodedata

JOINERS = '\u200c\u200d'  # between letters of Persian and Hindi, and in emoji
CONTROLS = (
    'Cc',
    'Cf',
    'Cs',
    'Zl',
    'Zp',
)  # categories of Unicode: control, format (bidirectional among them), half a character, line breaks
LONGEST = 2000  # characters of a message


def is_printable(character):
    """Whether a character shows and does nothing else: letters, signs and spaces, not line breaks, control or bidirectional characters."""
    return character.isprintable() or character in JOINERS or unicodedata.category(character) not in CONTROLS


def visible(text, keep=''):
    """`text` with an escape, such as \\x1b or \\u202e, for each character that is not printable; those in `keep` stay."""
    text = str(text)
    if text.isprintable():  # nearly always, and quick
        return text
    return ''.join(c if c in keep or is_printable(c) else c.encode('unicode_escape').decode() for c in text)


def cut(text, longest=LONGEST):
    """`text`, its middle left out if it is longer than `longest`: its beginning says where, its end says what to do."""
    return text if len(text) <= longest else f'{text[: longest * 3 // 4]} … {text[-longest // 4 :]}'
