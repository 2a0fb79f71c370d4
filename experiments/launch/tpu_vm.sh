#!/usr/bin/env bash
# Training on Cloud TPU VMs: one slice or several, spot or on demand, by queued resources.
# shellcheck disable=SC2016,SC2153  # $ in single quotes is for the worker; common.sh sets NAME
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
tpu_vm.sh [--dry-run] [--settings=FILE] COMMAND       (--dry-run, or DRY_RUN=1: print the commands only)

  iam       once: APIs, service account, bucket, roles
  stage     source, model and data to the bucket
  create    check the config by a dry run here, and ask for the TPUs
  setup     install on all workers
  run       start the restart loop on all workers
  status    of the queued resource, the loops and the run
  logs [SLICE [WORKER]]   follow one worker's log (default 0 0: the main worker)
  stop      let all workers save and end
  delete    give the TPUs back
  babysit   create, set up, run; again after each preemption; delete when the run has ended
TEXT
}

queued_resources() {
  local verb=$1
  shift
  execute gcloud compute tpus queued-resources "$verb" "$NAME" "--project=$PROJECT" "--zone=$ZONE" "$@"
}

on_all_workers() {
  queued_resources ssh --node=all --worker=all --batch-size=all "--command=$1"
}

create() {
  check_config && ask
}

ask() {
  local flags=("--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME" "--service-account=$SERVICE_ACCOUNT")
  if ((SLICES > 1)); then
    flags+=("--node-count=$SLICES" "--node-prefix=$NAME")
  else
    flags+=("--node-id=$NAME")
  fi
  ((SPOT == 0)) || flags+=(--spot)
  [[ -z ${VALID_UNTIL-} ]] || flags+=("--valid-until-duration=$VALID_UNTIL")
  [[ -z $HF_TOKEN_SECRET ]] || flags+=(--scopes=https://www.googleapis.com/auth/cloud-platform)
  forget_state
  queued_resources create "${flags[@]}"
}

stage() {
  archive_source
  execute gcloud storage cp "$archive" "$run_url/source.tar.gz"
  stage_inputs
}

# Ubuntu 22.04's own Python is 3.10, so uv brings one.
setup() {
  on_all_workers "$(print_lines \
    'set -e' \
    'mkdir -p dapo && cd dapo' \
    "gcloud storage cat $run_url/source.tar.gz | tar xz" \
    'python3 -m pip install --quiet --user uv' \
    'python3 -m uv python install 3.12' \
    'PIP_QUIET=1 make setup PYTHON="$(python3 -m uv python find 3.12)"' \
    '.venv/bin/pip install --quiet -r requirements.txt "jax[tpu]"')"
}

# A systemd unit outlives the ssh connection, and gets SIGTERM (with the network still up) when the
# VM shuts down. KillMode=mixed: the loop alone gets it, and passes it on.
run() {
  local assignment environment=
  for assignment in "${worker_environment[@]}"; do
    environment+=" --setenv=$(print_command "$assignment")"
  done
  forget_state
  on_all_workers "$(print_lines \
    'set -e' \
    'cd dapo' \
    'sudo systemctl reset-failed dapo 2>/dev/null || true' \
    "sudo systemd-run --unit=dapo --uid=\$(id -u) --gid=\$(id -g) --working-directory=\$PWD \
--property=KillMode=mixed --property=TimeoutStopSec=90 --property=After=network-online.target \
--setenv=HOME=\$HOME --setenv=PATH=\$PATH$environment \
/usr/bin/env bash experiments/launch/run_worker.sh $(print_command "${train_flags[@]}")")"
}

stop() {
  on_all_workers 'sudo systemctl stop dapo || true'
}

status() {
  queued_resources describe '--format=value(state.state)'
  on_all_workers 'echo "$(hostname): $(systemctl is-active dapo)"'
  execute gcloud storage cat "$run_url/state"
}

logs() {
  queued_resources ssh "--node=${1:-0}" "--worker=${2:-0}" "--command=tail -n 100 -F dapo/runs/$RUN.logs/current"
}

delete() {
  queued_resources delete --force --quiet
}

# The run's state in the bucket, written by the main worker's loop: "running" or "exited CODE".
# One of an earlier start must not be taken for this one's.
forget_state() {
  execute_or_go_on gcloud storage rm "$run_url/state"
}

print_lines() {
  local line text=
  for line in "$@"; do text+="$line; "; done
  echo "${text%; }"
}

babysit() {
  if ((DRY_RUN)); then
    local example began=0
    for example in ABSENT WAITING_FOR_RESOURCES ACTIVE "ACTIVE running" "SUSPENDED running" "FAILED" \
      "ACTIVE exited 75" "ACTIVE exited 134" "ACTIVE exited 0" "ACTIVE exited 1"; do
      echo "# $example"
      # shellcheck disable=SC2086
      (react $example) || true # the end of the run is an exit
    done
    return
  fi
  local resource state
  while true; do
    if ! resource=$(gcloud compute tpus queued-resources list "--project=$PROJECT" "--zone=$ZONE" \
      "--filter=name~/$NAME\$" '--format=value(state.state)'); then
      echo "$(date '+%F %T') the state could not be read; looking again" >&2
      sleep "$POLL_SECONDS"
      continue
    fi
    state=$(gcloud storage cat "$run_url/state" 2>/dev/null || true)
    echo "$(date '+%F %T') ${resource:=ABSENT} $state"
    # shellcheck disable=SC2086
    react $resource $state
    sleep "$POLL_SECONDS"
  done
}

checked=
began=      # when this babysit started the run
keep_until= # when what ended early is given back
EARLY_SECONDS=${EARLY_SECONDS:-600} # an error before that is one of settings

# react RESOURCE-STATE [running | exited CODE]: one step towards the end of the run. A step that fails
# (a worker that is not up yet, a preemption in the midst of it) is taken again at the next look.
react() {
  case "$*" in
    ABSENT*) { [[ -n $checked ]] || check_config; } && checked=1 && ask ;;
    SUSPENDED* | FAILED*) delete && forget_state ;;
    ACTIVE) setup && run && began=$SECONDS ;;
    "ACTIVE running") keep_until='' && { ! main_worker_is_new || rerun; } ;;
    "ACTIVE exited 75") rerun ;;
    "ACTIVE exited "*) ended "$3" ;;
    *) ;; # not granted yet, or on its way out
  esac || echo "that failed; looking again in $POLL_SECONDS s" >&2
}

# Cloud TPU may replace a broken slice under an active queued resource; its VMs know of no run.
main_worker_is_new() {
  local question=(gcloud compute tpus queued-resources ssh "$NAME" "--project=$PROJECT" "--zone=$ZONE"
    --node=0 --worker=0 '--command=systemctl is-active dapo || true')
  if ((DRY_RUN)); then
    print_command "${question[@]}"
    echo "# if that says inactive:"
  else
    [[ $("${question[@]}") == *inactive* ]]
  fi
}

rerun() {
  stop && setup && run && began=$SECONDS
}

# Crashes that wore out a loop's patience may be a peer's that was replaced: a few more tries.
reruns=0
ended() {
  if (($1 >= 128 && reruns < RERUN_LIMIT)); then
    reruns=$((reruns + 1))
    rerun
  elif (($1 == 0 || $1 >= 128)) || ! keep "$1"; then
    delete && exit "$1"
  fi
}

# An error in the settings shows within minutes, and what was waited for may be used by a mended run.
keep() {
  if [[ -z $began ]]; then # an earlier babysit's end: the settings may be mended
    rerun
    return 0
  fi
  if [[ -z $keep_until ]]; then
    ((SECONDS - began < EARLY_SECONDS)) || return 1
    keep_until=$((SECONDS + BABYSIT_KEEP_S))
    echo "# the run ended with code $1; $NAME is kept for $BABYSIT_KEEP_S s: end this babysit, mend the settings, \`stage\` what \
changed, and babysit again"
  fi
  ((SECONDS < keep_until))
}

start "$@"
set -- "${arguments[@]}"
case $1 in
  iam) grant_access tpu.googleapis.com ;;
  stage | create | setup | run | status | logs | stop | delete | babysit) "$@" ;;
  *) fail "there is no command $1; --help lists them" ;;
esac
