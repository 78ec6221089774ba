"""Shims that let upstream YOLOv9 run on current libraries without changes to its files.

patch_yolov9.sh puts a block at the top of upstream's `utils/__init__.py` and `models/__init__.py`, which calls
`apply_before_upstream()`. The shims need torch, NumPy and Pillow, so they wait until the first module of upstream runs:
our own commands import `utils.qat` long before, and `-h`, or a command that only reads an ONNX file, never needs them.

One function per shim. Each returns True if it had something to do, and its docstring says when it can be deleted. Where
possible it checks for the feature that it replaces, not for a version. Line numbers are of WongKinYiu/yolov9 at 5b1ea9a.
Nothing here replaces a `forward` or assigns inside `torch.nn`.
"""

import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger('yolov9_qat.compat')


def _folder(file: str) -> Path:
    """Return the real folder of a file without resolving the file itself: `patch_yolov9.sh --link` makes ours symlinks."""
    return Path(os.path.realpath(os.path.dirname(os.path.abspath(file))))


TREE = _folder(__file__).parents[1]  # the patched tree
OURS = 'utils.qat', 'models.quantize', 'models.deploy'  # packages that need no shims until they import upstream
_fired: list[str] | None = None  # names of the shims that fired; None until apply() has run


class BeforeUpstream:
    """A finder, first on sys.meta_path, that finds no module but notices when one of upstream is about to run."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Apply the shims if `name` is a module of upstream."""
        if name.startswith(('utils.', 'models.')) and '.'.join(name.split('.')[:2]) not in OURS:
            sys.meta_path.remove(BeforeUpstream)
            apply()


class TorchvisionWithoutDynamo:
    """A finder of torchvision, whoever imports it first: it is imported without torch._dynamo, which only roi_align calls.

    utils/general.py:31 and our own modules import torchvision. Since 0.16 torchvision/ops/roi_align.py imports torch._dynamo.utils:
    a second or two of each start. Delete when torchvision imports it inside the function.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Find torchvision, and no other module."""
        if name != 'torchvision':
            return None
        sys.meta_path.remove(TorchvisionWithoutDynamo)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                importlib.import_module('torch')  # which may need the real one
                with imported_when_called('torch._dynamo.utils', 'is_compile_supported'):
                    run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def apply_before_upstream() -> None:
    """Arrange a call of `apply` at the import of the first module inside upstream's `utils` or `models`."""
    if _fired is None and BeforeUpstream not in sys.meta_path:
        sys.meta_path[:0] = [BeforeUpstream, TorchvisionWithoutDynamo]


def apply() -> list[str]:
    """Install every shim that this environment needs, once; return the names of those that had something to do."""
    global _fired
    if _fired is None:
        _fired = [shim.__name__ for shim in SHIMS if shim()]
        LOGGER.debug('compat: %s', ', '.join(_fired) or 'nothing to do')
    return list(_fired)


def called_from_upstream() -> bool:
    """Tell whether the caller of the caller is defined in the patched tree, and not in a venv inside it."""
    file = sys._getframe(2).f_globals.get('__file__')
    if not file:  # interactive, or code built by exec
        return False
    folder = _folder(file)
    return folder.is_relative_to(TREE) and 'site-packages' not in folder.relative_to(TREE).parts


def stand_in(name: str, doc: str, **members: object) -> types.ModuleType:
    """Put a module with these members into sys.modules, with a spec, so that importlib.util.find_spec finds it."""
    module = types.ModuleType(name, doc)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def stand_in_until_used(name: str, *functions: str) -> types.ModuleType:
    """Put a stand-in for an installed module into sys.modules, which imports the real one at its first use.

    Access to `functions` does not import it, only a call does.
    """

    def real() -> types.ModuleType:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return importlib.import_module(name)

    def attribute(asked: str) -> object:
        if asked.startswith('__'):  # torch asks each loaded module for its file (inspect.getmodule)
            raise AttributeError(asked)
        return getattr(real(), asked)

    def later(function: str) -> object:
        return lambda *args, **kwargs: getattr(real(), function)(*args, **kwargs)

    members = {function: later(function) for function in functions}
    module = stand_in(name, 'Stand-in of yolov9-qat until it is used.', __getattr__=attribute, **members)
    return module


@contextmanager
def imported_when_called(name: str, *functions: str) -> Iterator[None]:
    """Context for an import of a library that needs only `functions` of the module `name`, which is slow to import."""
    module = None if name in sys.modules else stand_in_until_used(name, *functions)
    try:
        yield
    finally:
        if module and sys.modules.get(name) is module:
            del sys.modules[name]


def auto_install_off() -> bool:
    """Turn off the `pip install` that upstream runs by itself.

    utils/general.py:45,377-406: `check_requirements` runs it. It replaces packages of a container and hangs offline.
    A user who wants it sets YOLOv5_AUTOINSTALL=true. Keep for ever.
    """
    if 'YOLOv5_AUTOINSTALL' in os.environ:
        return False
    os.environ['YOLOv5_AUTOINSTALL'] = 'false'
    return True


def pkg_resources_module() -> bool:
    """Stand in for the module pkg_resources.

    utils/general.py:29 and utils/loggers/__init__.py:5 import it. It is gone since setuptools 82, and the one of old
    setuptools does not import on Python 3.12. Delete when upstream uses `packaging`.
    """
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated as an API')  # of setuptools 67 to 81
    try:
        importlib.import_module('pkg_resources')
        return False
    except (ImportError, AttributeError):  # AttributeError: pkgutil.ImpImporter, gone in Python 3.12
        pass
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.version import parse

    class VersionConflict(Exception):
        """An installed distribution does not meet the requirement."""

    def parse_requirements(lines: Iterable[str]) -> Iterator[Requirement]:
        """Parse the requirements in a file or a list of lines; comments and options of pip are left out."""
        for line in lines:
            line = line.split(' #')[0].strip()
            if line and not line.startswith(('#', '-')):
                yield Requirement(line)

    def require(text: str) -> None:
        """Raise unless the requirement is met; unlike the real function, do not follow dependencies."""
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            return
        version = metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            raise VersionConflict(f'{requirement.name} {version} is installed, {requirement} is required')

    stand_in(
        'pkg_resources',
        "Stand-in of yolov9-qat for setuptools' removed module.",
        parse_version=parse,
        parse_requirements=parse_requirements,
        require=require,
        VersionConflict=VersionConflict,
        DistributionNotFound=metadata.PackageNotFoundError,
    )
    return True


def ipython_module() -> bool:
    """Stand in for the module IPython.

    utils/general.py:26, models/common.py:21 and utils/__init__.py import it, for notebooks only. Delete when upstream
    imports it inside notebook_init.
    """
    if importlib.util.find_spec('IPython'):
        return False
    display, clear = lambda *things, **_: print(*things), lambda *_, **__: None
    shown = stand_in('IPython.display', 'Stand-in of yolov9-qat.', display=display, clear_output=clear)
    stand_in(
        'IPython',
        'Stand-in of yolov9-qat: no notebook.',
        get_ipython=lambda: None,
        display=shown,
        __path__=[],
        version_info=(8, 24, 0),  # matplotlib asks every IPython for it, and has no workaround for 8.24
    )
    return True


def git_module() -> bool:
    """Stand in for the module git of GitPython: the tree counts as no repository.

    utils/general.py:345 (check_git_info, called by classify/train.py) imports it, to note the commit in a checkpoint. Delete when
    upstream asks the program git.
    """
    if importlib.util.find_spec('git'):
        return False

    class InvalidGitRepositoryError(Exception):
        """A folder is no repository."""

    def repository(path: str) -> None:
        raise InvalidGitRepositoryError(path)

    errors = stand_in('git.exc', 'Stand-in of yolov9-qat.', InvalidGitRepositoryError=InvalidGitRepositoryError)
    stand_in('git', 'Stand-in of yolov9-qat: no repository.', Repo=repository, exc=errors, __path__=[])
    return True


def numpy_trapz() -> bool:
    """Give NumPy the name `trapz` again.

    utils/metrics.py:113 calls np.trapz, which NumPy 2.0 renamed to trapezoid and 2.4 removed. Delete when upstream
    renames.
    """
    import numpy as np

    if hasattr(np, 'trapz'):
        # NumPy 2.0 to 2.3 would warn for each class and threshold.
        warnings.filterwarnings('ignore', message='`trapz` is deprecated', category=DeprecationWarning)
        return False
    vars(np)['trapz'] = np.trapezoid
    return True


def pillow_getsize() -> bool:
    """Give Pillow's fonts the method `getsize` again.

    utils/plots.py:86,165 call font.getsize, gone since Pillow 10. The height counts from the ascender line, as it
    did. Delete when upstream uses getbbox.
    """
    from PIL import ImageFont

    def getsize(self: Any, text: str, *args: object, **kwargs: object) -> tuple[int, int]:
        left, _, right, bottom = self.getbbox(text, *args, **kwargs)
        return right - left, bottom

    fonts = [font for font in (ImageFont.FreeTypeFont, ImageFont.ImageFont) if not hasattr(font, 'getsize')]
    for font in fonts:
        setattr(font, 'getsize', getsize)  # noqa: B010  # their types do not have it
    return bool(fonts)


def font_from_matplotlib() -> bool:
    """Store matplotlib's DejaVu Sans under the name of the font that upstream downloads.

    utils/general.py:483-490 (check_font, called by check_dataset and the plots) downloads Arial, which hangs or fails
    without internet. Delete when upstream does without the download.
    """
    import torch

    real = torch.hub.download_url_to_file

    @functools.wraps(real)
    def download_url_to_file(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        name = str(url).rsplit('/', 1)[-1]
        if not (name in ('Arial.ttf', 'Arial.Unicode.ttf') and called_from_upstream()):
            return real(url, dst, *args, **kwargs)
        import matplotlib

        # Renamed when complete: the processes of a training, and plotting threads, run this at once.
        part = f'{dst}.{os.getpid()}.{threading.get_ident()}'
        shutil.copyfile(Path(matplotlib.get_data_path(), 'fonts', 'ttf', 'DejaVuSans.ttf'), part)
        os.replace(part, dst)

    torch.hub.download_url_to_file = download_url_to_file
    return True


def settings_of_ones_own() -> bool:
    """Keep upstream's settings (a font) in a folder of this process if the home folder has no place for them.

    utils/general.py:150 (user_config_dir) otherwise takes /tmp/Ultralytics, which all users of the machine share: the second
    user may not write to it, and reads the files of the first. Delete when upstream takes a folder of the user's.
    """
    if os.environ.get('YOLOV5_CONFIG_DIR') or os.access(os.path.expanduser('~/.config'), os.W_OK):
        return False
    folder = tempfile.mkdtemp(prefix='yolov9-qat-settings-')  # mode 700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ['YOLOV5_CONFIG_DIR'] = folder  # child processes share it
    return True


def torch_load_of_modules() -> bool:
    """Let upstream's torch.load read pickled modules again.

    models/experimental.py:243, train*.py, hubconf.py, utils/general.py:999: bare torch.load of checkpoints with
    pickled modules, refused since torch 2.6 (weights_only=True by default). A call from the tree without weights_only
    tries the safe way first, and the full pickle, which executes code, only for a file that needs it. Delete when
    upstream passes weights_only.
    """
    import torch

    real = torch.load

    @functools.wraps(real)
    def load(f: Any, *args: Any, **kwargs: Any) -> object:
        # pickle_module is the positional argument after map_location: a caller who gives it has chosen already.
        if 'weights_only' in kwargs or 'pickle_module' in kwargs or len(args) > 1 or not called_from_upstream():
            return real(f, *args, **kwargs)
        start = f.tell() if hasattr(f, 'seek') else None
        try:
            return real(f, *args, weights_only=True, **kwargs)
        except pickle.UnpicklingError:
            LOGGER.debug('compat: %s holds more than weights, loading the full pickle', getattr(f, 'name', f))
        if start is not None:
            f.seek(start)
        return real(f, *args, weights_only=False, **kwargs)

    torch.load = load
    return True


def torchscript_onnx_export() -> bool:
    """Let upstream's torch.onnx.export take the TorchScript exporter.

    export.py:105,167: torch.onnx.export with dynamic_axes and opset 12, written for this exporter. Since torch 2.9 the
    default is another one, which needs onnxscript. Delete when upstream passes `dynamo`.
    """
    import torch

    real = torch.onnx.export
    if 'dynamo' not in inspect.signature(real).parameters:  # before torch 2.5
        return False

    @functools.wraps(real)
    def export(*args: Any, **kwargs: Any) -> Any:
        if called_from_upstream():
            kwargs.setdefault('dynamo', False)
        return real(*args, **kwargs)

    torch.onnx.export = export
    return True


def cuda_amp_quiet() -> bool:
    """Silence the warnings about torch.cuda.amp, a FutureWarning per batch.

    train*.py, utils/loss_tal*.py, utils/autobatch.py and models/common.py:23 use it, deprecated since torch 2.4. Delete when
    upstream uses torch.amp.
    """
    warnings.filterwarnings(
        'ignore',
        category=FutureWarning,
        message=r'`torch\.cuda\.amp\.(autocast|GradScaler)\(args\.\.\.\)` is deprecated',
    )
    return True


def seaborn_when_used() -> bool:
    """Stand in for the module seaborn until a name of it is asked for.

    utils/plots.py:13 imports it for two plots of train.py. It loads SciPy: 1 s of each start. importlib.util.LazyLoader would
    load it as soon as torch asks each loaded module for its file (inspect.getmodule). Delete when upstream imports it inside
    these plots.
    """
    if 'seaborn' in sys.modules or not importlib.util.find_spec('seaborn'):
        return False
    stand_in_until_used('seaborn')
    return True


SHIMS = (
    auto_install_off,
    pkg_resources_module,
    ipython_module,
    git_module,
    numpy_trapz,
    pillow_getsize,
    font_from_matplotlib,
    settings_of_ones_own,
    torch_load_of_modules,
    torchscript_onnx_export,
    cuda_amp_quiet,
    seaborn_when_used,
)
