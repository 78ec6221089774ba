"""Versions of the packages that decide the numbers of a run."""

import platform
from importlib import metadata

PACKAGES = ('torch', 'torchvision', 'numpy', 'pytorch-quantization')


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES: name → version."""
    return {'python': platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}
