"""The contract with distributed: each private name that we touch is still there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest
from dask.array.core import concatenate3
from dask.array.rechunk import old_to_new
from dask.dataframe import dispatch, multi
from dask.dataframe import shuffle as frame_shuffle
from dask.dataframe.dask_expr import _merge as expressions_of_joins
from dask.dataframe.dask_expr import _shuffle as expressions
from distributed import scheduler, stealing
from distributed.shuffle import _arrow, _core, _merge, _rechunk, _shuffle
from distributed.stealing import WorkStealing

from ferroflow_dask.bundling import plain_shuffles, shuffles
from ferroflow_dask.scheduler import _distributed

#: The functions of P2P tasks.
_TRANSFERS = (
    _shuffle.shuffle_transfer,
    expressions._shuffle_transfer,
    _rechunk.rechunk_transfer,
    expressions_of_joins.create_assign_index_merge_transfer(),
)
_UNPACKS = (_shuffle.shuffle_unpack, _rechunk.rechunk_unpack, _merge.merge_unpack)


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
        (
            scheduler.Scheduler._add_to_memory,
            ["self", "ts", "ws", "recommendations", "client_msgs", "type", "typename"],
        ),
        (
            scheduler.Scheduler._propagate_erred,
            [
                "self",
                "ts",
                "worker",
                "cause",
                "exception",
                "traceback",
                "exception_text",
                "traceback_text",
            ],
        ),
        (
            scheduler.Transition,
            ["key", "start", "finish", "recommendations", "stimulus_id", "timestamp"],
        ),
        (scheduler.TaskGroup.add_duration, ["self", "action", "start", "stop"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_what_we_override_takes_what_it_took(function: object, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters  # type: ignore[arg-type]


def test_placement_goes_through_the_instance() -> None:
    source = inspect.getsource(scheduler.SchedulerState._transition_waiting_processing)
    assert "self.is_rootish(ts)" in source
    assert "self.decide_worker_non_rootish(ts)" in source


# P2P shuffles, which plain tasks replace


def test_p2p_has_the_functions_that_plain_tasks_replace() -> None:
    assert {function.__name__ for function in _TRANSFERS} == shuffles.TRANSFERS.keys()
    assert {function.__name__ for function in _UNPACKS} == shuffles.UNPACKS.keys()
    assert all(function.__module__.startswith(shuffles._MODULES) for function in (*_TRANSFERS, *_UNPACKS))


@pytest.mark.parametrize("function", [*_TRANSFERS, *_UNPACKS], ids=lambda one: one.__name__)
def test_the_identifiers_of_shuffles_are_where_we_read_them(function: Callable[..., object]) -> None:
    names, name = [*inspect.signature(function).parameters], function.__name__
    if name in shuffles.TRANSFERS:
        assert names[shuffles.TRANSFERS[name]] == "id"
    else:
        found = [names[i] for i in shuffles.UNPACKS[name]]
        assert found == (["id"] if len(found) == 1 else ["shuffle_id_left", "shuffle_id_right"])


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (expressions._shuffle_transfer, ["input", "id", "input_partition"]),
        (_rechunk.rechunk_transfer, ["input", "id", "input_chunk"]),
        (
            expressions_of_joins.create_assign_index_merge_transfer(),
            ["df", "index", "name", "npartitions", "id", "input_partition", "index_merge"],
        ),
        (_shuffle.shuffle_unpack, ["id", "output_partition", "barrier_run_id"]),
        (_rechunk.rechunk_unpack, ["id", "output_chunk", "barrier_run_id"]),
        (
            _merge.merge_unpack,
            [
                *("shuffle_id_left", "shuffle_id_right", "output_partition", "barrier_left", "barrier_right"),
                *plain_shuffles._MERGE_OPTIONS,
            ],
        ),
        (_arrow.check_dtype_support, ["meta_input"]),
        (_arrow.convert_shards, ["shards", "meta", "partition_column", "drop_column"]),
        (old_to_new, ["old_chunks", "new_chunks"]),
        (concatenate3, ["arrays"]),
        (expressions._select_columns_or_index, ["df", "columns_or_index"]),
        (expressions._is_numeric_cast_type, ["dtype"]),
        (frame_shuffle.partitioning_index, ["df", "npartitions", "cast_dtype"]),
        (multi.merge_chunk, ["lhs", "args", "result_meta", "kwargs"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parts_of_p2p_take_what_they_took(function: Callable[..., object], parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


def test_the_barriers_of_shuffles_have_the_attributes_that_we_read() -> None:
    assert "spec" in _core.P2PBarrierTask.__slots__
    frames = {one.name for one in fields(_shuffle.DataFrameShuffleSpec)}
    arrays = {one.name for one in fields(_rechunk.ArrayRechunkSpec)}
    assert frames >= {"id", "meta", "column", "drop_column"}
    assert arrays >= {"id", "old", "new"}
    # They distinguish shuffles of frames from rechunks.
    assert "old" not in frames
    assert "meta" not in arrays
    assert _arrow._INPUT_PARTITION_ID_COLUMN
    assert callable(dispatch.to_pyarrow_table_dispatch)
