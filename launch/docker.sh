#!/usr/bin/env bash
# Build the container image, or train in it on this machine.
#
#   launch/docker.sh build --device cpu|cuda12|cuda13|tpu --tag IMAGE [--python 3.13] [--pip-config FILE] [--dry-run]
#   launch/docker.sh run --image IMAGE --storage FOLDER [--gpus all|N] [--env NAME=VALUE] [--grace S] [--dry-run] \
#       -- train --config C --workdir W
#
#   --tag IMAGE           its name, with your registry in front where it is to be pushed: docker push IMAGE
#   --pip-config FILE     a pip.conf to build with, for a mirror or a proxy; it does not get into the image
#   --storage FOLDER      seen as /shared; W and the data are below it: relative paths are
#   --gpus all|N          GPUs to hand in (none)
#   --env NAME=VALUE      for the trainer; may be repeated
#   --grace S             seconds between SIGTERM and SIGKILL on docker stop (120)
#   --dry-run             print the command; run nothing
#
# Details: docs/docker.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}lib.sh"

action="${1:-}" device="" tag="" python=3.13 pip_config="" image="" storage="" gpus="" grace=120
case "$action" in
build | run) shift ;;
-h | --help) usage ;;
*) fail "first comes build or run, not '$action' (see $me --help)" ;;
esac
while [ $# -gt 0 ]; do
    case "$action $1" in
    *" -h" | *" --help") usage ;;
    *" --dry-run") dry_run=yes ;;
    "build --device") device="$(value "$@")"; shift ;;
    "build --tag") tag="$(value "$@")"; shift ;;
    "build --python") python="$(value "$@")"; shift ;;
    "build --pip-config") pip_config="$(value "$@")"; shift ;;
    "run --image") image="$(value "$@")"; shift ;;
    "run --storage") storage="$(value "$@")"; shift ;;
    "run --gpus") gpus="$(value "$@")"; shift ;;
    "run --grace") grace="$(value "$@")"; shift ;;
    "run --env") pair="$(value "$@")"; add_environment "$pair"; shift ;;
    "run --") shift; break ;;
    *) fail "unknown argument '$1' of $action (see $me --help)" ;;
    esac
    shift
done

if [ "$action" = build ]; then
    required --device "$device" "cpu, cuda12, cuda13 or tpu"
    required --tag "$tag" "the image's name"
    case "$device" in cpu | cuda12 | cuda13 | tpu) ;; *) fail "--device must be cpu, cuda12, cuda13 or tpu, not '$device'" ;; esac
    case "$python" in 3.11 | 3.12 | 3.13) ;; *) fail "--python must be 3.11, 3.12 or 3.13, not '$python'" ;; esac
    [ -z "$pip_config" ] || [ -f "$pip_config" ] || fail "--pip-config $pip_config: there is no such file"
    run docker build --file "$root/launch/Dockerfile" --build-arg "DEVICE=$device" --build-arg "PYTHON=$python" --tag "$tag" \
        ${pip_config:+--secret "id=pip,src=$pip_config"} "$root"
    exit 0
fi

required --image "$image" "the image, as launch/docker.sh build made it"
required --storage "$storage" "the folder that keeps runs and data"
[ -d "$storage" ] || fail "--storage $storage: there is no such folder"
[[ "$storage" != *[:,]* ]] || fail "--storage $storage: no colons or commas, please"
[ -z "$gpus" ] || [ "$gpus" = all ] || number --gpus "$gpus" 1
number --grace "$grace" 1
read_program "$@"
on_storage
[[ "$storage" == /* ]] || storage="$PWD/$storage" # Docker takes a plain name for a volume of its own
variables=()
for pair in "JAX_COMPILATION_CACHE_DIR=$storage_at/compiled" ${environment[@]+"${environment[@]}"}; do
    variables+=(--env "$pair")
done
# Files belong to who runs this; the memory that processes share is the host's.
run docker run --rm --init --ipc host --stop-timeout "$grace" --user "$UID:${GROUPS[0]}" ${gpus:+--gpus "$gpus"} \
    --volume "$storage:$storage_at" "${variables[@]}" "$image" "${program[@]}"
