"""How DAGs scale over SLURM jobs, in ferroflow's layout: run this on a login node.

Each number of jobs is measured on a cluster of its own, stock Dask and ferroflow taking turns. Every run adds
a row to the file; what it has already is not run again, so an interrupted measurement goes on.

    python examples/scaling.py 2 4 8
    ferroflow report scaling.jsonl
"""

import subprocess
import sys

WORKLOADS = ("imbalanced", "xlarge-wide", "xlarge-transformer")
OUTPUT = "scaling.jsonl"
OPTIONS = (
    *("--policy", "dask", "--policy", "static", "--policy", "ferroflow"),
    *("--costs", "known", "--costs", "learned", "--repeat", "3", "--output", OUTPUT),
)


def main(jobs: list[str]) -> None:
    for number in jobs:
        subprocess.run(
            ["ferroflow", "bench", "run", *WORKLOADS, "--cluster", "slurm", "--jobs", number, *OPTIONS],
            check=True,
        )
    subprocess.run(["ferroflow", "report", OUTPUT], check=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["1", "2", "4"])
