#!/usr/bin/env bash
# The tests on other versions of Python, torch and NumPy than run_tests.sh has: one environment and one run per row.
#
#   scripts/test_matrix.sh                          every row
#   scripts/test_matrix.sh newest                   one of them
#   scripts/test_matrix.sh oldest -- -n 0 -k demo   what follows -- goes to pytest
#   scripts/test_matrix.sh --fresh newest           make its environment again: with what the package index serves today
#
# In: a Python of each row, as python3.10 on the PATH or under ~/.pyenv; a package index. 6 GB of disk per row.
# Out: .work/matrix/ROW/ (environment, tests.log) and, last, a table. Exit status 1 if a test failed,
# 2 if a row could not run.
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"

# row → Python; what is installed before requirements.txt, which then leaves it alone (without a version: the newest); how the rest is.
declare -A PYTHONS=([oldest]=3.10 [newest]=3.13)
declare -A PACKAGES=([oldest]="torch==2.4.1 torchvision==0.19.1 numpy==1.26.4" [newest]="torch torchvision numpy")
declare -A OPTIONS=([oldest]="" [newest]=--latest)

FRESH=no ROWS=()
while (($#)); do
    case $1 in
        --fresh) FRESH=yes ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        --) shift && break ;;
        *)
            [[ -n ${PYTHONS[$1]:-} ]] || fail "no row $1" "allowed: oldest newest, --fresh, and -- before what is for pytest"
            ROWS+=("$1") ;;
    esac
    shift
done
((${#ROWS[@]})) || ROWS=(oldest newest)

find_python() { # VERSION → path. That of pyenv on the PATH may be a script that only says which versions there are.
    local python
    for python in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        "$python" -c '' 2>/dev/null && echo "$python" && return
    done
    fail "no Python $1 on this machine" "install it, for instance: pyenv install $1"
}

run_row() { # ROW, pytest's arguments → its tests.log; in a subshell of its own
    local row=$1 folder=$HERE/.work/matrix/$1
    shift
    say "$row: Python ${PYTHONS[$row]}, ${PACKAGES[$row]}"
    [[ $FRESH == no ]] || rm -rf "$folder"
    mkdir -p "$folder"
    rm -f "$folder"/{versions,tests.log}
    PYTHON=$(find_python "${PYTHONS[$row]}")
    make_environment "$folder/.venv"
    if [[ $(cat "$folder/packages" 2>/dev/null) != "${PACKAGES[$row]}" ]]; then
        # shellcheck disable=SC2086  # several words
        run_module python pip install --disable-pip-version-check ${PACKAGES[$row]} || fail "pip could not install the packages of $row, its message is above"
        echo "${PACKAGES[$row]}" >"$folder/packages"
    fi
    "$HERE/install_dependencies.sh" --tests --trex ${OPTIONS[$row]:+"${OPTIONS[$row]}"}
    python - >"$folder/versions" <<'PYTHON'
import sys; sys.path[:] = filter(None, sys.path)  # see demo/setup.sh
import platform
from importlib.metadata import version

print(' | '.join([platform.python_version(), *(version(name).split('+')[0] for name in ('torch', 'torchvision', 'numpy', 'onnxruntime'))]))
PYTHON
    cd "$HERE"
    python -m pytest -p no:cacheprovider -n 2 --dist loadfile "$@" 2>&1 | tee "$folder/tests.log"
}

[[ -z ${YOLOV9_DIR:-} ]] || YOLOV9_DIR=$(readlink -f "$YOLOV9_DIR")
[[ -n ${YOLOV9_DIR:-} ]] || set_up_yolov9
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as run_tests.sh has it
STATUS=0
for row in "${ROWS[@]}"; do
    set +e # not `|| code=$?`: that would switch off `set -e` in there as well
    (set -e; run_row "$row" "$@")
    code=$?
    set -e
    ((code < 2)) || code=2
    ((code <= STATUS)) || STATUS=$code
done

say "Tests on ${YOLOV9_DIR:-.work/yolov9}"
echo '| row | Python | torch | torchvision | NumPy | ONNX Runtime | date | result |'
echo '|---|---|---|---|---|---|---|---|'
for row in "${ROWS[@]}"; do
    folder=$HERE/.work/matrix/$row
    result=$(sed -nE '$s/^=* ?(.* in [0-9.]+s( \([0-9:]+\))?).*$/\1/p' "$folder/tests.log" 2>/dev/null || true)
    echo "| $row | $(cat "$folder/versions" 2>/dev/null || echo "${PYTHONS[$row]} | | | | ") | $(date +%F) | ${result:-did not run: see above} |"
done
exit $STATUS
