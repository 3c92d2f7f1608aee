#!/usr/bin/env bash
# Runs under a real SLURM on this machine: Debian's slurmctld and two slurmd, as two nodes. As root.
#   bash launch/test_slurm.sh          configs/tiny_cpu.py with two learner processes, two engines and an exporter; the job is
#                                      requeued by hand, then a node is lost; the run must end with its report. About 4 minutes.
#   bash launch/test_slurm.sh --stub   the same, and more, with roles that compute nothing. About 5 minutes.
# FOLDER names the folder for everything it leaves (a temporary one by default, removed at the end).
# Exit code 1 where a check fails, 2 where it cannot run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PACKAGES=(slurmctld slurmd slurm-client munge)
STUB=
case "${1:-}" in
  --stub) STUB=1 ;;
  '') ;;
  *) echo "error: usage: bash launch/test_slurm.sh [--stub]" >&2 && exit 2 ;;
esac

refuse() {
  echo "error: $1" >&2
  exit 2
}

fail() {
  echo "FAILED: $1" >&2
  tail -n 30 "$FOLDER"/*/slurm/*.out 2>/dev/null >&2 || true
  exit 1
}

say() { echo "$(date +%T) $*"; }

# Installs SLURM from Debian's packages.
find_slurm() {
  local program missing=
  for program in slurmctld slurmd munged sbatch; do
    [ -x "/usr/sbin/$program" ] || [ -x "/usr/bin/$program" ] || missing=$program
  done
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || refuse "SLURM's programs must be run and installed by root, and this is $(id -un): use root"
  command -v apt-get >/dev/null || refuse "there is no $missing, and no apt-get to install ${PACKAGES[*]}: use Debian 12"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}"; } \
    >"$FOLDER/apt.log" 2>&1 || refuse "apt-get cannot install ${PACKAGES[*]}: $(tail -n 1 "$FOLDER/apt.log")"
}

find_port() {
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

write_conf() {
  local host node
  host=$(hostname -s)
  cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(find_port)
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool.%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.%n.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd.%n.log
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
SlurmdTimeout=10
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=10
InactiveLimit=0
CONF
  for node in n1 n2; do
    echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$(find_port) CPUs=2 RealMemory=2000 State=UNKNOWN"
  done >>"$SLURM_CONF"
  cat >>"$SLURM_CONF" <<'CONF'
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
PartitionName=first Nodes=n1 MaxTime=INFINITE State=UP OverSubscribe=YES
PartitionName=second Nodes=n2 MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
}

start_cluster() {
  local key=$FOLDER/munge
  mkdir -p "$FOLDER/state" "$FOLDER/spool.n1" "$FOLDER/spool.n2"
  write_conf
  (umask 077 && head -c 1024 /dev/urandom >"$key.key")
  munged --key-file="$key.key" --socket="$key.socket" --pid-file="$FOLDER/munged.pid" --log-file="$FOLDER/munged.log" \
    --seed-file="$key.seed" --force --num-threads=2 >"$FOLDER/munged.out" 2>&1 ||
    refuse "munged does not start: $(tail -n 1 "$FOLDER/munged.out")"
  slurmctld -f "$SLURM_CONF" || refuse "slurmctld does not start: see $FOLDER/slurmctld.log"
  slurmd -N n1 -f "$SLURM_CONF" && slurmd -N n2 -f "$SLURM_CONF" || refuse "slurmd does not start: see $FOLDER/slurmd.n1.log"
  wait_until 60 'two nodes to be idle' has_idle_nodes
}

has_idle_nodes() { [ "$(sinfo -h -p main -t idle -o %D 2>/dev/null)" = 2 ]; }

# wait_until SECONDS WHAT COMMAND...
wait_until() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "waited in vain for $what"
    sleep 0.5
  done
}

# Processes of this cluster whose environment has a line $1.
list_processes() {
  local directory
  for directory in /proc/[0-9]*; do
    if grep -qzxF "SLURM_CONF=$SLURM_CONF" "$directory/environ" 2>/dev/null &&
      grep -qzx "$1" "$directory/environ" 2>/dev/null; then
      echo "${directory#/proc/}"
    fi
  done
}

# Kills a node as a power failure would: slurmd, the step daemons, the processes of the steps.
lose_node() {
  local tasks
  kill -KILL "$(cat "$FOLDER/slurmd.$1.pid")"
  tasks=$(list_processes "SLURMD_NODENAME=$1")
  # shellcheck disable=SC2086
  kill -KILL $(for task in $tasks; do ps -o ppid= -p "$task" 2>/dev/null; done | sort -u | grep -vx ' *1' |
    while read -r parent; do grep -q slurmstepd "/proc/$parent/cmdline" && echo "$parent"; done) $tasks 2>/dev/null || true
}

stop_cluster() {
  local name
  scancel --state=RUNNING 2>/dev/null || true
  scancel --state=PENDING 2>/dev/null || true
  for _ in $(seq 40); do
    [ -n "$(squeue -h 2>/dev/null)" ] || break
    sleep 0.5
  done
  for name in slurmd.n1 slurmd.n2 slurmctld munged; do
    [ -f "$FOLDER/$name.pid" ] && kill "$(cat "$FOLDER/$name.pid")" 2>/dev/null || true
  done
  sleep 2
  # shellcheck disable=SC2046
  kill -KILL $(list_processes '.*' | grep -vx $$) 2>/dev/null || true
}

finish() {
  local code=$?
  trap - EXIT
  [ -z "${SLURM_CONF:-}" ] || stop_cluster
  if [ -n "$REMOVED" ] && [ $code != 1 ]; then rm -rf "$FOLDER"; else echo "everything it left is in $FOLDER"; fi
  exit $code
}

# submit NAME FLAGS...: sets RUN, the workdir, and JOB.
submit() {
  RUN=$FOLDER/$1
  shift
  JOB=$("$PYTHON" -m "${STUB:+tests.launch.stand_in_slurm}${REAL:+launch.slurm}" --config=configs/tiny_cpu.py \
    --workdir="$RUN" --local_nodes --host=127.0.0.1 "${FLAGS[@]}" "$@" | sed -n 's/^job \([0-9]*\).*/\1/p')
  [ -n "$JOB" ] || fail 'the job was not submitted'
  say "job $JOB: $RUN"
}

# How far the run has come.
count_steps() {
  if [ -n "$STUB" ]; then cat "$RUN/step" 2>/dev/null || echo 0; else cat "$RUN/metrics.jsonl" 2>/dev/null | wc -l; fi
}

has_steps() { [ "0$(count_steps)" -ge "$1" ]; } # a file that is being written is empty
state_of() { scontrol show job "$JOB" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1; }
is_in() { [ "$(state_of)" = "$1" ]; }
has_ended() { case $(state_of) in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE) ;; *) false ;; esac }

# Waits for start number $1 of the job. SLURM waits for two minutes after a requeue, which is shortened here; not to
# nothing, since a node refuses the credential of a job that it has ended in the same second.
await_start() {
  wait_until 120 'the job to be queued again' is_in PENDING
  sleep 10
  scontrol update "JobId=$JOB" StartTime=now
  wait_until 180 "start $1 of the job" has_start "$1"
}

has_start() { [ -d "$RUN/slurm/$JOB.$1" ]; }

require_end() {
  wait_until "$LONG_S" 'the end of the job' has_ended
  is_in COMPLETED || fail "the job ended as $(state_of)"
  [ -f "$RUN/report.json" ] || fail 'there is no report.json'
  wait_until 30 'all its processes to end' no_processes
  say "the run ended with its report after $(count_steps) steps"
}

no_processes() { [ -z "$(list_processes "SLURM_JOB_ID=$JOB")" ]; }

# A requeue by hand, then the loss of the second node.
check_requeue_and_loss() {
  submit run
  wait_until "$LONG_S" 'the first steps' has_steps "$FIRST"
  scontrol requeue "$JOB"
  say 'requeued'
  await_start 1
  wait_until "$LONG_S" 'steps after the requeue' has_steps "$SECOND"
  lose_node n2
  say 'the node n2 is lost'
  wait_until 120 'the end of the job on a lost node' is_in PENDING
  slurmd -N n2 -f "$SLURM_CONF"
  await_start 2
  require_end
  [ -z "$STUB" ] || return 0
  "$PYTHON" -m areal_jax.main_check_log "$RUN/events.jsonl" || fail 'the event log breaks a rule'
  [ -f "$RUN/exports/20/model.safetensors" ] && [ -f "$RUN/exports/40/model.safetensors" ] || fail 'an export is missing'
}

# What SLURM does before a time limit: the roles save their state, and the job is queued again.
check_time_limit() {
  submit told
  wait_until 60 'the first steps' has_steps "$FIRST"
  scancel --batch --signal=TERM "$JOB"
  wait_until 60 'the job to be queued again' is_in PENDING
  grep -q '^learner 0 end 75' "$RUN/events" && grep -q '^controller 0 end 75' "$RUN/events" || fail 'a role did not save'
  await_start 1
  require_end
}

# A job that is cancelled stays away.
check_cancel() {
  submit cancelled
  wait_until 60 'the first steps' has_steps "$FIRST"
  scancel "$JOB"
  wait_until 60 'the end of the job' has_ended
  sleep 3
  is_in CANCELLED || fail "a cancelled job is $(state_of)"
  grep -q '^controller 0 end 75' "$RUN/events" || fail 'the controller did not save'
}

# An engine that is killed is started again, alone.
check_engine() {
  submit engine
  wait_until 60 'the first steps' has_steps "$FIRST"
  kill -KILL "$(sed -n 's/^engine 1 start \([0-9]*\) .*/\1/p' "$RUN/events" | tail -n 1)"
  require_end
  [ "$(grep -c '^engine 1 start' "$RUN/events")" = 2 ] || fail 'the engine was not started again'
  [ "$(grep -c '^controller 0 start' "$RUN/events")" = 1 ] || fail 'the controller was started again'
}

# A role that does not end is killed, and the job lives: one that was told to save is queued again, one whose controller
# has finished ends with 0.
check_deaf_role() {
  STAND_IN_DEAF=engine-0 submit deaf --grace_s=10
  wait_until 60 'the first steps' has_steps "$FIRST"
  scancel --batch --signal=TERM "$JOB"
  wait_until 60 'the job to be queued again' is_in PENDING
  await_start 1
  require_end
  require_killed 2
}

# The roles of the job were killed $1 times, and it ended with 0.
require_killed() {
  [ "$(grep -c 'roles that do not end are killed' "$RUN/slurm/$JOB.out")" = "$1" ] || fail 'no role was killed'
  ! grep -q 'cannot be killed' "$RUN/slurm/$JOB.out" || fail 'a role was not killed'
  has_exit 0 || fail "the job ended with $(scontrol show job "$JOB" | grep ExitCode)"
}

has_exit() { scontrol show job "$JOB" | grep -q " ExitCode=$1:0"; }

# The error of one learner process is that of the run, though srun ends the others with larger codes.
check_learner_error() {
  local code
  for code in 1 2; do
    STAND_IN_ENDS=learner-1=$code submit "error$code"
    wait_until 60 'the end of the job' has_ended
    has_exit $code || fail "the job ended with $(scontrol show job "$JOB" | grep ExitCode)"
    grep -q '^error of learner-1$' "$RUN/slurm/$JOB.out" || fail 'the log of the wrong learner process was shown'
    [ "$(grep -c '^learner 1 start' "$RUN/events")" = 1 ] || fail 'the learner was started again'
  done
}

# Engines on nodes of another kind, one of which does not end.
check_heterogeneous() {
  STAND_IN_DEAF=engine-0 STAND_IN_LEARNERS=1 submit het --partition=first --engine_partition=second --noshare_nodes \
    --grace_s=10 --config.cluster.learner='hosts=1 x fsdp=2' --config.cluster.engines='1 x tensor=1'
  require_end
  grep -q '^learner 0 start [0-9]* n1 ' "$RUN/events" && grep -q '^engine 0 start [0-9]* n2 ' "$RUN/events" ||
    fail 'a role is on a node of the wrong kind'
  require_killed 1
}

REMOVED=${FOLDER:-yes}
[ "$REMOVED" = yes ] || REMOVED=
FOLDER=${FOLDER:-$(mktemp -d)}
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd)
REAL=1
[ -z "$STUB" ] || REAL=
trap finish EXIT
trap 'exit 1' INT TERM
find_slurm
[ "$(id -u)" = 0 ] || refuse "slurmctld and slurmd must be run by root, and this is $(id -un): use root"
source launch/environment.sh
make_environment dev
export SLURM_CONF=$FOLDER/slurm.conf
start_cluster
say 'two nodes are idle'
FLAGS=(
  --share_nodes --config.learner.rows_per_microbatch=2 --config.rollout.server=own --config.publication.channel=files
  --config.cluster.learner='hosts=2 x fsdp=2' --config.cluster.engines='2 x tensor=1'
)
if [ -n "$STUB" ]; then
  export STAND_IN_STEPS=150
  LONG_S=120 FIRST=20 SECOND=60
  check_engine
  check_time_limit
  check_deaf_role
  check_learner_error
  check_cancel
  check_heterogeneous
else
  FLAGS+=(--config.run.steps=60 --config.checkpoint.every=5 --config.checkpoint.keep=12 --config.run.export_every=20)
  LONG_S=400 FIRST=8 SECOND=16
fi
check_requeue_and_loss
say 'every check held'
