"""What we do with names of distributed that are not public, behind names of ours.

`REQUIRED` lists the names that the plugin touches, also in its other modules, for the
contract test (tests/test_seams.py): when an upgrade of distributed takes one away, that test names it. Line
numbers of upstream are left out on purpose; they age.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

from dask._task_spec import GraphNode, Task
from dask.typing import Key
from distributed.comm.addressing import get_address_host
from distributed.protocol.serialize import Serialized
from distributed.scheduler import Scheduler, TaskState, WorkerState, heartbeat_interval
from distributed.stealing import WorkStealing, fast_tasks

#: Attributes of a Scheduler that we read, call or override on the instance.
REQUIRED: dict[str, tuple[str, ...]] = {
    "Scheduler": (
        "_get_prefix_duration",
        "_reschedule",
        "_task_to_msg",
        "acquire_resources",
        "check_idle_saturated",
        "decide_worker_non_rootish",
        "is_rootish",
        "register_worker_plugin",
        "request_remove_replicas",
        "release_resources",
        "send_task_to_worker",
        "stimulus_queue_slots_maybe_opened",
        "subscribe_topic",
        "unregister_worker_plugin",
        "unsubscribe_topic",
        "valid_workers",
        "worker_send",
    ),
    "WorkerState": ("_network_occ", "add_to_processing", "needs_what", "remove_from_processing"),
    "WorkStealing": (
        "_add_to_in_flight",
        "_remove_from_in_flight",
        "move_task_confirm",
        "move_task_request",
        "put_key_in_stealable",
        "remove_key_from_stealable",
    ),
}

#: Replies of a worker that is asked for a task (distributed.stealing). In any other state than these
#: two sets it does not know the task, which must then be scheduled again.
GIVEN_UP = frozenset({"ready", "constrained", "waiting"})
STARTED = frozenset({"memory", "executing", "long-running", "cancelled", "resumed"})


def missing_names() -> list[str]:
    """Return the names of `REQUIRED` that this distributed does not have."""
    owners = {"Scheduler": Scheduler, "WorkerState": WorkerState, "WorkStealing": WorkStealing}
    return [
        f"{owner}.{name}"
        for owner, names in REQUIRED.items()
        for name in names
        if not hasattr(owners[owner], name)
    ]


def override_placement(
    scheduler: Scheduler,
    decide: Callable[[TaskState], WorkerState | None],
    passes_queue: Callable[[TaskState], bool],
) -> Callable[[], None]:
    """Let `decide` place the tasks that Dask would not queue, and those for which `passes_queue` is true.

    Returns what undoes it.
    """
    stock_is_rootish = scheduler.is_rootish
    return _override(
        scheduler,
        is_rootish=lambda ts: not passes_queue(ts) and stock_is_rootish(ts),
        decide_worker_non_rootish=decide,
    )


def _override(scheduler: Scheduler, **functions: Callable[..., Any]) -> Callable[[], None]:
    # They are set on the instance, through which distributed calls them; others may have done so, too.
    before = {name: vars(scheduler)[name] for name in functions if name in vars(scheduler)}
    vars(scheduler).update(functions)

    def restore() -> None:
        for name, function in functions.items():
            if vars(scheduler).get(name) is not function:
                continue
            if name in before:
                vars(scheduler)[name] = before[name]
            else:
                del vars(scheduler)[name]

    return restore


def override_messages(
    scheduler: Scheduler,
    message: Callable[[TaskState], dict[str, Any] | None],
    may_drop: Callable[[Key, str], bool],
) -> Callable[[], None]:
    """Change what workers are sent; returns what undoes it.

    `message` returns what is sent for a task, or None for Dask's own; copies of results for which `may_drop`
    is false, given the worker's address, are not asked to be dropped.
    """
    stock_task_to_msg, stock_remove = scheduler._task_to_msg, scheduler.request_remove_replicas

    def task_to_msg(ts: TaskState) -> dict[str, Any]:
        return message(ts) or stock_task_to_msg(ts)

    def request_remove_replicas(addr: str, keys: list[Key], *, stimulus_id: str) -> None:
        dropped = [key for key in keys if may_drop(key, addr)]
        if dropped:
            stock_remove(addr, dropped, stimulus_id=stimulus_id)

    return _override(scheduler, _task_to_msg=task_to_msg, request_remove_replicas=request_remove_replicas)


def override_gather(scheduler: Scheduler, known: Callable[[Key], bytes | None]) -> Callable[[], None]:
    """Answer clients that gather results with those that are `known`, pickled; workers are asked for others.

    Returns what undoes it.
    """
    stock = scheduler.handlers["gather"]

    async def gather(keys: Collection[Key], serializers: list[str] | None = None) -> dict[str, Any]:
        here = {} if serializers else {key: value for key in keys if (value := known(key)) is not None}
        others = [key for key in keys if key not in here]
        answer: dict[str, Any] = await stock(keys=others, serializers=serializers)
        if answer["status"] == "OK":
            header = {"serializer": "pickle", "writeable": ()}
            answer["data"] |= {key: Serialized(header, [value]) for key, value in here.items()}
        return answer

    def restore() -> None:
        if scheduler.handlers.get("gather") is gather:
            scheduler.handlers["gather"] = stock

    scheduler.handlers["gather"] = gather
    return restore


def early_message(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> dict[str, Any]:
    """Return what a worker is sent for a task whose inputs are there, or will be.

    Those that are not yet have a size of -1 and are said to be there: nothing else is known of them, and the
    worker looks at neither, since it has them by then.
    """
    run_id, validate = ts.run_id, scheduler.validate
    scheduler.validate = False  # it would be checked that all inputs are somewhere
    try:
        message = type(scheduler)._task_to_msg(scheduler, ts)
    finally:
        scheduler.validate = validate
        ts.run_id = run_id  # what was told of earlier runs still counts
    message["who_has"] = {key: there or (ws.address,) for key, there in message["who_has"].items()}
    return message


def would_queue(scheduler: Scheduler, ts: TaskState) -> bool:
    """Return whether Dask would let a task wait in its queue for a worker with a slot."""
    return bool(type(scheduler).is_rootish(scheduler, ts))


def stock_decision(scheduler: Scheduler, ts: TaskState) -> WorkerState | None:
    """Return where Dask would place a task."""
    return type(scheduler).decide_worker_non_rootish(scheduler, ts)


def prefix_duration(scheduler: Scheduler, ts: TaskState) -> float:
    """Return what Dask has learned of tasks with the same prefix [s], or its default."""
    return float(scheduler._get_prefix_duration(ts.prefix))


def prefix_average(ts: TaskState) -> float | None:
    """Return the mean that Dask keeps of tasks with the same prefix [s]; None if none has ended yet."""
    average_s = float(ts.prefix.duration_average)
    return None if average_s < 0 else average_s


def is_on_its_way_to(ws: WorkerState, needed: TaskState) -> bool:
    """Return whether a worker fetches a result, or is about to, for a task it has."""
    return needed in ws.needs_what


def incoming_nbytes(ws: WorkerState) -> int:
    """Return the bytes of results that a worker fetches, or is about to, for the tasks it has [B]."""
    return int(ws._network_occ) if ws.needs_what else 0  # it drifts when sizes are corrected


@lru_cache(maxsize=2**16)
def host_of(address: str) -> str:
    """Return the host that a worker runs on, as workers tell theirs from others."""
    return str(get_address_host(address))


def heartbeat_s(scheduler: Scheduler) -> float:
    """Return how often each worker tells of itself [s]."""
    return float(heartbeat_interval(len(scheduler.workers)))


def measured_bandwidths(ws: WorkerState) -> dict[str, tuple[float, int]]:
    """Return what a worker's last heartbeat told of transfers from others: the sum [B/s], and how many."""
    measured: dict[str, tuple[float, int]] = ws.metrics.get("bandwidth", {}).get("workers", {})
    return measured


def is_kept_anyway(ts: TaskState) -> bool:
    """Return whether a result stays until most of its group are there: for one task that needs them."""
    readers, most = ts.dependents, len(ts.group) / 2
    return not readers or any(len(reader.dependencies) >= most for reader in readers)


def is_used_soon(ts: TaskState, n: int) -> bool:
    """Return whether a task that needs this result waits for no more than so many, this one included."""
    return any(len(dependent.waiting_on or ()) <= n for dependent in ts.dependents)


def is_never_stolen(ts: TaskState) -> bool:
    """Return whether Dask knows the task for one that costs nothing, such as the parts of a split."""
    return ts.prefix.name in fast_tasks


def valid_workers(scheduler: Scheduler, restrictions: Any) -> set[WorkerState] | None:
    """Return the running workers that restrictions admit; None for all.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    restrictions : object
        With the attributes of a `TaskState` that tell of restrictions.
    """
    return scheduler.valid_workers(restrictions)


def is_in_process(scheduler: Scheduler) -> bool:
    """Return whether clients and workers share this process, so that results are the objects themselves."""
    return str(getattr(scheduler, "address", "")).startswith("inproc")


def is_plain(ts: TaskState) -> bool:
    """Return whether a task does no more than call a function, as the barrier of a shuffle does."""
    return type(ts.run_spec) is Task and not ts.actor


def is_ordinary(ts: TaskState) -> bool:
    """Return whether a task is no actor, and of Dask's own kinds, which P2P shuffles and others extend."""
    return type(ts.run_spec).__module__ == GraphNode.__module__ and not ts.actor


def is_restricted(ts: TaskState) -> bool:
    """Return whether a task may not run everywhere."""
    return bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)


def may_run_on(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> bool:
    """Return whether a task's restrictions, as they are now, admit a worker that runs."""
    if not is_restricted(ts):
        return True
    valid = None if ts.loose_restrictions else scheduler.valid_workers(ts)
    return valid is None or ws in valid


def can_run(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> bool:
    """Return whether a worker may be sent a task now: it runs, may, and has the resources asked for."""
    needed = (ts.resource_restrictions or {}).items()
    has_them = all(ws.resources.get(name, 0) >= amount for name, amount in needed)
    return ws in scheduler.running and has_them and may_run_on(scheduler, ts, ws)


def take_blame_back(scheduler: Scheduler, key: Key) -> None:
    """Let a task be suspected once less of having ended its worker."""
    ts = scheduler.tasks.get(key)
    if ts is not None and ts.suspicious:
        ts.suspicious -= 1
        ts.prefix.suspicious -= 1


def hand_over(scheduler: Scheduler, ts: TaskState, victim: WorkerState, thief: WorkerState) -> None:
    """Move a task that its worker has given up to another one, its resources included.

    Stock stealing leaves the resources with the victim, whose account then never balances.
    """
    scheduler.release_resources(ts, victim)
    victim.remove_from_processing(ts)
    ts.processing_on = thief
    thief.add_to_processing(ts)
    scheduler.acquire_resources(ts, thief)
    scheduler.send_task_to_worker(thief.address, ts)


def reschedule(scheduler: Scheduler, ts: TaskState, stimulus_id: str) -> None:
    """Let the scheduler find a worker for a task that its worker does not know."""
    scheduler._reschedule(ts.key, stimulus_id=stimulus_id)


def reschedule_from(scheduler: Scheduler, key: Key, worker: str, stimulus_id: str) -> None:
    """Let the scheduler find a worker for a task that is accounted to `worker`, which gave it up."""
    ts = scheduler.tasks.get(key)
    if ts is not None and ts.processing_on is not None and ts.processing_on.address == worker:
        reschedule(scheduler, ts, stimulus_id)


def warn_clients(scheduler: Scheduler, message: str) -> None:
    """Show a warning in every client, as `distributed.warn` does from a worker."""
    scheduler.log_event("warn", {"message": pickle.dumps(message), "category": pickle.dumps(UserWarning)})


def check_idle(scheduler: Scheduler, ws: WorkerState) -> None:
    """Let Dask decide anew whether a worker can be sent tasks; safe within a transition."""
    scheduler.check_idle_saturated(ws)


def slots_may_have_opened(scheduler: Scheduler, *workers: WorkerState, stimulus_id: str) -> None:
    """Tell the scheduler that the queues of some workers have changed."""
    for ws in workers:
        if scheduler.workers.get(ws.address) is ws:
            scheduler.check_idle_saturated(ws)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
