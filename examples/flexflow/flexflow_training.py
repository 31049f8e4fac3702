"""FlexFlow's evaluation in simulation: found strategies against data-parallel and expert-designed ones.

Durations follow from published rates of the devices, not from measurements. Absolute times are therefore
not those of the paper. Ratios of strategies are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flexflow_networks import NETWORKS, Network

from ferroflow_dask.bench.markdown import table
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.search import ENDLESS, Choice, Found, Simulation, simulate, time_spent
from ferroflow_dask.search.candidates import spread
from ferroflow_dask.search.search import RECOMPUTED, with_less_computed_twice
from ferroflow_dask.search.training import TrainingProblem
from ferroflow_dask.search.training_baselines import compute_s, least_traffic, nbytes_between
from ferroflow_dask.search.training_search import search_training
from ferroflow_dask.simulation import Machine
from ferroflow_dask.topology import load_topology

#: By preset, what a device computes [FLOP/s] and moves in its memory [B/s]: half of its published peak for
#: the products of networks, and three quarters of its memory bandwidth.
_RATES = {"flexflow-p100": (0.5 * 10.6e12, 0.75 * 732e9), "flexflow-k80": (0.5 * 2.8e12, 0.75 * 240e9)}
#: Devices of one host, in both clusters.
_PER_HOST = 4

CLUSTERS = tuple(_RATES)
DEVICES = (4, 16, 64)


@dataclass(frozen=True, slots=True)
class Trained:
    """One iteration of a network under one strategy, simulated.

    Bytes are in all and between hosts, `compute_s` is of all parts together. `fits` says whether the state
    fits the memory of the devices. `microbatches` and `in_flight` are as for `TrainingProblem`. `recomputed`
    is the part of the operators that compute their forward pass twice.
    """

    samples_per_s: float
    nbytes_moved: int
    nbytes_between: int
    compute_s: float
    fits: bool
    microbatches: int
    in_flight: int
    recomputed: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A network on a number of devices of a cluster, with the number of strategies that were simulated.

    `one` is the speed of one device with its share of the samples [1/s].
    """

    network: str
    cluster: str
    devices: int
    one: float
    data_parallel: Trained
    expert: Trained
    found: Trained
    proposals: int

    @property
    def all(self) -> tuple[Trained, Trained, Trained]:
        """Data-parallel training, the expert's strategy, and the found one."""
        return self.data_parallel, self.expert, self.found

    @property
    def over_data_parallel(self) -> float:
        """Speed-up of the found strategy over data-parallel training."""
        return self.found.samples_per_s / self.data_parallel.samples_per_s

    @property
    def over_expert(self) -> float:
        """Speed-up of the found strategy over the expert's."""
        return self.found.samples_per_s / self.expert.samples_per_s

    @property
    def efficiency(self) -> float:
        """Speed of the found strategy as a part of as many independent devices."""
        return self.found.samples_per_s / (self.devices * self.one)


@dataclass(frozen=True, slots=True)
class Setting:
    """How networks are trained.

    Parameters
    ----------
    synchronization : str, optional
        As for `TrainingProblem`.
    samples : int, optional
        Of each device; AlexNet has four times as many.
    microbatches : int, optional
        Most microbatches that a search may choose.
    """

    synchronization: str = "server"
    samples: int = 64
    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.samples % self.microbatches:
            raise UsageError(
                f"microbatches must divide the {self.samples} samples of a device, got {self.microbatches}"
            )


_SETTING = Setting()


def problem_of(network: Network, cluster: str, devices: int, **options: Any) -> TrainingProblem:
    """Return the training of a network on devices of a cluster; the options are those of the problem.

    The network is that of one microbatch.
    """
    machine = Machine.of_topology(load_topology(cluster).with_workers(devices))
    flop_rate, bandwidth = _RATES[cluster]
    # What is put together is read and written.
    fixed: dict[str, Any] = {
        "times": network.times,
        "without": network.without,
        "copy_bandwidth": bandwidth / 2,
    }
    return TrainingProblem(network.graph, machine, AnalyticCost(flop_rate, bandwidth), **fixed, **options)


def expert(problem: TrainingProblem, network: Network) -> list[Choice]:
    """Return the strategy of experts.

    Convolutional networks: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
    2014: dense layers are split by their weights, all others by samples. Recurrent networks: Y. Wu et al.,
    "Google's neural machine translation system", 2016: a copy for each host, and the layers of a copy on the
    devices of the host.
    """
    n = len(problem.machine.threads)
    choices = [Choice((), (0,))] * problem.n_nodes
    for node in problem.changeable:
        op = problem.op(node)
        assert op is not None
        space = problem.spaces[op.name]
        sizes = {} if isinstance(space, str) else space.sizes
        if network.depth:
            hosts = max(1, n // _PER_HOST)
            device = network.depth[problem.name_of(node)] % min(n, _PER_HOST)
            split = (("sample", hosts),) if hosts > 1 and "sample" in sizes else ()
            copies = range(hosts) if split else range(1)
            choices[node] = Choice(split, tuple(host * _PER_HOST + device for host in copies))
        else:
            axis = "parameter1" if op.op_type == "Gemm" else "sample"
            choices[node] = spread(problem, ((axis, n),) if sizes.get(axis, 0) >= n > 1 else ())
    return choices


def compared(
    name: str,
    cluster: str,
    devices: int,
    seconds: float,
    *,
    steps: int = ENDLESS,
    setting: Setting = _SETTING,
) -> Compared:
    """Search a strategy and compare it.

    Parameters
    ----------
    name : str
        Of `NETWORKS`.
    cluster : str
        Of `CLUSTERS`.
    devices : int
    seconds : float
        Budget of the search [s].
    steps : int, optional
        Strategies to simulate at most.
    setting : Setting, optional
    """
    spent = time_spent(seconds, time.monotonic)
    of_microbatch = cache(lambda n: NETWORKS[name](setting.samples * devices // n))
    whole = of_microbatch(1)

    def make(microbatches: int, in_flight: int) -> TrainingProblem:
        options = {"synchronization": setting.synchronization, "in_flight": in_flight}
        network = of_microbatch(microbatches)
        return problem_of(network, cluster, devices, microbatches=microbatches, **options)

    def more(problem: TrainingProblem) -> dict[str, list[Choice]]:
        return {"expert": expert(problem, whole), "least traffic": least_traffic(problem)}

    problem, found = search_training(make, steps=steps, most=setting.microbatches, more=more, spent=spent)
    first = make(1, 1)
    return Compared(
        name,
        cluster,
        devices,
        _alone(name, cluster, setting),
        _trained(whole, cluster, first, _fitting(first, found, "data-parallel")),
        _trained(whole, cluster, first, _fitting(first, found, "expert")),
        _trained(whole, cluster, problem, found.best),
        found.n_proposals,
    )


def _fitting(problem: TrainingProblem, found: Found, name: str) -> Simulation:
    """Return a baseline; if it does not fit the memory, with as many results computed twice as needed."""
    plain = found.baselines[name]
    if not plain.excess_nbytes:
        return plain
    return with_less_computed_twice(problem, found.baselines[name + RECOMPUTED])


def _trained(network: Network, cluster: str, problem: TrainingProblem, one: Simulation) -> Trained:
    hosts = load_topology(cluster).with_workers(len(problem.machine.threads)).host_of
    twice = [one.choices[node].recompute for node in problem.first_copy]
    return Trained(
        network.samples / one.makespan_s,
        one.nbytes_moved,
        nbytes_between(problem, one, hosts),
        compute_s(problem, one),
        not one.excess_nbytes,
        problem.microbatches,
        problem.in_flight,
        sum(twice) / len(twice),
    )


def _alone(name: str, cluster: str, setting: Setting) -> float:
    """Return the speed of one device with its share of the samples and enough memory [1/s]."""
    network = NETWORKS[name](setting.samples)
    problem = problem_of(network, cluster, 1)
    return network.samples / simulate(problem, [Choice((), (0,))] * problem.n_nodes).makespan_s


def compare(
    names: Sequence[str],
    clusters: Sequence[str],
    devices: Sequence[int],
    seconds: float,
    *,
    setting: Setting = _SETTING,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Compared]:
    """Yield a comparison for each cluster, network and number of devices that the cluster has."""
    for cluster in clusters:
        n_workers = len(load_topology(cluster).workers)
        for name in names:
            for n in devices:
                if n <= n_workers:
                    progress(f"{name} on {n} devices of {cluster}")
                    yield compared(name, cluster, n, seconds, setting=setting)


def flexflow_table(rows: Sequence[Compared]) -> str:
    """Return comparisons in markdown. Three numbers are data-parallel, the expert's and found."""
    header = (
        "network",
        "cluster",
        "devices",
        "samples [1/s]",
        "over data-parallel",
        "over expert",
        "of the ideal",
        "moved [GB]",
        "between hosts [GB]",
        "computing [s]",
        "microbatches",
        "computed twice",
    )
    lines = [
        (
            row.network,
            row.cluster.removeprefix("flexflow-").upper(),
            str(row.devices),
            " / ".join(_speed(one) for one in row.all),
            f"{row.over_data_parallel:.2f}",
            f"{row.over_expert:.2f}",
            f"{row.efficiency:.0%}",
            " / ".join(f"{one.nbytes_moved / 1e9:.3g}" for one in row.all),
            " / ".join(f"{one.nbytes_between / 1e9:.3g}" for one in row.all),
            " / ".join(f"{one.compute_s:.3g}" for one in row.all),
            f"{row.found.microbatches} ({row.found.in_flight})",
            f"{row.found.recomputed:.0%}",
        )
        for row in rows
    ]
    return table(header, lines, right=header[2:])


def _speed(one: Trained) -> str:
    return f"{one.samples_per_s:,.0f}" + ("" if one.fits else " (too large)")
