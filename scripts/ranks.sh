# Starts ranks so that people can read them and a signal ends them well: sourced, after
# bootstrap/settings.sh.

# What ranks print, for people: the root rank's lines as they are, "rank 1: " before another's, and
# without what TensorFlow says at every start before its log level is read.
readable() {
  sed -u -e 's/\(.\)\[1,[0-9]*\]<std[a-z]*>:/\1/g' -e 's/^\[1,0\]<std[a-z]*>://' \
    -e 's/^\[1,\([0-9]*\)\]<std[a-z]*>:/rank \1: /' -e '/before absl::InitializeLog() is called/d' \
    -e '/oneDNN custom operations are on/d'
}

# below PID NAME -> the process of that name among those that PID started, directly or not
below() {
  local stat pid parent program
  for stat in /proc/[0-9]*/stat; do
    pid=${stat//[^0-9]/}
    # after the name in brackets: state and parent
    parent=$(sed 's/.*) . \([0-9]*\) .*/\1/' "$stat" 2>/dev/null) || continue
    [ "$parent" = "$1" ] || continue
    { IFS= read -r -d '' program <"/proc/$pid/cmdline"; } 2>/dev/null || continue
    if [ "${program##*/}" = "$2" ]; then
      printf '%s' "$pid"
    else
      below "$pid" "$2"
    fi
  done
}

# horovodrun keeps a SIGTERM to itself and its ranks run on; mpirun below it passes SIGUSR1 on at
# once, and the ranks save and leave. A second signal does not wait for them.
stop_ranks() {
  local launcher signal=USR1
  [ -z "$STOPPED" ] || signal=TERM
  STOPPED=$2
  launcher=$(below "$1" mpirun)
  [ -n "$launcher" ] || signal=TERM
  kill "-$signal" "${launcher:-$1}" 2>/dev/null || true
}

# launch_ranks NUMBER COMMAND...
launch_ranks() {
  local number=$1 launcher reader out code=0
  shift
  STOPPED=
  exec {out}> >(readable)
  reader=$!
  horovodrun -np "$number" "$@" >&"$out" 2>&1 &
  launcher=$!
  exec {out}>&-
  # shellcheck disable=SC2064
  trap "stop_ranks $launcher 143" TERM
  # shellcheck disable=SC2064
  trap "stop_ranks $launcher 130" INT
  # a signal ends the wait, not the ranks: wait until they have left
  while kill -0 "$launcher" 2>/dev/null; do
    code=0
    wait "$launcher" || code=$?
  done
  wait "$reader" || true
  trap - TERM INT
  return "${STOPPED:-$code}"
}
