#!/bin/bash
# Two hosts, a and b, on one machine: network namespaces on a bridge, each with its own host name and
# an sshd on port 2222, as the pods of deploy/kubernetes have it. For root, with `ip` and `sshd`.
#
#   two_hosts.sh up FOLDER             makes them; keys and logs go into FOLDER
#   two_hosts.sh on a FOLDER COMMAND...   runs a command on host a
#   two_hosts.sh cut b                 takes host b's cable out;  `mend b` puts it back
#   two_hosts.sh left FOLDER           process ids on both hosts that are no sshd listening there
#   two_hosts.sh down FOLDER           ends what runs there and removes them
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
BRIDGE=tfmp-bridge
FILTER=/proc/sys/net/bridge/bridge-nf-call-iptables

space() { printf 'tfmp-%s' "$1"; }
address() { case $1 in a) echo 10.231.7.1 ;; b) echo 10.231.7.2 ;; esac; }

# on HOST FOLDER COMMAND... -> with its network, host name and /etc/hosts
on() {
  local host=$1 folder=$2
  shift 2
  # shellcheck disable=SC2016
  exec ip netns exec "$(space "$host")" unshare --uts \
    sh -c 'hostname "$1"; export PATH="$2:$PATH"; shift 2; exec "$@"' sh "$host" "$folder/bin" "$@"
}

wire() {
  local host=$1
  ip netns add "$(space "$host")"
  ip link add "tfmp-$host" type veth peer name eth0 netns "$(space "$host")"
  ip link set "tfmp-$host" master "$BRIDGE" up
  ip -n "$(space "$host")" addr add "$(address "$host")/24" dev eth0
  ip -n "$(space "$host")" link set eth0 up
  ip -n "$(space "$host")" link set lo up
  mkdir -p "/etc/netns/$(space "$host")"
  printf '127.0.0.1 localhost\n%s a\n%s b\n' "$(address a)" "$(address b)" \
    >"/etc/netns/$(space "$host")/hosts"
}

# The configuration of the pods, with the keys of this run.
keys() {
  local folder=$1
  mkdir -p "$folder/bin" /run/sshd
  ssh-keygen -q -t ecdsa -N '' -f "$folder/id_rsa"
  cp "$folder/id_rsa.pub" "$folder/authorized_keys"
  sed "s|%d/.ssh|$folder|" "$ROOT/deploy/kubernetes/ssh_config" >"$folder/ssh_config"
  printf '#!/bin/sh\nexec /usr/bin/ssh -F %s/ssh_config -i %s/id_rsa "$@"\n' "$folder" "$folder" \
    >"$folder/bin/ssh"
  chmod 755 "$folder/bin/ssh"
  sed -e "s|^HostKey .*|HostKey $folder/id_rsa|" \
    -e "s|^AuthorizedKeysFile .*|AuthorizedKeysFile $folder/authorized_keys|" \
    "$ROOT/deploy/kubernetes/sshd_config" >"$folder/sshd_config"
}

serve() {
  local host=$1 folder=$2
  on "$host" "$folder" "$(command -v sshd || echo /usr/sbin/sshd)" -De -f "$folder/sshd_config" \
    >"$folder/sshd-$host.log" 2>&1 &
}

# The sshd that listens on a host; those of sessions are its children.
listening() {
  local pid
  for pid in $(ip netns pids "$(space "$1")" 2>/dev/null); do
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q 'sshd.* -De -f'; then
      echo "$pid"
    fi
  done
}

up() {
  local folder=$1 host
  down "$folder" 2>/dev/null || true
  mkdir -p "$folder"
  keys "$folder"
  # a Docker engine's firewall drops what crosses a bridge
  if [ -e "$FILTER" ]; then
    cat "$FILTER" >"$folder/filter"
    echo 0 >"$FILTER"
  fi
  ip link add "$BRIDGE" type bridge
  ip link set "$BRIDGE" up
  for host in a b; do wire "$host"; done
  for host in a b; do serve "$host" "$folder"; done
  for host in a b; do reach "$host" "$folder"; done
}

# Waits for the sshd of a host.
reach() {
  local host=$1 folder=$2
  for _ in $(seq 50); do
    if (on a "$folder" ssh "$host" true) 2>>"$folder/reach.log"; then
      return
    fi
    sleep 0.2
  done
  cat "$folder"/*.log >&2
  echo "host $host does not answer" >&2
  return 1
}

left() {
  local host pid
  for host in a b; do
    for pid in $(ip netns pids "$(space "$host")" 2>/dev/null); do
      listening "$host" | grep -qx "$pid" || echo "$pid"
    done
  done
}

down() {
  local folder=$1 host pid
  for host in a b; do
    for pid in $(ip netns pids "$(space "$host")" 2>/dev/null); do
      kill -KILL "$pid" 2>/dev/null || true
    done
    ip link del "tfmp-$host" 2>/dev/null || true
    ip netns del "$(space "$host")" 2>/dev/null || true
    rm -rf "/etc/netns/$(space "$host")"
  done
  ip link del "$BRIDGE" 2>/dev/null || true
  [ ! -e "$folder/filter" ] || cat "$folder/filter" >"$FILTER"
}

case ${1:-} in
  up | on | left | down) "$@" ;;
  cut) ip link set "tfmp-$2" down ;;
  mend) ip link set "tfmp-$2" up ;;
  *) sed -n '2,11p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
