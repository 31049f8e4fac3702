"""Replaced functions of distributed's scheduler: lean transitions, and the choice of queued tasks.

*Lean* are three functions that are called for each task. They do what distributed's own ones do, with the
same results. They leave out copies and calls that change nothing. A task's links are copied only if the
transition may remove them. Hooks that do nothing are not called. A worker's occupancy is computed only if its
number of tasks does not decide. One search for the least busy worker serves many tasks.

All are installed on the scheduler's instance. All functions that they stand for must be known, by the hashes
of their source. Otherwise distributed's functions stay.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from textwrap import dedent
from typing import Any

from dask.typing import Key
from distributed import scheduler as upstream
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time
from distributed.scheduler import Scheduler, TaskPrefix, TaskState, Transition, WorkerState

from ferroflow_dask.scheduler.changes import Change, ItemChange

logger = logging.getLogger("ferroflow_dask")

#: Functions that are replaced, or on whose behaviour the replacements rely, and the hashes of their source
#: in distributed 2026.7.1 to 2026.8.0. If an upgrade changes one, read what has changed and add its hash.
KNOWN: dict[str, frozenset[str]] = {
    "SchedulerState._transition": frozenset({"4dc6faf52edadfed"}),
    "SchedulerState._propagate_forgotten": frozenset({"c83c97eda12cab05"}),
    "SchedulerState.check_idle_saturated": frozenset({"cf2ffc98cdeabc91"}),
    "SchedulerState.decide_worker_rootish_queuing_enabled": frozenset({"98c9f695c40c7bb9"}),
    "SchedulerState.is_unoccupied": frozenset({"999c7e64147d0111"}),
    "SchedulerState.total_occupancy": frozenset({"27ed6b26f14258eb"}),
    "SchedulerState._calc_occupancy": frozenset({"09f307f830e5c369"}),
    "SchedulerState._get_prefix_duration": frozenset({"11f899cc5472f197"}),
    "WorkerState.occupancy": frozenset({"3014cbb83903eb69"}),
    "_worker_full": frozenset({"fc600c5772c86edf"}),
    "_task_slots_available": frozenset({"22021da7cd1eb1de"}),
}
#: The same for the choice of queued tasks.
_OF_QUEUE: dict[str, frozenset[str]] = {
    "SchedulerState._transition_queued_processing": frozenset({"3c39768197c97212"}),
    "SchedulerState.stimulus_queue_slots_maybe_opened": frozenset({"f31d2a28afe642d6"}),
}
#: A worker is saturated if its waiting tasks take longer than this [s] and than this many times the mean.
_PENDING_S, _TIMES_MEAN = 0.4, 1.9

_Recommendations = dict[Key, Any]
_Messages = dict[str, list[dict[str, Any]]]
_Outcome = tuple[_Recommendations, _Messages, _Messages]


def source_hash(name: str, scheduler_type: type = Scheduler) -> str:
    """Return the hash of a function of `distributed.scheduler`; "" if its source is not available.

    Parameters
    ----------
    name : str
        A key of `KNOWN`.
    scheduler_type : type, optional
        A subclass may override what `SchedulerState` defines.
    """
    owner_name, _, attribute = name.rpartition(".")
    owner: Any = {"": upstream, "SchedulerState": scheduler_type, "WorkerState": WorkerState}[owner_name]
    try:
        found: Any = inspect.getattr_static(owner, attribute)
        function: Any = found.fget if isinstance(found, property) else found
        source = inspect.getsource(function)
    except (AttributeError, OSError, TypeError):
        return ""
    return hashlib.sha256(dedent(source).encode()).hexdigest()[:16]


def _unknown(known: Mapping[str, Collection[str]], scheduler: Scheduler) -> list[str]:
    """Return the functions whose source has none of their known hashes."""
    return [name for name, hashes in known.items() if source_hash(name, type(scheduler)) not in hashes]


def unknown_functions(scheduler: Scheduler) -> list[str]:
    """Return the functions of a scheduler that differ from the known ones; none if lean ones can be used."""
    unknown = _unknown(KNOWN, scheduler)
    # One that was overridden on the instance is to be called.
    own = [name for name in KNOWN if name.rpartition(".")[2] in vars(scheduler)]
    return list(dict.fromkeys(unknown + own))


def lean_changes(scheduler: Scheduler) -> Iterable[Change]:
    """Return the changes that install the lean functions; none if a function is unknown."""
    # With the setting `distributed.admin.pdb-on-err`, distributed's function starts a debugger.
    unknown = unknown_functions(scheduler)
    if unknown or upstream.LOG_PDB:
        logger.debug("ferroflow: Dask's own transitions stay, since these are unknown: %s", unknown)
        return
    least = _Least()
    for name, function in (
        ("_transition", _transition_on(scheduler)),
        ("check_idle_saturated", _check_on(scheduler, least)),
        ("decide_worker_rootish_queuing_enabled", _choice_on(scheduler, least)),
    ):
        yield ItemChange(f"Scheduler.{name}", vars(scheduler), name, function)


def queue_changes(
    scheduler: Scheduler,
    reserved: Collection[Key],
    choose: Callable[[WorkerState, TaskState], TaskState],
) -> Iterable[Change]:
    """Return the changes by which `choose` chooses the queued task that a worker with a free slot gets.

    It gets the worker and the first task of the queue. It is not called if that one has no dependent or
    several, unless tasks are reserved. There are no changes if a function is unknown.
    """
    if unknown := _unknown(_OF_QUEUE, scheduler):
        logger.debug("ferroflow: Dask's own queue stays, since these are unknown: %s", unknown)
        return
    usual = scheduler.decide_worker_rootish_queuing_enabled
    chosen: list[WorkerState] = []

    def decide() -> WorkerState | None:
        return chosen.pop() if chosen else usual()

    def open_slots(*, stimulus_id: str) -> None:
        while scheduler.queued and (ws := usual()) is not None:
            first = ts = scheduler.queued.peek()
            if reserved or len(first.dependents) == 1:
                ts = choose(ws, first)
                if ts.state != "queued":
                    ts = first
            chosen.append(ws)
            try:
                scheduler.transitions({ts.key: "processing"}, stimulus_id)
            finally:
                chosen.clear()
            if ts.state == "queued":
                return

    for name, function in (
        ("decide_worker_rootish_queuing_enabled", decide),
        ("stimulus_queue_slots_maybe_opened", open_slots),
    ):
        yield ItemChange(f"Scheduler.{name}", vars(scheduler), name, function)


def _transition_on(scheduler: Any) -> Callable[..., _Outcome]:
    table = type(scheduler)._TRANSITIONS_TABLE
    no_hook = SchedulerPlugin.transition

    def transition(key: Key, finish: Any, stimulus_id: str, **details: Any) -> _Outcome:
        ts = scheduler.tasks.get(key)
        if ts is None or ts._state == finish:
            return {}, {}, {}
        start = ts._state
        try:
            scheduler.transition_counter += 1
            limit = scheduler.transition_counter_max
            assert not limit or scheduler.transition_counter < limit
            step = table.get((start, finish))
            links = None
            if step is None or finish == "forgotten":  # hooks see the links that the transition removes
                links = set(ts.dependents), set(ts.dependencies)
            if step is not None:
                outcome: _Outcome = step(scheduler, key, stimulus_id, **details)
            else:
                assert not details, (details, start, finish)
                outcome = _through_released(scheduler, key, start, finish, stimulus_id)
                start = "released"
            actual = ts._state
            stimulus_id = stimulus_id or _no_stimulus(scheduler)
            scheduler.transition_log.append(Transition(key, start, actual, outcome[0], stimulus_id, time()))
            if actual == "forgotten":
                # Hooks look the task up.
                ts.dependents, ts.dependencies = links or (ts.dependents, ts.dependencies)
                scheduler.tasks[key] = ts
            for plugin in tuple(scheduler.plugins.values()):
                hook = plugin.transition
                if getattr(hook, "__func__", None) is no_hook:
                    continue
                try:
                    hook(key, start, actual, stimulus_id=stimulus_id, **details)
                except Exception:  # noqa: BLE001 -- as distributed does
                    upstream.logger.info("Plugin failed with exception", exc_info=True)
            if actual == "forgotten":
                _forget(scheduler, ts)
        except Exception:
            _report(scheduler, key, start, finish)
            raise
        return outcome

    return transition


def _no_stimulus(scheduler: Any) -> str:
    if scheduler.validate:
        raise RuntimeError("stimulus_id not set during Scheduler transition")
    return str(upstream.STIMULUS_ID_UNSET)


def _forget(scheduler: Any, ts: Any) -> None:
    """Remove a task, and its group with the last of its tasks."""
    del scheduler.tasks[ts.key]
    group = ts.group
    is_last = all(not n or state == "forgotten" for state, n in group.states.items())
    if is_last and group.name in scheduler.task_groups:
        ts.prefix.remove_group(group)
        del scheduler.task_groups[group.name]


def _through_released(scheduler: Any, key: Key, start: str, finish: str, stimulus_id: str) -> _Outcome:
    """Take a task to a state to which there is no direct transition."""
    if "released" in (start, finish):
        raise RuntimeError(
            f"Impossible transition from {start} to {finish} for {key!r}: stimulus_id={stimulus_id!r}, "
            f"story={scheduler.story(scheduler.tasks[key])}"
        )
    first = scheduler._transition(key, "released", stimulus_id)
    # What the release recommends for the task itself comes first.
    step = type(scheduler)._TRANSITIONS_TABLE["released", first[0].get(key, finish)]
    second = step(scheduler, key, stimulus_id)
    return first[0] | second[0], _joined(first[1], second[1]), _joined(first[2], second[2])


def _joined(*messages: _Messages) -> _Messages:
    joined: _Messages = {}
    for address, sent in chain.from_iterable(one.items() for one in messages):
        joined.setdefault(address, []).extend(sent)
    return joined


def _report(scheduler: Any, key: Key, start: str, finish: str) -> None:
    upstream.logger.exception("Error transitioning %r from %r to %r", key, start, finish)
    event = {"key": key, "start": start, "finish": finish, "transition_log": list(scheduler.transition_log)}
    scheduler.log_event("transitions", {"action": "scheduler-transition-failed", **event})


class _Least:
    """What is known of the least busy workers with free slots."""

    __slots__ = ("load", "rest")

    def __init__(self) -> None:
        #: No worker has fewer tasks per thread.
        self.load = 0.0
        #: All workers that may have as few, in the order of Dask's set; None if that is not known.
        self.rest: Iterator[WorkerState] | None = None


def _choice_on(scheduler: Any, least: _Least) -> Callable[[], WorkerState | None]:
    def search(idle: set[WorkerState]) -> WorkerState:
        workers = list(idle)
        chosen, chosen_load, place = workers[0], math.inf, 0
        for at, ws in enumerate(workers):
            load = len(ws.processing) / ws.nthreads
            if load < chosen_load:
                chosen, chosen_load, place = ws, load, at
                if load <= least.load:
                    break  # none is less busy
        least.load, least.rest = chosen_load, islice(workers, place + 1, None)
        return chosen

    def choose() -> WorkerState | None:
        idle: set[WorkerState] = scheduler.idle_task_count
        for ws in least.rest or ():
            if ws in idle and len(ws.processing) <= least.load * ws.nthreads:
                return ws
        return search(idle) if idle else None

    return choose


def _check_on(scheduler: Any, least: _Least) -> Callable[..., None]:
    def occupancy_of(counts: dict[str, int], nbytes: float) -> float:
        prefixes: dict[str, TaskPrefix] = scheduler.task_prefixes
        occupancy_s = 0.0
        for name, n in counts.items():
            duration_s = prefixes[name].duration_average
            if duration_s < 0:
                longest_s = prefixes[name].max_exec_time
                duration_s = 2 * longest_s if longest_s > 0 else scheduler.UNKNOWN_TASK_DURATION
            occupancy_s += duration_s * n
        return max(occupancy_s + nbytes / float(scheduler.bandwidth), 0.0)

    def check(ws: WorkerState, occ: float = -1.0) -> None:
        n_threads, n_all = ws.nthreads, scheduler.total_nthreads
        if not n_all or ws.status == Status.closed:
            return
        n, address, idle = len(ws.processing), ws.address, scheduler.idle
        is_running, is_idle, is_saturated = ws.status == Status.running, False, False
        if n <= least.load * n_threads:
            least.load, least.rest = n / n_threads, None
        if is_running and n < n_threads:
            is_idle = True
        elif is_running:
            if occ < 0:
                occ = ws._occupancy_cache or occupancy_of(ws.task_prefix_count, ws._network_occ)
            mean_s = occupancy_of(scheduler._task_prefix_count_global, scheduler._network_occ_global) / n_all
            is_idle = occ < n_threads * mean_s / 2
            if not is_idle and n > n_threads:
                pending_s = occ * (n - n_threads) / (n * n_threads)
                is_saturated = _PENDING_S < pending_s > _TIMES_MEAN * mean_s
        if is_idle:
            if idle.get(address) is not ws:
                idle[address] = ws
        elif address in idle:
            del idle[address]
        (scheduler.saturated.add if is_saturated else scheduler.saturated.discard)(ws)
        saturation = scheduler.WORKER_SATURATION
        has_slots = math.isinf(saturation) or (
            max(math.ceil(saturation * n_threads), 1) > n - len(ws.long_running)
        )
        if not (is_running and has_slots):
            scheduler.idle_task_count.discard(ws)
        elif ws not in scheduler.idle_task_count:
            scheduler.idle_task_count.add(ws)
            least.rest = None  # the order of the set may have changed

    return check
