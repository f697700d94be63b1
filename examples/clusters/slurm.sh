#!/usr/bin/env bash
#SBATCH --job-name=streamrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Executes a run file on a Ray cluster of this job's nodes: sbatch --nodes=4 --gpus-per-node=8 examples/clusters/slurm.sh run.toml
# POOLS names the run file's pools: one for the whole job, or one for each component of a heterogeneous job. The first
# component has the head; it should be the trainer's. Further arguments go to `streamrl execute`.
set -euo pipefail
run_file=$1
port=${RAY_PORT:-6379}
read -ra pools <<<"${POOLS:-gpus}"
components=${SLURM_HET_SIZE:-1}
if [ "${#pools[@]}" -ne "$components" ]; then
    echo "POOLS names ${#pools[@]} pools, the job has $components components" >&2
    exit 2
fi
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

nodes_of() { # of a component
    local variable=SLURM_JOB_NODELIST
    if [ -n "${SLURM_HET_SIZE:-}" ]; then variable=SLURM_JOB_NODELIST_HET_GROUP_$1; fi
    scontrol show hostnames "${!variable}"
}

start() { # COMPONENT NODE ARGUMENTS...
    local group=() component=$1 node=$2
    shift 2
    if [ -n "${SLURM_HET_SIZE:-}" ]; then group=(--het-group="$component"); fi
    srun "${group[@]}" --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        ray start --block --resources="{\"pool-${pools[$component]}\": 1}" "$@" &
}

head=$(nodes_of 0 | head -n 1)
start 0 "$head" --head --port="$port" --include-dashboard=false
until ray status --address="$head:$port" >/dev/null 2>&1; do sleep 2; done
for ((component = 0; component < components; component++)); do
    for node in $(nodes_of "$component"); do
        [ "$node" = "$head" ] || start "$component" "$node" --address="$head:$port"
    done
done
total=$(for ((component = 0; component < components; component++)); do nodes_of "$component"; done | wc -l)
until [ "$(ray list nodes --address="$head:$port" --filter state=ALIVE --format json 2>/dev/null | grep -c '"node_id"')" -ge "$total" ]; do sleep 2; done
exec streamrl execute "$run_file" --set execute.launcher=ray --set execute.ray_address="$head:$port" "${@:2}"
