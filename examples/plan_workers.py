"""How many workers help my program? Simulate it before you ask for them.

python plan_workers.py
"""

import dask.array as da

from ferroflow_dask import simulate


def main():
    x = da.ones((8_000, 8_000), chunks=(500, 500))
    total = (x @ x.T).mean()  # your Dask collection
    options = {"workers": [4, 16, 64], "durations_s": 0.05, "nbytes": 2e6}
    for found in simulate(total, "narval", ["dask", "ferroflow"], **options):
        print(
            f"{found.policy}, {found.workers} workers: {found.makespan_s:.2f} s, "
            f"efficiency {found.efficiency:.0%}, scheduler busy {found.scheduler_busy:.0%}"
        )


if __name__ == "__main__":
    main()
