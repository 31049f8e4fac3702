#!/usr/bin/env bash
# Run examples/gpu.py on one GPU of Narval or Nibi (Digital Research Alliance of Canada):
#
#   cd $SCRATCH
#   sbatch --account=def-someuser ~/ferroflow-dask/examples/gpu.sh                       # Narval: one A100
#   sbatch --account=def-someuser --gres=gpu:h100:1 --cpus-per-task=14 --mem=230G \
#          ~/ferroflow-dask/examples/gpu.sh                                              # Nibi: one H100
#
# Options of sbatch override the directives below. Arguments after the script are passed to gpu.py. The results
# are in gpu.jsonl in the folder from which the job was submitted. docs/alliance.md says how to install.
#SBATCH --job-name=ferroflow-gpu
#SBATCH --gres=gpu:a100:1
#SBATCH --cpus-per-task=12
#SBATCH --mem=120G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -e
module load StdEnv/2023 python/3.11 cuda/12.6
source "${FERROFLOW_ENV:-$HOME/ferroflow}/bin/activate"
python "${FERROFLOW_CLONE:-$HOME/ferroflow-dask}/examples/gpu.py" --cpus 8 "$@"
ferroflow report gpu.jsonl
