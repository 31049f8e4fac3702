"""Kinds of jobs: the arguments of dask-jobqueue that jobs with and without GPUs have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import dask

from ferroflow_dask.counts import as_count
from ferroflow_dask.exceptions import UsageError

#: Jobs of a cluster.
MOST_JOBS = 100_000
MOST_JOBS_REASON = "Slurm's own default limit, MaxJobCount, is 10,000"


@dataclass(frozen=True, slots=True)
class JobKind:
    """Jobs that one section describes.

    Parameters
    ----------
    section : str
        Name of the section in the configuration.
    arguments : mapping
        Arguments of `dask_jobqueue.slurm.SLURMJob`.
    where : str, optional
        The section and its file, for errors.
    given : collection of str, optional
        Arguments that the caller gave, and not the section.
    """

    section: str
    arguments: Mapping[str, Any]
    where: str = ""
    given: Collection[str] = ()

    @property
    def processes(self) -> int:
        """Number of workers of a job."""
        return int(self.arguments["processes"])

    @property
    def threads(self) -> int:
        """Number of threads of each worker."""
        return max(1, int(self.arguments["cores"]) // self.processes)

    def options(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a job, with those that the cluster gives to jobs of all kinds."""
        return {**common, **self.arguments, "kind": self}

    def n_jobs(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: str | None = None,
        cores: int | None = None,
    ) -> int | None:
        """Return the number of jobs that together have what is given; None if nothing is given."""
        for name, number in (("n", n), ("jobs", jobs)):
            if number is not None and as_count(number) is None:
                raise UsageError(f"{name} must be a whole number from 0 up, got {number!r}")
        numbers = [] if jobs is None else [jobs]
        if n is not None:
            numbers.append(math.ceil(n / self.processes))
        if memory is not None:
            each = dask.utils.parse_bytes(self.arguments["memory"])
            numbers.append(math.ceil(dask.utils.parse_bytes(memory) / each))
        if cores is not None:
            numbers.append(math.ceil(cores / self.arguments["cores"]))
        for number in numbers:
            if not 0 <= number <= MOST_JOBS:
                raise UsageError(f"jobs must be from 0 to {MOST_JOBS:,} ({MOST_JOBS_REASON}), got {number:,}")
        return max(numbers, default=None)


def kind_of(kinds: Mapping[str, JobKind], name: str) -> JobKind:
    """Return the kind of a cluster's jobs with this name.

    Raises
    ------
    UsageError
        The cluster has no jobs of this kind.
    """
    if name not in kinds:
        raise UsageError("this cluster has no jobs with GPUs; give slurm_cluster a gpu_section")
    return kinds[name]
