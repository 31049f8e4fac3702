"""FlexFlow's evaluation in simulation: found strategies against data-parallel and expert-designed ones.

Durations follow from published rates of the devices, not from measurements. Absolute times are therefore
not those of the paper. Ratios of strategies are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ferroflow_dask.bench.flexflow_models import NETWORKS, Network
from ferroflow_dask.bench.markdown import table
from ferroflow_dask.cost import AnalyticCost
from ferroflow_dask.search import ENDLESS, Choice, Problem, Simulation, search, simulate, time_spent
from ferroflow_dask.search.candidates import spread
from ferroflow_dask.search.training import TrainingProblem, compute_s, least_traffic, nbytes_between
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

    Parameters
    ----------
    samples_per_s : float
        [1/s]
    nbytes_moved, nbytes_between : int
        In all, and between hosts [B].
    compute_s : float
        Of all parts together [s].
    """

    samples_per_s: float
    nbytes_moved: int
    nbytes_between: int
    compute_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A network on a number of devices of a cluster.

    Parameters
    ----------
    network, cluster : str
    devices : int
    one : float
        Samples of one device, with its share of the samples [1/s].
    data_parallel, expert, found : Trained
    proposals : int
        Strategies that were simulated.
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
    def over_data_parallel(self) -> float:
        """Speed-up of the found strategy over data-parallel training."""
        return self.found.samples_per_s / self.data_parallel.samples_per_s

    @property
    def over_expert(self) -> float:
        """Speed-up of the found strategy over the expert's."""
        return self.found.samples_per_s / self.expert.samples_per_s

    @property
    def fewer_bytes(self) -> float:
        """How many times more bytes data-parallel training moves."""
        return self.data_parallel.nbytes_moved / max(1, self.found.nbytes_moved)

    @property
    def fewer_between(self) -> float:
        """How many times more bytes data-parallel training moves between hosts."""
        return self.data_parallel.nbytes_between / max(1, self.found.nbytes_between)

    @property
    def efficiency(self) -> float:
        """Speed of the found strategy as a part of as many independent devices."""
        return self.found.samples_per_s / (self.devices * self.one)


def problem_of(
    network: Network, cluster: str, devices: int, synchronization: str = "server"
) -> TrainingProblem:
    """Return the training of a network on devices of a cluster as a problem."""
    machine = Machine.of_topology(load_topology(cluster).with_workers(devices))
    flop_rate, bandwidth = _RATES[cluster]
    cost = AnalyticCost(flop_rate, bandwidth)
    return TrainingProblem(
        network.graph,
        machine,
        cost,
        times=network.times,
        without=network.without,
        # What is put together is read and written.
        copy_bandwidth=bandwidth / 2,
        synchronization=synchronization,
    )


def expert(problem: Problem, network: Network) -> list[Choice]:
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
            device = network.depth[op.name] % min(n, _PER_HOST)
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
    synchronization: str = "server",
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
    synchronization : str, optional
        As for `TrainingProblem`.
    """
    network = NETWORKS[name](devices)
    problem = problem_of(network, cluster, devices, synchronization)
    spent = time_spent(seconds, time.monotonic)
    more = {"expert": expert(problem, network), "least traffic": least_traffic(problem)}
    hosts = load_topology(cluster).with_workers(devices).host_of
    found = search(problem, steps=steps, more=more, spent=spent)

    def trained(one: Simulation) -> Trained:
        speed = network.samples / one.makespan_s
        between = nbytes_between(problem, one, hosts)
        return Trained(speed, one.nbytes_moved, between, compute_s(problem, one))

    alone = NETWORKS[name](1)
    single = problem_of(alone, cluster, 1)
    whole = simulate(single, [Choice((), (0,))] * single.n_nodes)
    return Compared(
        name,
        cluster,
        devices,
        alone.samples / whole.makespan_s,
        trained(found.baselines["data-parallel"]),
        trained(found.baselines["expert"]),
        trained(found.best),
        found.n_proposals,
    )


def compare(
    names: Sequence[str],
    clusters: Sequence[str],
    devices: Sequence[int],
    seconds: float,
    *,
    synchronization: str = "server",
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Compared]:
    """Yield a comparison for each cluster, network and number of devices that the cluster has."""
    for cluster in clusters:
        n_workers = len(load_topology(cluster).workers)
        for name in names:
            for n in devices:
                if n <= n_workers:
                    progress(f"{name} on {n} devices of {cluster}")
                    yield compared(name, cluster, n, seconds, synchronization=synchronization)


def flexflow_table(rows: Sequence[Compared]) -> str:
    """Return comparisons in markdown; ratios are those of data-parallel or the expert's to the found one."""
    header = (
        "network",
        "cluster",
        "devices",
        "data-parallel [1/s]",
        "expert [1/s]",
        "found [1/s]",
        "over data-parallel",
        "over expert",
        "fewer bytes",
        "between hosts",
        "computing",
        "of the ideal",
    )
    lines = [
        (
            row.network,
            row.cluster.removeprefix("flexflow-").upper(),
            str(row.devices),
            f"{row.data_parallel.samples_per_s:,.0f}",
            f"{row.expert.samples_per_s:,.0f}",
            f"{row.found.samples_per_s:,.0f}",
            f"{row.over_data_parallel:.2f}",
            f"{row.over_expert:.2f}",
            f"{row.fewer_bytes:.1f}",
            f"{row.fewer_between:.1f}" if row.data_parallel.nbytes_between else "",
            f"{row.found.compute_s / row.data_parallel.compute_s - 1:+.0%}",
            f"{row.efficiency:.0%}",
        )
        for row in rows
    ]
    return table(header, lines, right=header[2:])
