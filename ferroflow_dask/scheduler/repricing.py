"""Repricing: corrects the expected durations of tasks on workers when new durations are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dask.typing import Key

from ferroflow_dask.scheduler import _distributed
from ferroflow_dask.scheduler.cost_model import CostModel

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Factor by which an expectation must change before tasks are repriced, and the inverse of the part of them
#: that must have finished since the last time: so each finished task costs O(1), however an average varies.
_FACTOR = 1.5
_ONE_IN = 8


@dataclass(slots=True)
class _Account:
    """Tasks that are on workers, by group, and what they were last expected to take [s]; None for a guess."""

    price_s: float | None
    tasks: dict[str, set[TaskState]] = field(default_factory=dict)
    n_tasks: int = 0
    n_ended: int = 0


class Repricing:
    """Expected durations of the tasks of which only those of others of their group or name are known.

    A group of which tasks have ended has an account of its own. All others of a name share one.

    Parameters
    ----------
    costs : CostModel
    reprice : callable
        Told the key of a task on a worker and what it is now expected to take [s].
    """

    def __init__(self, costs: CostModel, reprice: Callable[[Key, float], None]) -> None:
        self._costs = costs
        self._reprice = reprice
        self._names: dict[str, _Account] = {}
        # Of each group on workers, whether it is the group's own or its name's.
        self._accounts: dict[str, _Account] = {}

    def sent(self, ts: TaskState) -> None:
        """Note that a task is on a worker."""
        group = ts.group.name
        account = self._accounts.get(group)
        if account is None:
            account = self._accounts[group] = self._account_for(ts)
            account.tasks[group] = set()
        tasks = account.tasks[group]
        if ts not in tasks:
            tasks.add(ts)
            account.n_tasks += 1

    def _account_for(self, ts: TaskState) -> _Account:
        if self._costs.has_group(ts):
            return _Account(self._costs.expected(ts))
        name = ts.prefix.name
        account = self._names.get(name)
        if account is None:
            account = self._names[name] = _Account(self._costs.expected(ts))
        return account

    def left(self, ts: TaskState) -> None:
        """Note that a task is on no worker any more."""
        group = ts.group.name
        account = self._accounts.get(group)
        if account is None or ts not in account.tasks[group]:
            return
        tasks = account.tasks[group]
        tasks.remove(ts)
        account.n_tasks -= 1
        if not tasks:
            del self._accounts[group]
            self._close(ts, account)

    def _close(self, ts: TaskState, account: _Account) -> None:
        """Take a task's group out of an account, and drop the account if it was the last one."""
        del account.tasks[ts.group.name]
        if not account.tasks and self._names.get(ts.prefix.name) is account:
            del self._names[ts.prefix.name]

    def finished(self, ts: TaskState) -> None:
        """Price those of the same group and name anew, if what is expected of them has changed by much."""
        account, of_name = self._accounts.get(ts.group.name), self._names.get(ts.prefix.name)
        if account is not None and account is of_name and self._costs.has_group(ts):
            account = self._open(ts, account)
        if account is not None and account is not of_name:
            self._ended(account, self._costs.expected(ts))
        if of_name is not None:
            self._ended(of_name, _distributed.prefix_average(ts))

    def _open(self, ts: TaskState, of_name: _Account) -> _Account:
        """Move a task's group from its name's account to one of its own; it has no price there yet."""
        group = ts.group.name
        tasks = of_name.tasks[group]
        of_name.n_tasks -= len(tasks)
        self._close(ts, of_name)
        account = self._accounts[group] = _Account(None, {group: tasks}, len(tasks))
        return account

    def _ended(self, account: _Account, now_s: float | None) -> None:
        account.n_ended += 1
        before_s = account.price_s
        if now_s is None:
            return
        if before_s is not None:
            has_moved = now_s > _FACTOR * before_s or _FACTOR * now_s < before_s
            if not has_moved or _ONE_IN * account.n_ended < account.n_tasks:
                return
        for tasks in account.tasks.values():
            for other in tasks:
                self._reprice(other.key, now_s)
        account.price_s, account.n_ended = now_s, 0

    def keys(self) -> list[Key]:
        """Return the tasks that are on workers."""
        return [ts.key for group, account in self._accounts.items() for ts in account.tasks[group]]

    def clear(self) -> None:
        """Forget all tasks."""
        self._names.clear()
        self._accounts.clear()
