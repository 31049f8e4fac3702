"""ferroflow's policy: earliest finish time at once, stealing when a worker runs dry.

Placement considers the holders of a task's inputs and the least loaded worker of each kind, which is
enough: no other worker has a thread for it earlier (StarPU's `dmda`; Augonnet et al. 2011). Where only
averages are known of durations, a busy worker that lacks more of the inputs must gain a task's length.
Stealing moves half of the surplus by time, as randomised work stealing does by count (Blumofe and
Leiserson 1999; Berenbrink et al. 2003), the cheapest to move first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ferroflow_dask.policy.base import Policy
from ferroflow_dask.policy.events import (
    Event,
    GraphArrived,
    StealConfirmed,
    StealRefused,
    TaskFinished,
    TaskReady,
    WorkerIdle,
    WorkerJoined,
    WorkerLeft,
)
from ferroflow_dask.policy.instructions import (
    AssignTask,
    DeclineSteal,
    DivideTask,
    Instruction,
    Reason,
    SetPriority,
    StealTask,
)
from ferroflow_dask.policy.state import Key, TaskView, WorkerKey, WorkerView
from ferroflow_dask.policy.view import ClusterView

#: Victims that one idle worker tries, most loaded first, and tasks tried of each: they bound the cost of a
#: decision, not its quality, since the next event looks again.
_VICTIMS = 4
_TASKS = 64
#: Workers and tasks looked at to find these, among others that the idle worker may not take.
_LOOKED_AT = 16
_TASKS_LOOKED_AT = 256
#: Tasks that idle workers are given before the next look, shared among them: what bounds the time until
#: the last of them is served.
_MOVES = 96
#: Shorter tasks are run in the time that a steal takes of the scheduler and of the two workers [s].
_SHORTEST_S = 5e-4
#: Shorter tasks are stolen too from a worker whose first task takes so much longer than expected [s]: a
#: hundred times such a task. In Dask the next heartbeat corrects the average, then stealing moves them.
_STUCK_S = 100 * _SHORTEST_S
#: Data that move in this part of the duration of the task that reads them are free.
_FREE_PART = 1 / 200
#: What two workers may differ in load by, in one-way messages, before a short task goes elsewhere.
_MESSAGES = 3
#: A running bundle is late by so much at least [s], and so many times the expected duration of a step: on a
#: busy machine several times the expected duration is usual.
_LATE_S, _LATE = 0.05, 4.0
#: Time of the scheduler for a division [s]. A rest that ends before it could make one for each thread stays.
_DIVISION_S = 5e-4
#: Running bundles looked at for one idle worker.
_BUNDLES_LOOKED_AT = 256
#: Why a worker is chosen, and which one it was compared with.
_FINISHES = "finishes in {:.4g} s (queue {:.4g}, transfer {:.4g}, run {:.4g}), first of {}"
_FINISHES_BEFORE = _FINISHES + "; next best {} in {:.4g} s"
_STAYS = _FINISHES + "; {} in {:.4g} s is no reason to fetch more data to a busy worker"
#: Why a task is stolen, or not.
_ENDS = "ends in {:.4g} s instead of {:.4g} s"
_WOULD_END = "would end in {:.4g} s instead of {:.4g} s"
_WOULD_END_DATA = _WOULD_END + ", for data that take {:.4g} s"
#: Why a running bundle is divided.
_IS_LATE = "it takes {:.4g} s longer than expected"
_HAS_REST = "it runs for {:.4g} s more"
_DONE_SOON = "the victim is done in {:.4g} s; a steal takes {:.4g} s"


class StealingPolicy(Policy):
    """Place by earliest finish time, correct by stealing."""

    ignores = frozenset({TaskFinished, WorkerJoined, WorkerLeft, StealConfirmed, StealRefused})
    #: No other worker can start a task sooner than the one that holds or makes all of its inputs.
    keeps_successors = True

    def __init__(self) -> None:
        # Where the last task without inputs went.
        self._last: WorkerKey | None = None

    def handle(self, event: Event, view: ClusterView, now: float) -> Iterator[Instruction]:
        """Answer an event; see the module's docstring for how."""
        if isinstance(event, TaskReady):
            return iter(self._place(event.task, view))
        if isinstance(event, GraphArrived):
            return self._order(event.tasks)
        if isinstance(event, WorkerIdle):
            return self._serve(view.workers[event.worker], view, now)
        return iter(())

    @staticmethod
    def _order(tasks: Iterable[TaskView]) -> Iterator[Instruction]:
        # Tasks with a rank share out the places they have among themselves, so that tasks of others
        # in the same submission keep theirs.
        ranked = [task for task in tasks if task.rank_s is not None]
        places = sorted(int(task.priority[-1]) for task in ranked)
        for task, place in zip(_depth_first(ranked), places, strict=True):
            if place != task.priority[-1]:
                yield SetPriority(task.key, place)

    def _place(self, task: TaskView, view: ClusterView) -> tuple[Instruction, ...]:
        if not task.held and not task.is_guess and (neighbour := self._beside_the_last(task, view)):
            reason: Reason = "beside the task before, as both are short"
            return (AssignTask(task.key, neighbour.key, reason),)
        candidates = self._candidates(task, view)
        if task.is_bundle:  # Dask can neither spill the values inside a bundle nor pause it
            roomy = [one for one in candidates if one.is_running and not one.is_short_of_memory]
            candidates = roomy or candidates
        best = second = None
        n_candidates = 0
        # A busy worker that lacks more data than others gets a task only if that gains a task's length.
        # Averages are wrong by as much, and an idle worker steals. Data that take less time than a message
        # are free.
        most: float = task.input_bytes
        if not task.has_cost and task.held:
            most += view.latency_s * view.bandwidth - max(task.held.values())
        for worker in candidates:
            if not worker.is_running:
                continue
            n_candidates += 1
            load = worker.load
            missing = task.input_bytes - task.held.get(worker.key, 0) if task.input_bytes else 0
            transfer_s = view.transfer_s(task, worker.key) if missing or task.output_bytes else 0.0
            run_s = (task.cost_on(worker) if task.costs_s else task.cost_s) / worker.speed
            here_s = load[0] + transfer_s + run_s
            is_bet = missing > most and load[0]
            # Locality, load and memory break ties.
            finish = (here_s + (run_s if is_bet else 0.0), missing, *load[:2], worker.nbytes, load[2])
            if best is None or finish < best[0]:
                best, second = (finish, worker, here_s, transfer_s, run_s), best
            elif second is None or finish < second[0]:
                second = (finish, worker, here_s, transfer_s, run_s)
        if best is None:
            return ()
        finish, chosen, here_s, transfer_s, run_s = best
        if not task.held:
            self._last = chosen.key
        reason = (_FINISHES, here_s, finish[2], transfer_s, run_s, n_candidates)
        if second is not None:
            compared = _FINISHES_BEFORE if here_s <= second[2] else _STAYS
            reason = (compared, *reason[1:], second[1].key, second[2])
        return (AssignTask(task.key, chosen.key, reason),)

    @staticmethod
    def _candidates(task: TaskView, view: ClusterView) -> Iterable[WorkerView]:
        workers = view.workers
        if task.allowed is not None:
            return [workers[key] for key in task.allowed if key in workers]
        if not task.held:
            return view.least_loaded_for(task)
        candidates = [workers[key] for key in task.held if key in workers]
        is_free = task.input_bytes <= _FREE_PART * task.cost_s * view.bandwidth
        if view.queue_s and not (is_free or task.is_guess or task.has_cost):
            # Free threads get queued tasks at once. So a task delays nothing, by averages, if it ends where
            # its inputs are before the queue is empty.
            for worker in candidates:
                end_s = worker.load[0] + task.cost_s / worker.speed
                if end_s <= view.queue_s and worker.is_running and not worker.is_short_of_memory:
                    return candidates
        # A guessed duration is no reason to move data: until the first task of a prefix has finished, holders
        # of inputs keep the tasks that could not start at once elsewhere.
        may_wait = not (task.is_guess and candidates)
        for worker in view.least_loaded_for(task):
            if (may_wait or worker.has_free_thread) and worker not in candidates:
                candidates.append(worker)
        return candidates

    def _beside_the_last(self, task: TaskView, view: ClusterView) -> WorkerView | None:
        """Return where the last task without inputs went, if a short one may as well go there too.

        What needs neighbours' results finds them in one place then. It costs nothing as long as the worker
        is ahead of the others by less than the time that messages take.
        """
        worker = view.workers.get(self._last or "")
        if worker is None or not worker.is_running:
            return None
        if worker.is_full or worker.is_short_of_memory or not task.may_run_on(worker.key):
            return None
        least_s = min((other.wait_s for other in view.least_loaded()), default=0.0)
        if len(task.costs_s) > 1:
            return None  # where it runs matters more
        is_ahead = worker.wait_s + task.cost_s / worker.speed > least_s + _MESSAGES * view.latency_s
        return None if is_ahead else worker

    def _serve(self, thief: WorkerView, view: ClusterView, now: float) -> Iterator[Instruction]:
        has_stolen = False
        for instruction in self._steal(thief, view, now):
            has_stolen |= isinstance(instruction, StealTask)
            yield instruction
        if not has_stolen and view.divisible:
            yield from _divide(thief, view, now)

    def _steal(self, thief: WorkerView, view: ClusterView, now: float) -> Iterator[Instruction]:
        margin_s = view.steal_s
        n_tried = 0
        for victim in list(islice(view.crowded_from_most_loaded(), _LOOKED_AT)):
            if victim is thief:
                continue
            overrun_s = victim.overrun_s(now)
            if overrun_s < margin_s:  # the message that it has finished may be in flight
                overrun_s = 0.0
            free_s = victim.wait_s + overrun_s
            if free_s <= margin_s:
                reason: Reason = (_DONE_SOON, free_s, margin_s)
                yield DeclineSteal(victim.last_waiting.key, victim.key, thief.key, reason)
            elif moves := _moves(victim, thief, view, 0.0 if overrun_s > _STUCK_S else _SHORTEST_S):
                yield from self._steal_from(
                    victim, thief, moves, view, overrun_s=overrun_s, margin_s=margin_s
                )
            else:
                reason = "no task there may move here, and is long enough"
                yield DeclineSteal(victim.last_waiting.key, victim.key, thief.key, reason)
                continue  # the next one may have some
            n_tried += 1
            if n_tried == _VICTIMS or not thief.has_free_thread:
                break

    @staticmethod
    def _steal_from(
        victim: WorkerView,
        thief: WorkerView,
        moves: Sequence[TaskView],
        view: ClusterView,
        *,
        overrun_s: float,
        margin_s: float,
    ) -> Iterator[Instruction]:
        declined: DeclineSteal | None = None
        has_stolen = False
        for task in moves:
            if not victim.n_waiting:
                return
            transfer_s = view.transfer_s(task, thief.key)  # what was stolen before comes first
            victim_start_s = (victim.backlog_s - task.cost_s) / (victim.nthreads * victim.speed) + overrun_s
            victim_end_s = victim_start_s + task.cost_s / victim.speed
            thief_end_s = thief.wait_s + transfer_s + margin_s + task.cost_on(thief) / thief.speed
            # A free thread takes what ends there earlier. After that the victim must stay the later
            # one of the two, or work would only change sides: so half of the surplus moves, by time.
            if thief_end_s >= (victim_end_s if thief.has_free_thread else victim_start_s):
                if not thief.has_free_thread:
                    return
                reason: Reason = (_WOULD_END, thief_end_s, victim_end_s)
                if transfer_s:
                    reason = (_WOULD_END_DATA, thief_end_s, victim_end_s, transfer_s)
                declined = declined or DeclineSteal(task.key, victim.key, thief.key, reason)
                continue  # another may be shorter here, or longer there
            has_stolen = True
            yield StealTask(task.key, victim.key, thief.key, (_ENDS, thief_end_s, victim_end_s))
        if declined is not None and not has_stolen:
            yield declined


def _divide(thief: WorkerView, view: ClusterView, now: float) -> Iterator[Instruction]:
    """Ask for steps of the bundle that will run longest, if it is late or if its rest is worth a steal."""
    best: tuple[float, TaskView, WorkerView] | None = None
    least_s = 2 * (view.steal_s + _DIVISION_S * view.n_threads)
    for key, may_halve in islice(view.divisible.items(), _BUNDLES_LOOKED_AT):
        task, worker = view.assigned[key]
        if not task.has_started or not task.may_run_on(thief.key):
            continue
        left_s = task.started_at + task.cost_s / worker.speed - now
        if left_s < -max(_LATE_S, _LATE * task.cost_s / task.n_steps):
            # A late task will probably run on for as long as it has run.
            reason: Reason = (_IS_LATE, -left_s)
            yield DivideTask(key, worker.key, thief.key, "free", reason)
            return
        if may_halve and left_s > least_s and (best is None or left_s > best[0]):
            best = left_s, task, worker
    # Divisions that are under way may be for this thread.
    if best is not None and len(view.dividing) < view.n_idle:
        left_s, task, worker = best
        yield DivideTask(task.key, worker.key, thief.key, "half", (_HAS_REST, left_s))


def _moves(victim: WorkerView, thief: WorkerView, view: ClusterView, shortest_s: float) -> list[TaskView]:
    """Return the last waiting tasks of a victim that a thief may take, cheapest to move first."""
    n_most = max(1, _MOVES // max(1, view.n_idle))
    last = islice(victim.waiting_from_last(), _TASKS_LOOKED_AT)
    found = (task for task in last if _may_move(task, thief, shortest_s))
    # Of equal ones, the last comes first.
    moves = sorted(islice(found, min(_TASKS, 4 * n_most)), key=lambda task: view.transfer_s(task, thief.key))
    return moves[:n_most]


def _may_move(task: TaskView, thief: WorkerView, shortest_s: float) -> bool:
    return task.is_movable and task.cost_s >= shortest_s and task.may_run_on(thief.key)


def _depth_first(tasks: Sequence[TaskView]) -> Iterator[TaskView]:
    """Yield tasks after what they depend on, highest upward rank first, but each branch to its end.

    By rank alone a graph would be run level by level, and hold a result for each of its branches.
    """
    by_key = {task.key: task for task in tasks}
    followers: dict[Key, list[TaskView]] = {key: [] for key in by_key}
    n_missing = {}
    for task in tasks:
        needed = [key for key in task.dependencies if key in by_key]
        n_missing[task.key] = len(needed)
        for key in needed:
            followers[key].append(task)
    stack = _last_is_first(task for task in tasks if not n_missing[task.key])
    while stack:
        task = stack.pop()
        yield task
        for follower in followers[task.key]:
            n_missing[follower.key] -= 1
        stack += _last_is_first(task for task in followers[task.key] if not n_missing[task.key])


def _last_is_first(tasks: Iterable[TaskView]) -> list[TaskView]:
    by_rank = sorted(tasks, key=lambda task: (-(task.rank_s or 0.0), task.priority))
    return by_rank[::-1]
