#!/bin/bash
# One model over two nodes of four GPUs each. The heads are split over all GPUs.
#   sbatch slurm.sh MODEL PROMPT_FILE
# Slurm starts one process for each GPU. With --mesh, JAX finds the others in Slurm's environment.
#SBATCH --job-name=jshadow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=01:00:00
set -euo pipefail
MODEL=${1:?usage: sbatch slurm.sh MODEL PROMPT_FILE}
PROMPT_FILE=${2:?usage: sbatch slurm.sh MODEL PROMPT_FILE}

# Each process must see all GPUs of its node, because it takes the one with its own number.
exec srun --gpu-bind=none --kill-on-bad-exit=1 \
    jshadow generate "$MODEL" --prompt-file "$PROMPT_FILE" --chat --policy shadowkv --fetch device_put \
    --mesh tp=8 --join-timeout 300
