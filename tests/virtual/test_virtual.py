"""Virtual clusters keep time exactly: makespans worked out by hand, the same in every run."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from virtual_runs import L, chain, independent, pinned, run

from ferroflow_dask.exceptions import SimulationError, UsageError
from ferroflow_dask.virtual import VirtualCluster, VirtualTask

POLICIES = ["ferroflow", "dask", "no-stealing", "static", "random"]


def fan_out(n: int) -> dict[Any, VirtualTask]:
    """Return a root and its dependents, whose cost is declared."""
    cost = {"ferroflow_cost": 0.5}
    return {"root": VirtualTask(0.5)} | {
        ("leaf", i): VirtualTask(0.5, ("root",), annotations=cost) for i in range(n)
    }


# Makespans by hand. A task takes two messages more than its duration: sent to the worker, and reported.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("graph", "options", "makespan_s"),
    [
        pytest.param(independent(1), {}, 0.5 + 2 * L, id="one task"),
        pytest.param(independent(2), {"nthreads": 2}, 0.5 + 2 * L, id="two threads run two tasks"),
        pytest.param(independent(2), {}, 1.0 + 2 * L, id="one thread runs one after the other"),
        pytest.param(independent(1), {"speeds": {0: 4.0}}, 0.125 + 2 * L, id="a fast worker takes less time"),
        pytest.param(
            independent(1), {"service_s": 0.25}, 0.75 + 2 * L, id="the scheduler takes its time for a message"
        ),
        pytest.param(
            independent(2),
            {"nthreads": 2, "service_s": 0.25},
            1.0 + 2 * L,
            id="the second message waits until the scheduler is done with the first",
        ),
        pytest.param(
            independent(2) | {"slow": VirtualTask(1.0)},
            {"nthreads": 3, "batching_s": (0.0, 2.0)},
            2.5 + 2 * L,
            id="a message that follows a batch waits for the next one",
        ),
    ],
)
def test_one_worker(
    policy: str, graph: dict[Any, VirtualTask], options: dict[str, Any], makespan_s: float
) -> None:
    cluster = run(graph, policy=policy, **options)
    assert cluster.record.makespan_s == makespan_s
    assert cluster.record.n_started == dict.fromkeys(graph, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_waits_for_the_scheduler_unless_it_was_sent_ahead(policy: str) -> None:
    alone_s = 3 * (0.5 + 2 * L)
    assert run(chain(3), policy=policy).record.makespan_s == (
        1.5 + 2 * L if policy == "ferroflow" else alone_s
    )


@pytest.mark.parametrize(
    ("saturation", "makespan_s"),
    [
        pytest.param(1.0, 5 * (0.5 + 2 * L), id="one slot: each task is asked for"),
        pytest.param(1.1, 5 * 0.5 + 2 * L, id="two slots: one waits while another runs"),
        pytest.param(math.inf, 5 * 0.5 + 2 * L, id="all are sent at once"),
    ],
)
def test_the_queue_of_the_scheduler(saturation: float, makespan_s: float) -> None:
    assert run(independent(5), policy="dask", saturation=saturation).record.makespan_s == makespan_s


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    graph = {
        "a": VirtualTask(0.5, nbytes=64, annotations={"workers": [0]}),
        "b": VirtualTask(0.5, ("a",), annotations={"workers": [1]}),
    }
    cluster = run(graph, workers=2, bandwidth=256.0)
    sent = 0.5 + 3 * L
    assert cluster.record.timeline() == [("a", 0, L, 0.5 + L), ("b", 1, sent + L + 0.25, sent + L + 0.75)]
    (transfer,) = cluster.record.transfers
    assert (transfer.keys, transfer.source, transfer.destination) == (("a",), 0, 1)
    assert (transfer.nbytes, transfer.start, transfer.stop) == (64, sent, sent + L + 0.25)
    assert cluster.record.makespan_s == sent + L + 0.75 + L


def test_what_a_worker_fetches_comes_one_after_the_other() -> None:
    graph = {("a", i): VirtualTask(0.5, nbytes=64, annotations={"workers": [i]}) for i in range(2)}
    graph |= {("b", i): VirtualTask(0.5, (("a", i),), annotations={"workers": [2]}) for i in range(2)}
    first, second = run(graph, workers=3, bandwidth=256.0).record.transfers
    assert first.start == second.start
    assert second.stop == first.stop + 0.25


def test_large_inputs_are_not_all_sent_at_once() -> None:
    # All are on worker 0, which takes 6 s for what reads them; each takes 1 s to send. Three links bring 15
    # of them in 5 s, while worker 0 runs the others.
    graph = {("a", i): VirtualTask(2**-10, nbytes=64, annotations={"workers": [0]}) for i in range(100)}
    cost = {"ferroflow_cost": 0.06}
    graph |= {("b", i): VirtualTask(0.06, (("a", i),), annotations=cost) for i in range(100)}
    cluster = run(graph, workers=4, bandwidth=64.0)
    readers = [execution for execution in cluster.record.executions if execution.key[0] == "b"]
    assert 10 <= sum(execution.worker != 0 for execution in readers) <= 15
    assert sum(transfer.nbytes for transfer in cluster.record.transfers) <= 15 * 64
    assert cluster.record.makespan_s < 5.3


@pytest.mark.parametrize("cost", [{"ferroflow_cost": 0.06}, {}], ids=["declared", "unknown"])
def test_work_stays_on_the_host_of_its_data_where_others_are_far(cost: dict[str, float]) -> None:
    # Worker 1 fetches an input in 10 ms, workers 2 and 3 in 1 s. What links are like is measured in the first
    # of the six rounds; each takes its two workers 1.2 s.
    graph: dict[Any, VirtualTask] = {}
    for turn in range(6):
        before = ((turn - 1, "sum"),) if turn else ()
        pinned = {"nbytes": 10**8, "annotations": {"workers": [0]}}
        graph |= {(turn, "data", i): VirtualTask(0.001, before, **pinned) for i in range(40)}
        readers = {
            (turn, "read", i): VirtualTask(0.06, ((turn, "data", i),), annotations=cost) for i in range(40)
        }
        graph |= readers | {(turn, "sum"): VirtualTask(0.001, tuple(readers))}
    cluster = run(graph, workers=4, workers_per_host=2, bandwidth=1e8, host_bandwidth=1e10)
    counts = Counter(execution.worker for execution in cluster.record.executions if "read" in execution.key)
    assert counts[2] + counts[3] <= 16
    assert abs(counts[0] - counts[1]) <= 12
    assert cluster.record.makespan_s < 8.5


ROOT_S = 0.5 + 2 * L


@pytest.mark.parametrize(
    ("policy", "makespan_s", "split"),
    [
        pytest.param("no-stealing", ROOT_S + 4 * 0.5 + 2 * L, [4, 0], id="Dask: all at the data"),
        # Its clock ticks at 1 s: the first leaf runs still, the last one of the others goes.
        pytest.param("dask", ROOT_S + 3 * 0.5 + 2 * L, [3, 1], id="Dask steals one when its clock ticks"),
        # The first of the others brings their input.
        pytest.param("ferroflow", ROOT_S + 2 * 0.5 + 2 * L, [2, 2], id="ferroflow: half at once"),
    ],
)
def test_a_fan_out_on_two_workers(policy: str, makespan_s: float, split: list[int]) -> None:
    cluster = run(fan_out(4), workers=2, policy=policy)
    leaves = [e.worker for e in cluster.record.executions if e.key != "root"]
    assert sorted(map(leaves.count, (0, 1)), reverse=True) == split
    assert cluster.record.makespan_s == makespan_s


def test_a_steal_is_asked_for_answered_and_sent() -> None:
    cluster = run(pinned(4), workers=2, policy="ferroflow")
    assert cluster.record.timeline() == [
        (("t", 0), 0, L, 0.5 + L),
        (("t", 3), 1, 3 * L, 0.5 + 3 * L),  # asked for, given up, sent
        (("t", 1), 0, 0.5 + L, 1.0 + L),
        (("t", 2), 1, 0.5 + 7 * L, 1.0 + 7 * L),  # and again, once the thief is known to be idle
    ]
    assert cluster.record.makespan_s == 1.0 + 8 * L
    assert cluster.stealing.steals == {"asked": 2, "confirmed": 2, "refused": 0, "aborted": 0}
    assert cluster.n_steals == 2


# Repeatable


def layered(layers: int = 6, width: int = 12) -> dict[Any, VirtualTask]:
    """Return a DAG in which nothing is even: durations, sizes and numbers of inputs differ."""
    graph: dict[Any, VirtualTask] = {}
    for layer in range(layers):
        for i in range(width):
            inputs = tuple((f"l{layer - 1}", (i * k + k) % width) for k in range(i % 4)) if layer else ()
            graph[f"l{layer}", i] = VirtualTask(
                0.01 * (1 + (7 * i + layer) % 5), tuple(dict.fromkeys(inputs)), nbytes=1000 * (i + 1)
            )
    return graph


def story(policy: str, seed: int = 0) -> tuple[Any, ...]:
    cluster = run(layered(), workers=5, policy=policy, interval_s=0.05, bandwidth=1e6, seed=seed)
    record = cluster.record
    return record.timeline(), record.completions, record.transfers, record.n_messages, cluster.n_steals


def test_another_seed_breaks_ties_in_another_way() -> None:
    assert len({str(story("dask", seed)[0]) for seed in range(4)}) > 1


def fetched_together() -> list[Any]:
    """Return what a worker runs that has two threads free when the inputs of eight tasks come at once."""
    graph = {f"a{i}": VirtualTask(0.5, nbytes=8, annotations={"workers": [0]}) for i in range(9)}
    graph["last"] = VirtualTask(0.5, tuple(graph), annotations={"workers": [0]})
    readers = {f"b{i}": VirtualTask(0.5, (f"a{i}", "last"), annotations={"workers": [1]}) for i in range(9)}
    cluster = run(graph | readers, workers=2, nthreads=3, policy="dask", saturation=math.inf)
    assert max(len(transfer.keys) for transfer in cluster.record.transfers) == 8
    return cluster.record.timeline()


@pytest.mark.parametrize("call", ["[*map(story, POLICIES)]", "fetched_together()"])
def test_a_run_in_other_processes_is_the_same(call: str) -> None:
    code = f"import logging; logging.disable(); from test_virtual import *; print({call})"
    told = []
    for hash_seed in ("1", "5"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        told.append(run.stdout)
    assert told[0] == told[1]
    assert len(told[0]) > 100


# Priorities are Dask's


@pytest.mark.parametrize(
    ("fifo_timeout_s", "generations"),
    [
        pytest.param(0.1, [1, 1, 2, 2, 3], id="as client.submit and client.map ask"),
        pytest.param(60.0, [1, 1, 1, 1, 1], id="as compute and persist ask"),
        pytest.param(0.0, [1, 2, 3, 4, 5], id="without"),
    ],
)
def test_graphs_that_arrive_soon_after_each_other_share_a_generation(
    fifo_timeout_s: float, generations: list[int]
) -> None:
    cluster = VirtualCluster(1)
    # The time counts from the graph that began the generation, not from the last one.
    for i, when in enumerate([0.0, 0.0625, 0.125, 0.1875, 0.25]):
        cluster.at(when, cluster.submit, {i: VirtualTask(9.0)}, fifo_timeout_s=fifo_timeout_s)
    cluster.run(until=1.0)
    assert [cluster.scheduler.tasks[i].priority for i in range(5)] == [(0, g, 0) for g in generations]


def test_a_clients_priority_comes_first_and_a_tasks_own_overrides_it() -> None:
    cluster = VirtualCluster(1, policy="dask")
    own = VirtualTask(9.0, annotations={"priority": 7})
    cluster.submit({"a": VirtualTask(9.0), "b": own}, priority=3, annotations={"ferroflow_cost": 2.0})
    tasks = cluster.scheduler.tasks
    assert [tasks[key].priority for key in "ab"] == [(-3, 1, 0), (-7, 1, 1)]
    assert tasks["a"].annotations == {"ferroflow_cost": 2.0}


def test_ranks_reorder_what_waits_on_a_worker() -> None:
    graph = {
        ("t", i): VirtualTask(0.5, annotations={"ferroflow_cost": 0.5, "ferroflow_rank": float(i)})
        for i in range(5)
    }
    cluster = run(graph, policy="ferroflow")
    # Dask sends the first two tasks of a new graph in its own order; the others wait in its queue.
    assert [c.key[1] for c in cluster.record.completions] == [0, 1, 4, 3, 2]


# Wrong use and wrong ends are told


def hang(cluster: VirtualCluster) -> None:
    cluster.submit(independent(1, annotations={"resources": {"GPU": 1}}))


def cut_short(cluster: VirtualCluster) -> None:
    cluster.submit(independent(2))
    cluster.run(until=0.25)


def break_the_plugin(cluster: VirtualCluster) -> None:
    cluster.submit(independent(2))
    cluster.stealing.guard.fail(ValueError("on purpose"))


def leave_resources(cluster: VirtualCluster) -> None:
    (ws,) = cluster.scheduler.workers.values()
    ws.used_resources["GPU"] = 1


def forget_a_result(cluster: VirtualCluster) -> None:
    cluster.submit(independent(1))
    cluster.run()
    cluster.workers[0].state.data.clear()


def leave_a_task_in_the_view(cluster: VirtualCluster) -> None:
    cluster.submit(independent(2))
    cluster.run()
    view = cluster.stealing.view
    view.assign(cluster.stealing.parts.task_views(cluster.scheduler.tasks["t", 0]), *view.workers, 0.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(hang, "is wanted and no-worker", id="a task that nobody can run"),
        pytest.param(cut_short, "is wanted and processing", id="a run cut short"),
        pytest.param(break_the_plugin, "gave up.*on purpose", id="a plugin that failed"),
        pytest.param(leave_resources, "1 of GPU in use", id="resources in use"),
        pytest.param(forget_a_result, "the scheduler knows of", id="a worker without its data"),
        pytest.param(leave_a_task_in_the_view, "1 tasks are in the view", id="a task left in the view"),
    ],
)
def test_a_wrong_end_is_told(spoil: Callable[[VirtualCluster], None], message: str) -> None:
    cluster = VirtualCluster(1, policy="ferroflow")
    spoil(cluster)
    if spoil is not cut_short:
        cluster.run()
    with pytest.raises(SimulationError, match=message):
        cluster.check()


def test_a_run_without_end_is_told() -> None:
    cluster = VirtualCluster(0)

    def again() -> None:
        cluster.at(cluster.time.now + 1.0, again)

    again()
    with pytest.raises(SimulationError, match="no end after 100 events"):
        cluster.run(max_events=100)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: VirtualCluster(1, policy="magic"), id="an unknown policy"),
        pytest.param(lambda: run({"a": VirtualTask(1.0, ("b",))}), id="an input that nobody has"),
    ],
)
def test_wrong_use_is_told(make: Callable[[], Iterable[Any]]) -> None:
    with pytest.raises(UsageError):
        make()


NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VirtualTask(-1.0), "duration_s is -1.0; it must be a finite number, at least 0"),
        (lambda: VirtualTask(NAN), "duration_s is nan"),
        (lambda: VirtualTask("1"), "duration_s is '1'"),
        (lambda: VirtualTask(1.0, nbytes=-1), "nbytes is -1"),
        (lambda: VirtualTask(1.0, failures=-1), "failures is -1; it must be a whole number, at least 0"),
        (lambda: VirtualCluster(-1), "workers is -1"),
        (lambda: VirtualCluster(1.5), "workers is 1.5"),
        (lambda: VirtualCluster(1, 0), "nthreads is 0"),
        (lambda: VirtualCluster(1).join(speed=0.0), "speed is 0.0; it must be a finite number above 0"),
        (lambda: VirtualCluster(1).join(resources={"GPU": -1}), "the amount of GPU is -1"),
        (lambda: VirtualCluster(1, latency_s=-1.0), "latency_s is -1.0"),
        (lambda: VirtualCluster(1, service_s=NAN), "service_s is nan"),
        (lambda: VirtualCluster(1, batching_s=(0.0, INFINITY)), "batching_s is inf"),
        (lambda: VirtualCluster(1, bandwidth=0.0), "bandwidth is 0.0; it must be a number above 0"),
        (lambda: VirtualCluster(1, host_bandwidth=0.0), "host_bandwidth is 0.0"),
        (lambda: VirtualCluster(1, saturation=NAN), "saturation is nan"),
        (lambda: VirtualCluster(1, interval_s=0.0), "interval_s is 0.0"),
        (lambda: VirtualCluster(1, workers_per_host=0), "workers_per_host is 0"),
        (lambda: VirtualCluster(2, speeds={0: INFINITY}), "speed is inf"),
        (lambda: VirtualCluster(2, speeds={2: 1.0}), "speeds has worker 2; the workers are 0 to 1"),
        (lambda: VirtualCluster(0, resources={0: {"GPU": 1}}), "resources has worker 0; there are no"),
        (lambda: VirtualCluster(1).run(until=NAN), "until is nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        make()
