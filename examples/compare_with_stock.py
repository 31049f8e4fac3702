"""ferroflow's policy against stock Dask on `imbalanced`, written for Dask in each of four ways.

How a graph is written changes stock Dask's speed up to threefold: whether its root is a task or is
there before, and whether long and short tasks have names of their own, by which Dask learns durations.
Runs are interleaved; what counts is the ratio within one run of this script.
"""

import gc
import statistics
import sys
import time
from contextlib import ExitStack

from distributed import Client, LocalCluster

from ferroflow_dask import Graph, generate, install, place
from ferroflow_dask.graph import Op
from ferroflow_dask.lowering.collection import bind

WORKERS, REPEATS = 8, 5


def one_name(op: Op) -> str:
    return "slow"


def name_by_duration(op: Op) -> str:
    return "heavy" if op.attributes["duration"] > 0.1 else "fast"


def measure(client: Client, graph: Graph, prefix) -> float:
    """Return ops/s, from the un-lowered graph until all results are here."""
    start = time.perf_counter()
    collection = client.persist(bind(graph, {}, prefix=prefix))
    client.gather(list(collection.__dask_graph__().to_dict().values()))
    return len(graph.ops) / (time.perf_counter() - start)


if __name__ == "__main__":
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    with ExitStack() as stack:
        rows = {}
        for policy in ("dask", "ferroflow"):
            cluster = stack.enter_context(
                LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0")
            )
            client = stack.enter_context(Client(cluster))
            if policy == "ferroflow":
                install(client)
            graph = generate("imbalanced")
            for root, lowered in (("root a task", graph), ("root placed", place(graph, client))):
                for prefix in (one_name, name_by_duration):
                    rows[policy, root, prefix.__name__] = (client, lowered, prefix, [])
        gc.collect()
        gc.freeze()  # or full collections, of 0.1 s each, hit some runs and not others
        for repeat in range(repeats + 1):
            for client, lowered, prefix, figures in rows.values():
                speed = measure(client, lowered, prefix)
                if repeat:  # the first round warms up: imports, connections, durations
                    figures.append(speed)
                time.sleep(0.2)
        for name, (*_, figures) in rows.items():
            line = f"{statistics.median(figures):6.0f} ops/s  ({min(figures):.0f}–{max(figures):.0f})"
            print(f"{' · '.join(name):45} {line}", flush=True)
