#!/usr/bin/env bash
# Run a command on a Ray cluster inside a Slurm job: a head on the first node, a worker on each other node.
#   sbatch --nodes=2 --gpus-per-node=4 deploy/slurm.sh .venv/bin/python train.py ... --num_workers 8
# Submit it in the folder of the code, which all nodes share, with .venv made by ./run.sh 0. It exits with the exit code
# of the command. Before the time limit Slurm sends SIGTERM: training saves a checkpoint and the script exits with 143;
# the same command continues from there.
#SBATCH --job-name=dreambooth
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@180
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"

PYTHON=${PYTHON:-.venv/bin/python}
START_SECONDS=${START_SECONDS:-300} # how long the nodes may take to start Ray
if (($# == 0)); then
    echo "deploy/slurm.sh: name a command: sbatch deploy/slurm.sh .venv/bin/python train.py ..." >&2
    exit 2
fi

# A token for this job alone. srun passes it on in the environment, which only this user can read.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# With several networks, set HEAD_IP to the first node's address on the fast one.
IP=${HEAD_IP:-$(hostname -I | cut -d ' ' -f 1)}
PORT=$((20000 + SLURM_JOB_ID % 10000))
CPUS=${SLURM_CPUS_PER_TASK:-$(nproc)}
unset RAY_ADDRESS

start_ray() { # start Ray on the nodes $1 (names with commas) until this script ends; the other words: for `ray start`
    local names=${1//,/ }
    srun --nodes="$(wc -w <<<"$names")" --ntasks-per-node=1 --cpus-per-task="$CPUS" --nodelist="$1" \
        "$PYTHON" -m ray.scripts.scripts start --block --num-cpus="$CPUS" --disable-usage-stats "${@:2}" >&2 &
    STEPS+=($!)
}

count_nodes() { # print how many nodes of the cluster are alive
    "$PYTHON" -c 'import ray
ray.init(logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null
}

wait_for_nodes() { # return when all nodes have joined
    while (("$(count_nodes || echo 0)" < ${#NODES[@]})); do
        if ((SECONDS > START_SECONDS)); then
            echo "deploy/slurm.sh: not all of ${NODES[*]} run Ray after $START_SECONDS s: see the log above" >&2
            exit 75
        fi
        sleep 2
    done
}

STEPS=()
trap 'kill "${STEPS[@]}" 2>/dev/null || true' EXIT
trap 'exit 143' TERM
start_ray "${NODES[0]}" --head --node-ip-address="$IP" --port="$PORT" --temp-dir="/tmp/ray-$SLURM_JOB_ID"
if ((${#NODES[@]} > 1)); then
    others=${NODES[*]:1}
    start_ray "${others// /,}" --address="$IP:$PORT"
fi
export RAY_ADDRESS=$IP:$PORT
wait_for_nodes

"$@" &
COMMAND=$!
trap 'kill -TERM "$COMMAND"' TERM
code=0
wait "$COMMAND" || code=$?
if kill -0 "$COMMAND" 2>/dev/null; then # a signal ended the first wait; the command is saving
    code=0
    wait "$COMMAND" || code=$?
fi
exit "$code"
