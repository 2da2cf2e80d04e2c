#!/usr/bin/env bash
# What the launchers share: reading arguments, refusing wrong ones with exit status 2, doing a thing or only printing it. Sourced, not run.
#
# Before something is really done nothing here needs a program beside bash: --dry-run works anywhere and changes nothing.
# shellcheck disable=SC2034  # the variables set here are read by the scripts that source this file

me="launch/${0##*/}"
root="${BASH_SOURCE[0]%lib.sh}.."
storage_at=/shared # where containers see the storage; a relative workdir or data path is below it
port=55527         # of the process coordinator where the platform names none
dry_run=no
environment=() # NAME=VALUE for the trainer

fail() {
    printf '%s: %s\n' "$me" "$*" >&2
    exit 2
}

usage() { # the comment at the head of the script
    local line
    while IFS= read -r line; do
        case "$line" in
        '#!'*) ;;
        '#'*)
            line="${line#\#}"
            printf '%s\n' "${line# }"
            ;;
        *) exit 0 ;;
        esac
    done <"$0"
}

value() { # value OPTION [VALUE ...]: what follows the option
    if [ $# -lt 2 ] || [ -z "$2" ] || [[ "$2" == --* ]]; then
        fail "$1 needs a value (see $me --help)"
    fi
    printf '%s' "$2"
}

required() { # required OPTION VALUE WHAT
    [ -n "$2" ] || fail "$1 is missing: $3 (see $me --help)"
}

number() { # number OPTION VALUE MINIMUM
    [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$1 must be a whole number, not '$2'"
    [ "$2" -ge "$3" ] || fail "$1 must be at least $3, not $2"
}

resource_name() { # of a JobSet or a TPU
    [[ "$1" =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] || fail "--name '$1': a letter, then letters, digits and -, all lower case, 40 at most"
}

add_environment() { # NAME=VALUE
    [[ "$1" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || fail "--env takes NAME=VALUE, not '$1'"
    [[ "$1" != *$'\n'* ]] || fail "--env ${1%%=*}: a value of one line, please"
    environment+=("$1")
}

# What follows `--`: sets program, the arguments of gammalm, and workdir.
read_program() {
    local word previous="" config=""
    program=("$@") workdir=""
    case "${1:-}" in
    train | grid) ;;
    "") fail "nothing to run: end with  -- train --config C --workdir W  (or grid)" ;;
    *) fail "after -- comes train or grid and its options, not '$1'" ;;
    esac
    for word in "$@"; do
        [[ "$word" != *$'\n'* ]] || fail "an argument of gammalm has a line break: $word"
        case "$previous" in
        --config) config="$word" ;;
        --workdir) workdir="$word" ;;
        esac
        case "$word" in
        --config=*) config="${word#*=}" ;;
        --workdir=*) workdir="${word#*=}" ;;
        esac
        previous="$word"
    done
    workdir="${workdir%"${workdir##*[!/]}"}" # without slashes at its end
    [ -n "$config" ] || fail "gammalm $1 needs --config C"
    [ -n "$workdir" ] || fail "gammalm $1 needs --workdir W: the folder that outlives the machine"
}

on_storage() { # the workdir must be on what the user gave as storage, or it is gone with the container
    [[ "$workdir" != /* || "$workdir" == "$storage_at"/* ]] ||
        fail "--workdir $workdir is not on the storage: write a relative path, or one below $storage_at"
    [[ "/$workdir/" != */../* ]] || fail "--workdir $workdir: no .., please"
}

# KIND:AxB or KIND:AxBxC, as `gammalm plan --topology` writes it: sets kind, shape and chips.
read_topology() {
    local dimensions side
    kind="${1%%:*}" shape="${1#*:}" chips=1
    case "$kind" in
    v5e | v6e) dimensions=2 ;;
    v4 | v5p | tpu7x) dimensions=3 ;;
    *) fail "--topology $1: unknown accelerator type '$kind'; known are v4, v5e, v5p, v6e and tpu7x, as in v5e:16x16 or v5p:4x4x8" ;;
    esac
    local sides="${shape//x/ }"
    # shellcheck disable=SC2086  # the words are wanted
    set -- "$1" $sides
    [ $# -eq $((dimensions + 1)) ] || fail "--topology $1: $kind has $dimensions dimensions, as in 4x4 or 2x2x2"
    for side in "${@:2}"; do
        [[ "$side" =~ ^[1-9][0-9]{0,2}$ ]] || fail "--topology $1: '$side' is no number of chips"
        chips=$((chips * side))
    done
    [ $chips -eq 1 ] || [ $((chips % 4)) -eq 0 ] || fail "--topology $1: $chips chips; machines have 4 each (or 1x1)"
}

quoted() { # its arguments as bash would have to read them
    local word text="" quote="'\\''"
    for word in "$@"; do
        if [[ ! "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            word="'${word//\'/$quote}'"
        fi
        text+="${text:+ }$word"
    done
    printf '%s' "$text"
}

run() { # run COMMAND...: do it, or print it
    if [ "$dry_run" = yes ]; then
        printf '%s\n' "$(quoted "$@")"
    else
        "$@"
    fi
}

feed() { # feed TEXT COMMAND...: the same with TEXT on its standard input
    local text="$1"
    shift
    if [ "$dry_run" = yes ]; then
        printf "%s <<'END'\n%s\nEND\n" "$(quoted "$@")" "$text"
    else
        "$@" <<<"$text"
    fi
}

own_gammalm() { # the command of this checkout's .venv, else the one on PATH
    if [ -x "$root/.venv/bin/gammalm" ]; then
        printf '%s' "$(cd "$root" && pwd)/.venv/bin/gammalm"
    else
        printf gammalm
    fi
}
