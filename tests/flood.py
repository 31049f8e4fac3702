"""Wrong durations in virtual time: tasks in bundles take 60 times as long as was learned, or half of them do.

`python tests/flood.py` prints divisions ÷ bundles, and the CPU time of the scheduler's event loop ÷ that
without bundles, each the least of several runs. Cutting a graph is not part of it: a scheduler does it in
another thread.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from ferroflow_dask.topology import Host, Link, Runtime, Topology, Worker
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

#: Learned and real duration of the tasks [s].
LEARNED_S, LONG_S = 0.001, 0.06


def graph_of(n: int, is_mixed: bool) -> dict[Any, VirtualTask]:
    return {("t", i): VirtualTask(LEARNED_S if is_mixed and i % 2 else LONG_S, nbytes=100) for i in range(n)}


def flood(
    threads: int, n: int, *, is_mixed: bool, is_bundled: bool, policy: str = "ferroflow"
) -> tuple[VirtualCluster, float]:
    """Run some tasks; return the cluster and the CPU time of its scheduler [s]."""
    host = Host("here", 1e9, (Worker(),) * threads, inside=Link(1e-4, 1e9))
    topology = Topology([host], runtime=Runtime(noise=0.0))
    cluster = VirtualCluster.on(
        topology, policy=policy, without=() if is_bundled else ["bundles"], scheduler_cpu="measured"
    )
    cluster.submit(graph_of(n, is_mixed), learned_s={"t": LEARNED_S})
    cluster.run()
    cluster.check()
    return cluster, cluster.cpu.seconds


def counts(cluster: VirtualCluster) -> tuple[int, int]:
    """Return how many bundles were created, and how many divisions were asked for."""
    stealing: Any = cluster.stealing
    return stealing.graphs.bundles.counts["created"], stealing.graphs.dividing.n_asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    logging.disable()
    for threads in (4, 64, 512):
        for is_mixed in (False, True):
            least = {}
            for name, is_bundled, policy in (
                ("bundled", True, "ferroflow"),
                ("separate", False, "ferroflow"),
                ("stock", False, "dask"),
            ):
                runs = [
                    flood(threads, arguments.tasks, is_mixed=is_mixed, is_bundled=is_bundled, policy=policy)
                    for _ in range(arguments.repeats)
                ]
                least[name] = min(seconds for _, seconds in runs), runs[0][0]
            n_bundles, n_divisions = counts(least["bundled"][1])
            cpu_s = {name: seconds for name, (seconds, _) in least.items()}
            makespan_s = {name: cluster.record.makespan_s for name, (_, cluster) in least.items()}
            print(
                f"{threads:3} threads, {'1 and 60 ms' if is_mixed else '60 ms':11}"
                f" bundles {n_bundles:4} divisions {n_divisions:5}"
                f" CPU {cpu_s['bundled']:.2f} s ÷ separate {cpu_s['bundled'] / cpu_s['separate']:.2f}"
                f" ÷ stock {cpu_s['bundled'] / cpu_s['stock']:.2f}"
                f" makespan ÷ separate {makespan_s['bundled'] / makespan_s['separate']:.3f}"
                f" messages {dict(least['bundled'][1].record.messages)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
