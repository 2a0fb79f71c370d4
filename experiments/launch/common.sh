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
  MODEL='' DATA=() EXTRA=() SLICES=1 SPOT=0 REVISION=HEAD POLL_SECONDS=${POLL_SECONDS:-60} RERUN_LIMIT=${RERUN_LIMIT:-5}
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

  REGION=${ZONE%-*}
  RUNTIME=${RUNTIME:-$(documented_runtime)}
  [[ -n $RUNTIME ]] || fail "RUNTIME is not set, and the one for $ACCELERATOR is not known here"
  SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-dapo-worker@$PROJECT.iam.gserviceaccount.com}
  run_url=gs://$BUCKET/$RUN
  data_url=gs://$BUCKET/inputs/data
  model_url=$MODEL
  [[ -z $MODEL || $MODEL =~ ^(gs|hf):// ]] || model_url=gs://$BUCKET/inputs/$(basename "$MODEL")

  train_flags=(
    --distributed
    "--config=$CONFIG"
    "--workdir=runs/$RUN"
    "--config.checkpoint.directory=$run_url/checkpoints"
  )
  [[ -z $model_url ]] || train_flags+=("--config.model.path=$model_url")
  ((SLICES == 1)) || train_flags+=("--config.mesh.slices=$SLICES")
  train_flags+=("${EXTRA[@]}")

  # For all runs of the bucket: a program is found by what it is, not by its run.
  COMPILED=${COMPILED-gs://$BUCKET/compiled}
  worker_environment=("RUN_URL=$run_url" "WORKDIR=runs/$RUN" "JAX_COMPILATION_CACHE_DIR=$COMPILED")
  ((${#DATA[@]} == 0)) || worker_environment+=("DATA_URL=$data_url")
  [[ -z ${LIBTPU_INIT_ARGS-} ]] || worker_environment+=("LIBTPU_INIT_ARGS=$LIBTPU_INIT_ARGS")
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
    execute gcloud storage cp "${DATA[@]}" "$data_url/"
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
