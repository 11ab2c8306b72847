#!/usr/bin/env bash
# Asks Cloud TPU for a slice, and starts one process on each of its hosts when it is there.
#
#   PROJECT=my-project ZONE=us-west4-a CHECKPOINTS=/mnt/checkpoints \
#     tpu_configs/launch/queued_resources.sh tpu_configs/v5e-16.yaml v5litepod-16 v2-alpha-tpuv5-lite
#
# The second argument is gcloud's --accelerator-type, the third its --runtime-version; both are
# listed by `gcloud compute tpus accelerator-types list` and `... tpus versions list`. SPOT=1 asks
# for capacity that may be taken back: SIGTERM then saves, and the same command resumes.
set -euo pipefail

config=${1:?"the config, e.g. tpu_configs/v5e-16.yaml"}
accelerator=${2:?"--accelerator-type, e.g. v5litepod-16"}
runtime=${3:?"--runtime-version, e.g. v2-alpha-tpuv5-lite"}
: "${PROJECT:?your project}" "${ZONE:?a zone that has the accelerator}"
: "${CHECKPOINTS:?a folder that all hosts see, e.g. a Filestore mount or a Cloud Storage FUSE mount}"
name=mpjax-$(basename "$config" .yaml)
where=(--project="$PROJECT" --zone="$ZONE")

# Wrong jobs are cheapest here: on this machine, before anything is rented.
python examples/train_pod.py "$config" --check

gcloud compute tpus queued-resources create "$name" "${where[@]}" \
  --node-id="$name" --accelerator-type="$accelerator" --runtime-version="$runtime" ${SPOT:+--spot}
until gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
  --format="value(state.state)" | grep -q ACTIVE; do
  sleep 30
done

gcloud compute tpus tpu-vm scp --recurse "${where[@]}" --worker=all . "$name":mpjax
gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="
  pip install --quiet -e 'mpjax[examples,tpu]' &&
  python mpjax/examples/train_pod.py mpjax/$config --distributed \
    --set checkpoint.folder=$CHECKPOINTS/$name"
