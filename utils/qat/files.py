"""What a file is, by its content; and where the files of a run go."""
import hashlib

from utils.qat.distributed import from_first, is_first


def sha256(path):
    """Hex digest of a file."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest() if hasattr(hashlib, 'file_digest') \
            else hashlib.sha256(f.read()).hexdigest()


def new_folder(config):
    """Create and return PROJECT/NAME (numbered if it exists and --exist-ok is not given)."""
    from utils.general import increment_path  # here: it imports torch, and `-h` must not
    folder = from_first(increment_path(config.project / config.name, exist_ok=config.exist_ok))
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
    return folder
