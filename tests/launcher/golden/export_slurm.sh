#!/usr/bin/env bash
#SBATCH --job-name=products
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu
#SBATCH --exclusive
# the bundled trainer: 4 processes on 2 nodes
# Written by gnnfleet export --to slurm; submit it with sbatch. Every node needs gnnfleet in $PYTHON, the parts in $PARTS, the key file $KEY.
# When Slurm sends the signal above, a checkpoint is saved.
# A job that is requeued continues from its newest checkpoint.
set -euo pipefail
export PATH=/opt/gnn/bin:"$PATH"
export PYTHON="/opt/gnn/bin/python"
export PARTS="/scratch/parts"
export JOB="/jobs/runs/Products_1-$SLURM_JOB_ID"  # logs, metrics, checkpoints of all nodes
export KEY="/jobs/products.key"
mkdir -p "$JOB"
rm -f "$JOB"/node*/server.ready "$JOB/node0/control/checkpoint"

trainer=
warned() {  # on SIGUSR1, before the time limit
  trap '' USR1
  if [[ -n $trainer ]]; then
    echo "$SLURM_JOB_NAME: Slurm ends the job soon: saving a checkpoint" >&2
    mkdir -p "$JOB/node0/control"
    : >"$JOB/node0/control/checkpoint"  # rank 0 deletes it when the checkpoint is on the disk
    end=$((SECONDS + 60))
    while [[ -e $JOB/node0/control/checkpoint ]] && kill -0 "$trainer" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
  fi
  if [[ -n $trainer ]]; then  # trains on until Slurm ends the job; the trap has ended its wait
    wait "$trainer" || exit $?
    exit 0
  fi
}
trap warned USR1

"$PYTHON" -m trainer partition make --dataset ogbn-products --num-parts 2 --method auto --seed 0 \
    --balance types+seeds --out "$PARTS"  # does nothing if the parts exist
if [[ -e $JOB/node0/checkpoints/last.pt ]]; then export GNNFLEET_RESUME="$JOB/node0/checkpoints/last.pt"; fi

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
cat >"$JOB/cluster.json" <<END
{"run_id": "Products_1", "num_parts": 2, "version": 1, "serving": null, "nodes": [
  {"node_rank": 0, "host": "${NODES[0]}", "role": "worker", "endpoint": "tcp://${NODES[0]}:29600", "parts": [0], "ranks": [0, 1]},
  {"node_rank": 1, "host": "${NODES[1]}", "role": "worker", "endpoint": "tcp://${NODES[1]}:29601", "parts": [1], "ranks": [2, 3]}
]}
END

variables() {  # of the processes on one node
  NODE=$SLURM_NODEID
  OWN=(0 1)  # parts by node
  RUN="$JOB/node$NODE"
  mkdir -p "$RUN"
  export NODE_RANK=$NODE GNNFLEET_RUN_DIR="$RUN" GNNFLEET_CLUSTER="$JOB/cluster.json"
  export GNNFLEET_PARTS="$PARTS" GNNFLEET_PART_IDS="${OWN[NODE]}"
  export GNNFLEET_SERVER_READY="$RUN/server.ready"
  export GNNFLEET_SERVICE_KEY="$KEY"
  export GNNFLEET_CACHE=10%
  export GNNFLEET_SERVER_WAIT=60
  export GNNFLEET_TOPOLOGY=partitioned
  export GNNFLEET_WIRE_ROWS=stored
  export TORCH_CPP_LOG_LEVEL=ERROR
  if [[ $NODE == 1 ]]; then export NCCL_DEBUG=INFO; fi
  threads=$((${SLURM_CPUS_ON_NODE:-$(nproc)} / 2))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
  # The network interface on the way to another node, for gloo and NCCL: a host's own name may mean 127.0.1.1.
  peer=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((NODE == 0 ? 2 : 1))p")
  interface=$(ip -o route get "$(getent ahosts "$peer" | awk 'NR == 1 {print $1}')" | grep -oP 'dev \K\S+') || true
  [[ -z $interface ]] || export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
  cd "$RUN"
}
serve() {
  variables
  export CUDA_VISIBLE_DEVICES=''
  exec "$PYTHON" -m trainer serve --parts "$PARTS" --own "${OWN[NODE]}" --bind "tcp://0.0.0.0:$((29600 + NODE))" \
      --cluster "$GNNFLEET_CLUSTER" --key-file "$KEY" --ready-file "$GNNFLEET_SERVER_READY" --node-rank "$NODE" \
      --stats-file "$RUN/server_stats.json" --server-wait 60 \
      >"$RUN/server.log" 2>&1
}
train() {  # the trainer reads its rank from Slurm's variables
  variables
  exec "$PYTHON" -m trainer train --model sage --task auto --hidden 256 --heads 4 --dropout 0.3 --fanouts 15,10,5 \
      --temporal-strategy uniform --batch-size 1024 --eval-batch-size 4096 --negatives 128 \
      --eval-negatives 1000 --epochs 3 --lr 0.004 --weight-decay 0.0 --seed 0 --eval-every 1 \
      --checkpoint-every 1 --sampler-threads 1 --prefetch 2 --backend auto --timeout 120.0
}
export -f variables serve train

# A graph server on each node, then the ranks.
srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_NNODES" bash -c serve &
server=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0" || true; wait' EXIT
until [[ $(find "$JOB" -path '*/node*/server.ready' | wc -l) == "$SLURM_NNODES" ]]; do
  kill -0 $server 2>/dev/null || { tail "$JOB"/node*/server.log >&2; exit 1; }
  sleep 0.5
done
srun --overlap --ntasks=4 --kill-on-bad-exit bash -c train &
trainer=$!
wait "$trainer"  # in the background, so that Bash can handle SIGUSR1
