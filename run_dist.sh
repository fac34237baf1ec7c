#!/usr/bin/env bash
# One distributed run. Edit the variables or set them in the environment:
#   EPOCHS=5 BATCH_SIZE=512 ./run_dist.sh
# Whatever follows goes to launch.py as it is: ./run_dist.sh --dry-run, ./run_dist.sh --detach
# An empty variable leaves what CONFIG says. Paths are relative to where you call it from.

# Variables of torch_geometric's run_dist.sh, and which one it is here (its own script works with launch.py, too):
#   IP_CONFIG ip_config.yaml → CONFIG      NUM_TRAINING_PROCS → PROCS       NUM_NEIGHBORS → FANOUTS
#   DATASET, EPOCHS, BATCH_SIZE (of each process there, of all here)        DDP_PORT → MASTER_PORT
#   CONDA_ENV/bin/activate → CONDA_ENV     PART_CONFIG, NUM_NODES → found out

CONFIG=${CONFIG:-templates/local.yml}  # hosts, data, training, also another launcher's list; overridden below
NODES=${NODES:-}                       # "user@host1 user@host2", or a number of nodes on this machine
PROCS=${PROCS:-}                       # trainer processes per node
DATASET=${DATASET:-}                   # synthetic, file, ogbn-products, Planetoid:Cora …
DATA_SOURCE=${DATA_SOURCE:-}           # folder or file of DATASET=file
DATA_OPTIONS=${DATA_OPTIONS:-}         # options of DATASET, as in num_nodes: 5000, num_classes: 8
EPOCHS=${EPOCHS:-}
BATCH_SIZE=${BATCH_SIZE:-}             # global batch, over all processes
FANOUTS=${FANOUTS:-}                   # neighbours per hop: 15,10,5
MASTER_ADDR=${MASTER_ADDR:-}           # found by itself when empty
MASTER_PORT=${MASTER_PORT:-}           # found by itself when empty
CONDA_ENV=${CONDA_ENV:-}               # conda environment on the nodes, or
VENV=${VENV:-}                         # virtual environment on the nodes
RUNS_DIR=${RUNS_DIR:-}                 # where logs, checkpoints and results of runs are collected
LOG_DIR=${LOG_DIR:-logs}               # where this script's output is kept as well
PYTHON=${PYTHON:-}                     # runs launch.py; default .venv/bin/python, else python3

set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 2
[[ -n $PYTHON ]] || { [[ -x $here/.venv/bin/python ]] && PYTHON=$here/.venv/bin/python || PYTHON=python3; }
[[ -e $CONFIG || ! -e $here/$CONFIG ]] || CONFIG=$here/$CONFIG

args=(--config "$CONFIG")
[[ -z $PROCS ]] || args+=(--num_training_procs "$PROCS")
[[ -z $EPOCHS ]] || args+=(--epochs "$EPOCHS")
[[ -z $BATCH_SIZE ]] || args+=(--batch_size "$BATCH_SIZE")
[[ -z $FANOUTS ]] || args+=(--num_neighbors "$FANOUTS")
[[ -z $MASTER_ADDR ]] || args+=(--master_addr "$MASTER_ADDR")
[[ -z $MASTER_PORT ]] || args+=(--master_port "$MASTER_PORT")
[[ -z $RUNS_DIR ]] || args+=(--runs-dir "$RUNS_DIR")
if [[ -n $DATASET ]]; then  # another graph: neither CONFIG's options nor its partition folder fit
    args+=(--set "data.dataset=$DATASET" --set "data.options={$DATA_OPTIONS}")
    args+=(--set "data.folder=parts/${DATASET//[^A-Za-z0-9._-]/-}")
fi
[[ -z $DATA_SOURCE ]] || args+=(--set "data.source=$DATA_SOURCE")
[[ -z $CONDA_ENV ]] || args+=(--set "defaults.conda=$CONDA_ENV")
[[ -z $VENV ]] || args+=(--set "defaults.venv=$VENV")
if [[ $NODES =~ ^[0-9]+$ ]]; then
    args+=(--set "nodes=$NODES" --set transport=local)
elif [[ -n $NODES ]]; then
    read -ra hosts <<<"$NODES"
    list=$(printf '"%s",' "${hosts[@]}")
    args+=(--set "nodes=[${list%,}]" --set transport=ssh)
fi

mkdir -p "$LOG_DIR" || exit 2
log=$LOG_DIR/$(date +%Y%m%d-%H%M%S)-$$.log
"$PYTHON" "$here/launch.py" "${args[@]}" "$@" 2>&1 | tee -i "$log"  # -i: Ctrl-C is launch.py's to answer
status=${PIPESTATUS[0]}
echo "output kept in $log (exit status $status)"
exit "$status"
