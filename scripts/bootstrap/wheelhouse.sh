# A wheelhouse: one folder with every wheel, the compiled Horovod, the data and their checksums.
# Sourced by scripts/bootstrap.sh (to install from one) and scripts/make_wheelhouse.sh.

# What a wheelhouse is good for, one "key=value" a line
describe_wheelhouse() {
  printf 'python=%s\ndevice=%s\nmpi=%s\nmachine=%s\n' "$PYTHON_VERSION" "$DEVICE" "$MPI" "$(uname -m)"
}

check_wheelhouse() {
  local wanted line broken
  [ -n "${WHEELHOUSE:-}" ] || return 0
  [ -d "$WHEELHOUSE/wheels" ] && [ -e "$WHEELHOUSE/SHA256SUMS" ] && [ -e "$WHEELHOUSE/about" ] \
    || die "WHEELHOUSE=$WHEELHOUSE is no wheelhouse (it needs wheels/, about and SHA256SUMS):" \
      "make one with 'make wheelhouse' on a connected machine and copy the whole folder."
  wanted=$(describe_wheelhouse)
  for line in $wanted; do
    grep -qxF "$line" "$WHEELHOUSE/about" || die "the wheelhouse $WHEELHOUSE was made for" \
      "$(tr '\n' ' ' <"$WHEELHOUSE/about")and this set-up is for ${wanted//$'\n'/ }:" \
      "choose another PYTHON, DEVICE or MPI, or make a wheelhouse for this one."
  done
  is_done checked "$(fingerprint "$WHEELHOUSE" "$(cat "$WHEELHOUSE/SHA256SUMS")")" && return
  say "checking the files of $WHEELHOUSE"
  broken=$(cd "$WHEELHOUSE" && sha256sum --check --quiet SHA256SUMS 2>/dev/null | sed 's/: .*//' | head -n 3 | tr '\n' ' ') || true
  [ -z "$broken" ] || die "these files of the wheelhouse are damaged or missing: ${broken}-" \
    "copy $WHEELHOUSE again from where it was made."
}

# The data that came along, where `make train` looks for it
unpack_data() {
  [ -n "${WHEELHOUSE:-}" ] || return 0
  local set name
  mkdir -p "$DATA_DIR"
  for set in "$WHEELHOUSE"/data/*/; do
    name=$(basename "$set")
    [ -e "$set" ] && [ ! -e "$DATA_DIR/$name" ] || continue
    say "copying the data set $name to $DATA_DIR"
    cp -R "$set" "$DATA_DIR/.$name.$$" && mv -T "$DATA_DIR/.$name.$$" "$DATA_DIR/$name"
  done
  mark_done checked "$(fingerprint "$WHEELHOUSE" "$(cat "$WHEELHOUSE/SHA256SUMS")")"
}
