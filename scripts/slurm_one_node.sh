#!/usr/bin/env bash
# A Slurm cluster of this one machine, to try launcher=slurm on: its own ports, key and folder, nothing
# of it outside that folder. Needs root; installs Debian's slurm-wlm and munge where they are missing.
#
#   scripts/slurm_one_node.sh start          # idempotent
#   eval "$(scripts/slurm_one_node.sh env)"  # SLURM_CONF: sbatch, squeue ... then talk to it
#   scripts/slurm_one_node.sh stop           # ends its jobs and daemons, removes its folder
#
# SLURM_ONE_NODE names the folder (default: slurm_one_node in $TMPDIR), SLURM_ONE_NODE_CPUS its CPUs.
# Exit status: 0 well, 2 wrong usage, 3 Slurm cannot be installed here, 1 anything else.
set -euo pipefail

folder=${SLURM_ONE_NODE:-${TMPDIR:-/tmp}/slurm_one_node}
conf=$folder/slurm.conf
export SLURM_CONF=$conf
PATH=$PATH:/usr/sbin:/sbin

complain() { echo "slurm_one_node.sh: $1" >&2; exit "$2"; }

# The process that a pid file names, if it runs.
running() {
  local pid
  pid=$(cat "$folder/$1.pid" 2>/dev/null) && [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && echo "$pid"
}

install() {
  local missing=
  for program in slurmctld slurmd munged srun; do command -v $program > /dev/null || missing=1; done
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || complain "slurm-wlm and munge are not installed, and installing them needs root" 3
  command -v apt-get > /dev/null || complain "slurm-wlm and munge are not installed, and there is no apt-get" 3
  # Debian starts a package's daemons unless told not to; ours are started below.
  local log
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
         apt-get install -y --no-install-recommends slurm-wlm munge; } > "$log" 2>&1; then
    complain "apt-get cannot install slurm-wlm and munge: $(grep '^E:' "$log" | tail -1), see $log" 3
  fi
  rm "$log"
}

configure() {
  mkdir -p "$folder/state" "$folder/spool"
  chmod 755 "$folder"
  [ -s "$folder/munge.key" ] || (umask 077; head -c 1024 /dev/urandom > "$folder/munge.key")
  local name ports cpus
  name=$(hostname -s)
  cpus=${SLURM_ONE_NODE_CPUS:-$(nproc)}
  ports=($(python3 - <<'PYTHON'
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))
PYTHON
  ))
  cat > "$conf" <<CONF
ClusterName=one_node
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=1
NodeName=$name NodeAddr=127.0.0.1 CPUs=$cpus State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=one Nodes=$name Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=$name MaxTime=INFINITE State=UP PriorityTier=2
CONF
}

start() {
  install
  [ "$(id -u)" = 0 ] || complain "slurmd needs root" 1
  if ! running munged > /dev/null || ! running slurmctld > /dev/null || ! running slurmd > /dev/null; then
    halt
    configure
    munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
      --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    slurmctld
    slurmd
  fi
  for _ in $(seq 150); do
    if [ "$(sinfo --noheader --format %T 2>/dev/null)" = idle ]; then return; fi
    [ "$(squeue --noheader 2>/dev/null | wc -l)" = 0 ] || return 0  # it runs, and is at work
    sleep 0.2
  done
  complain "the node did not come up: $(tail -1 "$folder/slurmctld.log" "$folder/slurmd.log" | tr '\n' ' ')" 1
}

# Ends the daemons and every job of theirs.
halt() {
  local name pid
  if running slurmctld > /dev/null && running slurmd > /dev/null; then
    timeout 5 scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 50); do
      [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  for name in slurmd slurmctld munged; do
    if pid=$(running "$name"); then
      kill "$pid"
      for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
      kill -9 "$pid" 2>/dev/null || true
    fi
  done
}

case ${1:-} in
  start) start ;;
  stop) halt; rm -rf "$folder" ;;
  env) echo "export SLURM_CONF=$conf" ;;
  *) complain "${1:+$1: }no such command; allowed: start, stop, env" 2 ;;
esac
