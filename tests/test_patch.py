"""patch_yolov9.sh: what it writes, what it refuses, and that it leaves nothing behind."""

import hashlib
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

PATCH = REPO / "patch_yolov9.sh"
VERSION = (REPO / "VERSION").read_text().strip()


def patch(folder, *flags, script=PATCH, cwd=None):
    return subprocess.run([script, folder, *flags], cwd=cwd, capture_output=True, text=True)


def contents(folder):
    """Relative path -> mode and checksum, for every file that is not bytecode of upstream."""
    return {str(path.relative_to(folder)): (path.lstat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize("flags", [(), ("--link",)])
def test_revert_restores_every_byte(clone, flags):
    before = contents(clone)
    folders = {path for path in clone.rglob("*") if path.is_dir()}
    assert patch(clone, *flags).returncode == 0
    assert contents(clone).keys() > before.keys()
    # bytecode of our modules appears when they are used, and must go as well
    subprocess.run([sys.executable, "-c", "import utils.qat.compat, models"], cwd=clone, check=True,
                   env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})
    assert patch(clone, "--revert").returncode == 0
    assert contents(clone) == before
    left = {path for path in clone.rglob("*") if path.is_dir() and path.name != "__pycache__"}
    assert left == folders
    assert not [path for path in clone.rglob("*.pyc") if path.name.startswith(("compat.", "qat."))]


def test_no_upstream_file_is_overwritten(clone):
    before = contents(clone)
    patch(clone)
    after = contents(clone)
    assert {name for name in before if after[name] != before[name]} == {"utils/__init__.py", "models/__init__.py"}
    assert not {"README.md", "requirements.txt", "scripts/get_yolov9.sh", "scripts/test_matrix.sh"} & (after.keys() - before.keys())
    for name in ("utils/__init__.py", "models/__init__.py"):
        assert (clone / name).read_text().count("# >>> yolov9-qat >>>") == 1


@pytest.mark.parametrize("flags", [(), ("--link",)])
def test_twice_changes_nothing(clone, flags):
    patch(clone, *flags)
    first = {path: path.lstat().st_mtime_ns for path in clone.rglob("*")}
    again = patch(clone, *flags)
    assert again.returncode == 0 and "nothing written" in again.stdout
    assert {path: path.lstat().st_mtime_ns for path in clone.rglob("*")} == first


def test_relative_path_from_anywhere_and_says_what_it_wrote(clone):
    result = patch(clone.name, cwd=clone.parent)
    assert result.returncode == 0, result.stderr
    for name in ("utils/qat/compat.py", "models/__init__.py (block", "Next: "):
        assert name in result.stdout


def test_manifest_is_readable_by_sha256sum(clone):
    patch(clone)
    assert subprocess.run(["sha256sum", "--check", "--strict", ".yolov9-qat.manifest"], cwd=clone).returncode == 0
    assert f"# version {VERSION}" in (clone / ".yolov9-qat.manifest").read_text()


def test_version_is_stated_once_more_in_python():
    from utils.qat import __version__

    assert __version__ == VERSION


def test_check_tells_the_state(clone):
    assert patch(clone, "--check").returncode == 1
    before = contents(clone)
    patch(clone)
    assert patch(clone, "--check").returncode == 0
    (clone / "utils/qat/compat.py").write_text("edited\n")
    result = patch(clone, "--check")
    assert result.returncode == 1 and "edited: utils/qat/compat.py" in result.stdout
    patch(clone, "--force")
    (clone / "utils/__init__.py").write_text("# upstream's own again\n")
    result = patch(clone, "--check")
    assert result.returncode == 1 and "block missing or older: utils/__init__.py" in result.stdout
    assert before.keys() < contents(clone).keys()


@pytest.mark.parametrize("flags", [(), ("--check",), ("--revert",), ("--force",)])
def test_refuses_what_is_not_yolov9(tmp_path, flags):
    result = patch(tmp_path, *flags)
    assert result.returncode == 2 and "not a YOLOv9 folder" in result.stderr
    assert not list(tmp_path.iterdir())
    assert patch(tmp_path / "nowhere", *flags).returncode == 2


def test_refuses_unknown_flags_and_itself(clone):
    result = patch(clone, "--remove")
    assert result.returncode == 2 and "--revert" in result.stderr
    assert patch(REPO).returncode == 2
    assert subprocess.run([PATCH], capture_output=True).returncode == 2


def test_refuses_another_tool_then_force_moves_it_aside(clone):
    for name in ("models/quantize.py", "models/quantize_rules.py"):
        (clone / name).write_text("# of another tool\n")
    (clone / "utils/qat").mkdir()
    (clone / "utils/qat/compat.py").write_text("# of another tool\n")
    before = contents(clone)
    result = patch(clone)
    assert result.returncode == 2 and contents(clone) == before
    for name in ("models/quantize.py", "models/quantize_rules.py", "utils/qat/compat.py", "--force"):
        assert name in result.stderr
    assert patch(clone, "--force").returncode == 0
    assert not (clone / "models/quantize.py").exists()  # it would hide behind our package models/quantize/
    assert patch(clone).returncode == 0  # a later run remembers what was moved
    assert patch(clone, "--revert").returncode == 0
    assert contents(clone) == before


def test_keeps_edits_unless_forced(clone):
    before = contents(clone)
    patch(clone)
    edited = clone / "utils/qat/compat.py"
    edited.write_text(edited.read_text() + "# mine\n")
    state = contents(clone)
    for flags in ((), ("--revert",)):
        result = patch(clone, *flags)
        assert result.returncode == 2 and "utils/qat/compat.py" in result.stderr
        assert contents(clone) == state
    assert patch(clone, "--force").returncode == 0
    assert patch(clone, "--check").returncode == 0
    edited.write_text("# mine\n")
    assert patch(clone, "--revert", "--force").returncode == 0
    assert contents(clone) == before


def test_edits_beside_the_block_survive_revert(clone):
    patch(clone)
    file = clone / "utils/__init__.py"
    file.write_text(file.read_text() + "MINE = 1\n")
    assert patch(clone).returncode == 0
    assert patch(clone, "--revert").returncode == 0
    assert file.read_text().endswith("MINE = 1\n") and "yolov9-qat" not in file.read_text()


def test_switches_between_copy_and_link(clone):
    before = contents(clone)
    for flags, linked in (((), False), (("--link",), True), ((), False)):
        assert patch(clone, *flags).returncode == 0
        assert (clone / "utils/qat/compat.py").is_symlink() is linked
        assert patch(clone, "--check").returncode == 0
    patch(clone, "--revert")
    assert contents(clone) == before


def test_upgrades_an_older_version(clone, tmp_path):
    old = tmp_path / "old toolkit"
    (old / "utils/qat").mkdir(parents=True)
    shutil.copy(PATCH, old)
    (old / "VERSION").write_text("0.0.1\n")
    (old / "utils/qat/compat.py").write_text("def apply():\n    pass\n")
    (old / "utils/qat/gone.py").write_text("# part of 0.0.1 only\n")
    before = contents(clone)
    assert patch(clone, script=old / PATCH.name).returncode == 0
    result = patch(clone, "--check")
    assert result.returncode == 1
    for line in (f"version 0.0.1, this toolkit is {VERSION}", "older: utils/qat/compat.py",
                 "no longer part of the toolkit: utils/qat/gone.py"):
        assert line in result.stdout
    assert patch(clone).returncode == 0 and patch(clone, "--check").returncode == 0
    assert not (clone / "utils/qat/gone.py").exists()
    patch(clone, "--revert")
    assert contents(clone) == before
