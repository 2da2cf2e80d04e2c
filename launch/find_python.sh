#!/usr/bin/env bash
# Print the path of the newest Python from 3.11 to 3.13 that really runs and can make environments.
#
#   launch/find_python.sh          the newest of 3.13, 3.12, 3.11
#   launch/find_python.sh 3.11     that version only
#
# Looks at PATH, then at pyenv's versions. A shim that answers with an error is no Python, and a
# free-threaded build is passed over. Exit status 1 where there is none.
set -u

versions="${1:-3.13 3.12 3.11}"
pyenv_root="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"

# What a usable interpreter prints: the path of the program itself, behind every shim and link.
probe='
import ensurepip, ssl, sys, sysconfig, venv, zlib
if "%d.%d" % sys.version_info[:2] != sys.argv[1] or sys.implementation.name != "cpython":
    sys.exit(1)
if sysconfig.get_config_var("Py_GIL_DISABLED"):  # free-threaded: many packages have no wheels for it
    sys.exit(1)
print(sys.executable)
'

for version in $versions; do
    folders="${PATH:-}:"
    for folder in "$pyenv_root/versions/$version"*/bin; do
        folders="$folders$folder:"
    done
    while IFS= read -r -d : folder; do
        for name in "python$version" python3 python; do
            candidate="${folder:-.}/$name"
            [ -f "$candidate" ] && [ -x "$candidate" ] || continue
            if found="$("$candidate" -I -c "$probe" "$version" 2>/dev/null </dev/null)" && [ -x "$found" ]; then
                printf '%s\n' "$found"
                exit 0
            fi
        done
    done <<<"$folders"
done

echo "No working Python of version ${versions// / or } on PATH or in $pyenv_root/versions." \
    "Install one with the modules ssl and venv (Debian: python3-venv), then run this again." >&2
exit 1
