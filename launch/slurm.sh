#!/usr/bin/env bash
# Submit a run to Slurm: one process per GPU, or per node without GPUs; requeued at the time limit and after preemption until it is done.
#
#   launch/slurm.sh --nodes N --gpus-per-node G --time T [options] -- train --config C --workdir W
#
#   --nodes N             nodes
#   --gpus-per-node G     GPUs, and so processes, on each; 0: one process per node, on CPUs
#   --time T              time limit of one stay on the nodes, as Slurm writes it: 30, 4:00:00, 1-12:00:00
#   --partition P         --account A         passed on where given
#   --cpus-per-task N     CPUs of each process (8): reading data needs some
#   --grace S             seconds before the limit at which the trainer is asked to save and end (120)
#   --restarts N          how often at most (20)
#   --gammalm PATH        the command on the nodes (.venv/bin/gammalm of this checkout if it is there)
#   --cache FOLDER        compiled programs, for all nodes (WORKDIR/compiled)
#   --env NAME=VALUE      for the trainer; may be repeated. Slurm also hands on the environment of the submission
#   --dry-run             print what would be submitted; run nothing
#
# W, the data and the checkout are on a file system that all nodes see. Details: docs/slurm.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}lib.sh"

nodes="" gpus="" limit="" partition="" account="" cpus=8 grace=120 restarts=20 gammalm="$(own_gammalm)" cache=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage ;;
    --dry-run) dry_run=yes ;;
    --nodes) nodes="$(value "$@")"; shift ;;
    --gpus-per-node) gpus="$(value "$@")"; shift ;;
    --time) limit="$(value "$@")"; shift ;;
    --partition) partition="$(value "$@")"; shift ;;
    --account) account="$(value "$@")"; shift ;;
    --cpus-per-task) cpus="$(value "$@")"; shift ;;
    --grace) grace="$(value "$@")"; shift ;;
    --restarts) restarts="$(value "$@")"; shift ;;
    --gammalm) gammalm="$(value "$@")"; shift ;;
    --cache) cache="$(value "$@")"; shift ;;
    --env) pair="$(value "$@")"; add_environment "$pair"; shift ;;
    --) shift; break ;;
    *) fail "unknown argument '$1' (see $me --help)" ;;
    esac
    shift
done
required --nodes "$nodes" "the number of nodes"
required --gpus-per-node "$gpus" "GPUs on each node, 0 for none"
required --time "$limit" "the time limit"
number --nodes "$nodes" 1
number --gpus-per-node "$gpus" 0
number --cpus-per-task "$cpus" 1
number --grace "$grace" 1
number --restarts "$restarts" 0
[[ "$limit" =~ ^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$ ]] ||
    fail "--time must be as Slurm writes it (30, 4:00:00, 1-12:00:00), not '$limit'"
read_program "$@"
[[ "$workdir" != *[[:space:]%]* ]] || fail "--workdir $workdir: Slurm's log files cannot have blanks or % in their path"
cache="${cache:-$workdir/compiled}"

exports=""
for pair in "JAX_COMPILATION_CACHE_DIR=$cache" ${environment[@]+"${environment[@]}"}; do
    exports+="export $(quoted "$pair")"$'\n'
done

# Every process of a node sees all of its GPUs and takes the one of its number: what JAX does by itself under Slurm.
job="#!/usr/bin/env bash
#SBATCH --job-name=${workdir##*/}
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$((gpus > 0 ? gpus : 1))
#SBATCH --cpus-per-task=$cpus"
[ "$gpus" -eq 0 ] || job+="
#SBATCH --gpus-per-node=$gpus"
job+="
#SBATCH --time=$limit"
[ -z "$partition" ] || job+="
#SBATCH --partition=$partition"
[ -z "$account" ] || job+="
#SBATCH --account=$account"
job+="
#SBATCH --requeue
#SBATCH --signal=B:USR1@$grace
#SBATCH --open-mode=append
#SBATCH --output=$workdir/slurm-%j.log
set -uo pipefail
${exports}export SRUN_CPUS_PER_TASK=$cpus

# Near the limit Slurm wakes this script; the trainers get SIGTERM from it, save, and end.
stopped=no
trap 'stopped=yes; scancel --signal=TERM \"\$SLURM_JOB_ID\"' USR1

# A process that ends must not take those with it that still save: --kill-on-bad-exit=0. They notice by themselves.
srun --kill-on-bad-exit=0 $(quoted "$gammalm" "${program[@]}") &
step=\$!
while :; do
    told=\$stopped status=0
    wait \"\$step\" || status=\$?
    [ \"\$told\" != \"\$stopped\" ] || break # else it was the signal that ended the wait: once more
done

# 75: told to stop, as preemption does too, and saved; 76: stalled; 143: killed by SIGTERM. Any other fault would come again.
case \"\$status \$stopped\" in
\"0 \"* | \"2 \"*) ;;
75* | 76* | 143* | *\" yes\")
    if [ \"\${SLURM_RESTART_COUNT:-0}\" -lt $restarts ]; then
        echo \"stopped with status \$status after \${SLURM_RESTART_COUNT:-0} restarts: back into the queue\"
        scontrol requeue \"\$SLURM_JOB_ID\" && exit 0
    fi
    echo \"stopped with status \$status; $restarts restarts are used up. Submit it again to go on.\"
    ;;
esac
exit \"\$status\""

run mkdir -p "$workdir"
feed "$job" sbatch
