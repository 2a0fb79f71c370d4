#!/usr/bin/env bash
# The restart loop of one worker: run_worker.sh FLAGS-OF-dapo_jax.train
#
#   exit code     what the loop does
#   0             ends with 0
#   75            stopped by a signal and saved, or another process is gone: starts again at once, but
#                 waits longer each time when that happens again and again
#   128 and more  killed or aborted: starts again, waiting longer each time
#   others        an error in settings or a bug: ends with that code
#
# SIGTERM to the loop (or Ctrl-C, or a closed terminal) goes to the training as SIGTERM. The training's
# exit code is then the loop's: the VM is going away.
set -euo pipefail

WORKDIR=${WORKDIR:-runs/worker}            # mirrored to RUN_URL by the main worker
RUN_URL=${RUN_URL-}                        # gs://BUCKET/RUN; empty: nothing is mirrored
HF_TOKEN_SECRET=${HF_TOKEN_SECRET-}        # a version in Secret Manager; the training gets what it holds
LOGS=${LOGS:-$WORKDIR.logs}                # a file an attempt; `current` points to the newest
KEEP_LOGS=${KEEP_LOGS:-20}
RESTART=${RESTART:-1}                      # 0: one attempt (Kubernetes starts the next one)
STOPPED_CODE=${STOPPED_CODE:-75}           # what the loop says for 75 (xpk restarts on 143, not on 75)
BACKOFF_SECONDS=${BACKOFF_SECONDS:-10}     # after the first crash, doubled with each one after it
BACKOFF_MAX_SECONDS=${BACKOFF_MAX_SECONDS:-240}  # below the 300 s that JAX waits for its peers
CRASH_LIMIT=${CRASH_LIMIT:-6}              # crashes in a row that end the loop
LOST_LIMIT=${LOST_LIMIT:-10}               # so many 75 in a row do: another worker's loop may have ended
HEALTHY_SECONDS=${HEALTHY_SECONDS:-1800}   # an attempt that ran this long ends the rows
PUSH_SECONDS=${PUSH_SECONDS:-60}
python=.venv/bin/python
[[ -x $python ]] || python=python
read -ra train <<<"${TRAIN:-$python -m dapo_jax.train}"

stopping=
child=

main() {
  trap forward_stop TERM INT HUP
  trap : PIPE # the terminal may be gone; `say` goes on
  worker=$(worker_id)
  mkdir -p "$WORKDIR" "$LOGS"
  report running
  pull || { say "the mirror could not be read" && finish 1; }
  read_token || { say "the token of $HF_TOKEN_SECRET could not be read" && finish 1; }

  local crashes=0 lost=0 code started
  while true; do
    started=$SECONDS
    code=0
    [[ -n $stopping ]] && finish 75
    attempt "$@" || code=$?
    ((SECONDS - started < HEALTHY_SECONDS)) || crashes=0 lost=0
    say "attempt ended with code $code after $((SECONDS - started)) s"

    if [[ -n $stopping || $RESTART == 0 ]]; then finish "$code"; fi
    if ((code == 75)); then
      lost=$((lost + 1))
      ((lost < LOST_LIMIT)) || give_up "$code" "$lost times $code in a row, without $HEALTHY_SECONDS s of training"
      ((lost == 1)) || back_off $((lost - 1)) "code 75, $lost of $LOST_LIMIT"
    elif ((code >= 128)); then
      crashes=$((crashes + 1))
      ((crashes < CRASH_LIMIT)) || give_up "$code" "$crashes crashes in a row"
      back_off "$crashes" "crash $crashes of $CRASH_LIMIT"
    else
      finish "$code"
    fi
    if [[ -n $stopping ]]; then finish "$code"; fi
  done
}

# A background child and `wait`, so that the trap runs at once; the signal ends `wait`, not the child.
attempt() {
  local log interrupted code=127 pusher output ready
  log=$(new_log)
  say "$(date '+%F %T') ${train[*]} $*" | tee -a "$log" || true
  # What is said while it stops reaches the log, whether or not a terminal is there to show it. The
  # training starts once `tee` ignores signals: one that ends `tee` would break its output.
  mkfifo "$log.ready" && exec {ready}<>"$log.ready" && rm "$log.ready"
  exec {output}> >(trap '' HUP INT TERM PIPE && echo >&"$ready" && exec tee -a "$log")
  until read -rt 0.1 -u "$ready" _ || [[ -n $stopping ]]; do :; done
  exec {ready}>&-
  if [[ -n $stopping ]]; then exec {output}>&- && return 75; fi
  "${train[@]}" "$@" >&"$output" 2>&1 &
  child=$!
  exec {output}>&-
  [[ -z $stopping ]] || kill -TERM "$child"
  push_until_killed &
  pusher=$!
  while true; do
    interrupted=$stopping
    code=0
    wait "$child" || code=$?
    [[ $interrupted != "$stopping" ]] || break
  done
  child=
  kill "$pusher" 2>/dev/null || true
  wait "$pusher" 2>/dev/null || true
  return "$code"
}

forward_stop() {
  stopping+=x
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}

# back_off NUMBER-IN-THE-ROW WHAT
back_off() {
  local doublings=$(($1 <= 10 ? $1 - 1 : 9)) seconds
  seconds=$((BACKOFF_SECONDS * 2 ** doublings))
  ((seconds <= BACKOFF_MAX_SECONDS)) || seconds=$BACKOFF_MAX_SECONDS
  say "$2: again in $seconds s"
  sleep "$seconds" &
  child=$!
  [[ -z $stopping ]] || kill "$child"
  wait "$child" || true
  child=
}

give_up() {
  say "$2: giving up"
  finish "$1"
}

finish() {
  local code=$1
  push
  report "exited $code"
  ((code != 75)) || code=$STOPPED_CODE
  exit "$code"
}

# Attempts count on across starts of the loop, so no log is written over.
new_log() {
  local last number
  last=$(find "$LOGS" -name 'attempt-*.log' | sort | tail -n 1)
  number=$(basename "${last:-attempt-0000.log}" .log)
  number=$((10#${number#attempt-} + 1))
  printf -v last '%s/attempt-%04d.log' "$LOGS" "$number"
  touch "$last"
  ln -sfn "$(basename "$last")" "$LOGS/current"
  find "$LOGS" -name 'attempt-*.log' | sort | head -n "-$KEEP_LOGS" | xargs -r rm --
  echo "$last"
}

# A fresh VM goes on with the metrics of the one before it. The checkpoints are in the bucket anyway.
pull() {
  # What is here already may be newer than its mirror.
  if mirrors && [[ ! -e $WORKDIR/metrics.jsonl ]] && gcloud storage ls "$RUN_URL/workdir/" >/dev/null 2>&1; then
    gcloud storage rsync "$RUN_URL/workdir" "$WORKDIR" --recursive
  fi
}

# In the environment alone: commands, logs and the bucket have the secret's name.
read_token() {
  [[ -n $HF_TOKEN_SECRET ]] || return 0
  HF_TOKEN=$(gcloud secrets versions access "$HF_TOKEN_SECRET") && export HF_TOKEN
}

# Not the lock: the next VM would watch for 20 s whether the run of this one, of another name, lives.
push() {
  local left_out='^checkpoints/|^run[.]lock$|[.]tmp$'
  [[ -n $RUN_URL ]] || return 0
  if mirrors; then
    gcloud storage rsync "$WORKDIR" "$RUN_URL/workdir" "--exclude=$left_out" --recursive || say "the mirror failed"
  fi
  gcloud storage rsync "$LOGS" "$RUN_URL/logs/$worker" --recursive || say "the mirror of the logs failed"
}

# Ends between two pushes, so that no old one overtakes the last one.
push_until_killed() {
  local sleeper=
  trap 'kill "$sleeper" || true; exit' TERM
  while [[ -n $RUN_URL ]]; do
    sleep "$PUSH_SECONDS" &
    sleeper=$!
    wait "$sleeper"
    push
  done >/dev/null 2>&1
}

mirrors() {
  [[ -n $RUN_URL && $worker == 0-0 ]]
}

# What `babysit` reads.
report() {
  if mirrors; then echo "$1" | gcloud storage cp - "$RUN_URL/state" || say "the state could not be written"; fi
}

# SLICE-WORKER. 0-0 is the main worker: process 0, as JAX counts (jax/_src/clusters/cloud_tpu_cluster.py).
worker_id() {
  local slice number
  if [[ -n ${DAPO_PROCESS-} ]]; then
    echo "0-$DAPO_PROCESS"
  elif [[ -n ${TPU_WORKER_ID-} ]]; then # GKE
    echo "${MEGASCALE_SLICE_ID:-0}-$TPU_WORKER_ID"
  else # TPU VM; a line of tpu-env is KEY: 'VALUE'
    slice=$(metadata tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\{0,1\}\([0-9]*\).*/\1/p") || slice=
    number=$(metadata agent-worker-number) || { echo "error: which worker is this? set DAPO_PROCESS" >&2 && return 1; }
    echo "${slice:-0}-$number"
  fi
}

metadata() {
  curl --silent --fail --retry 5 --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

say() {
  echo "run_worker $worker: $*" || true
}

main "$@"
