#!/usr/bin/env bash
# Starts a program or a TorchTitan recipe under PyTorch's own launcher instead of `trn run`: on one machine, or one copy of
# this script on each of several. Change the variables here or set them in the environment.
#
#   launch/torchrun.sh train.py --steps 100
#   launch/torchrun.sh -m torchtitan.train --job.config_file recipes/llama3_debug.toml
#   NNODES=2 RDZV_ENDPOINT=first-host:29500 launch/torchrun.sh train.py      # on both hosts
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-8}   # ranks on this machine, at most 64: the logical NeuronCores of a trn2.48xlarge
NNODES=${NNODES:-1}                   # machines
RDZV_ENDPOINT=${RDZV_ENDPOINT:-}      # host:port of the machine where they meet, for NNODES above 1
RDZV_ID=${RDZV_ID:-trn_dist}          # the same on all machines of a run, different between runs
RDZV_CONF=${RDZV_CONF:-}             # such as is_host=1 on the machine where they meet and is_host=0 on the others
LOCAL_ADDR=${LOCAL_ADDR:-}           # address of this machine, where the others cannot resolve its name
MAX_RESTARTS=${MAX_RESTARTS:-0}       # restarts of all ranks after one of them failed
LOCAL_RANKS_FILTER=${LOCAL_RANKS_FILTER:-0}
LOG_DIR=${LOG_DIR:-}                  # folder for each rank's output
TORCHRUN=${TORCHRUN:-torchrun}

# Results depend on the number of threads; one a rank is what `trn run` sets.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ $# -eq 0 ]]; then
  echo "usage: $0 [-m] PROGRAM [ARGS...]" >&2
  exit 2
fi
command -v "$TORCHRUN" >/dev/null || {
  echo "$0: $TORCHRUN is not on PATH: activate the virtual environment (source .venv/bin/activate) or set TORCHRUN" >&2
  exit 2
}

options=(--nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS")
options+=(--local-ranks-filter "$LOCAL_RANKS_FILTER" --tee 3)
if [[ $NNODES -gt 1 ]]; then
  if [[ -z $RDZV_ENDPOINT ]]; then
    echo "$0: NNODES=$NNODES needs RDZV_ENDPOINT=host:port, the same on all machines" >&2
    exit 2
  fi
  options+=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID")
  if [[ -n $RDZV_CONF ]]; then
    options+=(--rdzv-conf "$RDZV_CONF")
  fi
  if [[ -n $LOCAL_ADDR ]]; then
    options+=(--local-addr "$LOCAL_ADDR")
  fi
else
  options+=(--standalone)
fi
if [[ -n $LOG_DIR ]]; then
  options+=(--log-dir "$LOG_DIR")
fi
exec "$TORCHRUN" "${options[@]}" "$@"
