"""Versions of the packages that decide the numbers."""

import platform
from importlib import metadata

PACKAGES = ('torch', 'torchvision', 'numpy', 'pytorch-quantization')  # whose versions decide the numbers


def versions():
    """Versions of what decides the numbers."""
    return {'python': platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}
