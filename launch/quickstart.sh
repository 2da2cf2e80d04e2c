#!/usr/bin/env bash
# From a fresh checkout to a report, in one command: finds Python, makes .venv, prepares the open text, trains the quickstart grid.
#
#   launch/quickstart.sh
#
# Stop it whenever you like and run it again: it goes on where it was; when everything is done it ends in seconds, without network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
"") ;;
*)
    echo "launch/quickstart.sh takes no argument ($1); for other runs see .venv/bin/gammalm --help" >&2
    exit 2
    ;;
esac

trap 'printf "\nStopped. Run launch/quickstart.sh again: it goes on from here.\n" >&2; exit 130' INT

started=$SECONDS
phase() { # phase TITLE COMMAND...: say what is done, do it, say how long it took
    local title="$1" from=$SECONDS status=0
    shift
    printf '\n== %s\n' "$title"
    "$@" || status=$?
    if [ "$status" -ne 0 ]; then
        printf '== failed after %d s (status %d): %s\n' $((SECONDS - from)) "$status" "$*" >&2
        exit "$status"
    fi
    printf '== %d s\n' $((SECONDS - from))
}

# A .venv whose Python works is kept, also when it was made by hand with an older one than the newest here.
python="$(PATH="$PWD/.venv/bin" PYENV_ROOT=/nonexistent "$BASH" launch/find_python.sh 2>/dev/null || launch/find_python.sh)"
gammalm=.venv/bin/gammalm

phase "1/3 environment .venv, with $python" launch/env.sh .venv "$python"
phase "2/3 text: fetch the open mix, train a tokenizer, write token shards into data/open-mix" \
    "$gammalm" data prepare --source open-mix --vocab-size 1024 --max-mb 60 --out data/open-mix
phase "3/3 train the quickstart grid in runs/quickstart, then write its report" \
    "$gammalm" grid --config grids/quickstart --workdir runs/quickstart

printf '\nDone in %d s.\n' $((SECONDS - started))
