#!/usr/bin/env bash
# Lay yolov9-qat over a clone of YOLOv9 (WongKinYiu/yolov9), say what is there, or take it away again.
#
#   in:  a YOLOv9 tree
#   out: the same tree plus our files, one marked block at the top of its utils/__init__.py and models/__init__.py
#        (they load utils/qat/compat.py; models/common.py imports removed modules before it imports utils, hence both),
#        and .yolov9-qat.manifest, which `sha256sum -c` reads and which --revert works from.
#
# No upstream file is overwritten; everything is checked before the first write.
set -euo pipefail
shopt -s nullglob globstar

HERE=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERSION=$(<"$HERE/VERSION")
MANIFEST=.yolov9-qat.manifest
BACKUP=.yolov9-qat.backup                     # files of other tools that --force moved aside
HOOKED=(utils/__init__.py models/__init__.py) # the two upstream files that get the block
BEGIN='# >>> yolov9-qat >>> written by patch_yolov9.sh, removed by patch_yolov9.sh --revert'
END='# <<< yolov9-qat <<<'

usage() {
    cat <<EOF
Usage: patch_yolov9.sh YOLOV9_DIR [--check | --revert | --link | --force]
  (nothing)  copy the toolkit into YOLOV9_DIR; running it again updates what is older
  --link     symlink (commands: a launcher) instead of copying, for work on the toolkit itself
  --check    write nothing; exit 0 if the tree is patched and up to date, 1 if not, with the difference
  --revert   restore the tree byte for byte
  --force    go on where it refuses: foreign files are moved to $BACKUP (--revert brings them back), edited files of
             ours are overwritten, or removed with --revert
EOF
}

refuse() { # reason, next step ...
    printf 'patch_yolov9.sh: %s\n' "$@" >&2
    exit 2
}

# ---- what we lay over: a whitelist of places, filled with what exists here -------------------------------------------
overlay_files() {
    cd "$HERE"
    local f
    for f in {qat,reparameterization,export_qat,export_yoloV9,val_trt,benchmark_trt,compare_outputs}.py \
        models/quantize/**/*.py models/deploy/**/*.py utils/qat/**/*.py segment/qat_seg.py scripts/*.sh scripts/*.py; do
        [[ -f $f && ! $f =~ ^scripts/(get_yolov9|test_matrix)\.sh$ ]] && echo "$f"
    done
    return 0
}

sum() { sha256sum "$1" | cut -d' ' -f1; }
exists() { [[ -e $1 || -L $1 ]]; } # -e alone misses a dangling link
with_block() { # the hooked file as it shall be: block, then the file as upstream wrote it
    printf '%s\nfrom utils.qat import compat as _qat_compat\n\n_qat_compat.apply_before_upstream()\n%s\n' "$BEGIN" "$END"
    without_block "$1"
}
without_block() { sed '/^# >>> yolov9-qat >>>/,/^# <<< yolov9-qat <<</d' "$1"; }

# ---- the manifest: "# key value" lines, then sha256sum lines -----------------------------------------------------------
declare -A LISTED=() # file of ours in this tree -> checksum when written
OLD_VERSION='' OLD_MODE='' FOLDERS=() MOVED=()
declare -A ORIGINAL=() # hooked file -> checksum before the block
read_manifest() {
    [[ -f $MANIFEST ]] || return 0
    local first second third
    while read -r first second third; do
        case "$first $second" in
            '# version') OLD_VERSION=$third ;;
            '# mode') OLD_MODE=$third ;;
            '# folder') FOLDERS+=("$third") ;;
            '# moved') MOVED+=("$third") ;;
            '# original') ORIGINAL[${third#*  }]=${third%%  *} ;;
            '# '* | '#'*) ;;
            *) LISTED[$second]=$first ;;
        esac
    done <"$MANIFEST"
}
write_manifest() {
    local f
    {
        printf '# Files of yolov9-qat in this tree. Verify: sha256sum -c %s   Remove: patch_yolov9.sh DIR --revert\n' "$MANIFEST"
        printf '# version %s\n# mode %s\n' "$VERSION" "$MODE"
        for f in "${!ORIGINAL[@]}"; do printf '# original %s  %s\n' "${ORIGINAL[$f]}" "$f"; done | sort
        for f in "${FOLDERS[@]}"; do printf '# folder %s\n' "$f"; done
        for f in "${MOVED[@]}"; do printf '# moved %s\n' "$f"; done
        sha256sum "${FILES[@]}" "${HOOKED[@]}"
    } >"$MANIFEST.new"
    if cmp -s "$MANIFEST.new" "$MANIFEST"; then rm "$MANIFEST.new"; else mv "$MANIFEST.new" "$MANIFEST"; fi
}

# Is this file in the tree as we left it (so that it may be replaced or removed)?
untouched() {
    if [[ -L $1 ]]; then
        [[ -n ${LISTED[$1]:-} || $1 -ef $HERE/$1 ]]
    elif [[ -n ${LISTED[$1]:-} ]]; then
        [[ $(sum "$1") == "${LISTED[$1]}" ]]
    else
        cmp -s "$1" "$HERE/$1" || launcher "$1" | cmp -s - "$1" # interrupted before it could write the manifest
    fi
}
# A command cannot be a symlink: Python puts the folder of the real file on sys.path, which is not the patched tree.
is_command() { [[ $1 != */* || $1 == scripts/*.py || $1 == segment/*.py ]]; }
launcher() { printf 'import runpy\n\nrunpy.run_path("%s", run_name="__main__")\n' "$HERE/$1"; }
current() { # is it what this version would write, in this mode?
    if [[ $MODE == copy ]]; then
        [[ ! -L $1 ]] && cmp -s "$1" "$HERE/$1"
    elif is_command "$1"; then
        [[ ! -L $1 ]] && launcher "$1" | cmp -s - "$1"
    else
        [[ -L $1 && $1 -ef $HERE/$1 ]]
    fi
}

# ---- the verbs -----------------------------------------------------------------------------------------------------------
check() {
    local f differs=()
    if [[ ! -f $MANIFEST ]]; then
        echo "$TREE: not patched. Next: $SELF '$TREE'"
        return 1
    fi
    MODE=$OLD_MODE
    [[ $OLD_VERSION == "$VERSION" ]] || differs+=("version $OLD_VERSION, this toolkit is $VERSION")
    for f in "${FILES[@]}"; do
        if ! exists "$f"; then
            differs+=("missing: $f")
        elif ! current "$f"; then
            if untouched "$f"; then differs+=("older: $f"); else differs+=("edited: $f"); fi
        fi
    done
    for f in "${!LISTED[@]}"; do
        [[ " ${FILES[*]} ${HOOKED[*]} " == *" $f "* ]] || differs+=("no longer part of the toolkit: $f")
    done
    for f in "${HOOKED[@]}"; do
        with_block "$f" | cmp -s - "$f" || differs+=("block missing or older: $f")
    done
    if ((${#differs[@]})); then
        printf '%s: patched, but not up to date\n' "$TREE"
        printf '  %s\n' "${differs[@]}"
        echo "Next: $SELF '$TREE'"
        return 1
    fi
    echo "$TREE: patched and up to date (yolov9-qat $VERSION, $MODE, ${#FILES[@]} files)"
}

refuse_foreign() { # every reason at once, before anything is written
    local f foreign=() edited=() why=()
    for f in models/quantize.py models/quantize_rules.py "${FILES[@]}"; do
        exists "$f" || continue
        if [[ " ${FILES[*]} " == *" $f "* ]]; then untouched "$f" && continue; fi
        if [[ -n ${LISTED[$f]:-} ]]; then edited+=("$f"); else foreign+=("$f"); fi
    done
    if [[ $FORCE == no ]] && ((${#foreign[@]} + ${#edited[@]})); then
        ((${#edited[@]} == 0)) || why+=("edited since they were written: ${edited[*]}")
        ((${#foreign[@]} == 0)) || why+=("not from this toolkit (another quantization tool?): ${foreign[*]}")
        refuse "$TREE was left as it is" "${why[@]}" \
            "use a fresh clone, or --force: foreign files go to $BACKUP/ and come back with --revert, edited ones are overwritten"
    fi
    for f in "${foreign[@]}"; do
        mkdir -p "$BACKUP/$(dirname "$f")"
        mv "$f" "$BACKUP/$f"
        MOVED+=("$f")
        echo "  moved to $BACKUP: $f"
    done
    for f in "${edited[@]}"; do echo "  overwritten, it was edited: $f"; done
}

make_folder() { # and remember each level that was not there
    [[ -d $1 ]] && return
    make_folder "$(dirname "$1")"
    mkdir "$1"
    FOLDERS+=("$1")
}

patch() {
    local f written=()
    refuse_foreign
    for f in "${!LISTED[@]}"; do # files of an older version that this one does not have
        if [[ " ${FILES[*]} ${HOOKED[*]} " == *" $f "* ]] || ! exists "$f"; then continue; fi
        if untouched "$f"; then remove_ours "$f"; else echo "  edited, kept though it is no longer ours: $f"; fi
    done
    for f in "${FILES[@]}"; do
        if exists "$f" && current "$f"; then continue; fi
        make_folder "$(dirname "$f")"
        rm -f "$f"
        if [[ $MODE == copy ]]; then
            cp --preserve=mode "$HERE/$f" "$f"
        elif is_command "$f"; then
            launcher "$f" >"$f"
        else
            ln -s "$HERE/$f" "$f"
        fi
        written+=("$f")
    done
    for f in "${HOOKED[@]}"; do
        ORIGINAL[$f]=$(without_block "$f" | sha256sum | cut -d' ' -f1)
        if with_block "$f" | cmp -s - "$f"; then continue; fi
        with_block "$f" >"$f.new"
        chmod --reference="$f" "$f.new"
        mv "$f.new" "$f"
        written+=("$f (block at the top)")
    done
    write_manifest
    if ((${#written[@]})); then
        printf '  %s\n' "${written[@]}"
        echo "yolov9-qat $VERSION: ${#written[@]} files written to $TREE ($MODE), listed in $MANIFEST"
    else
        echo "yolov9-qat $VERSION: $TREE is up to date, nothing written"
    fi
    echo "Next: cd '$TREE' && python qat.py quantize --help"
}

remove_ours() { # a file of ours and its bytecode
    local stem=${1##*/}
    rm -f "$1" "$(dirname "$1")/__pycache__/${stem%.py}".cpython-*.pyc
}

revert() {
    local f i edited=()
    if [[ ! -f $MANIFEST ]]; then
        echo "$TREE: not patched, nothing to revert"
        return
    fi
    for f in "${HOOKED[@]}"; do unset "LISTED[$f]"; done
    for f in "${!LISTED[@]}"; do
        if exists "$f" && ! untouched "$f"; then edited+=("$f"); fi
    done
    if [[ $FORCE == no ]] && ((${#edited[@]})); then
        refuse "$TREE was left as it is; edited since they were written: ${edited[*]}" \
            "save what you need of them, then: $SELF '$TREE' --revert --force"
    fi
    for f in "${!LISTED[@]}"; do remove_ours "$f"; done
    for f in "${HOOKED[@]}"; do
        without_block "$f" >"$f.new"
        chmod --reference="$f" "$f.new"
        mv "$f.new" "$f"
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
        mv "$BACKUP/$f" "$f"
        echo "  restored: $f"
    done
    rm -rf "$BACKUP"
    for f in __pycache__ segment/__pycache__ scripts/__pycache__; do
        [[ -d $f ]] && rmdir --ignore-fail-on-non-empty "$f"
    done
    rm "$MANIFEST"
    echo "$TREE: yolov9-qat ${OLD_VERSION} removed"
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
        *) [[ -z $TARGET ]] || refuse "one folder at a time, got '$TARGET' and '$arg'"; TARGET=$arg ;;
    esac
done
if [[ -z $TARGET ]]; then
    usage >&2
    exit 2
fi
[[ -d $TARGET ]] || refuse "no such folder: $TARGET" "Next: $HERE/scripts/get_yolov9.sh '$TARGET'"
SELF=$HERE/patch_yolov9.sh
TREE=$(cd -P "$TARGET" && pwd)
[[ $TREE != "$HERE" ]] || refuse "$TREE is the toolkit itself; name the folder of a YOLOv9 clone"
cd "$TREE"
for f in val.py models/yolo.py models/common.py utils/general.py "${HOOKED[@]}"; do
    [[ -f $f ]] || refuse "$TREE is not a YOLOv9 folder: it has no $f" "Next: $HERE/scripts/get_yolov9.sh NEW_DIR"
done
grep -q 'class RepNCSPELAN4' models/common.py ||
    refuse "$TREE is not YOLOv9: models/common.py has no RepNCSPELAN4" "Next: $HERE/scripts/get_yolov9.sh NEW_DIR"
mapfile -t FILES < <(overlay_files)
read_manifest
"$VERB"
