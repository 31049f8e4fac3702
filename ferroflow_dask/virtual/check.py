"""What must hold when a run has come to its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isclose

from distributed.stealing import WorkStealing

from ferroflow_dask.exceptions import SimulationError
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.virtual.upstream import VirtualScheduler
from ferroflow_dask.virtual.worker import VirtualWorker

#: Sums of floats leave dust; no account is as small as this [s].
_DUST_S = 1e-6


def check_end(
    scheduler: VirtualScheduler, workers: Iterable[VirtualWorker], stealing: WorkStealing | None
) -> None:
    """Raise `SimulationError` unless all is done, all accounts are at zero and all states are valid."""
    if isinstance(stealing, FerroflowStealing) and stealing.error is not None:
        raise SimulationError(f"the plugin gave up: {stealing.error!r}") from stealing.error
    problems = [*_unfinished(scheduler), *_open_accounts(scheduler)]
    if stealing is not None:
        problems += _steals_under_way(stealing)
    if isinstance(stealing, FerroflowStealing):
        problems += _wrong_view(scheduler, stealing)
        kept = stealing.parts.kept()
        # Those in memory may be read again.
        kept["are bundles"] = [key for key in kept["are bundles"] if key not in scheduler.tasks]
        problems += [f"{len(keys)} tasks {what}: {keys!r}" for what, keys in kept.items() if keys]
    alive = [worker for worker in workers if worker.is_alive]
    for worker in alive:
        problems += _wrong_store(scheduler, worker)
        if worker.n_held:
            problems.append(f"worker {worker.name} keeps {worker.n_held} tasks whose inputs nobody makes")
        if worker.n_asked:
            problems.append(f"worker {worker.name} was asked for {worker.n_asked} results that do not come")
    if problems:
        raise SimulationError("; ".join(problems))
    scheduler.validate_state()
    for worker in alive:
        worker.state.validate_state()


def _unfinished(scheduler: VirtualScheduler) -> Iterator[str]:
    for ts in scheduler.tasks.values():
        if ts.who_wants and ts.state not in ("memory", "erred"):
            yield f"{ts.key!r} is wanted and {ts.state}"
        elif ts.state in ("processing", "queued", "no-worker"):
            yield f"{ts.key!r} is wanted by nobody and {ts.state}"


def _open_accounts(scheduler: VirtualScheduler) -> Iterator[str]:
    for ws in scheduler.workers.values():
        for resource, amount in ws.used_resources.items():
            if amount:
                yield f"worker {ws.name} has {amount!r} of {resource} in use"
        if not isclose(ws.occupancy, 0, abs_tol=_DUST_S):
            yield f"worker {ws.name} has an occupancy of {ws.occupancy!r} s"


def _steals_under_way(stealing: WorkStealing) -> Iterator[str]:
    for ts in stealing.in_flight:
        yield f"{ts.key!r} is still being stolen"
    for ws, occupancy_s in stealing.in_flight_occupancy.items():
        if not isclose(occupancy_s, 0, abs_tol=_DUST_S):
            yield f"worker {ws.name} has {occupancy_s!r} s of occupancy in flight"


def _wrong_view(scheduler: VirtualScheduler, stealing: FerroflowStealing) -> Iterator[str]:
    view = stealing.view
    if set(view.workers) != set(scheduler.workers):
        yield f"the view has the workers {list(view.workers)!r}"
    running = {ws.address for ws in scheduler.running}
    for worker in view.workers.values():
        if worker.queue or worker.backlog_s:
            yield f"the view has {worker.backlog_s!r} s of work on {worker.key}"
        if worker.is_running != (worker.key in running):
            yield f"the view has {worker.key} {'running' if worker.is_running else 'paused'}"


def _wrong_store(scheduler: VirtualScheduler, worker: VirtualWorker) -> Iterator[str]:
    known = {ts.key for ts in scheduler.workers[worker.state.address].has_what}
    held = {*worker.state.data, *worker.state.actors}
    if known != held:
        yield f"worker {worker.name} has {list(held)!r}, the scheduler knows of {list(known)!r}"
