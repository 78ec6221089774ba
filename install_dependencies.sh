#!/usr/bin/env bash
# Install what requirements.txt lists into the environment of $PYTHON (default python3). No root needed.
#
# It works in the NVIDIA PyTorch container and in a bare venv. Installed packages that are recent enough stay. pip gets the installed torch,
# torchvision, TensorRT, NumPy and OpenCV as constraints, so it fails rather than replaces them. Without torch, torch and torchvision are
# installed. New packages get the versions of constraints.txt, which the tests ran with, unless packages that must stay have other versions:
# the set holds as a whole.
#
# Usage: [PYTHON=python3] install_dependencies.sh [--defaults] [--tests] [--trex | --no-trex] [--tensorrt 10|11|rtx] [--latest] [--dry-run]
#   --defaults  ask nothing (it never does; old command lines keep working)
#   --tests     also install the packages of the tests (run_tests.sh does): pytest, and TensorRT-RTX (96 MB)
#   --trex      also install pygraphviz, with Graphviz in it, for pictures of engines (scripts/draw_engine.py)
#   --no-trex   do not install it (the default)
#   --tensorrt  also install TensorRT 10 or 11 (about 4 GB), or TensorRT-RTX (96 MB, rtx), if none is installed
#   --latest    install the newest versions, not those of constraints.txt, which the tests ran with
#   --dry-run   print the packages to install, and change nothing
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"

TESTS=no TREX=no TENSORRT='' LATEST=no DRY_RUN=no
while (($#)); do
    case $1 in
        --defaults) ;;
        --tests) TESTS=yes ;;
        --trex) TREX=yes ;;
        --no-trex) TREX=no ;;
        --latest) LATEST=yes ;;
        --dry-run) DRY_RUN=yes ;;
        --tensorrt)
            [[ ${2:-} =~ ^(10|11|rtx)$ ]] || fail "--tensorrt ${2:-}: must be 10, 11 or rtx (8.6 has no package that pip can install: use its container)"
            TENSORRT=$2 && shift
            ;;
        -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;;
        *) fail "unknown option $1; allowed: --defaults --tests --trex --no-trex --tensorrt --latest --dry-run" ;;
    esac
    shift
done
command -v "$PYTHON" >/dev/null || fail "no $PYTHON on this machine" "set PYTHON to a Python 3.10 or newer"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$PYTHON" -V) is too old, 3.10 or newer is needed"
run_module "$PYTHON" pip --version >/dev/null 2>&1 || fail "$PYTHON has no pip" "make an environment: $PYTHON -m venv .venv, PYTHON=.venv/bin/python"

TMP=$(mktemp -d)
trap 'rm -rf "$TMP"' EXIT

# ---- plan: requirements.txt minus what is there -> $TMP/install.txt, $TMP/keep.txt, and $TMP/constraints.txt: keep.txt and pins
"$PYTHON" - "$HERE/requirements.txt" "$HERE/constraints.txt" "$TESTS" "$TREX" "$LATEST" "$TMP" <<'EOF'
import sys; sys.path[:] = filter(None, sys.path)  # see demo/setup.sh
import importlib.util
import re
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

source, pinned, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[6])
optional = {"tests": sys.argv[3], "trex": sys.argv[4]}  # sections that are installed only if asked for: yes or no
latest = sys.argv[5] == "yes"
# Modules that come under several distribution names, or (built from source) under none: what imports counts.
MODULES = {"opencv-python-headless": "cv2", "onnxruntime": "onnxruntime", "torch": "torch", "torchvision": "torchvision"}
# Replacing these breaks a container, so what is installed is what pip must work with.
KEEP = re.compile(r"torch|torchvision|torchaudio|triton|numpy|(nvidia-)?tensorrt.*|opencv-.*|nvidia-.*|cuda-.*")

installed = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
pins = {} if latest else {canonicalize_name(pin.name): pin for pin in map(Requirement, re.findall(r"(?m)^\w.*", pinned.read_text()))
                          if pin.marker is None or pin.marker.evaluate()}
install, other, section = [], [], ""
for line in source.read_text().splitlines():
    if line.startswith("# ["):
        section = line[3:line.index("]")]
    text = line.split("#")[0].strip()
    if not text or optional.get(section) == "no":
        continue
    wanted = Requirement(text)
    if wanted.marker and not wanted.marker.evaluate():
        print(f"  skip     {wanted.name} (only where {wanted.marker})")
        continue
    if latest:
        wanted.specifier = SpecifierSet(",".join(str(part) for part in wanted.specifier if part.operator != "<="))
        text = str(wanted)
    name = canonicalize_name(wanted.name)
    have = installed.get(name)
    module = MODULES.get(name)
    if have is None and module and importlib.util.find_spec(module):
        print(f"  keep     {module} (not installed under the name {name})")
    elif have and (section == "torch" or KEEP.fullmatch(name)):
        outside = "" if wanted.specifier.contains(have, prereleases=True) else f"; not tested, {wanted.specifier} is"
        print(f"  keep     {name} {have}{outside}")
        if name in pins and not pins[name].specifier.contains(have, prereleases=True):
            other.append(f"{name} {have}")
    elif have and wanted.specifier.contains(have, prereleases=True):
        print(f"  keep     {name} {have}")
    else:
        print(f"  {'replace' if have else 'install'}  {text}" + (f" (installed: {have})" if have else ""))
        install.append(text)
(out / "install.txt").write_text("".join(f"{text}\n" for text in install))
if install and pins:
    print("  versions " + (f"within requirements.txt: constraints.txt does not go with {', '.join(other)}" if other else "of constraints.txt"))
keep = [f"{n}=={v}" for n, v in sorted(installed.items()) if KEEP.fullmatch(n)]
(out / "keep.txt").write_text("".join(f"{line}\n" for line in keep))
pinning = [] if other else [str(pin) for name, pin in pins.items() if name not in installed]
(out / "constraints.txt").write_text("".join(f"{line}\n" for line in keep + pinning))
EOF

# ---- install -------------------------------------------------------------------------------------------------------------
if [[ ! -s $TMP/install.txt ]]; then
    echo "Everything is installed."
elif [[ $DRY_RUN == yes ]]; then
    echo "Dry run: nothing was changed. pip would have to keep: $(tr '\n' ' ' <"$TMP/keep.txt")"
else
    run_module "$PYTHON" pip install --disable-pip-version-check -r "$TMP/install.txt" -c "$TMP/constraints.txt" ||
        fail "pip could not install the packages above (its message says which)" \
            "offline: set PIP_FIND_LINKS to a folder of wheels; system Python: $PYTHON -m venv .venv, then PYTHON=.venv/bin/python ${0@Q}"
fi

# ---- TensorRT, if asked for. The package index has TensorRT-RTX itself; of TensorRT it has small packages that load the libraries
# from NVIDIA's own index while they are installed, which takes a machine that reaches it.
install_tensorrt() {
    local have wheels
    if [[ $TENSORRT == rtx ]]; then
        wheels=$(grep -o '^tensorrt-rtx-[^#]*' "$HERE/requirements.txt")
    else
        wheels="tensorrt>=$TENSORRT.0,<$((TENSORRT + 1))"
        if have=$(apart "$PYTHON" 'import tensorrt; print(tensorrt.__version__)' 2>/dev/null); then
            [[ $have == "$TENSORRT".* ]] || fail "TensorRT $have is installed and is never replaced" "another version: make an environment of its own"
            echo "  keep     tensorrt $have" && return
        fi
    fi
    echo "TensorRT: $wheels"
    [[ $DRY_RUN == no ]] || return 0
    echo "$wheels" >"$TMP/tensorrt.txt"
    run_module "$PYTHON" pip install --disable-pip-version-check -r "$TMP/tensorrt.txt" -c "$TMP/constraints.txt" ||
        fail "pip could not install TensorRT ($wheels): its libraries come from NVIDIA's package index, pypi.nvidia.com, which this machine does not reach" \
            "or has no version for this Python. Use the container nvcr.io/nvidia/pytorch, which has TensorRT, or NVIDIA's .deb or .tar of it;" \
            "or fetch the wheels elsewhere (pip download 'tensorrt>=$TENSORRT.0') and set PIP_FIND_LINKS to their folder." \
            "Without it: python val_trt.py --weights MODEL.onnx evaluates in ONNX Runtime, and --tensorrt rtx has a builder that needs no GPU"
}
[[ -z $TENSORRT ]] || install_tensorrt
[[ $DRY_RUN == no ]] || exit 0

# ---- what is there now -----------------------------------------------------------------------------------------------------
"$PYTHON" - "$HERE/requirements.txt" <<'EOF'
import sys; sys.path[:] = filter(None, sys.path)  # see demo/setup.sh
import re
from importlib import metadata


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


print(f"Versions in {sys.executable} (Python {sys.version.split()[0]}):")
for line in open(sys.argv[1]):
    if name := re.match(r"[A-Za-z][\w-]*", line):
        print(f"  {name[0]:28}{version(name[0]) or '-'}")
print(f"  {'tensorrt':28}{version('tensorrt') or '- (only building and running engines needs it)'}")
EOF
