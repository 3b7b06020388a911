#!/usr/bin/env bash
# A run on Slurm: Ray on the nodes of one allocation, the driver on the first of them.
#
#   sbatch --nodes=3 --gpus-per-node=1 deploy/slurm.sh run.yaml results/srl
#
# run.yaml holds the settings, as for `srl train --config`. The clone with its .venv and the results must be on storage
# that all nodes share. Before the time limit Slurm sends SIGTERM: the run writes a checkpoint, and the job is queued
# again (--requeue). A job that is started again continues the run. Set replay_local_directory in run.yaml to a directory on
# the nodes' own disks if the shared storage is a network file system.
#SBATCH --job-name=srl
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --open-mode=append
set -euo pipefail
[ $# -eq 2 ] || { echo "expected: sbatch deploy/slurm.sh SETTINGS_YAML RESULTS_DIR" >&2; exit 2; }
settings=$(realpath "$1") results=$(realpath -m "$2")
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
source .venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 6000 * 2)) # and the next one: both below 32768, where Linux begins to assign ports
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
gpus=${SLURM_GPUS_ON_NODE:-0}

on_node() { srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap "${@:2}"; }

# A directory and ports of its own, because other users' jobs may run on the same node: by default Ray uses fixed ports,
# and ends if one is taken. Sockets in the directory need a short path.
start_ray=(ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus"
    --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)
on_node "$head" "${start_ray[@]}" --head --node-ip-address="$address" --port="$port" --temp-dir="/tmp/ray-$SLURM_JOB_ID" \
    --ray-client-server-port="$((port + 1))" --include-dashboard=false --disable-usage-stats &
until on_node "$head" ray status --address="$address:$port" >/dev/null 2>&1; do
    kill -0 $! 2>/dev/null || { echo "Ray did not start on $head" >&2; exit 1; }
    sleep 2
done
for node in "${nodes[@]:1}"; do
    on_node "$node" "${start_ray[@]}" --address="$address:$port" &
done

# The driver gets Slurm's signal, and the job is queued again unless the run was complete.
RAY_ADDRESS="$address:$port" srl train --config "$settings" --out "$results" --resume auto &
driver=$!
trap 'kill -TERM $driver; stopped=1' TERM
status=0
wait $driver || status=$?
while kill -0 $driver 2>/dev/null; do wait $driver && status=0 || status=$?; done # `wait` ends at the first signal
if [ "${stopped:-}" ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID" # `srl train` ends with 143 after a signal, so this is no failure
fi
exit "$status"
