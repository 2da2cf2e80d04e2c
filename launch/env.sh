#!/usr/bin/env bash
# Make or refresh a virtual environment with gammalm installed in it (editable).
#
#   launch/env.sh FOLDER PYTHON [EXTRAS]      e.g. launch/env.sh .venv-test /usr/bin/python3.12 test
#
# Does nothing, without network, when the environment is whole and setup.py, the extras and the Python are what they were.
# Made anew when its Python is broken or another one, if this script made it; any other folder is left alone. Installing is tried
# three times; the log is FOLDER/install.log.
set -euo pipefail

folder="$1" python="$2" extras="${3:-}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "[$folder] $*"; }

describe() { "$1" -I -c 'import platform, sys; print(platform.python_version(), sys.base_prefix)' 2>/dev/null; }

wanted="$(describe "$python")" || { say "$python does not run"; exit 1; }
stamp="$folder/gammalm-stamp"
made="$folder/made-by-gammalm" # ours to delete
# The checkout's own path is part of it: an editable install points there, so a moved checkout is installed again.
fingerprint="$wanted|$extras|$PWD|$(cksum <setup.py)"

if [ -d "$folder" ] && [ "$(describe "$folder/bin/python" || true)" != "$wanted" ]; then
    if [ -f "$made" ]; then
        say "its Python is broken or not ${wanted%% *}: making it anew"
        rm -rf "$folder"
    elif ! rmdir "$folder" 2>/dev/null; then # not empty
        what="no virtual environment"
        [ ! -f "$folder/pyvenv.cfg" ] || what="an environment that launch/ did not make, and its Python is broken or not ${wanted%% *}"
        say "is $what; move it away, then run this again"
        exit 1
    fi
fi
if [ ! -d "$folder" ]; then
    say "making it with Python ${wanted%% *}"
    mkdir -p "$folder"
    : >"$made"
    "$python" -m venv "$folder" || { rm -rf "$folder"; exit 1; }
fi
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
    say "up to date"
    exit 0
fi

progress() { # of pip's many lines, one per package, as they come
    local line name count=0
    while IFS= read -r line; do
        case "$line" in
        *.whl.metadata*) ;; # which versions fit together; the package itself follows later
        *Downloading*.whl* | *Downloading*.gz* | *"Using cached"*.whl* | *Processing*.whl*)
            count=$((count + 1))
            name="${line%% (*}"
            name="${name##*[ /]}"
            case "$line" in *B\)) name="$name (${line##*\(}" ;; esac
            say "$(printf '%4d  %s' "$count" "$name")"
            ;;
        "Installing collected packages"*) say "      unpacking $(wc -w <<<"${line#*: }") packages ..." ;;
        esac
    done
}

rm -f "$stamp"
log="$folder/install.log"
for attempt in 1 2 3; do
    say "installing gammalm${extras:+[$extras]} (log: $log)"
    if PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/bin/python" -m pip install --no-input --progress-bar off --retries 2 \
        -e ".${extras:+[$extras]}" 2>&1 </dev/null | tee "$log" | progress; then
        printf '%s' "$fingerprint" >"$stamp"
        say "installed"
        exit 0
    fi
    tail -n 5 "$log"
    if [ "$attempt" -lt 3 ]; then
        say "installing failed; once more in $((attempt * 10)) s"
        sleep $((attempt * 10))
    fi
done
say "could not be installed; see $log. Behind a proxy or a mirror, set it up for pip (pip config), then run this again."
exit 1
