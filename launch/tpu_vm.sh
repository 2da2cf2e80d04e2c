#!/usr/bin/env bash
# Train on a TPU VM slice: makes it, starts the container on every host, follows the log; makes it again after preemption.
#
#   launch/tpu_vm.sh --name NAME --zone Z --topology KIND:AxB --image IMAGE --storage S [options] -- train --config C --workdir W
#
#   --topology KIND:AxB   the slice: v4:2x2x2, v5e:16x16, v5p:4x4x8, v6e:8x8 (tpu7x and several slices: launch/jobset.sh)
#   --storage S           what all hosts share, mounted at /shared: nfs://SERVER/EXPORT, or gs://BUCKET where gcsfuse is installed
#   --project P           passed on where given
#   --version V           the VM's software (chosen by KIND)
#   --spot                cheaper, and may be taken away
#   --grace S             seconds between SIGTERM and SIGKILL when the VM shuts down (25; Spot VMs get 30 in all)
#   --restarts N          how often at most it is made again (20)
#   --wait S              seconds before each of them (60)
#   --delete              delete the slice when the run is done; else it stays, and costs
#   --env NAME=VALUE      for the trainer; may be repeated
#   --dry-run             print the commands; run nothing
#
# W and the data are below /shared: relative paths are. Details: docs/tpu.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}lib.sh"

name="" zone="" topology="" image="" storage="" project="" version="" spot=no grace=25 restarts=20 wait=60 delete=no
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage ;;
    --dry-run) dry_run=yes ;;
    --spot) spot=yes ;;
    --delete) delete=yes ;;
    --name) name="$(value "$@")"; shift ;;
    --zone) zone="$(value "$@")"; shift ;;
    --topology) topology="$(value "$@")"; shift ;;
    --image) image="$(value "$@")"; shift ;;
    --storage) storage="$(value "$@")"; shift ;;
    --project) project="$(value "$@")"; shift ;;
    --version) version="$(value "$@")"; shift ;;
    --grace) grace="$(value "$@")"; shift ;;
    --restarts) restarts="$(value "$@")"; shift ;;
    --wait) wait="$(value "$@")"; shift ;;
    --env) pair="$(value "$@")"; add_environment "$pair"; shift ;;
    --) shift; break ;;
    *) fail "unknown argument '$1' (see $me --help)" ;;
    esac
    shift
done

required --name "$name" "the TPU's name"
required --zone "$zone" "where it is, as in us-central2-b"
required --topology "$topology" "the slice, as in v5e:16x16"
required --image "$image" "the container image (launch/docker.sh build makes one)"
required --storage "$storage" "what all hosts share"
resource_name "$name"
[[ "$zone" =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || fail "--zone '$zone' is no zone; one looks like us-central2-b"
number --grace "$grace" 1
number --restarts "$restarts" 0
number --wait "$wait" 0
read_topology "$topology"
case "$kind" in # names and software versions of the Cloud TPU API
v4) accelerator=(--type=v4 --topology="$shape") software=tpu-ubuntu2204-base ;;
v5e) accelerator=(--accelerator-type="v5litepod-$chips") software=v2-alpha-tpuv5-lite ;;
v5p) accelerator=(--type=v5p --topology="$shape") software=v2-alpha-tpuv5 ;;
v6e) accelerator=(--accelerator-type="v6e-$chips") software=v2-alpha-tpuv6e ;;
*) fail "--topology $topology: $kind is reached through Kubernetes, with launch/jobset.sh" ;;
esac
[[ "$storage" != *[[:space:]]* ]] || fail "--storage '$storage': no blanks, please"
case "$storage" in
nfs://*/?*)
    server="${storage#nfs://}"
    mount="command -v mount.nfs >/dev/null || sudo apt-get install --yes nfs-common
    sudo mount -t nfs $(quoted "${server%%/*}:/${server#*/}") $storage_at"
    ;;
gs://?*)
    mount="command -v gcsfuse >/dev/null || { echo 'gcsfuse is not installed on this VM (docs/tpu.md)' >&2; exit 1; }
    sudo gcsfuse --implicit-dirs -o allow_other $(quoted "${storage#gs://}") $storage_at"
    ;;
*) fail "--storage '$storage': nfs://SERVER/EXPORT or gs://BUCKET" ;;
esac
read_program "$@"
on_storage

variables=()
[ "$chips" -le 4 ] || variables+=(--env GAMMALM_COORDINATOR=auto) # from what the platform tells every host of a slice
for pair in "JAX_COMPILATION_CACHE_DIR=$storage_at/compiled" ${environment[@]+"${environment[@]}"}; do
    variables+=(--env "$pair")
done
container() { # container ID: what starts it, with the label run=ID
    quoted sudo docker run --detach --init --name gammalm --label "run=$1" --privileged --network host --stop-timeout "$grace" \
        --volume "$storage_at:$storage_at" --workdir "$storage_at" "${variables[@]}" "$image" "${program[@]}"
}
login="" # the VM's service account, to Google's registries
registry="${image%%/*}"
case "$registry" in
*-docker.pkg.dev | gcr.io | *.gcr.io)
    login="
    gcloud auth print-access-token | sudo docker login --username oauth2accesstoken --password-stdin https://$registry"
    ;;
esac

# On every host. The container outlives a lost connection. gcloud itself sends this again to a host that it lost: with the same ID it is
# followed further, while one of another ID is asked to save and end before the next begins.
on_host() { # on_host ID
    printf '%s' "set -euo pipefail
sudo mkdir -p $storage_at
if ! mountpoint -q $storage_at; then
    $mount
fi
if [ \"\$(sudo docker inspect --format '{{index .Config.Labels \"run\"}}' gammalm 2>/dev/null || true)\" != $1 ]; then
    sudo docker stop --time 120 gammalm >/dev/null 2>&1 || true
    sudo docker rm gammalm >/dev/null 2>&1 || true$login
    $(container "$1") >/dev/null
fi
sudo docker logs --follow gammalm
exit \"\$(sudo docker wait gammalm)\""
}

tpu() { run gcloud compute tpus tpu-vm "$1" "$name" --zone="$zone" ${project:+--project="$project"} "${@:2}"; }
create() {
    local kind_of_price=()
    [ "$spot" = no ] || kind_of_price=(--spot)
    tpu create "${accelerator[@]}" --version="${version:-$software}" ${kind_of_price[@]+"${kind_of_price[@]}"}
}
remove() { tpu delete --quiet; }
train() {
    local id="$$-$RANDOM-$RANDOM"
    tpu ssh --worker=all --command="$(on_host "$id")"
}
state() { tpu describe --format='value(state)' 2>/dev/null || true; } # empty: there is none

if [ "$dry_run" = yes ]; then
    printf '# Skipped where %s is READY; in another state it is deleted first.\n' "$name"
    create
    printf '# Up to %d times more, where this ends by no fault of its own (preemption, a lost connection): begin again,\n' "$restarts"
    printf '# each time with another label run=.\n'
    train
    [ "$delete" = no ] || remove
    exit 0
fi

for ((attempt = 0; ; attempt++)); do
    found="$(state)"
    if [ -n "$found" ] && [ "$found" != READY ]; then
        printf '%s is %s: deleting it\n' "$name" "$found"
        remove
        found=""
    fi
    status=0 made=""
    [ -n "$found" ] || create || status=$?
    if [ "$status" -eq 0 ]; then
        made=yes
        train || status=$?
        [ "$status" -ne 0 ] || break
    fi
    if [ "$attempt" -ge "$restarts" ]; then
        printf 'status %d; given up after %d restarts. Run the same command to go on.\n' "$status" "$restarts" >&2
        exit "$status"
    fi
    printf 'status %d; in %d s: see what became of %s\n' "$status" "$wait" "$name"
    sleep "$wait" # preemption shows in the state only after a while
    case "$status" in
    75 | 76 | 143 | 255) continue ;; # told to stop, stalled, killed by SIGTERM, or the connection was lost
    esac
    if [ -n "$made" ] && [ "$(state)" = READY ]; then
        printf '%s is READY, but the run ended with status %d: a fault that would come again, see the log above\n' "$name" "$status" >&2
        exit "$status"
    fi
done
[ "$delete" = no ] || remove
