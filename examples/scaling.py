"""Scaling of built-in graphs over SLURM jobs: run this script on a login node.

The script runs stock Dask, the policy `static` and ferroflow in turn, each on jobs of its own. Each run adds
a row to the output file. Runs that the file contains are skipped, so an interrupted measurement can continue.

    python examples/scaling.py 2 4 8
    ferroflow report scaling.jsonl
"""

import subprocess
import sys

WORKLOADS = ("imbalanced", "xlarge-wide", "xlarge-transformer")
OUTPUT = "scaling.jsonl"
OPTIONS = (
    *("--policy", "dask", "--policy", "static", "--policy", "ferroflow"),
    *("--repeat", "3", "--rows", OUTPUT),
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
