#!/usr/bin/env bash
# The tests, set-up included. Arguments go to pytest:
#
#   ./run_tests.sh                     every law and every command, in two processes; a line near the end counts those left for --faults
#   ./run_tests.sh --unit              the laws of tests/unit alone, in seconds; they need no YOLOv9
#   ./run_tests.sh --faults            kills, full disks, damaged and hostile files, more models, and only these
#   ./run_tests.sh -n 0 -k reparam     some of the first, in one process
#   ./run_tests.sh --faults tests/upstream/untrusted/test_mutations.py --mutations 1000 --seed 1    random changes of each kind of file
#   ./run_tests.sh --slow              those that take more than half a minute too
#   ./run_tests.sh --gpu               those that need an NVIDIA GPU, and only these
#   ./run_tests.sh --latest ...        in a .venv which, where there is none, gets the newest of every package, not the tested set
#
# All but --unit run on the tree that $YOLOV9_DIR names, else on .work/yolov9. Neither a GPU nor GitHub is needed.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;; esac

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"

LATEST=()
if [[ ${1:-} == --latest ]]; then
    LATEST=(--latest) && shift
fi
[[ -z ${YOLOV9_DIR:-} ]] || YOLOV9_DIR=$(readlink -f "$YOLOV9_DIR") # relative to where it was typed
set_up_python --tests --trex ${LATEST[@]+"${LATEST[@]}"}
if [[ ${1:-} == --unit ]]; then
    set -- -n 0 tests/unit "${@:2}" # a second process would take as long to load torch
    say "Tests without YOLOv9"
else
    [[ -n ${YOLOV9_DIR:-} ]] || set_up_yolov9
    say "Tests on ${YOLOV9_DIR:-.work/yolov9}"
fi
cd "$HERE"
# One torch thread per process: there are as many processes, and these small models gain nothing by more. A forward pass of the demo's
# took 0.05 to 0.10 s with one thread, beside other work, and 0.11 to 0.17 s with two that sleep while they wait (utils/qat/core/machine.py).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest -n 2 --dist loadfile "$@"
