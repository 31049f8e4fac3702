"""Registry of changes: every change to Dask is undone, in reverse order, even if some undo fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from ferroflow_dask.scheduler.changes import ATTEMPTS, CallChange, Changes, Guard, ItemChange


@pytest.fixture(autouse=True)
def _all_records(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see all records.

    A cluster of another file may have raised the level of its handler, and a command in the same process may
    have configured the logger.
    """
    caplog.handler.setLevel(logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("ferroflow_dask"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("ferroflow_dask"), "disabled", False)


class Fallible:
    """Notes what is called in a list shared with others; raises a given error the first `n_errors` times."""

    def __init__(
        self, name: str, calls: list[str], error: BaseException | None = None, n_errors: int = 1
    ) -> None:
        self.name, self.calls, self.error, self.n_errors = name, calls, error, n_errors

    def __call__(self, *_: Any) -> str:
        self.calls.append(self.name)
        if self.error is not None and self.n_errors > 0:
            self.n_errors -= 1
            raise self.error
        return self.name


def noted(name: str, calls: list[str], error: BaseException | None = None, n_errors: int = 1) -> CallChange:
    """Return a change that notes `+name` when it is made and `-name` when it is undone, which may fail."""
    return CallChange(name, Fallible(f"+{name}", calls), Fallible(f"-{name}", calls, error, n_errors))


# ItemChange


@pytest.mark.parametrize("before", [{"a": 1}, {}, {"a": None}], ids=["a value", "nothing", "none"])
def test_item_change_undo_restores_what_was_there(before: dict[str, Any]) -> None:
    items = dict(before)
    change = ItemChange("items['a']", items, "a", 2)
    assert not change.is_applied
    change.apply()
    change.apply()  # which remembers the first value
    assert (items, change.is_applied) == ({"a": 2}, True)
    change.undo()
    assert (items, change.is_applied) == (before, False)
    items["a"] = 3
    change.undo()
    assert items == {"a": 3}


@pytest.mark.parametrize("meanwhile", [{"a": "another plugin's"}, {}], ids=["replaced", "removed"])
def test_item_change_undo_keeps_what_another_plugin_has_done_since(meanwhile: dict[str, str]) -> None:
    items = {"a": "Dask's"}
    change = ItemChange("items['a']", items, "a", "ours")
    change.apply()
    items.pop("a")
    items |= meanwhile
    assert not change.is_applied
    change.undo()
    assert items == meanwhile


def test_item_change_recognizes_another_bound_method_of_the_same_object() -> None:
    class Ours:
        def handle(self) -> None: ...

    ours, items = Ours(), {"handler": print}
    change = ItemChange("handler", items, "handler", ours.handle)
    change.apply()
    items["handler"] = ours.handle  # each access makes a new object
    assert change.is_applied
    change.undo()
    assert items == {"handler": print}


def test_item_change_does_not_take_an_equal_number_or_array_for_its_own() -> None:
    number, array = 2.5e100, np.arange(3)
    items: dict[str, Any] = {"number": 1.0, "array": None}
    changes = [ItemChange(key, items, key, value) for key, value in (("number", number), ("array", array))]
    for change in changes:
        change.apply()
    assert all(change.is_applied for change in changes)
    items |= {"number": float("2.5e100"), "array": array.copy()}
    assert not any(change.is_applied for change in changes)
    for change in changes:
        change.undo()
    assert items["number"] == number
    assert items["array"] is not None


# CallChange


def test_call_change_calls_each_function_once_each_time_that_it_is_made() -> None:
    calls: list[str] = []
    change = noted("a", calls)
    assert repr(change) == "<CallChange a, not applied>"
    change.undo()
    assert calls == []
    for n in (0, 1):
        change.apply()
        change.apply()
        assert (calls, change.is_applied) == (["+a", "-a"] * n + ["+a"], True)
        change.undo()
        change.undo()
        assert (calls, change.is_applied) == (["+a", "-a"] * (n + 1), False)


# Changes


def test_undo_takes_one_change_out_and_undo_all_the_others_in_reverse_order() -> None:
    calls: list[str] = []
    changes = Changes()
    middle = noted("b", calls)
    for change in (noted("a", calls), middle, noted("c", calls)):
        changes.make(change)
    assert changes.names == ["a", "b", "c"]
    changes.undo(middle)
    assert changes.names == ["a", "c"]
    changes.undo_all()
    assert calls == ["+a", "+b", "+c", "-b", "-c", "-a"]
    assert changes.names == []


def test_undo_all_takes_what_another_plugin_has_replaced_out_of_the_registry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    items, changes = {"a": "Dask's", "b": "Dask's"}, Changes()
    for key in items:
        changes.make(ItemChange(f"items[{key!r}]", items, key, "ours"))
    items["a"] = "another plugin's"
    changes.undo_all()
    assert items == {"a": "another plugin's", "b": "Dask's"}
    assert changes.names == []
    assert not caplog.records


@pytest.mark.parametrize("error", [ZeroDivisionError("b is broken"), asyncio.CancelledError()], ids=repr)
def test_undo_all_goes_on_after_a_failure_and_logs_it(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    changes = Changes()
    for name in "abc":
        changes.make(noted(name, calls, error if name == "b" else None, n_errors=ATTEMPTS))
    with caplog.at_level(logging.WARNING, logger="ferroflow_dask"):
        changes.undo_all()
    assert calls[3:] == ["-c", *["-b"] * ATTEMPTS, "-a"]
    assert changes.names == ["b"]
    assert [record.getMessage() for record in caplog.records] == [
        "ferroflow: b could not be restored"
    ] * ATTEMPTS
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error] * ATTEMPTS


def test_undo_all_called_again_repairs_what_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    changes = Changes()
    n_errors = 3 * ATTEMPTS - 1  # the last of its attempts succeeds
    for name in "abc":
        changes.make(noted(name, calls, ZeroDivisionError(), n_errors=n_errors if name == "b" else 0))
    for expected in (["b"], ["b"], []):
        changes.undo_all()
        assert changes.names == expected
    assert calls[3:] == ["-c", *["-b"] * ATTEMPTS, "-a", *["-b"] * 2 * ATTEMPTS]
    assert len(caplog.records) == n_errors


def test_undo_all_lets_keyboard_interrupts_pass_and_keeps_what_is_not_undone() -> None:
    calls: list[str] = []
    changes = Changes()
    for name in "abc":
        changes.make(noted(name, calls, KeyboardInterrupt() if name == "b" else None))
    with pytest.raises(KeyboardInterrupt):
        changes.undo_all()
    assert changes.names == ["a", "b"]
    changes.undo_all()
    assert changes.names == []
    assert calls[3:] == ["-c", "-b", "-b", "-a"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), asyncio.CancelledError()], ids=repr)
def test_make_undoes_a_change_that_fails_and_raises_the_error(error: BaseException) -> None:
    calls: list[str] = []
    changes = Changes()
    changes.make(noted("a", calls))
    with pytest.raises(type(error)):
        changes.make(CallChange("b", Fallible("+b", calls, error), Fallible("-b", calls)))
    assert calls == ["+a", "+b", "-b"]
    assert changes.names == ["a"]


def test_make_keeps_a_change_that_fails_and_cannot_be_undone(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    changes = Changes()
    broken = CallChange(
        "a",
        Fallible("+a", calls, ZeroDivisionError()),
        Fallible("-a", calls, ValueError("undo is broken"), ATTEMPTS),
    )
    with pytest.raises(ZeroDivisionError):
        changes.make(broken)
    assert changes.names == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        "ferroflow: a could not be restored"
    ] * ATTEMPTS
    changes.undo_all()
    assert changes.names == []


# Guard


def test_guard_returns_what_the_function_returns() -> None:
    failures: list[str] = []
    guard = Guard(lambda: failures.append("failed"))

    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    guarded = guard(add)
    assert (guarded(1), guarded(1, b=2)) == (2, 3)
    assert (guarded.__name__, guarded.__doc__) == ("add", "Add.")
    assert (guard.error, failures) == (None, [])


@pytest.mark.parametrize("error", [ZeroDivisionError(), asyncio.CancelledError()], ids=repr)
def test_guard_takes_the_first_error_for_the_end_of_the_plugin(error: BaseException) -> None:
    failures: list[BaseException | None] = []
    calls: list[str] = []
    guard = Guard(lambda: failures.append(guard.error))
    broken = guard(Fallible("broken", calls, error))
    whole = guard(Fallible("whole", calls), default="default")
    assert whole() == "whole"
    assert broken() is None
    assert guard.error is error
    assert (broken(), whole()) == (None, "default")
    guard.fail(ValueError())
    assert calls == ["whole", "broken"]  # after a failure, nothing is called
    assert (guard.error, failures) == (error, [error])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_guard_lets_interrupts_and_exits_pass(error: BaseException) -> None:
    failures: list[str] = []
    guard = Guard(lambda: failures.append("failed"))
    guarded = guard(Fallible("stopped", [], error))
    with pytest.raises(type(error)):
        guarded()
    assert (guard.error, failures) == (None, [])
    assert guarded() == "stopped"
