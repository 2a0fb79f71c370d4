# shellcheck shell=bash
# shellcheck disable=SC2034  # what is set here is used there
# The settings, and how a command is run or only printed. Sourced by tpu_vm.sh and gke.sh.

here=$(dirname "${BASH_SOURCE[0]}")
root=$(cd "$here/../.." && pwd)
DRY_RUN=${DRY_RUN:-0}

fail() {
  echo "error: $*" >&2
  exit 2
}

# One line that a shell would read back as the same words.
print_command() {
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@,%+-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  echo "${line% }"
}

execute() {
  print_command "$@"
  ((DRY_RUN)) || "$@"
}

# For what may be there, or be gone, already.
execute_or_go_on() {
  ((DRY_RUN)) && echo "$(print_command "$@") || true" && return
  execute "$@" || true
}

# check VARIABLE REGEX WHAT-IT-IS
check() {
  local value=${!1-}
  [[ -n $value ]] || fail "$1 is not set: it is $3"
  [[ $value =~ ^($2)$ ]] || fail "$1=$value is not $3"
}

load_settings() {
  local file=$1
  [[ -f $file ]] || fail "there are no settings at $file: copy launch.env.example there, or give --settings=FILE"
  MODEL='' DATA=() EXTRA=() SLICES=1 SPOT=0 REVISION=HEAD CHECK=1 HF_TOKEN_SECRET=''
  POLL_SECONDS=${POLL_SECONDS:-60} RERUN_LIMIT=${RERUN_LIMIT:-5} BABYSIT_KEEP_S=${BABYSIT_KEEP_S:-600}
  # shellcheck disable=SC1090
  source "$file"

  local name='[a-z]([-a-z0-9]{0,38}[a-z0-9])?'
  check PROJECT '[a-z][-a-z0-9:.]+[a-z0-9]' "a project ID"
  check ZONE '[a-z]+-[a-z]+[0-9]+-[a-z]' "a zone, as us-east5-b"
  check BUCKET '[a-z0-9][-_.a-z0-9]+[a-z0-9]' "a bucket's name, without gs://"
  check NAME "$name" "a name of lower-case letters, digits and dashes"
  check RUN "$name" "a name of lower-case letters, digits and dashes"
  check CONFIG 'configs/[^ ]+' "a config, as configs/qwen2_5_32b.py:dapo"
  check ACCELERATOR 'v[0-9]+[a-z]*-[0-9]+' "an accelerator type, as v6e-16"
  check SLICES '[1-9][0-9]*' "a number of slices"
  check SPOT '[01]' "0 or 1"
  check CHECK '[01]' "0 or 1"
  check BABYSIT_KEEP_S '[0-9]+' "a number of seconds"
  check POLL_SECONDS '[0-9.]+' "a number of seconds"
  check RERUN_LIMIT '[0-9]+' "a number of starts"
  [[ $HF_TOKEN_SECRET != hf_* ]] || fail "HF_TOKEN_SECRET begins like a token: give the name of the secret that holds it"
  [[ -z $HF_TOKEN_SECRET ]] || check HF_TOKEN_SECRET '[a-zA-Z0-9_-]+' "the name of a secret of PROJECT"
  ACCELERATOR=${ACCELERATOR/#v5e-/v5litepod-} # gcloud's name for what documents call v5e

  REGION=${ZONE%-*}
  RUNTIME=${RUNTIME:-$(documented_runtime)}
  [[ -n $RUNTIME ]] || fail "RUNTIME is not set, and the one for $ACCELERATOR is not known here"
  SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-dapo-worker@$PROJECT.iam.gserviceaccount.com}
  run_url=gs://$BUCKET/$RUN
  data_url=gs://$BUCKET/inputs/data
  model_url=$MODEL model_here=$MODEL
  if [[ -n $MODEL && ! $MODEL =~ ^(gs|hf):// ]]; then
    model_url=gs://$BUCKET/inputs/$(basename "$MODEL") model_here=$(absolute "$MODEL")
  fi
  read_data

  train_flags=(
    --distributed
    "--config=$CONFIG"
    "--workdir=runs/$RUN"
    "--config.checkpoint.directory=$run_url/checkpoints"
  )
  [[ -z $model_url ]] || train_flags+=("--config.model.path=$model_url")
  ((SLICES == 1)) || train_flags+=("--config.mesh.slices=$SLICES")
  train_flags+=("${data_flags[@]}" "${EXTRA[@]}")

  # For all runs of the bucket: a program is found by what it is, not by its run.
  COMPILED=${COMPILED-gs://$BUCKET/compiled}
  worker_environment=("RUN_URL=$run_url" "WORKDIR=runs/$RUN" "JAX_COMPILATION_CACHE_DIR=$COMPILED")
  token_version=projects/$PROJECT/secrets/$HF_TOKEN_SECRET/versions/latest
  [[ -z $HF_TOKEN_SECRET ]] || worker_environment+=("HF_TOKEN_SECRET=$token_version")
  [[ -z ${LIBTPU_INIT_ARGS-} ]] || worker_environment+=("LIBTPU_INIT_ARGS=$LIBTPU_INIT_ARGS")
}

absolute() {
  case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}

# Makes of DATA, whose entries are FILE (training's) or NAME=FILE (evaluation set NAME's), what is
# copied (data_files), and the flags by which a worker reads it (data_flags), and this machine (data_here).
read_data() {
  local entry key file name keys=' ' names=' '
  data_files=() data_flags=() data_here=()
  for entry in "${DATA[@]}"; do
    key=data.train file=$entry
    if [[ $entry =~ ^([A-Za-z_][A-Za-z0-9_]*)=(.+)$ ]]; then key=eval.sets.${BASH_REMATCH[1]} file=${BASH_REMATCH[2]}; fi
    name=$(basename "$file")
    [[ $file != *://* ]] || fail "DATA: $file is no local file; EXTRA=(--config.$key.path=$file) reads it where it is"
    [[ $keys != *" $key "* ]] || fail "DATA: $file is a second file of $key; NAME=FILE is evaluation set NAME's, and a quoted * stands for shards"
    [[ $names != *" $name "* ]] || fail "DATA: there are two files named $name; rename one"
    [[ " ${EXTRA[*]}" != *" --config.$key.path"[=\ ]* ]] || fail "DATA: $file is for $key, but EXTRA sets $key.path; leave one out"
    [[ $key == data.train || " ${EXTRA[*]} " != *" --config.eval.every_steps=0 "* ]] || fail "DATA: $file is for $key, but EXTRA has no evaluations (eval.every_steps)"
    keys+="$key " names+="$name "
    data_files+=("$file")
    data_flags+=("--config.$key.path=$data_url/$name")
    data_here+=("--config.$key.path=$(absolute "$file")")
  done
}

# Refuses, before there is a TPU, what a run would refuse: a dry run here, on as many devices of a CPU, with
# the files that are here. As a worker it has the secret's token alone, and nothing that was downloaded before.
check_config() {
  local chips=${ACCELERATOR##*-} token='' home code=0
  local train=("$root/.venv/bin/python" -m dapo_jax.train)
  ((CHECK)) || return 0
  case $ACCELERATOR in v4-* | v5p-*) chips=$((chips / 2)) ;; esac
  [[ -z ${TRAIN-} ]] || read -ra train <<<"$TRAIN"
  train+=(--dry_run "--config=$CONFIG" "--workdir=${TMPDIR:-/tmp}/dapo-$RUN-check" "--config.mesh.cpu_devices=$((chips * SLICES))")
  [[ -z $MODEL ]] || train+=("--config.model.path=$model_here")
  ((SLICES == 1)) || train+=("--config.mesh.slices=$SLICES")
  train+=("${data_here[@]}" "${EXTRA[@]}")
  print_command "${train[@]}"
  ((!DRY_RUN)) || return 0
  git -C "$root" cat-file -e "$REVISION:${CONFIG%%:*}" || fail "CONFIG=$CONFIG is not in REVISION=$REVISION, which workers get: commit it"
  [[ -x ${train[0]} ]] || fail "there is no ${train[0]} to check the config with; \`make setup\` makes it, CHECK=0 does without"
  if [[ -n $HF_TOKEN_SECRET ]]; then
    token=$(gcloud secrets versions access "$token_version") || fail "HF_TOKEN_SECRET=$HF_TOKEN_SECRET could not be read"
  fi
  home=$(mktemp -d)
  (
    unset HF_HUB_CACHE HF_HUB_OFFLINE HF_TOKEN_PATH HUGGING_FACE_HUB_TOKEN
    export HF_HOME=$home HF_TOKEN=$token JAX_PLATFORMS=cpu
    cd "$root" && "${train[@]}"
  ) || code=$?
  rm -rf "$home"
  ((code != 75)) || return 75 # the hub, or the storage, is away for a while
  ((code == 0)) || fail "the run would end like this: mend it. HF_TOKEN_SECRET is for what is gated; CHECK=0 does without this check"
}

# https://cloud.google.com/tpu/docs/runtimes
documented_runtime() {
  case $ACCELERATOR in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v4-*) echo tpu-ubuntu2204-base ;;
  esac
}

# Workers get a commit, not a working tree: what ran can be found again.
archive_source() {
  archive=${TMPDIR:-/tmp}/dapo-$RUN-source.tar.gz
  execute git -C "$root" archive --format=tar.gz "--output=$archive" "$REVISION"
}

stage_inputs() {
  if [[ $model_url != "$MODEL" ]]; then
    execute gcloud storage rsync "$MODEL" "$model_url" --recursive
  fi
  if ((${#DATA[@]})); then
    execute gcloud storage cp "${data_files[@]}" "$data_url/"
  fi
}

# grant_access API...: one service account for the workers: it reads and writes the bucket and writes logs, nothing else.
grant_access() {
  execute gcloud services enable "--project=$PROJECT" "$@" storage.googleapis.com iam.googleapis.com
  execute_or_go_on gcloud iam service-accounts create "${SERVICE_ACCOUNT%%@*}" "--project=$PROJECT"
  execute_or_go_on gcloud storage buckets create "gs://$BUCKET" "--project=$PROJECT" "--location=$REGION" \
    --uniform-bucket-level-access --public-access-prevention
  # Orbax and gcsfs read the bucket's own metadata (storage.buckets.get), which no role of objects has.
  for role in objectUser legacyBucketReader; do
    execute gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" \
      "--member=serviceAccount:$SERVICE_ACCOUNT" "--role=roles/storage.$role"
  done
  grant_project "serviceAccount:$SERVICE_ACCOUNT" roles/logging.logWriter
  if [[ -n $HF_TOKEN_SECRET ]]; then
    execute gcloud services enable "--project=$PROJECT" secretmanager.googleapis.com
    for member in "serviceAccount:$SERVICE_ACCOUNT" ${LAUNCHER:+"$LAUNCHER"}; do
      execute gcloud secrets add-iam-policy-binding "$HF_TOKEN_SECRET" "--project=$PROJECT" \
        "--member=$member" --role=roles/secretmanager.secretAccessor
    done
  fi
  [[ -n ${LAUNCHER-} ]] || return 0
  grant_project "$LAUNCHER" roles/tpu.admin
  execute gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" "--member=$LAUNCHER" --role=roles/storage.objectUser
  execute gcloud iam service-accounts add-iam-policy-binding "$SERVICE_ACCOUNT" "--project=$PROJECT" \
    "--member=$LAUNCHER" --role=roles/iam.serviceAccountUser
}

# grant_project MEMBER ROLE
grant_project() {
  execute gcloud projects add-iam-policy-binding "$PROJECT" "--member=$1" "--role=$2" --condition=None
}

# Reads --dry-run and --settings=FILE, loads the settings, leaves the rest in `arguments`.
start() {
  local settings=$root/runs/launch.env
  arguments=()
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      --settings=*) settings=${1#*=} ;;
      --help | -h) usage && exit ;;
      --*) fail "there is no option $1" ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  ((${#arguments[@]})) || { usage >&2 && exit 2; }
  load_settings "$settings"
}
