"""When it is done, what failed, why workers are idle and tasks are where they are: panels of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from html import escape
from itertools import islice
from typing import Any

from ferroflow_dask.dashboard.figure import Text, set_text
from ferroflow_dask.dashboard.idle import MEANINGS
from ferroflow_dask.dashboard.lanes import natural
from ferroflow_dask.dashboard.recording import WorkerLoad
from ferroflow_dask.dashboard.style import BLUE, GREY, RED, Html, table, task_link
from ferroflow_dask.policy import policy_name

_MOST_ROWS = 50
#: Rows of workers; of more, those that are idle come first.
_MOST_WORKERS = 100


class Overview(Text):
    """When it is done, and who schedules."""

    title = "Ferroflow"
    help = "When is it done? The time left is learned; four of five graphs should end in the interval."
    most_height = None

    def refresh(self) -> None:
        """Say what is the case."""
        recorder = self.recorder
        progress, workers = recorder.progress, recorder.workers()
        sample = recorder.samples[-1] if recorder.samples else None
        n_failed = len(recorder.failures)
        tiles = self._of_graph()
        each = recorder.n_threads // max(1, len(workers))
        tiles.append(("workers", f"{len(workers):,} × {each} thread{'s' if each != 1 else ''}"))
        if sample is not None:
            tiles.append(("threads at work", f"{sample.efficiency:.0%}"))
            tiles.append(("tasks/s", f"{sample.tasks_per_s:,.0f}"))
        tiles.append(("failed", Html(f'<b class="bad">{n_failed:,}</b>') if n_failed else "0"))
        shown = "".join(
            f"<div>{value if isinstance(value, Html) else f'<b>{escape(value)}</b>'}<span>{name}</span></div>"
            for name, value in tiles
        )
        part = progress.n_done / progress.n_tasks if progress.n_tasks else 0.0
        bar = f'<div style="width:{part:.1%};background:{BLUE}"></div>'
        self.note(self._who())
        self.write(f'<div class="tiles">{shown}</div><div class="progress">{bar}</div>')

    def _of_graph(self) -> list[tuple[str, str]]:
        recorder, progress = self.recorder, self.recorder.progress
        if progress.started_at is None:
            return [("nothing has run since this page was opened", "idle")]
        done = ("tasks done", f"{progress.n_done:,} of {progress.n_tasks:,}")
        if progress.ended_at is not None:
            predicted = "" if progress.predicted is None else f", predicted {progress.predicted}"
            taken = (f"taken{predicted}", f"{progress.ended_at - progress.started_at:.2f} s")
            return [taken, *self._of_stock(), done]
        left = progress.left(recorder.n_threads, recorder.time)
        if left is None:
            return [("time left", "not known yet"), done]
        value, _, interval = str(left).partition(" (")
        return [(f"left ({interval}", value), done]

    def _of_stock(self) -> list[tuple[str, str]]:
        seconds = self.recorder.stock_s
        return [] if seconds is None else [("as single tasks of Dask (simulated)", f"{seconds:.2f} s")]

    def _who(self) -> str:
        stealing = self.recorder.stealing
        if stealing is None:
            return "Dask schedules this cluster, until ferroflow_dask.install(client)."
        return f"ferroflow schedules this cluster (policy {policy_name(stealing.placement.policy)})."


class Workers(Text):
    """What each worker does, or why it does nothing."""

    title = "Workers"
    help = "Why is a worker idle? " + "; ".join(f"{word}: {meaning}" for word, meaning in MEANINGS.items())
    click = "Click a worker for its tasks and decisions."
    most_height = 400

    def refresh(self) -> None:
        """Bring the table up to date."""
        workers = sorted(self.recorder.workers(why_idle=True), key=lambda one: natural(one.name))
        idle = [worker for worker in workers if worker.idle is not None and not worker.n_running]
        words = Counter(worker.idle.word for worker in idle if worker.idle is not None)
        self.note(", ".join(f"{n:,} {word}" for word, n in words.most_common()))
        more = ""
        if len(workers) > _MOST_WORKERS:
            more = f'<div class="faint">… and {len(workers) - _MOST_WORKERS:,} more workers</div>'
            workers = sorted(workers, key=lambda worker: worker.n_running > 0)[:_MOST_WORKERS]
        longest_s = max((worker.remaining_s for worker in workers), default=0.0)
        self.write(f"{_workers_table(workers, longest_s)}{more}" if workers else "")


def _workers_table(workers: list[WorkerLoad], longest_s: float) -> str:
    heads = ("worker", "state", "run", "wait", "left", "CPU", "memory")
    lines = "".join(f"<th>{head}</th>" for head in heads)
    rows = []
    for worker in workers:
        kind = " gpu" if worker.kind == "gpu" else ""
        memory = "" if worker.memory_part is None else f"{worker.memory_part:.0%}"
        rows.append(
            f'<tr data-worker="{escape(worker.address)}"><td>{escape(worker.name)}{kind}</td>'
            f"<td>{_state(worker)}</td><td>{worker.n_running}/{worker.n_threads}</td>"
            f"<td>{worker.n_waiting:,}</td>"
            + _bar(f"{worker.remaining_s:.2f} s", worker.remaining_s / longest_s if longest_s else 0.0)
            + _bar(f"{worker.cpu:.0%}", worker.cpu)
            + _bar(memory, worker.memory_part or 0.0)
            + "</tr>"
        )
    return f"<table><tr>{lines}</tr>{''.join(rows)}</table>"


def _state(worker: WorkerLoad) -> str:
    if worker.idle is None:
        return "busy" if worker.n_running else "idle"
    words = escape(str(worker.idle))
    if not worker.is_running:
        return f'<span class="bad">{words}</span>'
    return f"busy, {words}" if worker.n_running else f'<span class="faint">{words}</span>'


def _bar(text: str, part: float) -> str:
    colour = f"color-mix(in srgb, {RED if part > 1.1 else BLUE if part > 0.01 else GREY} 35%, transparent)"
    return f'<td class="bar" style="--part:{min(1.0, part):.0%};--bar:{colour}">{text}</td>'


class Failures(Text):
    """Tasks that raised exceptions."""

    title = "Failed tasks"
    help = "What failed, and why? Tasks that need it do not run."
    click = "Click a task for its traceback."

    def refresh(self) -> None:
        """Bring the table up to date."""
        failures = self.recorder.failures[:_MOST_ROWS]
        rows = [
            (_clock(one.time), task_link(one.key), ", ".join(one.workers), one.error.strip().splitlines()[-1])
            for one in failures
        ]
        self.note(f"{len(self.recorder.failures):,}")
        self.write(table(("at", "task", "worker", "error"), rows) if rows else "")


class Bundles(Text):
    """Bundles and the tasks in them."""

    title = "Bundles"
    help = "Which short tasks run together, as one task of Dask?"
    click = "Click a bundle for its decisions."

    def make(self, options: dict[str, Any]) -> Any:
        """Return a table, newest first."""
        self._seen: Any = None
        return super().make(options)

    def refresh(self) -> None:
        """Bring the table up to date."""
        counts, n_noted = self.recorder.bundle_counts, self.recorder.n_decisions
        if (dict(counts), n_noted) == self._seen:
            return
        self._seen = dict(counts), n_noted
        created, split = counts.get("created", 0), counts.get("split", 0)
        told = f"{created:,} bundle{'s hold' if created != 1 else ' holds'} {counts.get('tasks', 0):,} tasks"
        self.note(f"{told}, {split:,} were split after errors" if split else told)
        rows = [
            (_clock(one.time), task_link(str(one.key)), one.reason)
            for one in islice(self.recorder.decisions_of("bundled"), _MOST_ROWS)
        ]
        self.write(table(("at", "bundle", "content"), rows) if rows else "")


class Decisions(Text):
    """The last decisions, with their reasons."""

    title = "Decisions"
    help = "Why did tasks go where they went? The last decisions."
    click = "Click a task for all about it."

    def make(self, options: dict[str, Any]) -> Any:
        """Return a table, newest first."""
        self._n_seen = -1
        return super().make(options)

    def refresh(self) -> None:
        """Bring the table up to date."""
        n_noted = self.recorder.n_decisions
        if n_noted != self._n_seen:
            self._n_seen = n_noted
            self.write(decisions_table(reversed(self.recorder.decisions(_MOST_ROWS)), has_keys=True))


class Features(Text):
    """The features of the plugin."""

    title = "Features"
    help = "Which features of the plugin are on, how often did they act, and why are others off?"
    most_height = 400

    def make(self, options: dict[str, Any]) -> Any:
        """Return a table, in the order of installation."""
        self._seen: Any = None
        return super().make(options)

    def refresh(self) -> None:
        """Bring the table up to date."""
        stealing = self.recorder.stealing
        on, off = ([], {}) if stealing is None else (stealing.features, stealing.off)
        rows = [(one.name, one.summary, _counts(one.counts())) for one in on]
        rows += [(name, f"off: {reason}", "") for name, reason in off.items()]
        if rows != self._seen:
            self._seen = rows
            self.note(f"{len(on):,} on, {len(off):,} off")
            self.write(table(("feature", "effect", "counts"), rows) if rows else "")


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in values.items())


def decisions_table(decisions: Any, *, has_keys: bool) -> str:
    """Return decisions as a table, with or without the tasks that they are about."""
    rows = [
        (
            _clock(one.time),
            *([task_link(str(one.key))] if has_keys else []),
            one.what,
            one.worker,
            one.reason,
        )
        for one in decisions
    ]
    heads = ("at", *(["task"] if has_keys else []), "decision", "worker", "reason")
    return table(heads, rows) if rows else ""


class Details(Text):
    """All about the task or the worker that was clicked."""

    title = "Selected"
    help = "Click a task or a worker anywhere on the page; click here to close."

    most_height = 300

    def make(self, options: dict[str, Any]) -> Any:
        """Return a text that is hidden until something is clicked."""
        if self.chosen is not None:
            self.chosen.on_change("data", lambda _name, _old, _new: self._show())
        return super().make(options)

    def refresh(self) -> None:
        """Do nothing: it is of the moment of the click, and the decisions are searched for it."""
        if self.chosen is None or not any(_chosen(self.chosen)):
            self.show(False)

    def _show(self) -> None:
        task, worker = _chosen(self.chosen)
        self.show(bool(task or worker))
        if task:
            self.note(Html(f'task {escape(task)} <a data-task="">close</a>'))
            set_text(self.content, self._of_task(task))
        elif worker:
            name = self.recorder.name_of(worker)
            self.note(Html(f'worker {escape(name)} <a data-task="">close</a>'))
            set_text(self.content, self._of_worker(worker))

    def _of_task(self, key: str) -> str:
        state = self.recorder.state_of(key)
        errors = [one for one in self.recorder.failures if one.key == key][:1]
        error = "".join(
            f'<div class="bad">{escape(one.error)}</div><pre>{escape(one.traceback)}</pre>' for one in errors
        )
        decisions = decisions_table(self.recorder.about(key), has_keys=False)
        none = '<div class="faint">No decision about it is known: Dask placed it, or it was long ago.</div>'
        return f"<div>{escape(state)}</div>{error}{decisions or none}"

    def _of_worker(self, address: str) -> str:
        load = next((load for load in self.recorder.workers(why_idle=True) if load.address == address), None)
        if load is None:
            return "<div>It has left.</div>"
        running = " ".join(task_link(key) for key in self.recorder.tasks_on(address, _MOST_ROWS))
        meaning = "" if load.idle is None else f" ({MEANINGS[load.idle.word]})"
        facts = f"<div>{_state(load)}{escape(meaning)} · {escape(address)}</div>"
        tasks = f"<div>tasks: {running}</div>" if running else ""
        last = decisions_table(self.recorder.about_worker(address, _MOST_ROWS), has_keys=True)
        return f"{facts}{tasks}{last}"


def _chosen(chosen: Any) -> tuple[str, str]:
    task, worker = (chosen.data[name][0] for name in ("task", "worker"))
    return str(task), str(worker)


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S.%f")[:-3]
