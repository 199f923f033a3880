#!/bin/bash
# The image's entrypoint: the main job by default, `test`, a program by name, or train.py's options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# a user id that the image does not know has no home to write to
if [ ! -w "${HOME:-/}" ]; then
  export HOME=/tmp
fi
case ${1:-} in
  '' | -*) exec bash scripts/run_train.sh "$@" ;;
  train) shift && exec bash scripts/run_train.sh "$@" ;;
  test) shift && exec bash scripts/run_tests.sh "$@" ;;
  *) exec "$@" ;;
esac
