#!/bin/bash
# Lint, types and tests: run_tests.sh [lint] [single] [parallel] [integration], all when none is
# named. Every suite runs, also after a failure; the last lines say which were red.
set -euo pipefail
# shellcheck source=scripts/bootstrap/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap/settings.sh"
# shellcheck source=scripts/ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"
enter_venv
cd "$ROOT"

SUITE_SECONDS=${SUITE_SECONDS:-1800}    # a suite that hangs is ended and red
if [ ! -w "$ROOT" ]; then               # an image that is read-only, or another user's
  export MYPY_CACHE_DIR=${TMPDIR:-/tmp}/mypy_cache
  export PYTEST_ADDOPTS="-p no:cacheprovider ${PYTEST_ADDOPTS:-}"
fi

lint() {
  local code=0
  python -m flake8 tf_mp tests scripts benchmarks || code=1
  python -m mypy tf_mp || code=1
  return $code
}

# Each of the processes takes 3 GB and little more than one core.
single() { python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal tests/single; }

integration() { python -m pytest tests/integration; }

# The same pytest on two ranks. The first failure ends both (-x): the other rank would wait for it
# in a collective. They share no cache folder, and a stalled collective ends after two minutes.
parallel() {
  local code=0 log color=no
  [ ! -t 1 ] || color=yes    # a rank cannot tell: the launcher gives it a terminal
  RANK_LOGS=$(mktemp -d)
  export RANK_LOGS HOROVOD_STALL_CHECK_TIME_SECONDS=60 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=120
  launch_ranks 2 bash scripts/one_rank.sh python -m pytest -x -p no:cacheprovider \
    --color=$color tests/parallel || code=1
  for log in "$RANK_LOGS"/*.log; do
    [ -e "$log" ] || continue
    if [ $code = 0 ]; then
      say "$(basename "$log" .log): $(tail -n 1 "$log")"
    else
      say "all of $(basename "$log"):"
      cat "$log"
    fi
  done
  rm -rf "$RANK_LOGS"
  return $code
}

main() {
  local suite start red='' result
  [ $# -gt 0 ] || set -- lint single parallel integration
  for suite in "$@"; do
    say "--- $suite"
    start=$SECONDS
    # a new shell each: errexit is off inside an `if`, and `timeout` takes only programs
    if timeout --foreground "$SUITE_SECONDS" bash "${BASH_SOURCE[0]}" --only "$suite"; then
      result=green
    else
      result=RED
      red="$red $suite"
    fi
    results="${results:-}$(printf '\ntf_mp: %-12s %s, %s' "$suite" "$result" "$(minutes $((SECONDS - start)))")"
  done
  printf '%s\n' "$results"
  [ -z "$red" ] || die "red:$red"
}

if [ "${1:-}" = --only ]; then
  case $2 in
    lint | single | parallel | integration) "$2" ;;
    *) die "Received suite $2; there are: lint, single, parallel, integration." ;;
  esac
else
  main "$@"
fi
