#!/bin/bash
# Writes one folder (WHEELHOUSE, else ./wheelhouse) from which `make setup WHEELHOUSE=DIR` and
# `make train WHEELHOUSE=DIR` work without the net and without a compiler.
set -euo pipefail
target=${WHEELHOUSE:-wheelhouse}
unset WHEELHOUSE
here=$(dirname "${BASH_SOURCE[0]}")
for part in settings venv horovod wheelhouse; do
  # shellcheck disable=SC1090
  . "$here/bootstrap/$part.sh"
done
target=$(absolute "$target")
trap 'stop_watched; [ -z "${making:-}" ] || rm -rf "$making"' EXIT
trap 'exit 130' INT TERM
cd "$ROOT"
bash scripts/bootstrap.sh
plan_venv
# an environment may hold a Horovod whose wheel is no longer in the cache
if [ -z "$(horovod_wheel_in "$(cache_dir)/horovod/$(horovod_key)")" ]; then
  undo horovod
  bash scripts/bootstrap.sh
fi

collect_wheels() {
  "$VENV/bin/python" -m pip wheel --disable-pip-version-check --no-input \
    --constraint constraints.txt --wheel-dir "$making/wheels" --requirement "$STATE/requirements.txt" \
    cloudpickle packaging psutil pyyaml
}

[ ! -e "$target" ] || [ -e "$target/SHA256SUMS" ] \
  || die "$target is there and is no wheelhouse: name another folder with WHEELHOUSE=DIR."
need_disk "$target" 2500 'the wheelhouse'
mkdir -p "$(dirname "$target")"
making=$(mktemp -d "$target.XXXXXX")
chmod 755 "$making"
say "collecting wheels for $target"
watch wheels pip_words collect_wheels || explain 'the collection of wheels'
cp "$(horovod_wheel_in "$(cache_dir)/horovod/$(horovod_key)")" "$making/wheels/"
say 'collecting the data'
enter_venv
python -m tf_mp data --choose --data-dir "$making/data" \
  || die 'no data set could be prepared: what to do is said above.'
describe_wheelhouse >"$making/about"
(cd "$making" && find wheels data about -type f -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
rm -rf "$target"
mv -T "$making" "$target"
making=
say "ready: $target ($(du -sm "$target" | cut -f1) MB). Copy it and this checkout over, and there:" \
  "make train WHEELHOUSE=$(basename "$target")"
