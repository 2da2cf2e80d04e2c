#!/usr/bin/env bash
# The documentation as a site, in build/docs: makes .venv if quickstart has not, adds the extra `docs`, builds; a warning is an error.
#
#   launch/docs.sh [--serve]
#
# --serve    afterwards show it on http://localhost:8000, with its search, until Ctrl-C
# Without it open build/docs/index.html: everything but the search works from the file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

serve=no
case "${1:-}" in
-h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
--serve)
    serve=yes
    ;;
"") ;;
*)
    echo "launch/docs.sh takes --serve or nothing, not $1" >&2
    exit 2
    ;;
esac

export NO_MKDOCS_2_WARNING=1 # of the theme, about a version that setup.py excludes
python=.venv/bin/python
launch/env.sh .venv "$(PATH="$PWD/.venv/bin" PYENV_ROOT=/nonexistent "$BASH" launch/find_python.sh 2>/dev/null || launch/find_python.sh)"
if ! "$python" -c 'import material, mkdocs' 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -e '.[docs]' </dev/null
fi
# Not --quiet: it would hide warnings from the count that makes them errors.
"$python" -m mkdocs build --clean --config-file docs/site/mkdocs.yml
echo "build/docs/index.html"
if [ "$serve" = yes ]; then
    exec "$python" -m http.server --bind 127.0.0.1 --directory build/docs 8000
fi
