#!/bin/bash
# A Slurm array: each task runs one part on one GPU.
#   sbatch slurm_array.sh eval MODEL --tasks agreement --out /shared/results
#   sbatch slurm_array.sh library add /shared/documents --model MODEL /shared/texts/*.txt
# One part again: sbatch --array=3 slurm_array.sh eval ... (PARTS stays the number of all parts)
#SBATCH --job-name=jshadow-parts
#SBATCH --array=1-8
#SBATCH --gpus-per-task=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
PARTS=${PARTS:-8}

exec jshadow "$@" --part "$SLURM_ARRAY_TASK_ID/$PARTS"
