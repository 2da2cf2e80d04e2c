#!/usr/bin/env bash
# Submit a run to Kubernetes as a JobSet: TPU slices, GPU nodes or CPU nodes; restarted from its checkpoint when a node is lost.
#
#   launch/jobset.sh --name NAME --image IMAGE --storage S --topology KIND:AxB [--slices N] [options] -- train --config C --workdir W
#   launch/jobset.sh --name NAME --image IMAGE --storage S --nodes N --gpus-per-node G      [options] -- train --config C --workdir W
#
#   --topology KIND:AxB   one TPU slice, as in v5e:16x16 or v5p:4x4x8 (4 chips per node); --slices N of them (1)
#   --nodes N             nodes with --gpus-per-node G GPUs each (0: CPUs)
#   --storage S           what all nodes share, mounted at /shared: pvc:CLAIM, nfs://SERVER/EXPORT, or gs://BUCKET (GKE)
#   --namespace NS        --queue Q           Kueue's local queue (XPK: multislice-queue)
#   --service-account A   of the pods, for instance with access to the bucket
#   --node-selector K=V   more labels that nodes must have; may be repeated
#   --grace S             seconds between SIGTERM and SIGKILL when a pod is evicted (120)
#   --restarts N          how often at most (20); a config that cannot be run (exit status 2) is not tried again
#   --env NAME=VALUE      for the trainer; may be repeated
#   --dry-run             print the manifest; run nothing
#
# W and the data are below /shared: relative paths are. Details: docs/kubernetes.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}lib.sh"

name="" image="" storage="" topology="" slices=1 nodes="" gpus="" namespace="" queue="" account="" grace=120 restarts=20 selectors=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage ;;
    --dry-run) dry_run=yes ;;
    --name) name="$(value "$@")"; shift ;;
    --image) image="$(value "$@")"; shift ;;
    --storage) storage="$(value "$@")"; shift ;;
    --topology) topology="$(value "$@")"; shift ;;
    --slices) slices="$(value "$@")"; shift ;;
    --nodes) nodes="$(value "$@")"; shift ;;
    --gpus-per-node) gpus="$(value "$@")"; shift ;;
    --namespace) namespace="$(value "$@")"; shift ;;
    --queue) queue="$(value "$@")"; shift ;;
    --service-account) account="$(value "$@")"; shift ;;
    --node-selector) label="$(value "$@")"; selectors+=("$label"); shift ;;
    --grace) grace="$(value "$@")"; shift ;;
    --restarts) restarts="$(value "$@")"; shift ;;
    --env) pair="$(value "$@")"; add_environment "$pair"; shift ;;
    --) shift; break ;;
    *) fail "unknown argument '$1' (see $me --help)" ;;
    esac
    shift
done

required --name "$name" "the JobSet's name"
required --image "$image" "the container image (launch/docker.sh build makes one)"
required --storage "$storage" "what all nodes share"
resource_name "$name"
number --slices "$slices" 1
number --grace "$grace" 1
number --restarts "$restarts" 0
if [ -n "$topology" ]; then
    [ -z "$nodes$gpus" ] || fail "--topology (TPU) or --nodes with --gpus-per-node, not both"
    read_topology "$topology"
    nodes=$((chips > 4 ? chips / 4 : 1)) gpus=0
else
    required "--topology, or --nodes with --gpus-per-node," "$nodes$gpus" "what to run on"
    required --nodes "$nodes" "the number of nodes"
    required --gpus-per-node "$gpus" "GPUs on each node, 0 for none"
    number --nodes "$nodes" 1
    number --gpus-per-node "$gpus" 0
    [ "$slices" -eq 1 ] || fail "--slices is of TPUs: use it with --topology"
fi
case "$storage" in
pvc:?*) volume="persistentVolumeClaim: {claimName: \"${storage#pvc:}\"}" ;;
gs://?*)
    volume="csi: {driver: gcsfuse.csi.storage.gke.io,
                volumeAttributes: {bucketName: \"${storage#gs://}\", mountOptions: implicit-dirs}}"
    ;;
nfs://*/?*) server="${storage#nfs://}" && volume="nfs: {server: \"${server%%/*}\", path: \"/${server#*/}\"}" ;;
*) fail "--storage '$storage': pvc:CLAIM, nfs://SERVER/EXPORT or gs://BUCKET" ;;
esac
[[ "$storage" != *[\"\\[:space:]]* ]] || fail "--storage '$storage': no blanks or quotes, please"
read_program "$@"
on_storage

yaml() { # a string of YAML
    local text="${1//\\/\\\\}"
    printf '"%s"' "${text//\"/\\\"}"
}

# Put together piece by piece; every line of a piece carries its own indentation.
labels="" annotations="" pod_annotations="" hardware="" resources="" shm="" shm_mount=""
[ -z "$queue" ] || labels="
    kueue.x-k8s.io/queue-name: $(yaml "$queue")"
[[ "$storage" != gs://* ]] || pod_annotations="
            annotations: {gke-gcsfuse/volumes: \"true\"}"
node_labels=""
if [ -n "$topology" ]; then
    case "$kind" in
    v4) accelerator=tpu-v4-podslice ;;
    v5e) accelerator=tpu-v5-lite-podslice ;;
    v5p) accelerator=tpu-v5p-slice ;;
    v6e) accelerator=tpu-v6e-slice ;;
    tpu7x) accelerator=tpu7x ;;
    esac
    annotations="
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool # one slice, one node pool"
    node_labels="
              cloud.google.com/gke-tpu-accelerator: $accelerator
              cloud.google.com/gke-tpu-topology: $shape"
    resources="
              resources:
                limits: {google.com/tpu: $((chips > 4 ? 4 : chips))}
              securityContext: {privileged: true}"
elif [ "$gpus" -gt 0 ]; then
    hardware="
            tolerations:
            - {key: nvidia.com/gpu, operator: Exists}"
    resources="
              resources:
                limits: {nvidia.com/gpu: $gpus}"
    shm="
            - name: shm
              emptyDir: {medium: Memory}"
    shm_mount="
              - {name: shm, mountPath: /dev/shm}"
fi
[ -z "$topology" ] && [ "$gpus" -eq 0 ] || hardware+="
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet"
for label in ${selectors[@]+"${selectors[@]}"}; do
    [[ "$label" == ?*=* ]] || fail "--node-selector takes KEY=VALUE, not '$label'"
    node_labels+="
              $(yaml "${label%%=*}"): $(yaml "${label#*=}")"
done
[ -z "$node_labels" ] || hardware+="
            nodeSelector:$node_labels"
[ -z "$account" ] || hardware+="
            serviceAccountName: $(yaml "$account")"
variables=""
variable() { # variable NAME VALUE. Kubernetes would put a variable in the place of \$(NAME): the dollar is doubled
    variables+="
              - {name: $(yaml "$1"), value: $(yaml "${2//\$(/\$\$(}")}"
}
variable JAX_COMPILATION_CACHE_DIR "$storage_at/compiled"
for pair in ${environment[@]+"${environment[@]}"}; do variable "${pair%%=*}" "${pair#*=}"; done
if [ -z "$topology" ]; then
    variable GAMMALM_COORDINATOR "$name-slice-job-0-0.$name:$port"
    variable GAMMALM_PROCESSES "$nodes"
    variables+="
              - name: GAMMALM_PROCESS_ID
                valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}}"
elif [ $((nodes * slices)) -gt 1 ]; then
    variable GAMMALM_COORDINATOR auto # from what GKE tells every host of a slice
fi
command=""
for word in gammalm "${program[@]}"; do command+="${command:+, }$(yaml "${word//\$(/\$\$(}")"; done

manifest="apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: \"$name\"
  labels:
    xpk.google.com/workload: \"$name\"$labels$annotations
spec:
  network: {enableDNSHostnames: true}
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - name: refused # exit status 2, below: it would be refused again
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: slice-job
    replicas: $slices
    template:
      spec:
        parallelism: $nodes
        completions: $nodes
        completionMode: Indexed
        backoffLimit: 0 # a process that is lost ends all of them; the JobSet starts them again together
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: gammalm, operator: In, values: [2]}
        template:
          metadata:
            labels:
              xpk.google.com/workload: \"$name\"$pod_annotations
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $grace$hardware
            volumes:
            - name: shared
              $volume$shm
            containers:
            - name: gammalm
              image: $(yaml "$image")
              workingDir: $storage_at$resources
              volumeMounts:
              - {name: shared, mountPath: $storage_at}$shm_mount
              env:$variables
              command: [$command]"

feed "$manifest" kubectl create ${namespace:+--namespace "$namespace"} -f -
