#!/usr/bin/env bash
# One process a GPU under Slurm; JAX reads the processes' numbers from Slurm's variables.
#
#   sbatch --nodes=8 tpu_configs/launch/slurm.sh tpu_configs/h100-64-bf16.yaml
#
#SBATCH --job-name=mpjax
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail

config=${1:?"the config, e.g. tpu_configs/h100-64-bf16.yaml"}
# Each process takes the GPU of its local rank. SIGTERM, 120 s before the time is up, saves and ends
# with 143: then this asks Slurm to run it again, and it resumes.
status=0
srun --kill-on-bad-exit=1 python examples/train_pod.py "$config" --distributed || status=$?
if [[ $status -eq 143 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
