"""A YAML file that a flag names, as plain values."""

from pathlib import Path
from typing import Any

from utils.qat.core.errors import QatError

LARGEST_YAML = 2_000_000  # bytes; the names of 20 000 classes are a quarter of it


def read_yaml(file: Path, flag: str) -> Any:
    """Read a YAML file.

    Args:
        file: the file, which exists.
        flag: the option that named it.

    Raises:
        QatError: it is no YAML, or beyond the limits of bounded_yaml.
    """
    import yaml  # here, because `-h` must not need it

    from utils.qat.untrusted.bounded_yaml import TooMuch, load_yaml

    if file.stat().st_size > LARGEST_YAML:
        raise QatError(
            f'{flag} {file}: {file.stat().st_size / 1e6:.1f} MB, at most {LARGEST_YAML / 1e6:.0f} MB are read; is it another file?'
        )
    try:
        return load_yaml(file.read_text(encoding='utf-8', errors='ignore'))
    except TooMuch as e:
        raise QatError(f'{flag} {file}: not read: {e}; is it another file?') from e
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as e:
        raise QatError(f'{flag} {file}: not valid YAML: {" ".join(str(e).split())[:300] or type(e).__name__}') from e
