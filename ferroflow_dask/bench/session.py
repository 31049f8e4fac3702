"""A cluster that is measured: started, put under policies, observed, and ended if it misbehaves."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from distributed import wait

from ferroflow_dask.bench.baselines import forget, is_in_charge, put_in_charge
from ferroflow_dask.bench.observe import Measurement, Seen, TaskObserver, error_line, settle
from ferroflow_dask.bench.public.base import Clock
from ferroflow_dask.bench.public.probe import Probe
from ferroflow_dask.bench.schema import OK, Shape
from ferroflow_dask.bench.workloads.base import Cluster, Instance
from ferroflow_dask.deploy.local import local_client
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client

#: Starts a cluster and yields a client of it; the cluster ends with the context.
Start = Callable[[], AbstractContextManager["Client"]]


#: Name of the plugin that follows tasks.
_NAME = "ferroflow-bench"


class _Outcome:
    """The status of a run, which is its first failure: what fails inside of the context goes no further."""

    def __init__(self) -> None:
        self.status = OK

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.status == OK:
            self.status = _failure(error)
        return True


class Session:
    """A cluster that all policies use in turn.

    Idle workers of another cluster would take time from the measured ones.

    Parameters
    ----------
    shape : Shape
    seed : int
        Of policies that draw.
    timeout_s : float
        After which a run counts as hung [s].
    start : callable, optional
        Starts the cluster and yields a client of it, as a context; a local one if left out.
    on_problem : callable, optional
        Told, in a line, what went wrong outside of the runs; a warning if left out.
    """

    def __init__(
        self,
        shape: Shape,
        seed: int,
        timeout_s: float,
        start: Start | None = None,
        on_problem: Callable[[str], object] | None = None,
    ) -> None:
        self._shape = shape
        self._start_cluster = start or partial(local_client, shape.workers, shape.threads, shape.processes)
        self._seed = seed
        self._timeout_s = timeout_s
        self._on_problem = on_problem or warnings.warn
        self._stack = ExitStack()
        #: What has run since it was started.
        self.warm: set[tuple[Any, ...]] = set()
        #: What has run since it was started, or last made to forget.
        self.taught: set[tuple[Any, ...]] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        self.warm.clear()
        self.taught.clear()
        self.client = self._stack.enter_context(self._start_cluster())
        try:
            self._probe = Probe(self.client)
            self.client.register_plugin(TaskObserver(_NAME))
        except BaseException:
            self._end()
            raise

    def renew(self) -> None:
        """End the cluster, whatever state it is in, and start another."""
        self._end()
        gc.unfreeze()  # it may go
        self._start()

    def _end(self) -> None:
        """End the cluster; what broke a run may break this as well, and ends no other run either."""
        try:
            self._stack.close()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- told, and another is started
            self._on_problem(f"a cluster did not end cleanly, and may be there still: {_failure(error)}")

    def forget(self) -> None:
        """Let Dask and the policies know nothing of runs before."""
        self.taught.clear()
        forget(self.client)

    def measure(self, instance: Instance, policy: str) -> Measurement:
        """Run an instance once under a baseline or a policy, and check its result.

        Whatever fails, on the clock or beside it, is the status of this run and ends no other.
        """
        outcome = _Outcome()
        makespan_s, seen = 0.0, Seen(executed=0)
        cluster = Cluster(self.client, self._shape.workers, self._timeout_s)
        with outcome:
            settle(self.client, self._timeout_s)
            put_in_charge(self.client, policy, self._seed)
            if instance.prepare is not None:
                instance.prepare(cluster)
            self._collect_garbage()
            self.client.run_on_scheduler(_reset)
            results: Sequence[Any] = ()
            clock = Clock(self._probe.start, self._probe.stop)
            with outcome, clock:
                results = self._compute(instance, cluster)
            makespan_s = clock.seconds
            seen = self._probe.read(clock.started) | self.client.run_on_scheduler(_seen)
            del seen["repeated"]
            if not self._shape.processes:
                seen["worker_cpu_s"] = None  # of one process, which is not the workers' alone
            n_run, n_ended = seen["executed"], seen.pop("ended")
            if outcome.status == OK:
                if instance.count_executed is not None:
                    seen["executed"] = instance.count_executed(self.client)
                outcome.status = self._verdict(instance, policy, results, (n_run, n_ended), seen)
        with outcome:
            if instance.restore is not None:
                instance.restore(cluster)
        return Measurement(makespan_s, seen, outcome.status)

    def _compute(self, instance: Instance, cluster: Cluster) -> Sequence[Any]:
        futures = instance.submit(self.client)
        if instance.during is not None:
            instance.during(cluster)
        try:
            wait(futures, timeout=self._timeout_s)
        except TimeoutError:
            raise ResultError(f"no result within {self._timeout_s:g} s") from None
        if instance.collect is not None:
            return instance.collect(self.client, futures)
        results: Sequence[Any] = self.client.gather(list(futures))
        return results

    def _verdict(
        self, instance: Instance, policy: str, results: Sequence[Any], n_tasks: tuple[int, int], seen: Seen
    ) -> str:
        """Return the status of a run that has results, given how many tasks were started, and have ended."""
        n_run, n_ended = n_tasks
        if not is_in_charge(self.client, policy):
            return f"policy {policy!r} gave up during the run"
        if n_run != n_ended:
            return f"executed {n_run} times, for {n_ended} tasks"
        if instance.count_executed is not None and seen["executed"] != instance.n_ops:
            return f"executed {seen['executed']} ops of {instance.n_ops}"
        try:
            instance.check(results)
        except ResultError as error:
            return f"wrong result: {error}"
        return OK

    def _collect_garbage(self) -> None:
        # A full collection stops the scheduler, which runs in this process, for 0.1 s and more. What
        # exists now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()


def _reset(dask_scheduler: Any) -> None:
    dask_scheduler.plugins[_NAME].reset()


def _seen(dask_scheduler: Any) -> Seen:
    seen: Seen = dask_scheduler.plugins[_NAME].seen()
    return seen


def _failure(error: BaseException) -> str:
    return f"failed: {error_line(error)}"
