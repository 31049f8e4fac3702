"""Why does a task run on its worker? Print the scheduler's estimates for some tasks.

python explain_decisions.py
"""

import time

from distributed import Client, LocalCluster, wait

import ferroflow_dask


def load():
    return bytes(1_000_000)


def fit(data, i):
    time.sleep(0.1)
    return len(data) * i


if __name__ == "__main__":
    with LocalCluster(n_workers=3, threads_per_worker=1) as cluster, Client(cluster) as client:
        ferroflow_dask.install(client)
        wait(client.map(fit, [b""] * 3, range(3)))  # the duration of `fit` is known now
        data = client.submit(load)
        fits = [client.submit(fit, data, i, key=f"fit-{i}") for i in range(6)]
        wait(fits)
        for future in fits:
            for decision in ferroflow_dask.explain(client, future):
                print(f"{future.key} · {decision.what} · worker {decision.worker} · {decision.reason}")
