#!/usr/bin/env bash
# Train on the GPUs of this machine (or, with --gpus 0, its CPUs): one process for all of them, or several; started again after a fault.
#
#   launch/gpu_node.sh --gpus N [options] -- train --config C --workdir W
#
#   --gpus N              use the first N GPUs; 0: CPUs
#   --processes P         processes (1), each with N / P of the GPUs: the way of a cluster, on one machine
#   --port N              of their coordinator (55527); another one for each run on this machine
#   --restarts R          how often at most a run that failed is started again (3), not when it was stopped or its config is refused
#   --wait S              seconds before that (10)
#   --gammalm PATH        the command (.venv/bin/gammalm of this checkout if it is there)
#   --cache FOLDER        compiled programs (WORKDIR/compiled)
#   --env NAME=VALUE      for the trainer; may be repeated
#   --dry-run             print the commands; run nothing
#
# SIGTERM and Ctrl-C go on to the trainers, which save and end. Details: docs/gpu.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}lib.sh"

gpus="" processes=1 restarts=3 wait=10 gammalm="$(own_gammalm)" cache=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage ;;
    --dry-run) dry_run=yes ;;
    --gpus) gpus="$(value "$@")"; shift ;;
    --processes) processes="$(value "$@")"; shift ;;
    --port) port="$(value "$@")"; shift ;;
    --restarts) restarts="$(value "$@")"; shift ;;
    --wait) wait="$(value "$@")"; shift ;;
    --gammalm) gammalm="$(value "$@")"; shift ;;
    --cache) cache="$(value "$@")"; shift ;;
    --env) pair="$(value "$@")"; add_environment "$pair"; shift ;;
    --) shift; break ;;
    *) fail "unknown argument '$1' (see $me --help)" ;;
    esac
    shift
done
required --gpus "$gpus" "how many, 0 for CPUs"
number --gpus "$gpus" 0
number --processes "$processes" 1
number --port "$port" 1024
number --restarts "$restarts" 0
number --wait "$wait" 0
[ $((gpus % processes)) -eq 0 ] || fail "--gpus $gpus cannot be dealt out evenly to --processes $processes"
read_program "$@"

if [ "$dry_run" = no ] && [ "$gpus" -gt 0 ]; then
    found="$(nvidia-smi --list-gpus | grep -c ^GPU)" || fail "--gpus $gpus: nvidia-smi finds no GPU here"
    [ "$found" -ge "$gpus" ] || fail "--gpus $gpus: this machine has $found"
fi

each=$((gpus / processes))
commands=() # one line of shell per process
for ((process = 0; process < processes; process++)); do
    devices=""
    for ((gpu = process * each; gpu < (process + 1) * each; gpu++)); do devices+="${devices:+,}$gpu"; done
    line=(env "CUDA_VISIBLE_DEVICES=$devices" "JAX_COMPILATION_CACHE_DIR=${cache:-$workdir/compiled}")
    [ "$processes" -eq 1 ] || line+=("GAMMALM_COORDINATOR=localhost:$port" "GAMMALM_PROCESSES=$processes" "GAMMALM_PROCESS_ID=$process")
    commands+=("$(quoted "${line[@]}" ${environment[@]+"${environment[@]}"} "$gammalm" "${program[@]}")")
done
if [ "$dry_run" = yes ]; then
    printf '%s &\n' "${commands[@]}"
    printf 'wait\n# Where that ends with a fault (not 0, 2, 75, 130 or 143): once more after %d s, up to %d times.\n' "$wait" "$restarts"
    exit 0
fi

children=() stopped=0
stop() {
    stopped=$((stopped + 1))
    [ "${#children[@]}" -eq 0 ] || kill -TERM "${children[@]}" 2>/dev/null || true
}
trap stop TERM INT
for ((attempt = 0; ; attempt++)); do
    children=()
    for line in "${commands[@]}"; do
        eval "exec $line" &
        children+=($!)
    done
    [ "$stopped" -eq 0 ] || stop # it came while they were started
    status=0 # of the first process, in order, that failed
    for child in "${children[@]}"; do
        while :; do
            told=$stopped ended=0
            wait "$child" || ended=$?
            [ "$told" -ne "$stopped" ] || break # else it was a signal that ended the wait: once more
        done
        [ "$status" -ne 0 ] || status=$ended
    done
    case "$status" in
    0 | 2 | 75 | 130 | 143) exit "$status" ;;
    esac
    [ "$stopped" -eq 0 ] || exit "$status"
    if [ "$attempt" -ge "$restarts" ]; then
        printf 'status %d; given up after %d restarts. Run the same command to go on.\n' "$status" "$restarts" >&2
        exit "$status"
    fi
    printf 'status %d; restart %d of %d in %d s\n' "$status" $((attempt + 1)) "$restarts" "$wait" >&2
    sleep "$wait" &
    children=($!)
    wait "${children[0]}" || exit "$status" # stopped meanwhile
done
