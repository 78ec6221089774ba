"""Each shim in a new process that needs it, then upstream's own commands."""

import os
import textwrap

import pytest
import torch
import yaml
from conftest import REPO, TREE
from helpers.faults import sampled
from helpers.fresh import fresh as process
from helpers.zoo import SMALL, config, python

HIDE = """
import importlib.machinery, os, sys
real = importlib.machinery.PathFinder.find_spec
hidden = set(os.environ["HIDE"].split())
def find_spec(name, path=None, target=None):
    parts = name.split(".")
    return None if hidden & {".".join(parts[:i + 1]) for i in range(len(parts))} else real(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
for name in [name for name in sys.modules if name.split(".")[0] in hidden]:
    del sys.modules[name]
"""
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("network access")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.fixture
def fresh(tmp_path):
    """run(code, hide="IPython pkg_resources") -> stdout + stderr of a new process in the tree; it must end well.

    It has torch loaded, but nothing of upstream; `bare=True` starts an interpreter that has loaded nothing.
    """
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'hiding.py').write_text(HIDE)
    begin = f'import sys; sys.path.insert(1, {str(tmp_path / "site")!r}); import hiding'

    def run(code, hide='', bare=False, **env):
        env = {**os.environ, 'HIDE': hide, 'YOLOV5_CONFIG_DIR': str(tmp_path / 'config'), **env}
        env.pop('YOLOv5_AUTOINSTALL', None)
        if not bare:
            return process(*(['-c', textwrap.dedent(code)] if isinstance(code, str) else code), env=env, first=begin)
        code = f'{begin}\n{textwrap.dedent(code)}'
        return python('-c', code, env=env, timeout=300)

    return run


@pytest.fixture
def upstream_caller():
    """Source text -> name of a module in the tree, which compat takes for a file of upstream."""
    made = []

    def make(source):
        file = TREE / f'caller_{os.getpid()}_{len(made)}.py'
        file.write_text(textwrap.dedent(source))
        made.append(file)
        return file.stem

    yield make
    for file in made:
        file.unlink()


ORDERS = [
    ('import utils', 'import torch, numpy', 'import models.common'),
    ('import models', 'import torch', 'import utils.general'),
    ('import torch, numpy', 'import utils', 'import utils.general'),
    ('import torch', 'import models.experimental'),
    ('import utils.qat.config.qat, models.quantize', 'import torch', 'import utils.torch_utils'),
    ('import utils.loggers',),
]


@pytest.mark.parametrize('order', sampled(map(pytest.param, ORDERS), 6), ids='; '.join)
def test_shims_are_there_in_every_order_of_imports(fresh, order):
    """The last import is the first of a module inside upstream."""
    fresh(
        f"""
        import sys
        {'; '.join(order[:-1]) or 'pass'}
        compat = sys.modules.get("utils.qat.compat")
        assert not (compat and compat._fired), "before upstream needs them"
        {order[-1]}
        import numpy as np, PIL.ImageFont, torch, utils.qat.compat as compat
        assert compat._fired and compat.BeforeUpstream not in sys.meta_path
        for shimmed in torch.load, torch.hub.download_url_to_file, torch.onnx.export:
            assert shimmed.__wrapped__ and shimmed.__code__.co_filename == compat.__file__, shimmed
        assert np.trapz and PIL.ImageFont.FreeTypeFont.getsize
    """,
        bare=True,
    )


@pytest.mark.parametrize('package', ['utils', 'models'])
def test_upstreams_packages_alone_load_nothing(fresh, package):
    code = f'import sys, {package}, utils.qat.compat as compat; assert compat._fired is None'
    fresh(f'{code} and not {{"torch", "numpy", "PIL", "pkg_resources"}} & sys.modules.keys()', bare=True)


FIRST = (
    'models.quantize.run.run models.deploy.load utils.qat.data.image_folders models.quantize.activations torchvision'
)


@pytest.mark.parametrize('first', FIRST.split())
def test_no_module_of_ours_loads_dynamo_with_torchvision(fresh, first):
    """Whichever module imports torchvision first: torch._dynamo and sympy take a second or two of a start."""
    begin = 'import sys, utils, torch; before = set(sys.modules)'
    loaded = 'assert "torchvision" in sys.modules and not {"torch._dynamo", "sympy"} & (sys.modules.keys() - before)'
    fresh(f'{begin}; import {first}; {loaded}', bare=True)


def test_slow_libraries_are_imported_when_they_are_used(fresh):
    """A model is built and quantized without seaborn, SciPy's statistics and torch._dynamo; then each of them works."""
    fresh(
        """
        import sys, utils.qat, models.yolo, models.quantize.quantizers, torch, torchvision
        import utils.plots
        slow = {"torch._dynamo", "torch._dynamo.utils", "scipy.stats", "seaborn.relational", "sympy"}
        assert not slow & sys.modules.keys(), slow & sys.modules.keys()
        assert not hasattr(sys.modules["seaborn"], "__file__") and not slow & sys.modules.keys(), "asked for its file"
        box = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])
        assert torchvision.ops.roi_align(torch.ones(1, 3, 8, 8), box, 2).eq(1).all()
        assert callable(utils.plots.sn.heatmap) and sys.modules["seaborn"].__file__ and "scipy.stats" in sys.modules
        from pytorch_quantization.calib.histogram import entropy
        assert entropy([0.5, 0.5]) > 0.69
        from torchvision.ops.roi_align import is_compile_supported
        assert is_compile_supported("cpu") in (True, False) and sys.modules["torch._dynamo.utils"].__file__
    """,
        bare=True,
    )


WITHOUT = """
    import logging
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
    import models.common, sys, utils.general as general, utils.loggers

    pkg = general.pkg
    assert "yolov9-qat" in pkg.__doc__
    assert general.check_version("2.15.0", "2.6.0") and not general.check_version("1.9", "1.10")
    assert pkg.parse_version("2.4.0+cu121") >= pkg.parse_version("2.4")
    pkg.require("torch>=1.0")
    pkg.require("absent; python_version < '3'")
    for requirement, error in ("torch<1", pkg.VersionConflict), ("no-such-package", pkg.DistributionNotFound):
        try:
            pkg.require(requirement)
        except error:
            continue
        raise SystemExit(requirement)
    lines = ["# comment", "", "numpy>=1.18.5  # why", "-r other.txt", "thop"]
    assert [r.name for r in pkg.parse_requirements(lines)] == ["numpy", "thop"]
    assert not general.AUTOINSTALL
    general.check_requirements(["no-such-package>=1.0", "torch"])

    import matplotlib.pyplot as plt  # looks for a running IPython
    from tqdm.auto import tqdm
    plt.figure()
    models.common.display("shown")
    assert not general.is_notebook() and "yolov9-qat" in sys.modules["IPython"].__doc__
    assert general.check_git_info() == {"remote": None, "branch": None, "commit": None}
"""


def test_without_ipython_gitpython_and_pkg_resources(fresh, tmp_path):
    """Each has its place taken, pip is not run, and what was done is logged."""
    pip = tmp_path / 'bin' / 'pip'
    pip.parent.mkdir()
    pip.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'pip ran'}'\n")
    pip.chmod(0o755)
    path = f'{pip.parent}:{os.environ["PATH"]}'
    said = fresh(WITHOUT, hide='IPython git pkg_resources', MPLBACKEND='agg', PATH=path)
    assert 'shown' in said and not (tmp_path / 'pip ran').exists()
    logged = next(line for line in said.splitlines() if line.startswith('yolov9_qat.compat'))
    assert 'ipython_module' in logged and 'auto_install_off' in logged


def test_names_that_newer_libraries_lack(fresh, tmp_path):
    """Upstream finds the names of NumPy, Pillow and torch.cuda.amp that are gone or deprecated, and loads a pickled checkpoint."""
    said = fresh(f"""
        import numpy as np, torch
        from PIL import ImageFont
        if hasattr(np, "trapezoid"):
            np.__dict__.pop("trapz", None)
        for font in ImageFont.FreeTypeFont, ImageFont.ImageFont:
            if hasattr(font, "getsize"):
                del font.getsize
        from utils.metrics import compute_ap
        assert np.trapz([0, 1, 2], [0, 1, 3]) == 3.5
        assert abs(compute_ap([0.5, 1.0], [1.0, 1.0])[0] - 0.995) < 1e-3

        from utils.plots import Annotator
        drawn = Annotator(np.zeros((64, 128, 3), np.uint8), pil=True, font_size=12)
        drawn.box_label((10, 30, 60, 60), "cell 0.9")
        drawn.text([10, 60], "below", anchor="bottom")
        assert drawn.result().any()
        default = getattr(ImageFont, "load_default_imagefont", ImageFont.load_default)
        assert min(default().getsize("ab")) > 0

        with torch.cuda.amp.autocast(False):
            torch.cuda.amp.GradScaler(enabled=False)

        from models.common import Conv
        from models.experimental import attempt_load
        model, x = torch.nn.Sequential(Conv(3, 8, 3)), torch.rand(1, 3, 8, 8)
        torch.save({{"model": model, "ema": None}}, r"{tmp_path}/last.pt")
        assert torch.equal(attempt_load(r"{tmp_path}/last.pt", "cpu", fuse=False)(x), model.eval()(x))
    """)
    assert 'deprecated' not in said


def test_applied_twice_or_once_it_changes_no_more_than_it_says(fresh):
    """Nothing in torch.nn; a filter of warnings names its message."""
    fresh("""
        import contextlib, warnings, numpy, torch, PIL.ImageFont, torch.nn as nn, torch.nn.functional as F
        with contextlib.suppress(ImportError):
            import pkg_resources  # adds a filter of its own
        spaces = [nn, F, nn.modules.conv, nn.Module, nn.Conv2d, nn.Upsample, nn.MaxPool2d, torch.Tensor]
        before, filters = [dict(vars(space)) for space in spaces], list(warnings.filters)
        import utils.qat.compat as compat
        assert warnings.filters == filters
        first, load = compat.apply(), torch.load
        assert first == compat.apply() and torch.load is load
        added = [f for f in warnings.filters if f not in filters]
        assert added and all(message is not None for _, message, *_ in added), added
        import utils.general
        assert [dict(vars(space)) for space in spaces] == before
    """)


def test_pkg_resources_that_does_not_import(fresh, tmp_path):
    # setuptools before 66 on Python 3.12
    (tmp_path / 'site' / 'pkg_resources.py').write_text('import pkgutil\npkgutil.ImpImporterThatIsGone\n')
    fresh("import utils.general as general; assert general.check_version('2.0', '1.0')")


@pytest.mark.parametrize('home', sampled([False, True], 2, 1))
def test_settings_are_in_nobody_elses_folder(fresh, tmp_path, home):
    """Without a place at home upstream takes a folder of /tmp that all users of the machine share."""
    if home:
        (tmp_path / 'home').mkdir()
    said = fresh(
        """
        import os, stat
        from utils.general import CONFIG_DIR, check_font
        check_font()
        found = os.stat(CONFIG_DIR)
        assert found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700, CONFIG_DIR
        print("settings:", CONFIG_DIR)
        """,
        bare=True,
        HOME=str(tmp_path / 'home'),
        YOLOV5_CONFIG_DIR='',
    )
    assert not os.path.exists(said.split('settings:')[1].strip()), 'and it goes with the process'


def test_font_without_network_for_two_threads_that_plot(fresh, tmp_path):
    """Both threads copy the font before either renames it."""
    fresh(
        NO_NETWORK
        + textwrap.dedent("""
        import shutil, threading
        from concurrent.futures import ThreadPoolExecutor
        from PIL import ImageFont
        from utils.general import CONFIG_DIR, check_font
        copy, both = shutil.copyfile, threading.Barrier(2, timeout=60)
        shutil.copyfile = lambda *args: (copy(*args), both.wait())
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(check_font, "Arial.ttf") for _ in range(2)]:
                done.result()
        shutil.copyfile = copy
        check_font("Arial.Unicode.ttf")
        for name in "Arial.ttf", "Arial.Unicode.ttf":
            assert ImageFont.truetype(str(CONFIG_DIR / name), 10).getname()[0] == "DejaVu Sans"
    """)
    )
    assert {file.name for file in (tmp_path / 'config').glob('Arial*')} == {'Arial.ttf', 'Arial.Unicode.ttf'}


def test_other_downloads_still_go_out(fresh, upstream_caller):
    module = upstream_caller('import torch\ndef get(url, to):\n    torch.hub.download_url_to_file(url, to)\n')
    fresh(
        NO_NETWORK
        + textwrap.dedent(f"""
        import utils.general, {module}, torch
        for get, url in ({module}.get, "http://localhost/weights.pt"), (torch.hub.download_url_to_file, "http://localhost/Arial.ttf"):
            try:
                get(url, "/tmp/never")
            except AssertionError:
                continue
            raise SystemExit(url)
    """)
    )


def test_torch_load_from_upstream_tries_weights_only_first(fresh, upstream_caller, tmp_path):
    torch.save({'w': torch.ones(2)}, tmp_path / 'weights.pt')
    module = upstream_caller("""
        import torch
        class Pickled:
            pass
        def load(*args, **kwargs):
            return torch.load(*args, **kwargs)
    """)
    fresh(f"""
        import functools, io, torch
        asked, real = [], torch.load
        @functools.wraps(real)
        def spy(*args, **kwargs):
            asked.append(kwargs.get("weights_only"))
            return real(*args, **kwargs)
        torch.load = spy
        import utils.general, {module} as upstream

        def asks(*args, **kwargs):
            asked.clear()
            upstream.load(*args, **kwargs)
            return list(asked)

        torch.save({{"model": upstream.Pickled()}}, r"{tmp_path}/module.pt")
        assert asks(r"{tmp_path}/weights.pt", map_location="cpu") == [True]
        assert asks(r"{tmp_path}/module.pt", "cpu") == [True, False]
        assert asks(r"{tmp_path}/module.pt", weights_only=False) == [False]
        with open(r"{tmp_path}/module.pt", "rb") as file:  # read twice, from where it stood
            assert asks(file) == [True, False]

        asked.clear()  # callers outside the tree get what torch gives them
        torch.load(r"{tmp_path}/weights.pt")
        assert asked == [None]
    """)


def test_onnx_export_of_upstream_uses_torchscript(fresh, upstream_caller, tmp_path):
    module = upstream_caller("""
        import torch
        def export(model, x, file):
            torch.onnx.export(model, x, file, opset_version=13, input_names=["images"], dynamic_axes={"images": {0: "batch"}})
    """)
    fresh(
        f"""
        import utils.general, {module}, torch, onnx
        {module}.export(torch.nn.Conv2d(3, 4, 1).eval(), torch.rand(1, 3, 8, 8), r"{tmp_path}/conv.onnx")
        assert onnx.load(r"{tmp_path}/conv.onnx").graph.node[0].op_type == "Conv"
    """,
        hide='onnxscript',
    )


# ---- upstream's own commands --------------------------------------------------------------------------------------------


SCRIPTS = (
    'train_dual.py val.py detect.py export.py classify/train.py train.py segment/train.py panoptic/train.py'.split()
)


@pytest.mark.parametrize('script', sampled(SCRIPTS, 8))
def test_upstream_commands_start_offline(fresh, script):
    if not (TREE / script).exists():
        pytest.skip(f'this tree has no {script}')
    assert '--epochs' in (said := fresh([script, '-h'], hide='IPython git pkg_resources')) or '--weights' in said


@pytest.mark.slow
def test_train_validate_detect(fresh, small, tmp_path):
    """One epoch of train_dual.py, then its checkpoint in val_dual.py and detect_dual.py, offline, without IPython and pkg_resources."""
    images = small.data.parent / 'images/val'
    (tmp_path / 'cfg.yaml').write_text(yaml.safe_dump(config('demo', **SMALL, nc=10)))
    common = f'--device cpu --project {tmp_path} --exist-ok --img 64'
    data = f'--data {small.data} --batch-size 2 --workers 0'
    hyp = f'--hyp {REPO}/demo/hyp.yaml --cfg {tmp_path}/cfg.yaml --epochs 1 --name train'
    weights = f'--weights {tmp_path}/train/weights/best.pt'

    def run(line):
        return fresh([*line.split(), *common.split()], hide='IPython pkg_resources')

    run(f'train_dual.py {data} {hyp} --weights=')
    assert 'mAP50' in run(f'val_dual.py {data} {weights} --name val')
    if not (TREE / 'detect_dual.py').exists():
        pytest.skip('this tree has no detect_dual.py, and its detect.py takes single-branch models only')
    run(f'detect_dual.py {weights} --source {images} --name detect')
    assert len(list((tmp_path / 'detect').glob('*.jpg'))) == 12
