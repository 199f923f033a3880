# Where everything is and for which devices, from the environment: sourced by every script here.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac; }
VENV=$(absolute "${VENV:-.venv}")
[ -z "${WHEELHOUSE:-}" ] || WHEELHOUSE=$(absolute "$WHEELHOUSE")
MPI=${MPI:-pypi}
# shellcheck source=scripts/bootstrap/common.sh
. "$ROOT/scripts/bootstrap/common.sh"
DATA_DIR=$(absolute "${DATA_DIR:-$(cache_dir)/data}")

num_gpus() { nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true; }

# DEVICE as asked for, else what the machine has
case ${DEVICE:-} in
  cpu | gpu) DEVICE_WHY='asked for' ;;
  '')
    DEVICE=cpu DEVICE_WHY='no GPU found by nvidia-smi'
    if [ "$(num_gpus)" -gt 0 ]; then
      DEVICE=gpu DEVICE_WHY="$(num_gpus) found by nvidia-smi"
    fi
    ;;
  *) die "Received DEVICE=$DEVICE; it can be cpu or gpu." ;;
esac
case $MPI in
  pypi | system) ;;
  *) die "Received MPI=$MPI; it can be system (the mpicxx on PATH), or left out." ;;
esac
VENV_MEGABYTES=3500
[ "$DEVICE" = cpu ] || VENV_MEGABYTES=12000

# Everything that runs after the set-up finds the environment's programs first.
enter_venv() {
  export PATH="$VENV/bin:$PATH" PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
  # a container's root may start ranks too
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  if [ "$MPI" = system ]; then
    # the site's Open MPI does not read this environment's settings file
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
  fi
}
