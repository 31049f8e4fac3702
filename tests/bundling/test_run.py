"""Runs of bundles: whenever the event loop takes steps, each step runs once and no value is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from dask._task_spec import Task, TaskRef
from distributed import Reschedule
from distributed.utils import thread_state

from ferroflow_dask.bundling import run as module
from ferroflow_dask.bundling.deliveries import EXTENSION
from ferroflow_dask.bundling.results import LEFT
from ferroflow_dask.bundling.run import Run, Taken
from ferroflow_dask.bundling.sequence import ExecuteTasks, sequence_of

#: The thread needs less, so that a failing test ends [s].
_LONGEST_S = 20.0
#: What each step reads, `x` being an argument, and the steps that are exported.
SHAPES: dict[str, tuple[dict[str, str], str]] = {
    "chain": ({"a": "x", "b": "a", "c": "b", "d": "c", "e": "d", "f": "e"}, "cf"),
    "independent": ({"a": "", "b": "x", "c": "", "d": "", "e": "x", "f": ""}, "abcdef"),
    "fork": ({"a": "x", "b": "a", "c": "a", "d": "a", "e": "a", "f": "x a"}, "bcdef"),
    "join": ({"a": "", "b": "", "c": "", "d": "x", "e": "", "f": "a b c d e"}, "f"),
    "diamond": ({"a": "", "b": "a", "c": "a", "d": "b c", "e": "a d", "f": "x b"}, "ef"),
    "two chains": ({"a": "", "b": "a", "c": "b", "d": "", "e": "d", "f": "e"}, "cf"),
    "two": ({"a": "", "b": ""}, "ab"),
}


def bundle_of(
    shape: str, function: Callable[..., Any], delivered: str = "", functions: dict[str, Any] | None = None
) -> ExecuteTasks:
    reads, exports = SHAPES[shape]
    tasks = [
        Task(key, (functions or {}).get(key, function), key, *map(TaskRef, read.split()))
        for key, read in reads.items()
    ]
    return sequence_of(tasks, {"x": (0, None)}, [*exports], 1.0, [*delivered], returns_results=True)


def expected(shape: str) -> dict[str, Any]:
    values: dict[str, Any] = {"x": "argument"}
    for key, read in SHAPES[shape][0].items():
        values[key] = (key, *(values[one] for one in read.split()))
    return values


@dataclass
class Extension:
    """Stands for the worker's end: notes what the thread hands over."""

    delivered: dict[Any, Any] = field(default_factory=dict)
    failures: list[tuple[Taken, Any]] = field(default_factory=list)

    def started(self, run: Run) -> None:
        pass

    def ended(self, run: Run) -> None:
        pass

    def deliver(self, bundle: Any, values: dict[Any, tuple[Any, float, float]]) -> None:
        self.delivered |= {key: value for key, (value, _, _) in values.items()}

    def failed(self, run: Run, left: Taken, error: Any) -> None:
        self.failures.append((left, error))


@pytest.fixture(name="extension")
def _extension(monkeypatch: pytest.MonkeyPatch) -> Extension:
    extension = Extension()
    worker = SimpleNamespace(extensions={EXTENSION: extension}, active_threads={})
    monkeypatch.setattr(thread_state, "execution_state", {"worker": worker}, raising=False)
    return extension


@dataclass
class Interleaved:
    """Runs a bundle in a thread, line by line, in turns with the event loop."""

    run: Run
    outputs: Any = None
    #: Lines that the thread may execute before it stops.
    _budget: float = 0
    _is_dividing: bool = False
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._execute, daemon=True)
        self._thread.start()

    def _execute(self) -> None:
        self._go.acquire()
        sys.settrace(self._traced)
        try:
            self.outputs = self.run()
        except Reschedule as error:
            self.outputs = error
        finally:
            sys.settrace(None)
            self._is_over = True
            self._stopped.release()

    def _traced(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            self._budget -= 1
            holds_lock = self.run._lock.locked() and not self._is_dividing
            may_block = frame.f_code.co_name in ("_outputs", "_failed")
            while (self._budget < 0 and not holds_lock) or (may_block and self._is_dividing):
                self._stopped.release()
                self._go.acquire()
        return self._traced

    def advance(self, n_lines: float) -> None:
        """Let the thread execute some lines."""
        if not self._is_over:
            self._budget = n_lines
            self._go.release()
            assert self._stopped.acquire(timeout=_LONGEST_S), "the thread is blocked"

    def divide(self, act: Callable[[], Any], pause_at: int, n_lines: float) -> tuple[Any, bool]:
        """Divide the run; the thread executes some lines when the event loop comes to a line.

        Return the answer, and whether the event loop has come to this line.
        """
        left = pause_at

        def traced(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    self._is_dividing = self.run._lock.locked()
                    self.advance(n_lines)
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            return act(), left <= 0
        finally:
            sys.settrace(before)
            self._is_dividing = False


def moments(shape: str, share: str) -> Iterator[tuple[int, int, float]]:
    """Yield the line at which the thread is, that at which the event loop is, and how far the thread goes."""
    few = len(SHAPES[shape][0]) == 2
    for start in range(0, 50 if few else 100, 1 if few else 7):
        for pause_at in range(1, 45, 3 if share == "all" else 5):
            for n_lines in (5, 14, 1e9):
                yield start, pause_at, n_lines


def check(shape: str, interleaved: Interleaved, taken: Collection[Taken], ran: list[str]) -> None:
    """Run the steps that were taken, and compare all values."""
    extension, values = interleaved.run._extension, expected(shape)
    reads, exports = SHAPES[shape]
    outputs = interleaved.outputs
    assert not isinstance(outputs, Reschedule)
    found = {"x": "argument", **extension.delivered}
    for one in taken:
        found |= {key: value for key, (value, _, _) in one.values.items()}
    left = {key for one in taken for key in one.steps}
    for key in sorted(left):
        for read in reads[key].split():
            assert read in found, f"{key} reads {read}, which is nowhere"
        ran.append(key)
        found[key] = (key, *(found[read] for read in reads[key].split()))
    assert sorted(ran) == sorted(reads)
    assert found == {key: values[key] for key in found}
    added = [key for one in taken for key in one.read]
    for key, output in zip(exports, outputs, strict=False):
        assert output == (LEFT if key in left else values[key])
    assert len(outputs) == len(exports) + len(set(added) - {*exports})
    for key, output in zip(
        dict.fromkeys(key for key in added if key not in exports), outputs[len(exports) :], strict=False
    ):
        assert output == (LEFT if key in left else values[key])


@pytest.mark.parametrize("share", ["all", "free", "half"])
def test_values_are_handed_over_while_the_last_step_runs(share: str, extension: Extension) -> None:
    handed_over: list[Any] = []

    def last(key: str) -> Any:
        handed_over.append(run.take(share))
        return (key,)

    bundle = bundle_of("two", lambda key: (key,), "ab", {"b": last})
    run = Run(bundle, ["argument"])
    assert run() == (("a",), ("b",))
    ((value, start_s, stop_s),) = [left.values["a"] for left in handed_over if not left.steps]
    assert value == ("a",)
    assert start_s <= stop_s
    assert run.take(share) is None


@pytest.mark.parametrize("share", ["all", "free", "half"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_runs_once_at_whatever_line_the_run_is_divided(
    shape: str, share: str, extension: Extension
) -> None:
    n_divided = 0
    for start, pause_at, n_lines in moments(shape, share):
        ran: list[str] = []

        def step(key: str, *values: Any, ran: list[str] = ran) -> Any:
            ran.append(key)
            return key, *values

        extension.delivered, extension.failures = {}, []
        interleaved = Interleaved(Run(bundle_of(shape, step), ["argument"]))
        interleaved.advance(start)
        first, _ = interleaved.divide(partial(interleaved.run.take, share), pause_at, n_lines)
        interleaved.advance(n_lines)
        second = interleaved.run.take("half")
        interleaved.advance(1e9)
        taken = [one for one in (first, second) if one is not None]
        check(shape, interleaved, taken, ran)
        n_divided += any(one.steps for one in taken)
    # A chain has no free steps, and whole components of these are more than half.
    assert n_divided or (share == "half" and shape in ("chain", "join", "diamond", "two"))
