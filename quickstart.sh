#!/usr/bin/env bash
# Do the whole job on a small example, set-up included: `qat.py ship` makes the file to deploy of a trained YOLOv9 (digits on textured
# canvases, demo/), and a page that says why. It needs neither a GPU nor GitHub.
#
# Usage: [PYTHON=python3] [YOLOV9_DIR=an/existing/tree] quickstart.sh [--task detect|segment|classify] [--fresh] [--latest]
#   --task    what the model is: a dual-branch detector (the default), a segmentation model of one branch, or a classifier, cut from
#             the detector
#   --fresh   fetch upstream and do the job again (.work/yolov9, and .work/demo, .work/demo-seg or .work/demo-cls); .venv stays
#   --latest  if there is no .venv, make it with the newest packages, not with the tested set (constraints.txt)
#
#   in:  Python 3.10 or newer, git, a C compiler, a package index; it downloads several GB (torch with CUDA), once, into .venv
#   out: .venv/ (packages), .work/yolov9/ (upstream, patched; a copy of YOLOV9_DIR if that is set), .work/demo/, .work/demo-seg/ or
#        .work/demo-cls/ (data, checkpoint, and ship/ with the file, the page and all results)
#
# Each command is printed before it runs. A second run skips the steps that an earlier one finished.
set -euo pipefail

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=demo/setup.sh
source "$HERE/demo/setup.sh"

TASK=detect FRESH=no LATEST=()
while (($#)); do
    case $1 in
        --task)
            TASK=${2:-}
            shift ;;
        --fresh) FRESH=yes ;;
        --latest) LATEST=(--latest) ;;
        -h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$0" ;;
        *) fail "unknown option $1; allowed: --task --fresh --latest --help" ;;
    esac
    (($# == 0)) || shift
done
case $TASK in
    detect) NAME=demo ;;
    segment) NAME=demo-seg ;;
    classify) NAME=demo-cls ;;
    *) fail "--task ${TASK:-with no value}: allowed are detect, segment and classify" "quickstart.sh --help" ;;
esac
mkdir -p "$HERE/.work"
exec 9>"$HERE/.work/quickstart.lock" # held until this process and what it started have ended
flock -n 9 || fail "another quickstart.sh is at work in $HERE" "wait for it, or stop it"
[[ $FRESH == no ]] || rm -rf "$HERE"/.work/{yolov9,yolov9.origin,"$NAME"}

# ---- set-up -----------------------------------------------------------------------------------------------------------
set_up_python ${LATEST[@]+"${LATEST[@]}"}
set_up_yolov9
say "The toolkit, laid over .work/yolov9"
"$HERE/patch_yolov9.sh" "$HERE/.work/yolov9"

# ---- the job: from here on in the patched tree, with relative paths, as a user works -----------------------------------
cd "$HERE/.work/yolov9"
OUT=../$NAME
mkdir -p "$OUT/.done"
SOURCES=$(cat .yolov9-qat.manifest ../../demo/{make_data.py,weights.py,$NAME-weights.pt} | sha256sum) # all that a result hangs on
STALE=no
START=$SECONDS

# step TEXT OUTPUT COMMAND ...: run COMMAND, unless this very command, of these very sources, has finished OUTPUT before.
# The stamp is written last, so an interrupted step starts over; what follows a step that ran, runs as well.
step() {
    local text=$1 output=$2 stamp=$OUT/.done/${2##*/} start=$SECONDS
    shift 2
    say "$text"
    echo "\$ $*"
    if [[ $STALE == no && -e $output && $(cat "$stamp" 2>/dev/null) == "$SOURCES $*" ]]; then
        echo "done before: $output"
        return
    fi
    STALE=yes
    rm -rf "$stamp" "$output"
    "$@" || fail "that command failed, its message is above" "when the cause is mended, run quickstart.sh again: it goes on here"
    [[ -e $output ]] || fail "that command left no $output; please report it"
    echo "$SOURCES $*" >"$stamp"
    echo "-- $((SECONDS - start)) s"
}

# Sizes chosen so that the job takes at most two and a half minutes on two quiet cores.
MADE=() DATA=(--data "$OUT/data/data.yaml" --imgsz 320 --calib-images 100)
[[ $TASK != classify ]] || MADE=(--train 400 --val 600 --size 96) DATA=(--data "$OUT/data" --imgsz 96)
MODEL=$OUT/yolov9-$NAME
say "From here on in $PWD, with .venv/bin first on the PATH"

step "Data: handwritten digits on textured canvases" $OUT/data \
    python ../../demo/make_data.py --task "$TASK" --out $OUT/data --train 200 --val 100 ${MADE[@]+"${MADE[@]}"}
[[ $TASK != detect ]] || MODEL=$MODEL-dual # of two branches, as train_dual.py leaves it; the others have one
step "The trained model, as its training leaves it" $MODEL.pt \
    python ../../demo/weights.py build ../../demo/$NAME-weights.pt $MODEL.pt
say "Ship: from the trained model to the file to deploy"
SHIP=(python qat.py ship --weights "$MODEL.pt" "${DATA[@]}" --project "$OUT" --name ship --resume)
echo "\$ ${SHIP[*]}"
"${SHIP[@]}" || fail "that command failed, its message is above" "when the cause is mended, run quickstart.sh again: it goes on here"
say "Result (this run of the job took $((SECONDS - START)) s)"
printf '  %s\n' "the page: $HERE/.work/$NAME/ship/ship.html" "all files: $HERE/.work/$NAME/ship"
cat <<EOT

Next, with your own clone and weights:
  ./patch_yolov9.sh path/to/yolov9 && cd path/to/yolov9
EOT
YOURS=your-data.yaml
[[ $TASK != classify ]] || YOURS=your-folder-of-classes
echo "  python qat.py ship --weights your-yolov9.pt --data $YOURS"
