"""Existing Dask code: fit eight models to one data set, before and after `install`."""

import time

from distributed import Client, LocalCluster

import ferroflow_dask


def load():
    return 1.0


def fit(data, i):
    time.sleep(0.3)
    return data * i


if __name__ == "__main__":
    with LocalCluster(n_workers=8, threads_per_worker=1) as cluster, Client(cluster) as client:
        for scheduler in ("Dask", "ferroflow"):
            if scheduler == "ferroflow":
                ferroflow_dask.install(client)
            start = time.perf_counter()
            data = client.submit(load, pure=False)
            client.gather(client.map(fit, [data] * 8, range(8), pure=False))
            print(f"{scheduler}: {time.perf_counter() - start:.2f} s")
