"""Private names of distributed: the only module of `scheduler` that uses them, behind functions of ours.

`missing_names` checks all of them when the plugin is installed. `tests/scheduler/test_distributed_names.py`
is the contract test that names what an upgrade of distributed has taken away.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from dask._task_spec import GraphNode, Task
from dask.typing import Key
from distributed.batched import BatchedSend
from distributed.comm.addressing import get_address_host
from distributed.protocol.serialize import Serialized
from distributed.scheduler import Scheduler, TaskState, WorkerState, heartbeat_interval
from distributed.stealing import WorkStealing, fast_tasks

from ferroflow_dask.scheduler.changes import Change, Guard, ItemChange
from ferroflow_dask.scheduler.hooks import Hooks

#: Names that the plugin reads, calls or overrides, by the class that defines them.
REQUIRED: dict[type, tuple[str, ...]] = {
    Scheduler: (
        "_add_to_memory",
        "_find_lost_dependencies",
        "_get_prefix_duration",
        "_propagate_erred",
        "_reschedule",
        "_task_to_msg",
        "_transition",
        "_transitions",
        "acquire_resources",
        "add_plugin",
        "broadcast",
        "check_idle_saturated",
        "decide_worker_non_rootish",
        "is_rootish",
        "new_task",
        "register_worker_plugin",
        "request_remove_replicas",
        "release_resources",
        "send_all",
        "send_task_to_worker",
        "stimulus_queue_slots_maybe_opened",
        "subscribe_topic",
        "unregister_worker_plugin",
        "unsubscribe_topic",
        "valid_workers",
        "worker_send",
    ),
    WorkerState: ("_network_occ", "add_to_processing", "needs_what", "remove_from_processing"),
    WorkStealing: (
        "_add_to_in_flight",
        "_remove_from_in_flight",
        "move_task_confirm",
        "move_task_request",
        "put_key_in_stealable",
        "remove_key_from_stealable",
    ),
}
#: Attributes that the constructor of a scheduler sets, and request handlers that it registers.
ATTRIBUTES = (
    "WORKER_SATURATION",
    "_active_graph_updates",
    "allowed_failures",
    "client_comms",
    "computations",
    "extensions",
    "idle_task_count",
    "periodic_callbacks",
    "queued",
    "stream_comms",
    "stream_handlers",
    "worker_plugins",
)
HANDLERS = ("gather", "register_worker_plugin", "unregister", "unregister_worker_plugin")
STREAM_HANDLERS = (
    "add-keys",
    "cancel-keys",
    "request-refresh-who-has",
    "reschedule",
    "task-erred",
    "update-graph",
)

#: Prefixes of tasks that Dask never steals, such as the splits of a shuffle.
NEVER_STOLEN = fast_tasks
#: Replies of a worker to a steal request (distributed.stealing). In any other state the worker does not know
#: the task, and the scheduler must place it again.
GIVEN_UP = frozenset({"ready", "constrained", "waiting"})
STARTED = frozenset({"memory", "executing", "long-running", "cancelled", "resumed"})


def missing_names(scheduler: Scheduler | None = None) -> list[str]:
    """Return the required names that this distributed lacks; those of instances if a scheduler is given."""
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in REQUIRED.items()
        for name in names
        if not hasattr(owner, name)
    ]
    if "interval" not in BatchedSend.__init__.__code__.co_names:
        missing.append("BatchedSend.interval")
    if scheduler is not None:
        missing += [f"Scheduler.{name}" for name in ATTRIBUTES if not hasattr(scheduler, name)]
        missing += [f"Scheduler.handlers[{name!r}]" for name in HANDLERS if name not in scheduler.handlers]
        missing += [
            f"Scheduler.stream_handlers[{name!r}]"
            for name in STREAM_HANDLERS
            if name not in scheduler.stream_handlers
        ]
    return missing


def _override(scheduler: Scheduler, name: str, function: Callable[..., Any]) -> Change:
    # distributed calls these methods through the instance, so an attribute of the instance is enough.
    return ItemChange(f"Scheduler.{name}", vars(scheduler), name, function)


def placement_changes(
    scheduler: Scheduler,
    decide: Callable[[TaskState], WorkerState | None],
    passes_queue: Callable[[TaskState], bool],
    queued: Collection[Key],
) -> Iterable[Change]:
    """Return the changes by which `decide` places tasks.

    `decide` places the tasks that Dask would not queue, and those for which `passes_queue` is true.
    Dask queues those of `queued`.
    """
    stock_is_rootish = scheduler.is_rootish

    def is_rootish(ts: TaskState) -> bool:
        return not passes_queue(ts) and (ts.key in queued or stock_is_rootish(ts))

    yield _override(scheduler, "is_rootish", is_rootish)
    yield _override(scheduler, "decide_worker_non_rootish", decide)


def message_changes(scheduler: Scheduler, hooks: Hooks, guard: Guard) -> Iterable[Change]:
    """Return the changes to messages that features ask for by their hooks.

    Tasks and requests to drop replicas are messages to workers; results are sent to clients.
    """
    if hooks.instead or hooks.message:
        yield _override(scheduler, "_task_to_msg", _task_to_msg(scheduler, hooks, guard))
    if hooks.may_drop:
        stock_remove = scheduler.request_remove_replicas
        filters = [guard(may_drop, default=True) for may_drop in hooks.may_drop]

        def request_remove_replicas(addr: str, keys: list[Key], *, stimulus_id: str) -> None:
            for may_drop in filters:
                keys = [key for key in keys if may_drop(key, addr)]
            if keys:
                stock_remove(addr, keys, stimulus_id=stimulus_id)

        yield _override(scheduler, "request_remove_replicas", request_remove_replicas)
    if hooks.result_of and hasattr(scheduler, "handlers") and not is_in_process(scheduler):
        yield _gather_change(scheduler, [guard(result_of) for result_of in hooks.result_of])


def _task_to_msg(scheduler: Scheduler, hooks: Hooks, guard: Guard) -> Callable[[TaskState], Any]:
    stock = scheduler._task_to_msg
    answers = [(placed, guard(instead)) for placed, instead in hooks.instead]

    def change(ts: TaskState, message: dict[str, Any]) -> dict[str, Any]:
        if ts.processing_on is not None:
            for is_on, complete in hooks.message:
                message = complete(ts, ts.processing_on, message) if is_on else message
                if message is None:
                    raise TypeError(f"{complete.__qualname__} must return a message, got None")
        return message

    guarded = guard(change)

    def task_to_msg(ts: TaskState) -> Any:
        for placed, instead in answers:
            message = instead(ts) if placed else None
            if message is not None:
                return message
        # An exception of Dask's own function is none of the plugin.
        return guarded(ts, stock(ts)) or stock(ts)

    return task_to_msg


def _gather_change(scheduler: Scheduler, answers: Sequence[Callable[[Key], bytes | None]]) -> Change:
    stock = scheduler.handlers["gather"]

    async def gather(keys: Collection[Key], serializers: list[str] | None = None) -> dict[str, Any]:
        here: dict[Key, bytes] = {}
        others = list(keys)
        for result_of in answers if not serializers else ():
            here |= {key: value for key in others if (value := result_of(key)) is not None}
            others = [key for key in others if key not in here]
        answer: dict[str, Any] = await stock(keys=others, serializers=serializers)
        if answer["status"] == "OK":
            header = {"serializer": "pickle", "writeable": ()}
            answer["data"] |= {key: Serialized(header, [value]) for key, value in here.items()}
        return answer

    return ItemChange("Scheduler.handlers['gather']", scheduler.handlers, "gather", gather)


def interval_s(stealing: WorkStealing) -> float:
    """Return the time between two rounds of stealing by the clock [s]."""
    return float(stealing._callback_time)


def begin_steal(stealing: WorkStealing, ts: TaskState, victim: WorkerState, thief: WorkerState) -> bool:
    """Send a steal request; return whether it was sent."""
    return stealing.move_task_request(ts, victim, thief).startswith("steal-")


def end_steal(stealing: WorkStealing, ts: TaskState) -> Any:
    """Take a task out of the steals in flight; return that steal, None if there is none."""
    return stealing._remove_from_in_flight(ts)


async def stop(extension: WorkStealing, patience_s: float) -> None:
    """Stop an extension, and wait until its steals in flight have ended; raise `TimeoutError` if they do not.

    `WorkStealing.stop` removes the periodic callback that the scheduler has when the event loop comes to it.
    By then it may be that of another extension, which a recovery has put back.
    """
    WorkStealing.teardown(extension)
    await asyncio.wait_for(extension._in_flight_event.wait(), patience_s)


def start_now(extension: WorkStealing) -> None:
    """Start an extension; `WorkStealing.start` is a coroutine that never waits."""
    starting = extension.start()
    try:
        starting.send(None)
    except StopIteration:
        return
    starting.close()
    raise RuntimeError(f"{type(extension).__name__}.start must not wait")


def early_message(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> dict[str, Any]:
    """Return the message that sends a worker a task before all of its inputs exist.

    An input that does not exist yet has a size of -1 and the worker itself as its holder. The worker reads
    neither, since it has the input by the time it starts the task.
    """
    run_id, validate = ts.run_id, scheduler.validate
    scheduler.validate = False  # validation asserts that all inputs exist
    try:
        message = type(scheduler)._task_to_msg(scheduler, ts)
    finally:
        scheduler.validate = validate
        ts.run_id = run_id  # messages about the earlier run are still valid
    message["who_has"] = {key: there or (ws.address,) for key, there in message["who_has"].items()}
    return message


def stock_decision(scheduler: Scheduler, ts: TaskState, without: Collection[str] = ()) -> WorkerState | None:
    """Return the worker that Dask would choose for a task if some, by their addresses, were not running."""
    running = scheduler.running
    if without:
        scheduler.running = {ws for ws in running if ws.address not in without}
    try:
        return type(scheduler).decide_worker_non_rootish(scheduler, ts)
    finally:
        scheduler.running = running


def prefix_duration(scheduler: Scheduler, ts: TaskState) -> float:
    """Return Dask's average duration of a task's prefix, or its default [s]."""
    return float(scheduler._get_prefix_duration(ts.prefix))


def incoming_nbytes(ws: WorkerState) -> int:
    """Return the bytes in flight to a worker for the tasks that it has [B]."""
    return int(ws._network_occ) if ws.needs_what else 0  # distributed lets it drift when sizes are corrected


@lru_cache(maxsize=2**16)
def host_of(address: str) -> str:
    """Return the host of a worker's address."""
    return str(get_address_host(address))


def heartbeat_s(scheduler: Scheduler) -> float:
    """Return the interval of each worker's heartbeats [s]."""
    return float(heartbeat_interval(len(scheduler.workers)))


def measured_bandwidths(ws: WorkerState) -> dict[str, tuple[float, int]]:
    """Return the transfers in a worker's last heartbeat by source: sum of bandwidths [B/s] and count."""
    measured: dict[str, tuple[float, int]] = ws.metrics.get("bandwidth", {}).get("workers", {})
    return measured


def is_used_soon(ts: TaskState, n: int) -> bool:
    """Return whether a dependent of this task waits for at most `n` inputs."""
    return any(len(dependent.waiting_on or ()) <= n for dependent in ts.dependents)


def valid_workers(scheduler: Scheduler, restrictions: Any) -> set[WorkerState] | None:
    """Return the running workers that restrictions allow; None for all.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    restrictions : object
        Has the attributes of a `TaskState` that hold restrictions.
    """
    return scheduler.valid_workers(restrictions)


def is_in_process(scheduler: Scheduler) -> bool:
    """Return whether clients and workers share this process, so that results are passed as objects."""
    return str(getattr(scheduler, "address", "")).startswith("inproc")


def is_plain(ts: TaskState) -> bool:
    """Return whether a task only calls a function; the barrier of a P2P shuffle is a task of another type."""
    return type(ts.run_spec) is Task and not ts.actor


def is_ordinary(ts: TaskState) -> bool:
    """Return whether a task is no actor and has a type of Dask's own, not one of P2P shuffles or others."""
    return type(ts.run_spec).__module__ == GraphNode.__module__ and not ts.actor


def is_restricted(ts: TaskState) -> bool:
    """Return whether a task has restrictions."""
    return bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)


def may_run_on(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> bool:
    """Return whether the present restrictions of a task allow a running worker."""
    if not is_restricted(ts):
        return True
    valid = None if ts.loose_restrictions else scheduler.valid_workers(ts)
    return valid is None or ws in valid


def can_run(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> bool:
    """Return whether a worker is running, is allowed by a task's restrictions, and has its resources."""
    needed = (ts.resource_restrictions or {}).items()
    has_them = all(ws.resources.get(name, 0) >= amount for name, amount in needed)
    return ws in scheduler.running and has_them and may_run_on(scheduler, ts, ws)


def lower_blame(scheduler: Scheduler, key: Key) -> None:
    """Lower the number of dead workers that Dask counts for a task."""
    ts = scheduler.tasks[key]
    ts.suspicious -= 1
    ts.prefix.suspicious -= 1


def hand_over(scheduler: Scheduler, ts: TaskState, victim: WorkerState, thief: WorkerState) -> None:
    """Move a task from the victim to the thief, with its resources.

    Stock stealing leaves the resources with the victim, which then has too few for ever.
    """
    scheduler.release_resources(ts, victim)
    victim.remove_from_processing(ts)
    ts.processing_on = thief
    thief.add_to_processing(ts)
    scheduler.acquire_resources(ts, thief)
    scheduler.send_task_to_worker(thief.address, ts)


def reschedule(scheduler: Scheduler, ts: TaskState, stimulus_id: str) -> None:
    """Let the scheduler place a task again."""
    scheduler._reschedule(ts.key, stimulus_id=stimulus_id)


def reschedule_from(scheduler: Scheduler, key: Key, worker: str, stimulus_id: str) -> None:
    """Let the scheduler place a task again if it is still processing on `worker`."""
    ts = scheduler.tasks.get(key)
    if ts is not None and ts.processing_on is not None and ts.processing_on.address == worker:
        reschedule(scheduler, ts, stimulus_id)


def warn_clients(scheduler: Scheduler, message: str) -> None:
    """Show a warning in every client, as `distributed.warn` does from a worker."""
    scheduler.log_event("warn", {"message": pickle.dumps(message), "category": pickle.dumps(UserWarning)})


def check_idle(scheduler: Scheduler, ws: WorkerState) -> None:
    """Let Dask update its sets of idle and saturated workers; safe within a transition."""
    scheduler.check_idle_saturated(ws)


def slots_may_have_opened(scheduler: Scheduler, *workers: WorkerState, stimulus_id: str) -> None:
    """Let the scheduler send queued tasks to workers whose number of tasks has changed."""
    for ws in workers:
        if scheduler.workers.get(ws.address) is ws:
            scheduler.check_idle_saturated(ws)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
