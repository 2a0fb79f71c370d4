#!/usr/bin/env bash
# Training on GKE: by our own JobSet, or by xpk.
# shellcheck disable=SC2153  # common.sh sets NAME
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
gke.sh [--dry-run] [--settings=FILE] COMMAND          (--dry-run, or DRY_RUN=1: print the commands only)

  iam           once: APIs, service account, bucket, roles
  stage         model and data to the bucket
  image         build and push IMAGE
  cluster       cluster, a node pool a slice, JobSet
  render        print the JobSet
  run           submit it
  status, logs [SLICE [WORKER]], stop, delete           delete: the cluster with its node pools

  xpk-cluster, xpk-run, xpk-stop, xpk-delete            the same steps by xpk (after iam, stage, image)
TEXT
}

JOBSET_VERSION=v0.10.1

# GKE's names for what ACCELERATOR is (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus),
# and the slice's hosts from its shape.
shape() {
  local cores=1 sides chips=1 side
  check TOPOLOGY '[0-9]+x[0-9]+(x[0-9]+)?' "a topology, as 4x4"
  CHIPS_PER_HOST=${CHIPS_PER_HOST:-4}
  check CHIPS_PER_HOST '[148]' "1, 4 or 8"
  case $ACCELERATOR in
    v6e-*) label=tpu-v6e-slice machine=ct6e-standard-${CHIPS_PER_HOST}t ;;
    v5litepod-*) label=tpu-v5-lite-podslice machine=ct5lp-hightpu-${CHIPS_PER_HOST}t ;;
    v5p-*) label=tpu-v5p-slice machine=ct5p-hightpu-${CHIPS_PER_HOST}t cores=2 ;;
    v4-*) label=tpu-v4-podslice machine=ct4p-hightpu-${CHIPS_PER_HOST}t cores=2 ;;
    *) fail "ACCELERATOR=$ACCELERATOR has no GKE name here" ;;
  esac
  IFS=x read -ra sides <<<"$TOPOLOGY"
  for side in "${sides[@]}"; do chips=$((chips * side)); done
  ((chips * cores == ${ACCELERATOR##*-})) ||
    fail "TOPOLOGY=$TOPOLOGY has $chips chips of $cores cores, ACCELERATOR=$ACCELERATOR another number"
  ((chips % CHIPS_PER_HOST == 0)) || fail "CHIPS_PER_HOST=$CHIPS_PER_HOST does not divide the $chips chips of TOPOLOGY"
  hosts=$((chips / CHIPS_PER_HOST))
  ((SLICES == 1 || hosts > 1)) || fail "SLICES=$SLICES needs slices of several hosts on GKE, and $TOPOLOGY has one"
}

iam() {
  grant_access tpu.googleapis.com container.googleapis.com artifactregistry.googleapis.com
  # What GKE asks of a node's service account, and to pull the image.
  grant_project "serviceAccount:$SERVICE_ACCOUNT" roles/container.defaultNodeServiceAccount
  grant_project "serviceAccount:$SERVICE_ACCOUNT" roles/artifactregistry.reader
  [[ -z ${LAUNCHER-} ]] || grant_project "$LAUNCHER" roles/container.admin
}

image() {
  local context=${TMPDIR:-/tmp}/dapo-$RUN-context
  archive_source
  execute mkdir -p "$context"
  execute tar -xzf "$archive" -C "$context"
  execute docker build "--file=$context/experiments/launch/Dockerfile" "--tag=$IMAGE" "$context"
  execute docker push "$IMAGE"
}

# Nodes run as the service account, and pods on the host's network act as their node.
cluster() {
  local slice spot=()
  check_config
  ((SPOT == 0)) || spot=(--spot)
  execute gcloud container clusters create "$NAME" "--project=$PROJECT" "--location=$REGION" \
    "--node-locations=$ZONE" --num-nodes=1 "--service-account=$SERVICE_ACCOUNT"
  for ((slice = 0; slice < SLICES; slice++)); do
    execute gcloud container node-pools create "$NAME-slice-$slice" "--cluster=$NAME" "--project=$PROJECT" \
      "--location=$REGION" "--node-locations=$ZONE" "--machine-type=$machine" "--tpu-topology=$TOPOLOGY" \
      "--num-nodes=$hosts" "--service-account=$SERVICE_ACCOUNT" "${spot[@]}"
  done
  execute gcloud container clusters get-credentials "$NAME" "--project=$PROJECT" "--location=$REGION"
  execute kubectl apply --server-side \
    "--filename=https://github.com/kubernetes-sigs/jobset/releases/download/$JOBSET_VERSION/manifests.yaml"
}

# Exit codes that are worth another start: 75, and death by a signal.
restartable() {
  echo "75, $(seq --separator=', ' 129 159)"
}

yaml_string() {
  local text=${1//\\/\\\\}
  echo "\"${text//\"/\\\"}\""
}

render() {
  local assignment flag
  cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $RUN
  annotations:
    # a slice's pods have a node pool, that is a slice, to themselves
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    # one process cannot come back alone, so all jobs start again; an error in the settings ends the run
    maxRestarts: ${MAX_RESTARTS:-50}
    rules:
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $SLICES
      template:
        spec:
          parallelism: $hosts
          completions: $hosts
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: NotIn
                  values: [$(restartable)]
          template:
            spec:
              restartPolicy: Never
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              # a save takes up to 15 s, and then the mirror
              terminationGracePeriodSeconds: 90
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $label
                cloud.google.com/gke-tpu-topology: $TOPOLOGY
YAML
  ((SPOT == 0)) || echo '                cloud.google.com/gke-spot: "true"'
  cat <<YAML
              tolerations:
                - key: google.com/tpu
                  operator: Exists
              containers:
                - name: train
                  image: $IMAGE
                  securityContext:
                    privileged: true
                  resources:
                    limits:
                      google.com/tpu: $CHIPS_PER_HOST
                  command: [bash, experiments/launch/run_worker.sh]
                  args:
YAML
  for flag in "${train_flags[@]}"; do
    echo "                    - $(yaml_string "$flag")"
  done
  echo "                  env:"
  for assignment in RESTART=0 "${worker_environment[@]}"; do
    echo "                    - name: ${assignment%%=*}"
    echo "                      value: $(yaml_string "${assignment#*=}")"
  done
}

run() {
  local manifest=${TMPDIR:-/tmp}/dapo-$RUN-jobset.yaml
  echo "# $manifest is what \`render\` prints"
  render >"$manifest"
  execute kubectl apply "--filename=$manifest"
}

status() {
  execute kubectl get jobset "$RUN"
  execute kubectl get pods "--selector=jobset.sigs.k8s.io/jobset-name=$RUN" --output=wide
}

logs() {
  execute kubectl logs --follow \
    "--selector=jobset.sigs.k8s.io/jobset-name=$RUN,jobset.sigs.k8s.io/job-index=${1:-0},batch.kubernetes.io/job-completion-index=${2:-0}"
}

stop() {
  execute kubectl delete jobset "$RUN"
}

delete() {
  execute gcloud container clusters delete "$NAME" "--project=$PROJECT" "--location=$REGION" --quiet
}

on_cluster() {
  execute xpk "$@" "--cluster=$NAME" "--project=$PROJECT" "--zone=$ZONE"
}

xpk-cluster() {
  local capacity=--on-demand
  check_config
  ((SPOT == 0)) || capacity=--spot
  on_cluster cluster create "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" "$capacity"
}

# xpk starts again after 127 to 255 but not after 75, so the loop says 143 for it. `exec`, because xpk
# sends SIGTERM to the shell that it runs the command in.
xpk-run() {
  local assignment environment=()
  for assignment in RESTART=0 STOPPED_CODE=143 "${worker_environment[@]}"; do environment+=("--env=$assignment"); done
  on_cluster workload create "--workload=$RUN" "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" "--docker-image=$IMAGE" \
    "--max-restarts=${MAX_RESTARTS:-50}" --termination-grace-period-seconds=90 "${environment[@]}" \
    "--command=exec bash experiments/launch/run_worker.sh $(print_command "${train_flags[@]}")"
}

xpk-stop() {
  on_cluster workload delete "--workload=$RUN"
}

xpk-delete() {
  on_cluster cluster delete
}

start "$@"
set -- "${arguments[@]}"
case $1 in
  image | render | run | xpk-run) check IMAGE '[^ ]+/[^ ]+' "an image, as REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG" ;;
esac
case $1 in
  stage) stage_inputs ;;
  cluster | render | run) shape && "$@" ;;
  iam | image | status | logs | stop | delete | xpk-cluster | xpk-run | xpk-stop | xpk-delete) "$@" ;;
  *) fail "there is no command $1; --help lists them" ;;
esac
