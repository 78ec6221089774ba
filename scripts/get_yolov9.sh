#!/usr/bin/env bash
# Get the YOLOv9 source tree that the toolkit is laid over.
#
#   in:  a folder name that does not exist yet (or one made by an earlier run: then nothing is done)
#   out: DIR/val.py, DIR/models, DIR/utils ...
#
# Three sources, in this order: a copy of the tree that $YOLOV9_DIR names; a clone of WongKinYiu/yolov9 at the commit the
# toolkit is developed against; the source distribution yolov9pip 0.0.4 of the package index (the same code, some weeks
# older), for machines that reach an index but not GitHub. The last is taken as it is; what it lacks is printed.
set -euo pipefail

URL=https://github.com/WongKinYiu/yolov9
COMMIT=5b1ea9a8b3f0ffe4fe0e203ec6232d788bb3fcff
SDIST=yolov9pip==0.0.4
SHA256=3b14c5dd040db0d38da5ae580907e716c4fada9c672cbcee98719d476a5c8336
PYTHON=${PYTHON:-python3}
CONNECT_S=15 # a firewall that drops packets must not hold us longer than this

# shellcheck source=demo/setup.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../demo/setup.sh"
complete() { [[ -f $1/val.py && -f $1/models/yolo.py && -f $1/utils/general.py ]]; }

if [[ $# -ne 1 || $1 == -* ]]; then
    echo "Usage: [YOLOV9_DIR=an/existing/tree] [PYTHON=python3] get_yolov9.sh DIR"
    [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0
    exit 2
fi
DIR=$1
if complete "$DIR"; then
    echo "$DIR: YOLOv9 is there already, nothing to do"
    exit 0
fi
if [[ -e $DIR && ! -d $DIR ]] || [[ -d $DIR && -n $(ls -A "$DIR") ]]; then
    fail "$DIR exists and is not a YOLOv9 tree" "name a folder that does not exist, or remove this one"
fi
mkdir -p "$(dirname "$DIR")"
# made beside DIR, renamed when complete: an interrupted run leaves no half a tree under the final name
TMP=$(mktemp -d "$(dirname "$DIR")/.get_yolov9.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
chmod 755 "$TMP"
TREE=$TMP/tree

copy_existing() {
    complete "$YOLOV9_DIR" || fail "YOLOV9_DIR=$YOLOV9_DIR is not a YOLOv9 tree (val.py, models/yolo.py, utils/general.py)" \
        "correct it, or unset it to fetch the sources"
    echo "Copying YOLOV9_DIR=$YOLOV9_DIR (without .git, datasets and runs): that tree itself stays as it is"
    mkdir "$TREE"
    tar -C "$YOLOV9_DIR" --exclude=./.git --exclude=./datasets --exclude=./runs --exclude=__pycache__ -cf - . | tar -C "$TREE" -xf -
}

clone() { # false where GitHub, or git, cannot be had
    command -v git >/dev/null || return 1
    export GIT_TERMINAL_PROMPT=0
    echo "Cloning $URL at ${COMMIT:0:7}"
    timeout "$CONNECT_S" git ls-remote -q "$URL" HEAD >/dev/null 2>&1 || return 1
    git init -q "$TREE" && git -C "$TREE" remote add origin "$URL" &&
        git -C "$TREE" -c http.lowSpeedLimit=1000 -c http.lowSpeedTime=30 fetch -q --depth 1 origin "$COMMIT" &&
        git -C "$TREE" -c advice.detachedHead=false checkout -q FETCH_HEAD
}

unpack_sdist() {
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON on this machine" "set PYTHON to a Python 3.10 or newer"
    rm -rf "$TREE"
    # pip runs an sdist's setup.py to read its metadata; with a hash it checks the file before that
    echo "$SDIST --hash=sha256:$SHA256" >"$TMP/requirements.txt"
    run_module "$PYTHON" pip download -q --disable-pip-version-check --no-deps --no-binary :all: --require-hashes \
        -r "$TMP/requirements.txt" -d "$TMP" >"$TMP/pip.log" 2>&1 || {
        cat "$TMP/pip.log" >&2
        fail "neither $URL nor $SDIST from the package index could be fetched" \
            "fetch YOLOv9 on another machine and set YOLOV9_DIR to that folder"
    }
    echo "$SHA256  $TMP/yolov9pip-0.0.4.tar.gz" | sha256sum --check --quiet || fail "$SDIST: wrong checksum"
    tar -C "$TMP" -xzf "$TMP/yolov9pip-0.0.4.tar.gz"
    mv "$TMP/yolov9pip-0.0.4/yolov9" "$TREE"
    # the wrapper of the pip package, not part of YOLOv9; with __init__.py the tree would count as a package itself
    rm "$TREE/__init__.py" "$TREE/helpers.py"
    cp "$TMP/yolov9pip-0.0.4/"{LICENSE,requirements.txt} "$TREE/"
    cat <<EOF
This is $SDIST, YOLOv9 of February 2024. Compared with ${COMMIT:0:7} it lacks:
  blocks    ELAN1 (yolov9-t, yolov9-s, gelan-t, gelan-s), UConv: such checkpoints do not load
  heads     DSegment, DualDSegment: no YOLOv9 segmentation checkpoints; Panoptic is there, but parse_model refuses it
  configs   data/ (coco.yaml, hyps/), models/detect|segment|panoptic|hub/*.yaml: bring a config and pass --hyp, --cfg
  scripts   detect_dual.py (detect.py takes reparameterized checkpoints only), segment/, panoptic/, classify/, tools/,
            scripts/
  export    export.py --include onnx_end2end
  modules   utils/coco_utils.py, so utils/panoptic/dataloaders.py does not import
and it differs in two places: fuse() leaves RepConvN in its training form (same outputs, slower), and an activation set
in a model config does not reach RepConvN (such checkpoints load; models built from such a config differ).
EOF
}

if [[ -n ${YOLOV9_DIR:-} ]]; then
    copy_existing
elif ! clone; then
    echo "GitHub is not reachable; taking $SDIST from the package index"
    unpack_sdist
fi
complete "$TREE" || fail "what was fetched is not a YOLOv9 tree (val.py, models/yolo.py, utils/general.py)"
[[ ! -d $DIR ]] || rmdir "$DIR"
mv "$TREE" "$DIR"
echo "$DIR: ready. Next: ./patch_yolov9.sh ${DIR@Q}"
