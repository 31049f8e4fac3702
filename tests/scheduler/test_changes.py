"""Registry of changes: every change to Dask is undone, in reverse order, even if some undo fails."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferroflow_dask.scheduler.changes import ATTEMPTS, CallChange, Changes, Guard, ItemChange


@pytest.fixture(autouse=True)
def _all_records(caplog: pytest.LogCaptureFixture) -> None:
    """Let `caplog` take all records: a cluster of another file may have raised the level of its handler."""
    caplog.handler.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see the logger, which a command in the same process may have configured."""
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


def test_item_change_undo_puts_the_earlier_value_back() -> None:
    items = {"a": 1}
    change = ItemChange("items['a']", items, "a", 2)
    assert not change.is_applied
    change.apply()
    assert (items, change.is_applied) == ({"a": 2}, True)
    change.undo()
    assert (items, change.is_applied) == ({"a": 1}, False)


def test_item_change_undo_removes_an_item_that_was_absent() -> None:
    items: dict[str, Any] = {}
    change = ItemChange("items['a']", items, "a", None)
    change.apply()
    assert items == {"a": None}
    change.undo()
    assert items == {}


def test_item_change_undo_restores_an_earlier_value_of_none() -> None:
    items: dict[str, Any] = {"a": None}
    change = ItemChange("items['a']", items, "a", 1)
    change.apply()
    change.undo()
    assert items == {"a": None}


def test_item_change_undo_keeps_what_another_plugin_has_put_there_since() -> None:
    items = {"a": "Dask's"}
    change = ItemChange("items['a']", items, "a", "ours")
    change.apply()
    items["a"] = "another plugin's"
    assert not change.is_applied
    change.undo()
    assert items == {"a": "another plugin's"}


def test_item_change_undo_does_not_bring_back_what_another_plugin_has_removed() -> None:
    items = {"a": "Dask's"}
    change = ItemChange("items['a']", items, "a", "ours")
    change.apply()
    del items["a"]
    change.undo()
    assert items == {}


def test_item_change_apply_twice_remembers_the_first_value() -> None:
    items = {"a": 1}
    change = ItemChange("items['a']", items, "a", 2)
    change.apply()
    change.apply()
    change.undo()
    assert items == {"a": 1}


def test_item_change_undo_twice_changes_nothing_more() -> None:
    items = {"a": 1}
    change = ItemChange("items['a']", items, "a", 2)
    change.apply()
    change.undo()
    items["a"] = 3
    change.undo()
    assert items == {"a": 3}


def test_item_change_overrides_a_method_of_an_instance() -> None:
    class Owner:
        def answer(self) -> str:
            return "Dask's"

    owner = Owner()
    change = ItemChange("Owner.answer", vars(owner), "answer", lambda: "ours")
    change.apply()
    assert owner.answer() == "ours"
    change.undo()
    assert owner.answer() == "Dask's"
    assert "answer" not in vars(owner)


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


def test_call_change_calls_each_function_once() -> None:
    calls: list[str] = []
    change = noted("a", calls)
    assert not change.is_applied
    change.undo()
    assert calls == []
    change.apply()
    change.apply()
    assert (calls, change.is_applied) == (["+a"], True)
    change.undo()
    change.undo()
    assert (calls, change.is_applied) == (["+a", "-a"], False)


def test_call_change_can_be_made_again_after_it_was_undone() -> None:
    calls: list[str] = []
    change = noted("a", calls)
    for _ in range(2):
        change.apply()
        change.undo()
    assert calls == ["+a", "-a"] * 2


def test_call_change_that_fails_halfway_counts_as_applied() -> None:
    calls: list[str] = []
    change = CallChange("a", Fallible("+a", calls, ZeroDivisionError()), Fallible("-a", calls))
    with pytest.raises(ZeroDivisionError):
        change.apply()
    assert change.is_applied
    change.undo()
    assert (calls, change.is_applied) == (["+a", "-a"], False)


def test_call_change_stays_applied_until_its_undo_succeeds() -> None:
    calls: list[str] = []
    change = noted("a", calls, ZeroDivisionError())
    change.apply()
    with pytest.raises(ZeroDivisionError):
        change.undo()
    assert change.is_applied
    change.undo()
    assert not change.is_applied


def test_repr_says_whether_a_change_is_applied() -> None:
    change = noted("dashboard page", [])
    assert repr(change) == "<CallChange dashboard page, not applied>"
    change.apply()
    assert repr(change) == "<CallChange dashboard page, applied>"


# Changes


def test_undo_all_undoes_in_reverse_order() -> None:
    calls: list[str] = []
    changes = Changes()
    for name in "abc":
        changes.make(noted(name, calls))
    assert changes.names == ["a", "b", "c"]
    changes.undo_all()
    assert calls == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert changes.names == []


def test_undo_all_restores_an_item_that_was_changed_twice() -> None:
    items, changes = {"a": "Dask's"}, Changes()
    changes.make(ItemChange("first", items, "a", "first"))
    changes.make(ItemChange("second", items, "a", "second"))
    changes.undo_all()
    assert items == {"a": "Dask's"}


def test_undo_all_without_changes_does_nothing() -> None:
    changes = Changes()
    changes.undo_all()
    assert changes.names == []


def test_undo_takes_one_change_out_of_the_registry() -> None:
    calls: list[str] = []
    changes = Changes()
    middle = noted("b", calls)
    for change in (noted("a", calls), middle, noted("c", calls)):
        changes.make(change)
    changes.undo(middle)
    assert changes.names == ["a", "c"]
    changes.undo_all()
    assert calls[3:] == ["-b", "-c", "-a"]


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
    for name in "abc":
        changes.make(noted(name, calls, ZeroDivisionError(), n_errors=2 * ATTEMPTS if name == "b" else 0))
    for expected in (["b"], ["b"], []):
        changes.undo_all()
        assert changes.names == expected
    assert calls[3:] == ["-c", *["-b"] * ATTEMPTS, "-a", *["-b"] * ATTEMPTS, "-b"]
    assert len(caplog.records) == 2 * ATTEMPTS


def test_undo_tries_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    changes = Changes()
    changes.make(noted("a", calls, ZeroDivisionError(), n_errors=ATTEMPTS - 1))
    changes.undo_all()
    assert changes.names == []
    assert len(caplog.records) == ATTEMPTS - 1


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


def guard_of(failures: list[str]) -> Guard:
    return Guard(lambda: failures.append("failed"))


def test_guard_returns_what_the_function_returns() -> None:
    failures: list[str] = []
    guard = guard_of(failures)

    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    guarded = guard(add)
    assert (guarded(1), guarded(1, b=2)) == (2, 3)
    assert (guarded.__name__, guarded.__doc__) == ("add", "Add.")
    assert (guard.error, failures) == (None, [])


@pytest.mark.parametrize("error", [ZeroDivisionError(), asyncio.CancelledError()], ids=repr)
def test_guard_takes_the_first_error_for_the_end_of_the_plugin(error: BaseException) -> None:
    failures: list[str] = []
    calls: list[str] = []
    guard = guard_of(failures)
    broken, whole = (
        guard(Fallible("broken", calls, error)),
        guard(Fallible("whole", calls), default="default"),
    )
    assert whole() == "whole"
    assert broken() is None
    assert guard.error is error
    assert (broken(), whole()) == (None, "default")
    assert calls == ["whole", "broken"]  # after a failure, nothing is called
    assert failures == ["failed"]


def test_guard_notes_an_error_before_it_reports_the_failure() -> None:
    seen: list[BaseException | None] = []
    guard = Guard(lambda: seen.append(guard.error))
    error = ZeroDivisionError()
    guard.fail(error)
    guard.fail(ValueError())
    assert (guard.error, seen) == (error, [error])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_guard_lets_interrupts_and_exits_pass(error: BaseException) -> None:
    failures: list[str] = []
    guard = guard_of(failures)
    guarded = guard(Fallible("stopped", [], error))
    with pytest.raises(type(error)):
        guarded()
    assert (guard.error, failures) == (None, [])
    assert guarded() == "stopped"


def test_guard_works_for_bound_methods() -> None:
    owner = SimpleNamespace(value=3)

    class Reader:
        def read(self, name: str) -> Any:
            return getattr(owner, name)

    guard = guard_of([])
    read = guard(Reader().read, default="nothing")
    assert read("value") == 3
    assert read("missing") == "nothing"
    assert isinstance(guard.error, AttributeError)
