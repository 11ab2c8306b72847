#!/usr/bin/env bash
# Queues a job on a GKE cluster with XPK, which writes the JobSet; Kueue starts and restarts it.
#
#   CLUSTER=my-cluster PROJECT=my-project ZONE=us-west4-a IMAGE=my-image CHECKPOINTS=/mnt/checkpoints \
#     tpu_configs/launch/xpk.sh tpu_configs/v5e-256.yaml --tpu-type=v5litepod-256
#
# On GPUs the last arguments are e.g. --device-type=h100-mega-80gb-8 --num-nodes=8. The image holds
# this repository with its extras `examples` and `tpu` installed. jobset.yaml is the same by hand.
set -euo pipefail

config=${1:?"the config, e.g. tpu_configs/v5e-256.yaml"}
shift
: "${CLUSTER:?}" "${PROJECT:?}" "${ZONE:?}" "${IMAGE:?}" "${CHECKPOINTS:?a folder that all hosts see}"
name=mpjax-$(basename "$config" .yaml)

python examples/train_pod.py "$config" --check

xpk workload create --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --workload="$name" --docker-image="$IMAGE" --max-restarts=50 "$@" \
  --command="python examples/train_pod.py $config --distributed \
    --set checkpoint.folder=$CHECKPOINTS/$name"
