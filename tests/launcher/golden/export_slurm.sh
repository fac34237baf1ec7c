#!/usr/bin/env bash
#SBATCH --job-name=products
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu
#SBATCH --exclusive
# the bundled trainer: 4 processes on 2 nodes
# Written by gnnfleet export --to slurm; submit it with sbatch. It runs itself on every node of the job.
# When Slurm sends the signal above, a checkpoint is saved.
# A job that is requeued continues from its newest checkpoint.
# Every node needs gnnfleet in $PYTHON, the parts in $PARTS, the key file $KEY.
set -euo pipefail
HERE=/jobs
JOB="$HERE"/runs/Products_1-$SLURM_JOB_ID  # logs, metrics, checkpoints of all nodes
export PATH=/opt/gnn/bin:"$PATH"
PARTS=/scratch/parts
KEY="$HERE"/products.key
PYTHON=(/opt/gnn/bin/python)
fail() {
  echo "${SLURM_JOB_NAME:-$0}: $*" >&2
  exit 1
}

if [[ ${1:-} != node ]]; then  # once, on the first node of the job
  mkdir -p "$JOB"
  rm -f "$JOB/node0/control/checkpoint"
  cp "$0" "$JOB/run.sh"
  steps=
  warned() {  # on SIGUSR1, before the time limit
    trap '' USR1
    if [[ -n $steps ]]; then
      echo "$SLURM_JOB_NAME: Slurm ends the job soon: saving a checkpoint" >&2
      mkdir -p "$JOB/node0/control"
      : >"$JOB/node0/control/checkpoint"  # rank 0 deletes it when the checkpoint is on the disk
      end=$((SECONDS + 60))
      while [[ -e $JOB/node0/control/checkpoint ]] && kill -0 "$steps" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
    fi
    if [[ -n $steps ]]; then  # trains on until Slurm ends the job; the trap has ended its wait
      wait "$steps" || exit $?
      exit 0
    fi
  }
  trap warned USR1
  cd "$JOB"  # python -m imports modules of the current folder first
  "${PYTHON[@]}" -m trainer partition make --dataset ogbn-products --num-parts 2 --method auto --seed 0 \
    --balance types+seeds --out "$PARTS"  # does nothing if the parts exist
  # All processors of the job: the ranks of a node share them.
  srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
      --cpu-bind=none --kill-on-bad-exit bash "$JOB/run.sh" node &
  steps=$!
  wait "$steps"  # in the background, so that Bash can handle SIGUSR1
  exit
fi
NODE=$SLURM_NODEID
RUN="$JOB/node$NODE"
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ -e $JOB/node0/checkpoints/last.pt ]]; then export GNNFLEET_RESUME="$JOB/node0/checkpoints/last.pt"; fi
OWN=(0 1)  # parts
PROCS=(2 2)  # processes
FIRST_RANK=(0 2)
# Ports of torch.distributed on node 0, and of node 0's graph server; node k's is k higher. Runs at the same time
# have different ones. FIRST_PORT, set to the same number on every node, chooses others.
FIRST_PORT=${FIRST_PORT:-$((20000 + SLURM_JOB_ID % 4000 * 3))}
MASTER_PORT=$FIRST_PORT SERVICE_PORT=$((FIRST_PORT + 1))

for host in "${HOSTS[@]}"; do
  getent ahosts "$host" >/dev/null || fail "node $NODE: this host knows no address of $host, which is perhaps an alias" \
    "of ssh only: give the node \`address\` in cluster.yml and export again, or put the name into /etc/hosts"
done
for port in $((SERVICE_PORT + NODE)) $([[ $NODE != 0 ]] || echo "$MASTER_PORT"); do
  if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    fail "node $NODE: port $port is in use here; run again with other ports, the same on every node: FIRST_PORT=$((port + 777))"
  fi
done
mkdir -p "$RUN"
cd "$RUN"
"${PYTHON[@]}" -c 'import gnnfleet, sys; sys.exit(gnnfleet.__file__ is None)' 2>import.log ||
  fail "node $NODE: gnnfleet cannot be imported by ${PYTHON[*]}: $(tail -n 1 import.log)." \
    "Install it there: gnnfleet setup --with gnnfleet"
if [[ -n ${OWN[NODE]} && ! -e $PARTS/manifest.json ]]; then
  fail "node $NODE has no parts in $PARTS: there is no manifest.json;" 'make the parts there, or copy them'
fi
cat >cluster.json <<END
{"run_id": "Products_1", "num_parts": 2, "version": 1, "serving": null, "nodes": [
  {"node_rank": 0, "host": "${HOSTS[0]}", "role": "worker", "endpoint": "tcp://${HOSTS[0]}:$((SERVICE_PORT + 0))", "parts": [0], "ranks": [0, 1]},
  {"node_rank": 1, "host": "${HOSTS[1]}", "role": "worker", "endpoint": "tcp://${HOSTS[1]}:$((SERVICE_PORT + 1))", "parts": [1], "ranks": [2, 3]}
]}
END

export NODE_RANK=$NODE GNNFLEET_RUN_DIR="$RUN"
export GNNFLEET_PARTS="$PARTS" GNNFLEET_PART_IDS="${OWN[NODE]}" GNNFLEET_CLUSTER="$RUN/cluster.json"
export GNNFLEET_SERVICE_KEY="$KEY"
export GNNFLEET_CACHE=10%
export GNNFLEET_SERVER_WAIT=60
export GNNFLEET_TOPOLOGY=partitioned
export GNNFLEET_WIRE_ROWS=stored
export TORCH_CPP_LOG_LEVEL=ERROR
if [[ $NODE == 1 ]]; then export NCCL_DEBUG=INFO; fi
threads=$((${SLURM_CPUS_ON_NODE:-$(nproc)} / (PROCS[NODE] > 0 ? PROCS[NODE] : 1)))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
# The network interface on the way to another node, for gloo and NCCL: a host's own name may mean 127.0.1.1.
peer=$(getent ahosts "${HOSTS[NODE == 0 ? 1 : 0]}" | awk 'NR == 1 {print $1}')
interface=$(ip -o route get "$peer" | grep -oP 'dev \K\S+') || true
[[ -z $interface ]] || export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
# The graph server of this node's parts.
if [[ -n ${OWN[NODE]} ]]; then
  export GNNFLEET_SERVER_READY="$RUN/server.ready"
  rm -f "$RUN/server.ready"
  CUDA_VISIBLE_DEVICES='' "${PYTHON[@]}" -m trainer serve --parts "$PARTS" --own "${OWN[NODE]}" --bind "tcp://0.0.0.0:$((SERVICE_PORT + NODE))" \
    --cluster "$GNNFLEET_CLUSTER" --key-file "$KEY" --ready-file "$GNNFLEET_SERVER_READY" --node-rank "$NODE" \
    --stats-file "$RUN/server_stats.json" --server-wait 60 \
      >"$RUN/server.log" 2>&1 &
  pids+=($!)
  until [[ -e $RUN/server.ready ]]; do
    kill -0 "${pids[0]}" 2>/dev/null || { tail "$RUN/server.log" >&2; exit 1; }
    sleep 0.2
  done
fi

# The ranks of this node. The first process that fails ends the script, and with it the others.
export MASTER_ADDR="${HOSTS[0]}" MASTER_PORT
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=${PROCS[NODE]}
for ((i = 0; i < PROCS[NODE]; i++)); do
  RANK=$((FIRST_RANK[NODE] + i)) LOCAL_RANK=$i "${PYTHON[@]}" -m trainer train --model sage --task auto --hidden 256 --heads 4 --max-tokens 128 \
    --dropout 0.3 --fanouts 15,10,5 --temporal-strategy uniform --batch-size 1024 --eval-batch-size 4096 \
    --loss softmax --negatives 128 --eval-negatives 1000 --epochs 3 --lr 0.004 --embeddings auto \
    --weight-decay 0.0 --seed 0 --eval-every 1 --checkpoint-every 1 --sampler-threads 1 --prefetch 2 \
    --backend auto --timeout 120.0 &
  pids+=($!)
done
for ((i = 0; i < PROCS[NODE]; i++)); do wait -n; done
