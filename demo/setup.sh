# Sourced by the scripts that set up: what they need first. Whatever is there already is left as it is.
#
#   make_environment FOLDER
#                   an environment with nothing but pip in it; from then on `python` is the one in it
#   set_up_python   the same at .venv, with the packages of requirements.txt in the versions of constraints.txt. Arguments, such as
#                   --tests and --latest, go to install_dependencies.sh
#   set_up_yolov9   upstream YOLOv9 at .work/yolov9 (a copy of $YOLOV9_DIR where that is set)
#
# $PYTHON names the interpreter that an environment is made with (default python3). Needs HERE, the folder of the toolkit.
# shellcheck shell=bash

fail() { # reason, next step
    printf "${0##*/}: %s\n" "$@" >&2
    exit 2
}
say() { printf '\n== %s\n' "$*"; }

# Python imports from the current folder with -c, -m and -, and a pip.py that lies there must not run. -I would leave out PYTHONPATH
# and the user's own packages as well, and -P is of Python 3.11.
apart() { # PYTHON CODE ARGUMENT...
    "$1" -c "import sys; sys.path[:] = filter(None, sys.path); $2" "${@:3}"
}
run_module() { # PYTHON MODULE ARGUMENT..., as python -m
    apart "$1" "import runpy; runpy.run_module('$2', run_name='__main__', alter_sys=True)" "${@:3}"
}

make_environment() {
    local venv=$1 python=${PYTHON:-python3}
    if ! run_module "$venv/bin/python" pip --version >/dev/null 2>&1; then # none yet, or one that was interrupted
        command -v "$python" >/dev/null || fail "no $python on this machine" "install Python 3.10 or newer, or name one with PYTHON="
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            fail "$("$python" -V) is too old" "install Python 3.10 or newer, or name one with PYTHON="
        # Debian and Ubuntu cut ensurepip out of Python and put it into a package of its own
        apart "$python" 'import ensurepip, venv' 2>/dev/null ||
            fail "$python cannot make environments: it lacks the module venv or ensurepip" \
                "Debian, Ubuntu: apt install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); or name another Python with PYTHON="
        # in a container that brings its own torch, use that one rather than download another
        local share=()
        apart "$python" 'from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("torchvision")))' &&
            share=(--system-site-packages)
        run_module "$python" venv --clear ${share[@]+"${share[@]}"} "$venv" || fail "$python -m venv $venv failed, its message is above"
    fi
    # Not `source activate`: it holds the absolute path of the day it was made, and this folder may have been moved.
    export PATH="$venv/bin:$PATH" PYTHON="$venv/bin/python"
}

set_up_python() {
    local installed=$HERE/.venv/requirements.installed$* # what was installed with these arguments; written last
    say "Python environment: .venv"
    make_environment "$HERE/.venv"
    if cat "$HERE"/{requirements,constraints}.txt | cmp -s - "$installed"; then
        echo "$("$PYTHON" -V), requirements.txt is installed"
    else
        "$HERE/install_dependencies.sh" --defaults "$@"
        cat "$HERE"/{requirements,constraints}.txt >"$installed"
    fi
}

set_up_yolov9() {
    local tree=$HERE/.work/yolov9 origin=$HERE/.work/yolov9.origin
    local wanted=${YOLOV9_DIR:+$(readlink -f "$YOLOV9_DIR")}
    say "Upstream YOLOv9: .work/yolov9"
    if [[ -d $tree && -n $wanted && $wanted != "$(cat "$origin" 2>/dev/null)" ]]; then
        fail "$tree is there, and is no copy of YOLOV9_DIR=$YOLOV9_DIR" "unset YOLOV9_DIR, or remove that folder (quickstart.sh --fresh does)"
    fi
    "$HERE/scripts/get_yolov9.sh" "$tree"
    [[ -f $origin ]] || echo "$wanted" >"$origin"
}
