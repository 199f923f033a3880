#!/bin/bash
# Makes the environment that everything else runs in: Python packages, Open MPI, Horovod compiled
# for this TensorFlow, and tf_mp itself. Safe to run again: a step that is done is not repeated.
#
# Variables: PYTHON, VENV, DEVICE=cpu|gpu, MPI=system, WHEELHOUSE=DIR, DATA_DIR, XDG_CACHE_HOME,
# TF_MP_ONLY=packages (without tf_mp itself: for a layer of an image).
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
for part in settings venv horovod wheelhouse; do
  # shellcheck disable=SC1090
  . "$here/bootstrap/$part.sh"
done
cd "$ROOT"

clean_up() {
  stop_watched
  [ -z "${BUILDING:-}" ] || rm -rf "$BUILDING"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

main() {
  [ "$(uname -s)" = Linux ] || die "the set-up runs on Linux; on $(uname -s) use the image: make docker."
  plan_venv
  check_wheelhouse
  check_horovod_can_be_had
  make_venv
  install_wheels
  write_mpi_settings
  install_horovod
  [ "${TF_MP_ONLY:-}" = packages ] || install_project
  unpack_data
  say "ready: $VENV (Python $PYTHON_VERSION, DEVICE=$DEVICE: $DEVICE_WHY)"
}

main
