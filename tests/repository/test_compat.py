"""Each shim in a new process that needs it, then upstream's own commands."""

import os
import textwrap

import pytest
import torch
import yaml
from conftest import TREE
from faults import sampled
from fresh import fresh as process
from zoo import python

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


def test_apply_once_is_enough(fresh):
    fresh("""
        import torch, utils.qat.compat as compat
        first, load = compat.apply(), torch.load
        assert first == compat.apply() and torch.load is load
    """)


ORDERS = [
    ('import utils', 'import torch, numpy', 'import models.common'),
    ('import models', 'import torch', 'import utils.general'),
    ('import torch, numpy', 'import utils', 'import utils.general'),
    ('import torch', 'import models.experimental'),
    ('import utils.qat.config.qat, models.quantize', 'import torch', 'import utils.torch_utils'),
    ('import utils.loggers',),
]


@pytest.mark.parametrize('order', sampled(map(pytest.param, ORDERS), 3), ids='; '.join)
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
        assert np.trapz and np.float is float and PIL.ImageFont.FreeTypeFont.getsize
    """,
        bare=True,
    )


@pytest.mark.parametrize('package', ['utils', 'models'])
def test_upstreams_packages_alone_load_nothing(fresh, package):
    fresh(
        f"""
        import sys, {package}, utils.qat.compat as compat
        assert not {{"torch", "numpy", "PIL", "pkg_resources"}} & sys.modules.keys() and compat._fired is None
    """,
        bare=True,
    )


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


def test_nothing_in_torch_nn_changes(fresh):
    fresh("""
        import torch, torch.nn as nn, torch.nn.functional as F
        spaces = [nn, F, nn.modules.conv, nn.Module, nn.Conv2d, nn.Upsample, nn.MaxPool2d, torch.Tensor]
        before = [dict(vars(space)) for space in spaces]
        import utils.general
        assert [dict(vars(space)) for space in spaces] == before
    """)


def test_every_warning_filter_names_its_message(fresh):
    fresh("""
        import contextlib, warnings, numpy, torch, PIL.ImageFont
        with contextlib.suppress(ImportError):
            import pkg_resources  # adds a filter of its own
        before = list(warnings.filters)
        import utils.qat.compat as compat
        assert warnings.filters == before
        compat.apply()
        added = [f for f in warnings.filters if f not in before]
        assert added
        assert all(message is not None for _, message, *_ in added), added
    """)


def test_fired_shims_are_logged(fresh):
    out = fresh(
        """
        import logging
        logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
        import utils.general
    """,
        hide='IPython',
    )
    line = next(line for line in out.splitlines() if line.startswith('yolov9_qat.compat'))
    assert 'ipython_module' in line and 'auto_install_off' in line


def test_without_pkg_resources(fresh):
    fresh(
        """
        import utils.general as general, utils.loggers
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
    """,
        hide='pkg_resources',
    )


def test_pkg_resources_that_does_not_import(fresh, tmp_path):
    # setuptools before 66 on Python 3.12
    (tmp_path / 'site' / 'pkg_resources.py').write_text('import pkgutil\npkgutil.ImpImporterThatIsGone\n')
    fresh("import utils.general as general; assert general.check_version('2.0', '1.0')")


@pytest.mark.parametrize('hide', sampled(['', 'pkg_resources'], 2, 1))
def test_missing_packages_are_reported_and_pip_is_not_run(fresh, tmp_path, hide):
    pip = tmp_path / 'bin' / 'pip'
    pip.parent.mkdir()
    pip.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'pip ran'}'\n")
    pip.chmod(0o755)
    out = fresh(
        """
        from utils.general import AUTOINSTALL, check_requirements
        assert not AUTOINSTALL
        check_requirements(["no-such-package>=1.0", "torch", "opencv-python>=4.1.1", "ipython", "gitpython>=3.1.30"])
    """,
        hide=f'IPython git {hide}',
        PATH=f'{pip.parent}:{os.environ["PATH"]}',
    )
    assert 'no-such-package>=1.0' in out and not [name for name in ('opencv', 'ipython', 'gitpython') if name in out]
    assert not (tmp_path / 'pip ran').exists()


def test_without_ipython(fresh):
    out = fresh(
        """
        import models.common, utils.general, sys
        import matplotlib.pyplot as plt  # looks for a running IPython
        from tqdm.auto import tqdm
        plt.figure()
        models.common.display("shown")
        assert not utils.general.is_notebook()
        assert "yolov9-qat" in sys.modules["IPython"].__doc__
    """,
        hide='IPython',
        MPLBACKEND='agg',
    )
    assert 'shown' in out


def test_without_gitpython(fresh):
    out = fresh(
        """
        from utils.general import check_git_info
        assert check_git_info() == {"remote": None, "branch": None, "commit": None}
    """,
        hide='git',
    )
    assert 'requirements' not in out, 'nothing is asked for'


def test_numpy_names(fresh):
    fresh("""
        import numpy as np
        if hasattr(np, "trapezoid"):
            np.__dict__.pop("trapz", None)
        from utils.metrics import compute_ap
        assert np.trapz([0, 1, 2], [0, 1, 3]) == 3.5 and np.float is float
        assert abs(compute_ap([0.5, 1.0], [1.0, 1.0])[0] - 0.995) < 1e-3
    """)


def test_pillow_getsize(fresh):
    fresh("""
        from PIL import ImageFont
        for font in ImageFont.FreeTypeFont, ImageFont.ImageFont:
            if hasattr(font, "getsize"):
                del font.getsize
        import numpy as np
        from utils.plots import Annotator
        image = np.zeros((64, 128, 3), np.uint8)
        drawn = Annotator(image, pil=True, font_size=12)
        drawn.box_label((10, 30, 60, 60), "cell 0.9")
        drawn.text([10, 60], "below", anchor="bottom")
        assert drawn.result().any()
        width, height = ImageFont.load_default_imagefont().getsize("ab") if hasattr(ImageFont, "load_default_imagefont") \\
            else ImageFont.load_default().getsize("ab")
        assert width > 0 and height > 0
    """)


@pytest.mark.parametrize('name', sampled(['Arial.ttf', 'Arial.Unicode.ttf'], 2))
def test_font_without_network(fresh, tmp_path, name):
    fresh(
        NO_NETWORK
        + textwrap.dedent(f"""
        from PIL import ImageFont
        from utils.general import CONFIG_DIR, check_font
        check_font("{name}")
        assert ImageFont.truetype(str(CONFIG_DIR / "{name}"), 10).getname()[0] == "DejaVu Sans"
    """)
    )
    assert [file.name for file in (tmp_path / 'config').glob('Arial*')] == [name]


@pytest.mark.parametrize('home', [False, True], ids=['no_home', 'a_home_without_config'])
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


def test_font_for_two_threads_that_plot(fresh):
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
        assert ImageFont.truetype(str(CONFIG_DIR / "Arial.ttf"), 10).getname()[0] == "DejaVu Sans"
    """)
    )


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


def test_upstream_loads_a_pickled_checkpoint(fresh, tmp_path):
    fresh(f"""
        import torch, torch.nn as nn
        from models.common import Conv
        from models.experimental import attempt_load
        model = nn.Sequential(Conv(3, 8, 3))
        torch.save({{"model": model, "ema": None}}, r"{tmp_path}/last.pt")
        x = torch.rand(1, 3, 8, 8)
        assert torch.equal(attempt_load(r"{tmp_path}/last.pt", "cpu", fuse=False)(x), model.eval()(x))
    """)


def test_cuda_amp_is_quiet(fresh):
    out = fresh("""
        import utils.general, torch
        with torch.cuda.amp.autocast(False):
            torch.cuda.amp.GradScaler(enabled=False)
    """)
    assert 'deprecated' not in out


def test_cuda_amp_that_is_gone(fresh):
    fresh("""
        import hiding, sys, torch, torch._dynamo, torchvision  # today's torch still imports it for itself
        del sys.modules["torch.cuda.amp"], torch.cuda.amp
        hiding.hidden.add("torch.cuda.amp")
        from models.common import amp  # from torch.cuda import amp
        assert "yolov9-qat" in amp.__doc__ and torch.cuda.amp is amp
        with amp.autocast(False), torch.cuda.amp.autocast(enabled=False):
            assert not amp.GradScaler(enabled=False).is_enabled()
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


SCRIPTS = [
    'train_dual.py',
    'val.py',
    'detect.py',
    'export.py',
    'classify/train.py',
    'train.py',
    'segment/train.py',
    'panoptic/train.py',
]


@pytest.mark.parametrize('script', sampled(SCRIPTS, 4))
def test_upstream_commands_start_offline(fresh, script):
    if not (TREE / script).exists():
        pytest.skip(f'this tree has no {script}')
    assert '--epochs' in (said := fresh([script, '-h'], hide='IPython git pkg_resources')) or '--weights' in said


TINY = """
nc: 1
depth_multiple: 1.0
width_multiple: 1.0
anchors: 3
backbone:
  - [-1, 1, Silence, []]               # 0
  - [-1, 1, Conv, [8, 3, 2]]           # 1-P1
  - [-1, 1, Conv, [8, 3, 2]]           # 2-P2
  - [-1, 1, ADown, [16]]               # 3-P3
  - [-1, 1, RepNCSPELAN4, [16, 16, 8, 1]]  # 4
  - [-1, 1, AConv, [16]]               # 5-P4
  - [-1, 1, SPPELAN, [16, 8]]          # 6
head:
  - [[4, 6, 4, 6], 1, DualDDetect, [nc]]
"""
HYP = dict(
    lr0=0.01,
    lrf=0.01,
    momentum=0.9,
    weight_decay=0.0005,
    warmup_epochs=0.0,
    warmup_momentum=0.8,
    warmup_bias_lr=0.1,
    box=7.5,
    cls=0.5,
    cls_pw=1.0,
    obj=0.7,
    obj_pw=1.0,
    dfl=1.5,
    iou_t=0.2,
    anchor_t=5.0,
    fl_gamma=0.0,
    hsv_h=0.015,
    hsv_s=0.7,
    hsv_v=0.4,
    degrees=0.0,
    translate=0.1,
    scale=0.5,
    shear=0.0,
    perspective=0.0,
    flipud=0.0,
    fliplr=0.5,
    mosaic=1.0,
    mixup=0.1,
    copy_paste=0.0,
)


@pytest.fixture
def tiny_data(tmp_path):
    """Bright squares on dark ground, four images to train and two to validate."""
    cv2, np = pytest.importorskip('cv2'), pytest.importorskip('numpy')
    draw = np.random.default_rng(0)
    for split, count in (('train', 4), ('val', 2)):
        for kind in ('images', 'labels'):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in range(count):
            x, y = draw.integers(0, 40, 2)
            image = draw.integers(0, 60, (64, 64, 3)).astype(np.uint8)
            image[y : y + 24, x : x + 24] = 230
            cv2.imwrite(str(tmp_path / 'images' / split / f'{i}.png'), image)
            (tmp_path / 'labels' / split / f'{i}.txt').write_text(f'0 {(x + 12) / 64} {(y + 12) / 64} 0.375 0.375\n')
    (tmp_path / 'tiny.yaml').write_text(TINY)
    (tmp_path / 'hyp.yaml').write_text(yaml.safe_dump(HYP))
    (tmp_path / 'data.yaml').write_text(
        yaml.safe_dump(dict(path=str(tmp_path), train='images/train', val='images/val', nc=1, names=['square']))
    )
    return tmp_path


@pytest.mark.slow
def test_train_validate_detect(fresh, tiny_data):
    """One epoch of train_dual.py, then its checkpoint in val_dual.py and detect.py, offline, without IPython and pkg_resources."""
    hide, common = 'IPython pkg_resources', ['--device', 'cpu', '--project', str(tiny_data), '--exist-ok']
    weights = str(tiny_data / 'train' / 'weights' / 'best.pt')
    data = ['--data', str(tiny_data / 'data.yaml'), '--batch-size', '2', '--workers', '0']
    fresh(
        [
            'train_dual.py',
            *data,
            '--weights',
            '',
            '--cfg',
            str(tiny_data / 'tiny.yaml'),
            '--hyp',
            str(tiny_data / 'hyp.yaml'),
            '--img',
            '64',
            '--epochs',
            '1',
            '--name',
            'train',
            *common,
        ],
        hide=hide,
    )
    out = fresh(['val_dual.py', *data, '--weights', weights, '--img', '64', '--name', 'val', *common], hide=hide)
    assert 'mAP50' in out
    if not (TREE / 'detect_dual.py').exists():
        pytest.skip(
            'trained and validated; this tree has no detect_dual.py, and its detect.py takes single-branch models only'
        )
    fresh(
        [
            'detect_dual.py',
            '--weights',
            weights,
            '--source',
            str(tiny_data / 'images' / 'val'),
            '--img',
            '64',
            '--name',
            'detect',
            *common,
        ],
        hide=hide,
    )
    assert len(list((tiny_data / 'detect').glob('*.png'))) == 2
