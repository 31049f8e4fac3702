"""Which runs a benchmark consists of, and in which order."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferroflow_dask.bench.baselines import BASELINES, check_name
from ferroflow_dask.bench.schema import COSTS, Shape, written
from ferroflow_dask.bench.workloads import Workload
from ferroflow_dask.exceptions import UsageError


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to be measured, several times."""

    workload: Workload
    arguments: Mapping[str, Any]
    policy: str
    lowering: str
    costs: str

    def identity(self) -> tuple[Any, ...]:
        """Return what tells it from other cases."""
        return (self.workload.name, written(self.arguments), self.policy, self.lowering, self.costs)


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases, how often each runs, and on which clusters.

    Parameters
    ----------
    cases : sequence of Case
    shape : Shape
    repetitions : int
    seed : int
        Of inputs, of the order of runs, and of policies that draw.
    cluster : str
        What the clusters are: of `CLUSTERS`.
    section : str
        Of the configuration, from which their jobs are made; "" if there are none.
    tls : bool
        Whether messages are encrypted.
    is_fresh : bool
        Whether each run has a new one.
    """

    cases: Sequence[Case]
    shape: Shape
    repetitions: int
    seed: int = 0
    cluster: str = "local"
    section: str = ""
    tls: bool = False
    is_fresh: bool = False

    @property
    def n_runs(self) -> int:
        """Measured runs."""
        return len(self.cases) * self.repetitions

    def groups(self) -> Iterator[list[Case]]:
        """Yield the cases that are interleaved with each other: those of one workload and size."""
        groups: dict[tuple[Any, ...], list[Case]] = {}
        for case in self.cases:
            groups.setdefault(case.identity()[:2], []).append(case)
        yield from groups.values()

    def order(self, cases: Sequence[Case], repetition: int) -> list[Case]:
        """Return the cases of a group in the order of one repetition: drawn, so that no case has a place."""
        # With the group's name, else groups of equally many cases would all have the same order.
        group = zlib.crc32("\n".join(cases[0].identity()[:2]).encode())
        rng = np.random.default_rng([self.seed, repetition, group])
        return [cases[i] for i in rng.permutation(len(cases))]

    def identity(self, case: Case, repetition: int) -> str:
        """Return what tells a run from others; that of the row that it leaves is the same."""
        return written(self.facts(case, repetition))

    def facts(self, case: Case, repetition: int) -> dict[str, Any]:
        """Return the fields of a run's row that are known before it is made."""
        return {
            "workload": case.workload.name,
            "arguments": dict(case.arguments),
            "policy": case.policy,
            "lowering": case.lowering,
            "costs": case.costs,
            "workers": self.shape.workers,
            "threads_per_worker": self.shape.threads,
            "processes": self.shape.processes,
            "cluster": self.cluster,
            "section": self.section,
            "tls": self.tls,
            "fresh": self.is_fresh,
            "seed": self.seed,
            "repetition": repetition,
        }


def make_cases(
    workloads: Sequence[tuple[Workload, Mapping[str, Any]]],
    policies: Sequence[str],
    costs: Sequence[str],
) -> list[Case]:
    """Return the cases of all workloads under all policies.

    Dask's baselines run every lowering of a workload, so that the best of them can be told; our policies
    run the first, and those that are ours alone. Dask does not read declared costs, so its baselines have
    learned ones in their place.

    Parameters
    ----------
    workloads : sequence of (Workload, arguments)
    policies : sequence of str
    costs : sequence of str
        Of `COSTS`.

    Raises
    ------
    UsageError
        There is nothing to run, for all policies or for one, or a name is unknown.
    """
    for name in policies:
        check_name(name)
    if wrong := [name for name in costs if name not in COSTS]:
        raise UsageError(f"costs are {wrong[0]!r}; choose of: {', '.join(COSTS)}")
    dasks = dict.fromkeys("learned" if name == "known" else name for name in costs)
    cases = [
        Case(workload, arguments, policy, lowering, knowledge)
        for workload, arguments in workloads
        for policy in dict.fromkeys(policies)
        for lowering in (
            workload.lowerings if policy in BASELINES else (workload.lowerings[0], *workload.own_lowerings)
        )
        for knowledge in (dasks if policy in BASELINES else dict.fromkeys(costs))
    ]
    if not cases:
        raise UsageError(f"nothing to run: give a workload, a policy and one of: {', '.join(COSTS)}")
    return cases
