"""What a file is, by its content."""
import hashlib


def sha256(path):
    """Hex digest of a file."""
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest() if hasattr(hashlib, 'file_digest') \
            else hashlib.sha256(f.read()).hexdigest()
