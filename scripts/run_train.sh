#!/bin/bash
# The main job: real data, then the example trained by two ranks on CPUs, or on GPUs by one rank for
# each pair. Arguments, and the variable ARGS, go on to scripts/train.py and may override everything.
set -euo pipefail
# shellcheck source=scripts/bootstrap/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap/settings.sh"
# shellcheck source=scripts/ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"
enter_venv
cd "$ROOT"
RUNS_DIR=$(absolute "${RUNS_DIR:-runs}")

# Two stages a rank: a rank for each pair of GPUs.
decide_ranks() {
  RANKS=2
  if [ "$DEVICE" = gpu ]; then
    RANKS=$(($(num_gpus) / 2))
    [ "$RANKS" -ge 1 ] || RANKS=1
    say "$(num_gpus) GPUs and two stages a rank: $RANKS rank(s)"
  else
    say "DEVICE=cpu ($DEVICE_WHY): 2 ranks of two logical CPU devices each"
  fi
}

# Which data set, where it lies and why, from `tf-mp data`; its last line is JSON.
choose_data() {
  local choice
  choice=$(python -m tf_mp data --choose --data-dir "$DATA_DIR" --json) \
    || die "no data set could be prepared in $DATA_DIR: what to put there is said above."
  choice=$(tail -n 1 <<<"$choice")
  field() { python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$choice" "$1"; }
  DATASET=$(field dataset)
  DATA_DIR=$(field data_dir)
  say "data: $DATASET in $DATA_DIR ($(field why))"
}

main() {
  # shellcheck disable=SC2206    # ARGS is a list of words
  local more=(${ARGS:-} "$@")
  decide_ranks
  choose_data
  local run=$RUNS_DIR/train
  mkdir -p "$run"
  [ -d "$run/checkpoints" ] || rm -rf "$run/logs"
  launch_ranks "$RANKS" python scripts/train.py --dataset "$DATASET" --data-dir "$DATA_DIR" \
    --steps 600 --batch-size 100 --checkpoint-dir "$run/checkpoints" --log-dir "$run/logs" \
    --summary "$run/summary.json" "${more[@]}"
  # a run that was stopped goes on from its checkpoints; one that ended makes room for the next
  rm -rf "$run/checkpoints.last"
  [ ! -d "$run/checkpoints" ] || mv "$run/checkpoints" "$run/checkpoints.last"
  say "summary, TensorBoard logs and checkpoints: $run"
}

main "$@"
