#!/usr/bin/env bash
# Lay yolov9-qat over a clone of YOLOv9 (WongKinYiu/yolov9), check it, or remove it.
#
# Usage: patch_yolov9.sh YOLOV9_DIR [--check | --revert | --link | --force]
#   (nothing)  copy the toolkit into YOLOV9_DIR; a second run updates older files
#   --link     symlink (commands: a launcher) instead of copying, for work on the toolkit itself
#   --check    write nothing; exit 0 if the tree is patched and up to date, 1 if not, with the difference
#   --revert   restore the tree byte for byte
#   --force    continue where it would refuse: move foreign files to .yolov9-qat.backup (--revert brings them back), and
#              overwrite our edited files, or remove them with --revert
#
#   in:  a YOLOv9 tree
#   out: the same tree plus our files, one marked block at the top of its utils/__init__.py and models/__init__.py
#        (they load utils/qat/compat.py; models/common.py imports removed modules before it imports utils, hence both),
#        and .yolov9-qat.manifest, which `sha256sum -c` reads and which --revert works from.
#
# No upstream file is overwritten; everything is checked before the first write. A run can be killed at any moment:
#   1. What shall lie in the tree is written to .yolov9-qat.new/. A full disk or a missing permission shows here.
#   2. A plan takes the place of the manifest. It lists the files of before and of afterwards.
#   3. Each file is renamed into its place, and last of all the manifest.
# The next run reads the plan as it reads a manifest: --revert finds every file of ours, a patch starts again at 1.
set -euo pipefail
shopt -s nullglob globstar
unset CDPATH     # cd would go, and speak, elsewhere
export LC_ALL=C # A-Z means these letters, and what sort gives is the same everywhere

SELF=$(realpath -- "${BASH_SOURCE[0]}")
HERE=${SELF%/*}
VERSION=$(<"$HERE/VERSION")
MANIFEST=.yolov9-qat.manifest
LARGEST=200000 LONGEST=1000                   # bytes of it and of its lines: bash takes minutes for much longer ones
BACKUP=.yolov9-qat.backup                     # files of other tools that --force moved aside
NEW=.yolov9-qat.new                           # what shall lie in the tree, each file under its own path
HOOKED=(utils/__init__.py models/__init__.py) # the two upstream files that get the block
OTHERS=(models/quantize.py models/quantize_rules.py) # of another tool; the first would hide behind our package
BEGIN='# >>> yolov9-qat >>> written by patch_yolov9.sh, removed by patch_yolov9.sh --revert'
END='# <<< yolov9-qat <<<'

usage() { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p;}' "$SELF"; }

refuse() { # reason, next step ...: one line
    local line
    printf -v line '; %s' "$@"
    line=${line:2}
    printf 'patch_yolov9.sh: error: %s\n' "${line//$'\n'/ }" >&2
    exit 2
}

STATE='nothing was changed'
attempt() { # a function that writes; if it fails, the last line that it says is the reason
    local said code
    set +e
    said=$(set -e; "$@" 2>&1)
    code=$?
    set -e
    ((code == 0)) || refuse "$TREE: ${said##*$'\n'}" "$STATE"
    [[ -z $said ]] || printf '%s\n' "$said"
}

# ---- what we lay over: a whitelist of places, filled with what exists here -------------------------------------------
COMMANDS='qat|yolov9_qat|reparameterization|export_qat|export_yoloV9|val_trt|benchmark_trt|compare_outputs' # of every version
FOLDER='(models/(quantize|deploy)|utils/qat)(/[A-Za-z0-9_]+)*'
ours() { # is this a path that this toolkit, in any version, writes?
    [[ $1 =~ ^($COMMANDS|$FOLDER/[A-Za-z0-9_]+|segment/qat_seg|classify/qat_cls|scripts/[A-Za-z0-9_]+)\.py$ || $1 =~ ^scripts/[A-Za-z0-9_]+\.sh$ ]] &&
        [[ ! $1 =~ ^scripts/(get_|test_matrix) ]]
}
overlay_files() {
    cd "$HERE"
    local f
    for f in *.py models/**/*.py utils/**/*.py segment/*.py classify/*.py scripts/*.{py,sh}; do
        # verify_tensorrt runs our tests, which stay here
        if [[ -f $f && $f != scripts/verify_tensorrt.* ]] && ours "$f"; then echo "$f"; fi
    done
}

sum() { sha256sum "$1" | cut -d' ' -f1; }
exists() { [[ -e $1 || -L $1 ]]; } # -e alone misses a dangling link
quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; } # for a shell: 'it'\''s'
among() { [[ " ${*:2} " == *" $1 "* ]]; }
with_block() { # the hooked file as it shall be: block, then the file as upstream wrote it
    printf '%s\nfrom utils.qat import compat as _qat_compat\n\n_qat_compat.apply_before_upstream()\n%s\n' "$BEGIN" "$END"
    without_block "$1"
}
without_block() { sed '/^# >>> yolov9-qat >>>/,/^# <<< yolov9-qat <<</d' "$1"; }
folders_of() { # every folder above these paths, the outer ones first
    local f
    for f in "$@"; do
        while [[ $f == */* ]]; do
            f=${f%/*}
            echo "$f"
        done
    done | sort -u
}

# ---- the manifest: "# key value" lines, then sha256sum lines -----------------------------------------------------------
declare -A LISTED=() # file of ours in this tree -> checksum when written; in a plan, of before and of afterwards
OLD_VERSION='' OLD_MODE='' UNFINISHED=no FOLDERS=() MOVED=()
declare -A ORIGINAL=() # hooked file -> checksum before the block
read_manifest() {
    exists "$MANIFEST" || return 0
    [[ -f $MANIFEST && ! -L $MANIFEST ]] || refuse "$TREE/$MANIFEST is no file" 'move it away'
    local line f n=0
    local -A moved=()
    (($(wc -c <"$MANIFEST") <= LARGEST)) || refuse "$TREE/$MANIFEST has more than $LARGEST bytes, and is none of this toolkit's" 'move it away'
    while IFS= read -r line || [[ -n $line ]]; do
        n=$((n + 1))
        ((${#line} <= LONGEST)) || refuse "$TREE/$MANIFEST, line $n, is longer than any of this toolkit's" 'remove that line'
        f=${line##* }
        if [[ $line =~ ^[0-9a-f]{64}'  '[^' ']+$ ]] && ours "$f"; then
            LISTED[$f]+=" ${line::64}"
        elif [[ $line =~ ^'# original '[0-9a-f]{64}'  '[^' ']+$ ]] && among "$f" "${HOOKED[@]}"; then
            ORIGINAL[$f]=${line:11:64}
        elif [[ $line =~ ^'# version '[0-9A-Za-z.+-]+$ ]]; then
            OLD_VERSION=$f
        elif [[ $line =~ ^'# mode '(copy|link)$ ]]; then
            OLD_MODE=$f
        elif [[ $line =~ ^'# folder '($FOLDER|segment|classify|scripts)$ ]]; then
            FOLDERS+=("$f")
        elif [[ $line =~ ^'# moved '[^' ']+$ ]] && { ours "$f" || among "$f" "${OTHERS[@]}"; }; then
            moved[$f]=1
        elif [[ $line == '# unfinished' ]]; then
            UNFINISHED=yes
        elif [[ $line != '# Files of yolov9-qat '* ]] && ! { [[ $line =~ ^[0-9a-f]{64}'  ' ]] && among "$f" "${HOOKED[@]}"; }; then
            refuse "$TREE/$MANIFEST, line $n, is none of this toolkit's or names a file that it does not write" 'remove that line'
        fi
    done <"$MANIFEST"
    for f in "${!moved[@]}"; do # what was not moved yet, or is back already, is not ours
        if exists "$BACKUP/$f"; then
            MOVED+=("$f")
        elif exists "$f" && ! untouched "$f"; then
            unset "LISTED[$f]"
        fi
    done
}

launcher() { # of a command: it finds the toolkit by a link of ours, so that no name of a folder has to be quoted in Python
    local up=.
    [[ $1 != */* ]] || up=..
    cat <<EOF
import os
import runpy
import sys

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "$up")
TOOLKIT = os.path.join(os.path.dirname(os.path.realpath(os.path.join(TREE, "utils/qat/compat.py"))), "../..")
sys.path.insert(0, os.path.abspath(TREE))
runpy.run_path(os.path.abspath(os.path.join(TOOLKIT, "$1")), run_name="__main__")
EOF
}
stage() { # writes to $NEW what shall lie in the tree
    local f
    for f in $(folders_of "${FILES[@]}" "${HOOKED[@]}"); do mkdir -p "$NEW/$f"; done
    for f in "${FILES[@]}"; do
        if [[ $MODE == copy ]]; then
            cp --preserve=mode "$HERE/$f" "$NEW/$f"
        elif [[ ($f != */* && $f != yolov9_qat.py) || $f == scripts/*.py || $f == segment/*.py || $f == classify/*.py ]]; then
            # A command cannot be a symlink: Python puts the folder of the real file on sys.path, which is not the patched tree.
            launcher "$f" >"$NEW/$f"
        else
            ln -s "$HERE/$f" "$NEW/$f"
        fi
    done
    stage_hooked with_block
}
stage_hooked() { # with_block or without_block
    local f
    for f in "${HOOKED[@]}"; do
        mkdir -p "$NEW/${f%/*}"
        "$1" "$f" >"$NEW/$f"
        chmod --reference="$f" "$NEW/$f"
        ((EUID)) || chown --reference="$f" "$NEW/$f"
    done
}
stage_manifests() { # of what lies in $NEW; the plan lists what lies in the tree as well
    local f s
    {
        printf '# Files of yolov9-qat in this tree. Verify: sha256sum -c %s   Remove: patch_yolov9.sh DIR --revert\n' "$MANIFEST"
        printf '# version %s\n# mode %s\n' "$VERSION" "$MODE"
        for f in "${HOOKED[@]}"; do printf '# original %s  %s\n' "$(without_block "$f" | sha256sum | cut -d' ' -f1)" "$f"; done
        for f in "${FOLDERS[@]}"; do printf '# folder %s\n' "$f"; done
        for f in "${MOVED[@]}" "${foreign[@]}"; do printf '# moved %s\n' "$f"; done | sort
        (cd "$NEW" && sha256sum "${FILES[@]}" "${HOOKED[@]}")
    } >"$NEW/manifest"
    {
        cat "$NEW/manifest"
        echo '# unfinished'
        for f in "${!LISTED[@]}"; do
            for s in ${LISTED[$f]}; do echo "$s  $f"; done
        done
        if ((${#edited[@]})); then sha256sum "${edited[@]}"; fi # --force: they may go
    } >"$NEW/plan"
}

same() { # does the tree have this file as it lies in $NEW?
    if [[ -L $1 || -L $NEW/$1 ]]; then [[ $(readlink "$1") == "$(readlink "$NEW/$1")" ]]; else cmp -s "$1" "$NEW/$1"; fi
}
untouched() { # is this file in the tree as we left it (so that it may be replaced or removed)?
    if [[ -L $1 ]]; then
        [[ $1 -ef $HERE/$1 || -n ${LISTED[$1]:-} && $(readlink "$1") == */"$1" ]]
    else
        [[ -f $1 && "${LISTED[$1]:-} " == *" $(sum "$1") "* ]] || same "$1"
    fi
}

# ---- the verbs -----------------------------------------------------------------------------------------------------------
check() {
    local f differs=()
    if [[ ! -f $MANIFEST ]]; then
        echo "$TREE: not patched. Next: $AGAIN"
        return 1
    fi
    MODE=$OLD_MODE
    attempt stage
    [[ $UNFINISHED == no ]] || differs+=('a patch was interrupted')
    [[ $OLD_VERSION == "$VERSION" ]] || differs+=("version $OLD_VERSION, this toolkit is $VERSION")
    for f in "${FILES[@]}"; do
        if ! exists "$f"; then
            differs+=("missing: $f")
        elif ! same "$f"; then
            if untouched "$f"; then differs+=("older: $f"); else differs+=("edited: $f"); fi
        fi
    done
    for f in "${!LISTED[@]}"; do
        among "$f" "${FILES[@]}" || differs+=("no longer part of the toolkit: $f")
    done
    for f in "${HOOKED[@]}"; do
        same "$f" || differs+=("block missing or older: $f")
    done
    if ((${#differs[@]})); then
        printf '%s: patched, but not up to date\n' "$TREE"
        printf '  %s\n' "${differs[@]}"
        echo "Next: $AGAIN"
        return 1
    fi
    echo "$TREE: patched and up to date (yolov9-qat $VERSION, $MODE, ${#FILES[@]} files)"
}

patch() {
    local f foreign=() edited=() why=() gone=() changed=() blocks=0
    attempt stage
    for f in "${OTHERS[@]}" "${FILES[@]}"; do
        exists "$f" || continue
        if exists "$NEW/$f" && untouched "$f"; then continue; fi
        if [[ -n ${LISTED[$f]:-} && -f $f && ! -L $f ]]; then edited+=("$f"); else foreign+=("$f"); fi
    done
    if [[ $FORCE == no ]] && ((${#foreign[@]} + ${#edited[@]})); then # every reason at once
        ((${#edited[@]} == 0)) || why+=("edited since they were written: ${edited[*]}")
        ((${#foreign[@]} == 0)) || why+=("not from this toolkit (another quantization tool?): ${foreign[*]}")
        refuse "$TREE was left as it is" "${why[@]}" \
            "use a fresh clone, or --force: foreign files go to $BACKUP/ and come back with --revert, edited ones are overwritten"
    fi
    for f in "${foreign[@]}"; do
        ! exists "$BACKUP/$f" || refuse "$TREE: $BACKUP/$f is there already, from an earlier --force" "move $f away yourself"
    done
    for f in "${!LISTED[@]}"; do # of an older version
        if exists "$NEW/$f" || ! exists "$f"; then continue; fi
        if untouched "$f"; then gone+=("$f"); else echo "  edited, kept though it is no longer ours: $f"; fi
    done
    for f in $(folders_of "${FILES[@]}"); do
        [[ -d $f ]] || among "$f" "${FOLDERS[@]}" || FOLDERS+=("$f")
    done
    for f in "${FILES[@]}" "${HOOKED[@]}"; do
        same "$f" && continue
        changed+=("$f")
        ! among "$f" "${HOOKED[@]}" || blocks=$((blocks + 1))
    done
    attempt stage_manifests
    if ((${#changed[@]} + ${#foreign[@]} + ${#gone[@]})) || ! cmp -s "$NEW/manifest" "$MANIFEST"; then
        STATE="half done: mend that and run it again, or: $AGAIN --revert"
        attempt lay
        echo "yolov9-qat $VERSION: $((${#changed[@]} - blocks)) files written to $TREE ($MODE), $blocks of upstream's with our block; listed in $MANIFEST"
    else
        echo "yolov9-qat $VERSION: $TREE is up to date, nothing written"
    fi
    echo "Next: cd $(quoted "$TREE") && python qat.py quantize --help"
}
lay() { # what `patch` found to do
    local f
    mv -fT "$NEW/plan" "$MANIFEST"
    for f in "${foreign[@]}"; do
        mkdir -p "$BACKUP/$(dirname "$f")"
        mv -T "$f" "$BACKUP/$f"
        echo "  moved to $BACKUP: $f"
    done
    for f in "${edited[@]}"; do echo "  overwritten, it was edited: $f"; done
    for f in "${gone[@]}"; do remove_ours "$f"; done
    for f in $(folders_of "${FILES[@]}"); do mkdir -p "$f"; done
    for f in "${changed[@]}"; do
        mv -fT "$NEW/$f" "$f"
        ! among "$f" "${HOOKED[@]}" || echo "  $f (block at the top)"
    done
    mv -fT "$NEW/manifest" "$MANIFEST"
}

remove_ours() { # a file of ours and its bytecode
    local stem=${1##*/} cache
    cache=$(dirname "$1")/__pycache__
    rm -f "$1"
    [[ -L $cache ]] || rm -f "$cache/${stem%.py}".cpython-*.pyc # a link may lead out of the tree
}

revert() {
    local f edited=()
    if [[ ! -f $MANIFEST ]]; then
        echo "$TREE: not patched, nothing to revert"
        return
    fi
    for f in "${!LISTED[@]}"; do
        if exists "$f" && ! untouched "$f"; then edited+=("$f"); fi
    done
    for f in "${MOVED[@]}"; do # another file where one shall come back
        if exists "$f" && [[ -z ${LISTED[$f]:-} ]]; then edited+=("$f"); fi
    done
    if [[ $FORCE == no ]] && ((${#edited[@]})); then
        refuse "$TREE was left as it is; edited since they were written: ${edited[*]}" \
            "save what you need of them, then: $AGAIN --revert --force"
    fi
    attempt stage_hooked without_block
    STATE="half done: mend that and run it again"
    attempt take_away
    echo "$TREE: yolov9-qat ${OLD_VERSION} removed"
}
take_away() {
    local f i
    for f in "${!LISTED[@]}"; do remove_ours "$f"; done
    for f in "${HOOKED[@]}"; do
        mv -fT "$NEW/$f" "$f"
        [[ $(sum "$f") == "${ORIGINAL[$f]:-}" ]] || echo "  block removed; your other edits stay: $f"
    done
    for ((i = ${#FOLDERS[@]} - 1; i >= 0; i--)); do # deepest first
        f=${FOLDERS[i]}
        [[ -d $f ]] || continue
        rm -rf "$f/__pycache__"
        rmdir "$f" 2>/dev/null || echo "  not empty, kept: $f"
    done
    for f in "${MOVED[@]}"; do
        mkdir -p "$(dirname "$f")"
        mv -fT "$BACKUP/$f" "$f"
        echo "  restored: $f"
    done
    [[ ! -d $BACKUP ]] || find "$BACKUP" -depth -type d -empty -delete
    for f in __pycache__ segment/__pycache__ classify/__pycache__ scripts/__pycache__; do
        [[ ! -d $f || -L $f ]] || rmdir --ignore-fail-on-non-empty "$f"
    done
    rm "$MANIFEST"
}

# ---- arguments ------------------------------------------------------------------------------------------------------------
VERB=patch MODE=copy FORCE=no TARGET=''
for arg in "$@"; do
    case $arg in
        --check | --revert) VERB=${arg#--} ;;
        --link) MODE='link' ;;
        --force) FORCE=yes ;;
        -h | --help) usage && exit 0 ;;
        -*) refuse "unknown option $arg; allowed: --check --revert --link --force" ;;
        *) [[ -z $TARGET ]] || refuse "one folder at a time, got $TARGET and $arg"; TARGET=$arg ;;
    esac
done
if [[ -z $TARGET ]]; then
    usage >&2
    exit 2
fi
[[ -d $TARGET ]] || refuse "no such folder: $TARGET" "Next: $(quoted "$HERE/scripts/get_yolov9.sh") $(quoted "$TARGET")"
cd -P -- "$TARGET" 2>/dev/null || refuse "$TARGET cannot be entered"
TREE=$PWD
AGAIN="$(quoted "$SELF") $(quoted "$TREE")"
[[ $TREE != "$HERE" ]] || refuse "$TREE is the toolkit itself; name the folder of a YOLOv9 clone"
for f in val.py models/yolo.py models/common.py utils/general.py "${HOOKED[@]}"; do
    [[ -f $f ]] || refuse "$TREE is not a YOLOv9 folder: it has no $f" "Next: $(quoted "$HERE/scripts/get_yolov9.sh") NEW_DIR"
done
grep -q 'class RepNCSPELAN4' models/common.py ||
    refuse "$TREE is not YOLOv9: models/common.py has no RepNCSPELAN4" "Next: $(quoted "$HERE/scripts/get_yolov9.sh") NEW_DIR"
mapfile -t FILES < <(overlay_files)

# ---- may it be written to, and by nobody else ------------------------------------------------------------------------------
if [[ $VERB == check ]]; then
    NEW=$(mktemp -d 2>&1) || refuse "$NEW"
else
    exec {lock}<.
    flock -n "$lock" || refuse "another patch_yolov9.sh is at work in $TREE" 'wait for it'
    attempt rm -rf "$NEW" # of a run that was killed
fi
trap 'rm -rf "$NEW" 2>/dev/null' EXIT
read_manifest
for f in "${HOOKED[@]}" $(folders_of "$BACKUP/x" "${FILES[@]}" "${HOOKED[@]}" "${!LISTED[@]}" "${FOLDERS[@]/%//x}" "${MOVED[@]}" "${MOVED[@]/#/$BACKUP/}"); do
    [[ ! -L $f ]] || refuse "$TREE/$f is a link, and nothing is written through links" 'put what it leads to in its place'
    [[ ! -e $f || -d $f ]] || among "$f" "${HOOKED[@]}" || refuse "$TREE/$f is a file, and has to be a folder" 'move it away'
    [[ ! -d $f || -w $f || $VERB == check ]] || refuse "$TREE/$f: no permission to write" "$STATE"
done
for f in "${HOOKED[@]}"; do
    [[ $(grep -c '^# >>> yolov9-qat >>>' "$f") == $(grep -c '^# <<< yolov9-qat <<<' "$f") ]] ||
        refuse "$TREE/$f: our block lacks its first or last line" 'remove the rest of it'
done
"$VERB"
