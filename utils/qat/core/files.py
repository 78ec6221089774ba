"""What a file is, by its content; YAML and checkpoints, read and written."""
import hashlib
import io

from utils.qat.core.errors import QatError, atomic

LARGEST_YAML = 2_000_000  # bytes; the names of 20 000 classes are a quarter of it


def sha256(path):
    """Hex digest of a file."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest() if hasattr(hashlib, 'file_digest') \
            else hashlib.sha256(f.read()).hexdigest()


def read_yaml(file, flag):
    """Content of a YAML file given with `flag`. Raises QatError if it is none, or beyond what anybody writes."""
    import yaml  # here, so that `-h` does not need it

    from utils.qat.untrusted.bounded_yaml import TooMuch, load
    if file.stat().st_size > LARGEST_YAML:
        raise QatError(f'{flag} {file}: {file.stat().st_size / 1e6:.1f} MB, at most {LARGEST_YAML / 1e6:.0f} MB are read; is it another file?')
    try:
        return load(file.read_text(encoding='utf-8', errors='ignore'))
    except TooMuch as e:
        raise QatError(f'{flag} {file}: not read: {e}; is it another file?') from e
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as e:
        raise QatError(f"{flag} {file}: not valid YAML: {' '.join(str(e).split())[:300] or type(e).__name__}") from e


def write_torch(path, content):
    """torch.save to `path`, whole at any moment. In memory first: its own writer does not say that it was the disk that is full."""
    import torch
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(path) as tmp:
        tmp.write_bytes(buffer.getbuffer())
