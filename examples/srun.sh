#!/usr/bin/env bash
# Scheduler, client and workers inside one job, for sites that forbid long processes on login nodes:
#
#   sbatch --ntasks=10 --time=01:00:00 examples/srun.sh
#
# Of N tasks one is the scheduler, one runs the program below, and N - 2 are workers (dask-jobqueue's
# SLURMRunner). -K1: if one fails, the others do not wait for it for ever.
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00

program=$(mktemp -p "$PWD" ferroflow-XXXXXX.py)
trap 'rm -f "$program"' EXIT
cat > "$program" <<'PYTHON'
import time

from dask_jobqueue.slurm import SLURMRunner
from distributed import Client

import ferroflow_dask

if __name__ == "__main__":
    with SLURMRunner(scheduler_file="scheduler-{job_id}.json") as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers)
        ferroflow_dask.install(client)
        graph = ferroflow_dask.generate("imbalanced")
        start = time.perf_counter()
        client.compute(graph.bind()).result()
        seconds = time.perf_counter() - start
        print(f"{len(graph.live_ops)} ops in {seconds:.3f} s on {runner.n_workers} workers")
PYTHON
srun -K1 python "$program"
