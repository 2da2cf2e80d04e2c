#!/usr/bin/env bash
# The test suite, with environments of its own.
#
#   launch/test.sh [--full | --long] [pytest arguments]
#
# default   the newest Python in .venv-test; comparisons with torch, transformers and lm-eval (marker `parity`) on 3.11 in .venv-parity
# --full    adds the tests marked `full`, and the default tests on the 3.11 environment too; what .ci/run calls
# --long    only the tests marked `long`: figures and evaluations
# Both also put libtpu, which compiles for TPUs that are not there, into a folder of its own (.venv-libtpu). In .venv-test it would make
# every `import jax` look for a TPU. Where it cannot be installed its tests are skipped, and the summary says so.
# Where one Python is all there is, one environment serves for everything it can install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=default
case "${1:-}" in
--full | --long)
    tier="${1#--}"
    shift
    ;;
-h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
arguments=("$@")
trap 'exit 130' INT

cores="$(getconf _NPROCESSORS_ONLN)"
workers=$((cores > 4 ? 4 : cores))

newest="$(launch/find_python.sh)"
old="$(launch/find_python.sh 3.11 2>/dev/null || true)"

started=$SECONDS
summary=()
failed=0

environment() { # environment FOLDER PYTHON EXTRAS: status 1, and the whole script's in the end, where it cannot be installed
    local from=$SECONDS outcome=""
    launch/env.sh "$@" || outcome=": FAILED" failed=1
    summary+=("$(printf '%5d s  environment %s%s' $((SECONDS - from)) "$1" "$outcome")")
    [ -z "$outcome" ]
}

suite() { # suite TITLE FOLDER MARKERS: run the tests that MARKERS choose; none at all is fine
    local title="$1" folder="$2" markers="$3" from=$SECONDS status=0 outcome=passed
    printf '\n== %s (%s, -m "%s")\n' "$title" "$folder" "$markers"
    "$folder/bin/python" -m pytest -q -n "$workers" --dist worksteal --durations=10 --durations-min=1 -m "$markers" \
        ${arguments[@]+"${arguments[@]}"} </dev/null || status=$?
    case "$status" in
    0) ;;
    5) outcome="no tests" ;;
    *) outcome=FAILED failed=1 ;;
    esac
    summary+=("$(printf '%5d s  %s: %s' $((SECONDS - from)) "$title" "$outcome")")
}

newest_version="$("$newest" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
parity=.venv-parity
if [ "$newest_version" = 3.11 ]; then
    parity=.venv-test
    environment .venv-test "$newest" test,docs,notebooks,parity,eval || { parity="" && environment .venv-test "$newest" test,docs,notebooks; }
else
    environment .venv-test "$newest" test,docs,notebooks
fi

compiler_for_tpus() { # of the version that the extra `plan` names
    local folder=.venv-libtpu wanted
    wanted="$(.venv-test/bin/python -c 'from importlib.metadata import requires
print(*[r.split(";")[0] for r in requires("gammalm") if "extra == \"plan\"" in r])')" && [ -n "$wanted" ] || return 1
    if [ "$(cat "$folder/gammalm-stamp" 2>/dev/null)" != "$newest_version $wanted" ]; then
        rm -rf "$folder"
        .venv-test/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --target "$folder" "$wanted" </dev/null ||
            return 1
        printf '%s' "$newest_version $wanted" >"$folder/gammalm-stamp"
    fi
    export GAMMALM_LIBTPU="$PWD/$folder"
}

if [ "$tier" != default ] && ! compiler_for_tpus; then
    summary+=("         plans for TPUs: not tested, libtpu could not be installed")
fi

core="not parity and not full and not long"
case "$tier" in
long) suite "long, Python $newest_version" .venv-test "long" ;;
*)
    if [ "$tier" = full ]; then
        suite "core and full, Python $newest_version" .venv-test "not parity and not long"
    else
        suite "core, Python $newest_version" .venv-test "$core"
    fi
    if [ -z "$old" ]; then
        summary+=("         parity: not run, it needs Python 3.11 (torch's CPU build installs there)")
    else
        if [ "$parity" = .venv-parity ]; then
            environment "$parity" "$old" test,parity,eval || parity=""
        fi
        if [ -z "$parity" ]; then
            summary+=("         parity: not run, its environment could not be installed")
        else
            suite "parity, Python 3.11" "$parity" "parity$([ "$tier" = full ] || printf ' and not full')"
        fi
        if [ "$tier" = full ] && [ "$parity" = .venv-parity ]; then
            suite "core, Python 3.11" "$parity" "$core"
        fi
    fi
    ;;
esac

printf '\n'
printf '%s\n' "${summary[@]}"
printf '%5d s  in all\n' $((SECONDS - started))
exit "$failed"
