#!/bin/bash
# For whoever has two or more GPUs: the job, the proof and both ways of reduction in under 5 minutes,
# as one report to paste. A part that fails or hangs is noted, and the next one runs.
set -euo pipefail
# shellcheck source=scripts/bootstrap/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap/settings.sh"
enter_venv
cd "$ROOT"

REPORT=$(absolute "${RUNS_DIR:-runs}")/gpu-check.txt
PART_SECONDS=${PART_SECONDS:-60}
failed=''

# part TITLE COMMAND...
part() {
  local title=$1 start=$SECONDS code=0
  shift
  {
    printf '\n### %s\n' "$title"
    timeout --kill-after=15 "$PART_SECONDS" "$@" 2>&1 || code=$?
    printf '(exit %s after %s s%s)\n' "$code" $((SECONDS - start)) "$([ $code != 124 ] || echo ': it hung')"
  } | tee -a "$REPORT"
  # the braces run in a subshell: the code comes back in the report's last line
  tail -n 1 "$REPORT" | grep -q '^(exit 0 ' || failed="$failed, $title"
}

gpus=$(num_gpus)
[ "$gpus" -ge 2 ] || die "nvidia-smi lists $gpus GPU(s), and two stages need two: run this on a machine with a pair."
ranks=$((gpus / 2))
mkdir -p "$(dirname "$REPORT")"
printf 'tf_mp GPU check, %s\n' "$(date -u +%Y-%m-%dT%H:%MZ)" >"$REPORT"
choice=$(python -m tf_mp data --choose --data-dir "$DATA_DIR" --json | tail -n 1)
dataset=$(python -c 'import json, sys; print(json.loads(sys.argv[1])["dataset"])' "$choice")
job=(--dataset "$dataset" --data-dir "$DATA_DIR" --steps 100)

part 'machine' bash -c 'nvidia-smi; nvidia-smi topo -m; head -n 1 /etc/os-release'
part 'doctor' python -m tf_mp doctor
part "job: $ranks rank(s), all reductions through one GPU of a rank" \
  horovodrun -np "$ranks" python scripts/train.py "${job[@]}" --verify
part 'proof' python -m tf_mp verify
part "job: $ranks rank(s), every stage's reductions on its own GPU (may hang: horovod#2944)" \
  horovodrun -np "$ranks" python scripts/gpu_check_own_device.py "${job[@]}"

printf '\n%s\n' "${failed:+failed: ${failed#, }}" | tee -a "$REPORT"
say "the report to paste: $REPORT"
[ -z "$failed" ]
