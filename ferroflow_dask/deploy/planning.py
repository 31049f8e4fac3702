"""Plans: Slurm jobs on which a graph meets a deadline at least cost, or ends first within a budget.

The idea is that of PHAZE ("Integrated Hardware Architecture and Device Placement Search", 2024): resources
and placement are searched together. A plan counts from `compute` on a cluster whose workers run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from dask.utils import format_time, parse_bytes

from ferroflow_dask.cost import AnalyticCost, CostModel
from ferroflow_dask.deploy.searching import auto_choices
from ferroflow_dask.deploy.slurm.kinds import JobKind
from ferroflow_dask.deploy.slurm.sections import job_kind, section_names
from ferroflow_dask.deploy.slurm.settings import has_gpus
from ferroflow_dask.exceptions import StrategyError, UnknownNameError, UsageError
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.search import Choice, Problem, search, simulate
from ferroflow_dask.simulation import Machine
from ferroflow_dask.strategy import Strategy
from ferroflow_dask.topology import Topology, load_topology
from ferroflow_dask.topology.parts import Host, Link, Worker

#: Simulations with varied costs, for the interval of a prediction.
_VARIED = 20
#: Between nodes if the topology has one host only.
_LINK = Link(1e-4, 1.25e9)


@dataclass(frozen=True, slots=True)
class Plan:
    """Jobs of one section, and the strategy on their workers.

    Parameters
    ----------
    section : str
        Of `jobqueue.yaml`.
    nodes : int
        Number of jobs, each on a node of its own.
    makespan_s, low_s, high_s : float
        Predicted, and the interval of simulations with varied costs [s].
    strategy : Strategy
    """

    section: str
    nodes: int
    makespan_s: float
    low_s: float
    high_s: float
    strategy: Strategy

    @property
    def cost_s(self) -> float:
        """Nodes times predicted time [node-seconds]."""
        return self.nodes * self.makespan_s


@dataclass(frozen=True, slots=True)
class Planned:
    """The proposed plan, and all that were simulated.

    Parameters
    ----------
    best : Plan
    tried : list of Plan
    with_gpus : tuple of str
        Sections whose jobs have GPUs and no speed was given for. Their workers were simulated as CPU workers.
    """

    best: Plan
    tried: list[Plan]
    with_gpus: tuple[str, ...] = ()


def plan(
    graph: Graph,
    *,
    deadline_s: float | None = None,
    budget_node_s: float | None = None,
    sections: Collection[str] = (),
    config_file: str | Path | None = None,
    topology: Topology | None = None,
    cost: CostModel | None = None,
    speeds: Mapping[str, float] | None = None,
    most_nodes: int = 8,
    steps: int = 200,
    seed: int = 0,
    watch: Callable[[Plan], object] = lambda _: None,
) -> Planned:
    """Return the jobs that meet a deadline at least cost, or that end first within a budget.

    Parameters
    ----------
    graph : Graph
        With known shapes.
    deadline_s : float, optional
        The end of the predicted interval must not be later [s].
    budget_node_s : float, optional
        Nodes times the end of the predicted interval must not be more [node-seconds]. Give one of both.
    sections : collection of str, optional
        Of `jobqueue.yaml`; all if left out.
    config_file : path-like, optional
        In place of `jobqueue.yaml`.
    topology : Topology, optional
        Its links and its costs of Dask count; the preset `this-machine` if left out.
    cost : CostModel, optional
    speeds : mapping of str to float, optional
        By section, how many times faster than `cost` says its workers are.
    most_nodes : int, optional
    steps : int, optional
        Strategies to simulate for each number of nodes.
    seed : int, optional
    watch : callable, optional
        Called with each plan that was simulated.

    Raises
    ------
    UsageError
        A number is not above 0, or no plan is feasible; the error names the best one.
    UnknownNameError
        There is no such section.
    """
    _check(deadline_s, budget_node_s, {"most_nodes": most_nodes, "steps": steps, **dict(speeds or {})})
    names = list(dict.fromkeys(sections)) or section_names(config_file)
    for name in speeds or {}:
        if name not in names:
            raise UnknownNameError.of("section", name, names)
    kinds = [job_kind(name, config_file) for name in names]
    base = load_topology("this-machine") if topology is None else topology
    tried: list[Plan] = []
    for kind in kinds:
        speed = (speeds or {}).get(kind.section, 1.0)
        for nodes in range(1, most_nodes + 1):
            one = topology_of(kind, nodes, base, speed)
            found = _planned(graph, nodes, one, cost or AnalyticCost(), steps=steps, seed=seed)
            if found is not None:
                tried.append(found)
                watch(found)
    with_gpus = tuple(
        kind.section for kind in kinds if has_gpus(kind.arguments) and kind.section not in (speeds or {})
    )
    return Planned(_best(tried, deadline_s, budget_node_s, most_nodes), tried, with_gpus)


def _check(deadline_s: float | None, budget_node_s: float | None, numbers: Mapping[str, float]) -> None:
    if (deadline_s is None) == (budget_node_s is None):
        raise UsageError(
            "a plan needs either a deadline or a budget; give one of deadline_s and budget_node_s"
        )
    limits = {"deadline_s": deadline_s, "budget_node_s": budget_node_s, **numbers}
    for name, value in limits.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} must be a finite number above 0, got {value!r}")


def topology_of(kind: JobKind, nodes: int, base: Topology, speed: float = 1.0) -> Topology:
    """Return the workers of jobs, each job on a node of its own, with the links and runtime of a topology."""
    nbytes = int(parse_bytes(kind.arguments["memory"])) // kind.processes
    workers = (Worker(kind.threads, "cpu", speed, nbytes),) * kind.processes
    first = next(host for host in base.hosts if host.workers)
    link = first.link or _LINK
    cores = float(kind.arguments["cores"])
    hosts = [
        Host(f"{kind.section}-{i}", cores, workers, link=link, inside=first.inside) for i in range(nodes)
    ]
    login = Host("login", workers=(), link=link)
    return Topology(
        [*hosts, login], scheduler="login", client="login", runtime=base.runtime, name=kind.section
    )


def _planned(
    graph: Graph, nodes: int, topology: Topology, cost: CostModel, *, steps: int, seed: int
) -> Plan | None:
    """Return the plan with a number of nodes; None if the weights do not fit them."""
    problem = Problem(graph, Machine.of_topology(topology), cost)
    more = {'granularity="auto"': auto_choices(problem, topology.profile())}
    try:
        found = search(problem, steps=steps, seed=seed, more=more).best
    except StrategyError:
        return None
    spans = [
        simulate(one, found.choices).makespan_s
        for one in _varied(problem, found.choices, topology.runtime.noise, seed)
    ]
    low_s, high_s = min(spans, default=found.makespan_s), max(spans, default=found.makespan_s)
    strategy = problem.strategy(found.choices)
    return Plan(topology.name, nodes, found.makespan_s, low_s, max(high_s, found.makespan_s), strategy)


def _varied(problem: Problem, choices: Sequence[Choice], noise: float, seed: int) -> Iterator[Problem]:
    """Yield a problem with other costs: those of all ops, those of each part, and those of Dask."""
    sigma = float(np.sqrt(np.log1p(noise**2)))
    machine = problem.machine
    for i in range(_VARIED):
        rng = np.random.default_rng([seed, i])
        of_all, of_dask = rng.lognormal(-(sigma**2) / 2, sigma, 2)
        known = {
            (node, choices[node].degrees): [
                seconds * of_all * float(rng.lognormal(-(sigma**2) / 2, sigma))
                for seconds in problem.base_s(node, choices[node].degrees)
            ]
            for node in problem.changeable
        }
        slower = replace(
            machine,
            submit_s=machine.submit_s * of_dask,
            arrival_s=machine.arrival_s * of_dask,
            task_s=machine.task_s * of_dask,
            round_trip_s=machine.round_trip_s * of_dask,
            worker_s=machine.worker_s * of_dask,
        )
        yield problem.with_durations(known, slower)


def _best(
    tried: Sequence[Plan], deadline_s: float | None, budget_node_s: float | None, most_nodes: int
) -> Plan:
    if not tried:
        raise UsageError(
            f"no plan is feasible: the weights do not fit the memory of {most_nodes} nodes; "
            "use more nodes or a section with more memory"
        )
    if deadline_s is not None:
        found = [one for one in tried if one.high_s <= deadline_s]
        if found:
            return min(found, key=lambda one: (one.cost_s, one.nodes))
        fastest = min(tried, key=lambda one: one.high_s)
        raise UsageError(
            f"no plan of at most {most_nodes} nodes meets a deadline of {format_time(deadline_s)}; "
            f"the fastest is {fastest.nodes} × {fastest.section} with up to {format_time(fastest.high_s)}"
        )
    assert budget_node_s is not None
    found = [one for one in tried if one.nodes * one.high_s <= budget_node_s]
    if found:
        return min(found, key=lambda one: (one.makespan_s, one.nodes))
    cheapest = min(tried, key=lambda one: one.nodes * one.high_s)
    raise UsageError(
        f"no plan needs at most {budget_node_s:.4g} node-seconds; the cheapest is {cheapest.nodes} × "
        f"{cheapest.section} with up to {cheapest.nodes * cheapest.high_s:.4g}"
    )
