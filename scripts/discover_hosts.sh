#!/bin/bash
# Tells horovodrun's elastic launcher which hosts there are now: a line "host:slots" each. A slot
# is a replica with STAGES devices of its own: a host with 8 GPUs and two stages has four slots.
#
#   horovodrun --gloo --min-np 1 --max-np 8 --host-discovery-script scripts/discover_hosts.sh \
#     python scripts/train.py --elastic
#
# TF_MP_HOSTS=FILE   lines "host" or "host GPUS"; # begins a comment. The run follows the file: add
#                    a line and ranks join, delete it and they leave. Without FILE: this host.
# STAGES=2           as train.py's --stages
# CPU_SLOTS=1        replicas of a host without GPUs
set -euo pipefail

STAGES=${STAGES:-2}
CPU_SLOTS=${CPU_SLOTS:-1}

# The GPUs that the ranks of this host may see; a host of FILE without a number has as many.
count_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

# host GPUS -> "host:slots"
offer() {
  local slots=$CPU_SLOTS
  if [[ ! $2 =~ ^[0-9]+$ ]]; then
    echo "Received: $2 GPUs of $1. Expected: a number." >&2
    exit 1
  fi
  [ "$2" -eq 0 ] || slots=$(($2 / STAGES))
  if [ "$slots" -lt 1 ]; then
    echo "Received: $2 GPUs on $1 and STAGES=$STAGES. Expected: a GPU for each stage." >&2
    exit 1
  fi
  echo "$1:$slots"
}

if [ -n "${TF_MP_HOSTS:-}" ] && [ ! -r "$TF_MP_HOSTS" ]; then
  echo "Received: TF_MP_HOSTS=$TF_MP_HOSTS. Expected: a file that can be read." >&2
  exit 1
fi
gpus=$(count_gpus)
if [ -z "${TF_MP_HOSTS:-}" ]; then
  offer localhost "$gpus"
else
  while read -r host number _; do
    offer "$host" "${number:-$gpus}"
  done < <(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$TF_MP_HOSTS")
fi
