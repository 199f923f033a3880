# Words, errors with a remedy, stamps and watched commands: what every set-up file uses.
# Sourced by scripts/bootstrap.sh; expects ROOT (the checkout) and VENV (absolute).

STATE=$VENV/.tf_mp                      # what this set-up knows about its own environment
LOG=$STATE/setup.log                    # the output of the last long command
TELL_EVERY=${TF_MP_TELL_EVERY:-20}      # seconds between two words on progress

say() { printf 'tf_mp: %s\n' "$*"; }
die() { printf 'tf_mp: %s\n' "$*" >&2; exit 1; }

cache_dir() { printf '%s/tf_mp' "${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}"; }

# minutes SECONDS -> "2 min 05 s"
minutes() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }

# A step is done when its stamp holds the inputs it was done with.
fingerprint() { printf '%s\n' "$@" | sha256sum | cut -c1-16; }
is_done() { [ "$(cat "$STATE/$1.done" 2>/dev/null)" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >"$STATE/$1.done"; }
undo() { rm -f "$STATE/$1.done"; }

# The nearest folder above a path that exists: df can look at it.
existing_parent() {
  local path=$1
  while [ ! -e "$path" ]; do path=$(dirname "$path"); done
  printf '%s' "$path"
}

# need_disk DIR MEGABYTES WHAT
need_disk() {
  local free
  free=$(df -Pk "$(existing_parent "$1")" | awk 'NR == 2 { print int($4 / 1024) }')
  [ "$free" -ge "$2" ] || die "not enough disk for $3: $1 has $free MB free and needs $2;" \
    "free some, or put it elsewhere with VENV=DIR and XDG_CACHE_HOME=DIR."
}

# watch WHAT WORDS COMMAND...: run it into $LOG, and say every now and then how far it is;
# WORDS is a function that reads the log on its standard input.
watch() {
  local what=$1 words=$2 start=$SECONDS told=$SECONDS pid
  shift 2
  set -m    # a process group of its own, so that all of it can be stopped
  "$@" >"$LOG" 2>&1 </dev/null &
  set +m
  pid=$!
  WATCHED=$pid
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - told >= TELL_EVERY)); then
      told=$SECONDS
      say "  $what: $("$words" <"$LOG"), $(minutes $((SECONDS - start)))"
    fi
  done
  WATCHED=
  wait "$pid"
}

# A set-up that is stopped leaves no compiler behind.
stop_watched() {
  [ -z "${WATCHED:-}" ] || kill -TERM -- "-$WATCHED" 2>/dev/null || true
}

# The package that pip could not find, from its log
lacking() {
  grep -iE 'no matching distribution found for|^    The user requested' "$LOG" \
    | sed 's/.*\(for\|requested\) //' | head -n 1
}

# Say in one sentence why the command behind $LOG failed and what to do.
explain() {
  local what=$1 nothing_found='no matching distribution|ResolutionImpossible'
  local no_answer='NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|ProxyError'
  no_answer="$no_answer|SSLError|connection (refused|broken)|HTTP error (403|5..)"
  if grep -qiE 'no space left on device|disk quota exceeded' "$LOG"; then
    die "the disk filled up during $what: free some space, or use a larger disk with VENV=DIR" \
      "and XDG_CACHE_HOME=DIR, then run the same command again."
  fi
  if [ -n "${WHEELHOUSE:-}" ] && grep -qiE "$nothing_found" "$LOG"; then
    die "the wheelhouse $WHEELHOUSE lacks a package ($(lacking || true)):" \
      "make it anew with 'make wheelhouse' for this Python and DEVICE."
  fi
  if grep -qiE "$nothing_found|$no_answer" "$LOG"; then
    die "the package registry did not answer during $what, or lacks a package ($(lacking || true)): check" \
      "the connection and pip's index ('pip config list'), or carry the packages in:" \
      "'make wheelhouse' on a connected machine, then 'make setup WHEELHOUSE=DIR' here."
  fi
  tail -n 20 "$LOG" >&2
  die "$what failed: its last lines are above, all of them in $LOG."
}
