"""The contract with distributed: each private name that we touch is still there."""

from __future__ import annotations

import inspect

import pytest
from distributed import scheduler, stealing
from distributed.stealing import WorkStealing

from ferroflow_dask.scheduler import _distributed


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in _distributed.REQUIRED.items() for name in names]
)
def test_the_name_exists(owner: type, name: str) -> None:
    found = getattr(owner, name)
    assert callable(found) or inspect.ismemberdescriptor(found)


def test_workers_answers_mean_what_we_take_them_for() -> None:
    assert _distributed.GIVEN_UP == stealing._WORKER_STATE_CONFIRM
    assert _distributed.STARTED == stealing._WORKER_STATE_REJECT


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (WorkStealing.move_task_confirm, ["self", "key", "state", "stimulus_id", "worker"]),
        (WorkStealing.move_task_request, ["self", "ts", "victim", "thief"]),
        (scheduler.Scheduler.decide_worker_non_rootish, ["self", "ts"]),
        (scheduler.Scheduler.is_rootish, ["self", "ts"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_what_we_override_takes_what_it_took(function: object, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters  # type: ignore[arg-type]


def test_placement_goes_through_the_instance() -> None:
    source = inspect.getsource(scheduler.SchedulerState._transition_waiting_processing)
    assert "self.is_rootish(ts)" in source
    assert "self.decide_worker_non_rootish(ts)" in source
