"""What scheduler and workers say to each other: when, what before its time, and what beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from ferroflow_dask import config
from ferroflow_dask.plugin import inlining_worker, seams, successors_worker
from ferroflow_dask.plugin.durations import Durations
from ferroflow_dask.plugin.inlining import Inlining
from ferroflow_dask.plugin.streams import Streams
from ferroflow_dask.plugin.successors import Successors
from ferroflow_dask.plugin.worker_plugins import OnWorkers

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState


class Messages:
    """Streams without pauses, tasks that come before their inputs, and small inputs that come with tasks.

    Nothing changes until it is opened.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    durations : Durations
        What is known of the sizes of results.
    is_usual, ask, was_withdrawn : callable
        As `Successors` takes them.
    guarded : callable
        Calls a function with arguments; what that raises never reaches the scheduler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        durations: Durations,
        is_usual: Callable[[str], bool],
        ask: Callable[[], None],
        was_withdrawn: Callable[[Key, str], None],
        *,
        guarded: Callable[..., Any],
    ) -> None:
        self._scheduler = scheduler
        self._guarded = guarded
        self.streams = Streams(scheduler)
        self.inlining = Inlining(scheduler, durations)
        self.successors = Successors(scheduler, is_usual, ask, was_withdrawn, self.inlining)
        self._of_successors = OnWorkers(
            scheduler, successors_worker.WorkerSuccessors(), "ferroflow-successors"
        )
        self._of_inlining = OnWorkers(scheduler, inlining_worker.WorkerInlining(), "ferroflow-inlining")
        self._restore: Callable[[], None] | None = None
        self._restore_gather: Callable[[], None] | None = None

    def open(self, keeps_successors: bool) -> None:
        """Change what the configuration says, here and on the workers; `keeps_successors` as in a policy."""
        answers_clients = not seams.is_in_process(self._scheduler)
        self.change_tasks(keeps_successors, answers_clients)
        if self.inlining.is_open and answers_clients and self._restore_gather is None:
            self._restore_gather = seams.override_gather(self._scheduler, self.inlining.value_of)
        self._of_successors.want(self.successors.is_open)
        self._of_inlining.want(self.inlining.is_open)
        if config.get_bool("low-latency-streams"):
            self.streams.open()

    def change_tasks(self, keeps_successors: bool, answers_clients: bool = True) -> None:
        """Change what is sent with tasks, to workers that tell that they listen."""
        if keeps_successors and config.get_bool("send-successors"):
            self.successors.open()
        limit = config.get_bytes("inline-limit")
        if limit:
            self.inlining.open(limit, answers_clients)
            self._scheduler.stream_handlers[inlining_worker.RESULT] = self._result_told
        if self._restore is None and (self.successors.is_open or self.inlining.is_open):
            self._restore = seams.override_messages(
                self._scheduler,
                message=lambda ts: self._guarded(self._message, ts),
                may_drop=lambda *copy: self._guarded(self.successors.may_drop, *copy) is not False,
            )

    def close(self) -> None:
        """Leave everything as it was found."""
        self.streams.close()
        self.successors.close()
        self.inlining.close()
        self._of_successors.want(False)
        self._of_inlining.want(False)
        if self._restore is not None:
            self._restore()
            self._restore = None
        handlers = self._scheduler.stream_handlers
        if handlers.get(inlining_worker.RESULT) == self._result_told:
            # Workers would lose their connection over a message that nobody takes.
            handlers[inlining_worker.RESULT] = _comes_too_late
        if self._restore_gather is not None:
            self._restore_gather()
            self._restore_gather = None

    def clear(self) -> None:
        """Forget all tasks."""
        self.successors.clear()
        self.inlining.clear()

    def worker_joined(self, address: str) -> None:
        """Note a worker that joined."""
        self.streams.joined(address)

    def worker_left(self, address: str) -> None:
        """Forget a worker, and what it had."""
        self.streams.left(address)
        self.inlining.left(address)
        self.successors.left(address)

    def told(self, topic: str, msg: Any) -> None:
        """Note that a worker tells what it understands."""
        if topic == successors_worker.TOPIC and isinstance(msg, dict):
            self.successors.listens(msg.get("worker", ""))
        elif topic == inlining_worker.TOPIC and isinstance(msg, dict):
            self.inlining.listens(msg.get("worker", ""))

    def changed(self, key: Key, start: str, finish: str) -> None:
        """Note a task's transition, whatever it is."""
        self.successors.changed(key, start, finish)
        self.inlining.changed(key, finish)

    def _message(self, ts: TaskState) -> dict[str, Any] | None:
        """Return what is sent in place of a task, if anything is; else send what comes before it."""
        message = self.successors.message(ts)
        if message is None and ts.processing_on is not None:
            self.inlining.before(ts, ts.processing_on)
        return message

    def _result_told(self, **message: Any) -> None:
        self._guarded(self.inlining.told, **message)


def _comes_too_late(**_: Any) -> None:
    """Take a result that nobody keeps any more."""
