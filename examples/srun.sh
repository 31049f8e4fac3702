#!/usr/bin/env bash
# Run scheduler, client and workers in one job, for sites that forbid long processes on login nodes:
#
#   sbatch --ntasks=10 --time=01:00:00 examples/srun.sh
#
# dask-jobqueue's SLURMRunner uses one Slurm task for the scheduler, one for the program below, and the rest for
# workers. `srun -K1` ends the job if one Slurm task fails; otherwise the others would wait for it.
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00

program=$(mktemp -p "$PWD" ferroflow-XXXXXX.py)
trap 'rm -f "$program"' EXIT
cat > "$program" <<'PYTHON'
import asyncio
import time

from dask_jobqueue.slurm import SLURMRunner
from distributed import Client

import ferroflow_dask


class Runner(SLURMRunner):
    """Tries again if the scheduler is still writing its file; dask-jobqueue 0.9 fails then."""

    async def get_scheduler_address(self):
        while True:
            try:
                return await super().get_scheduler_address()
            except ValueError:
                await asyncio.sleep(0.2)


if __name__ == "__main__":
    with Runner(scheduler_file="scheduler-{job_id}.json") as runner, Client(runner) as client:
        client.wait_for_workers(runner.n_workers, timeout=300)  # imports from a shared file system are slow
        ferroflow_dask.install(client)
        model = ferroflow_dask.generate("imbalanced")
        start = time.perf_counter()
        client.compute(model.bind()).result()
        seconds = time.perf_counter() - start
        print(f"{len(model.graph.live_ops)} ops in {seconds:.3f} s on {runner.n_workers} workers")
PYTHON
srun -K1 python "$program"
