"""Averages of prefixes: durations and sizes for tasks that handle other amounts of data than those before."""

from __future__ import annotations

import pytest
from dask._task_spec import Alias, DataNode, Task, TaskRef

from ferroflow_dask.bundling.averages import Averages, expected, size_class

#: Of 1 MiB in the mean, and of 64 MiB.
_SMALL, _LARGE = Averages(0.01, 8.0, 16.0, 2.0**20), Averages(0.4, 80.0, 160.0, 2.0**26)
BOTH = Averages(0.1, 44.0, 160.0, 2.0**26, {21: _SMALL, 27: _LARGE})


@pytest.mark.parametrize(
    ("nbytes", "place"), [(0, 15), (2**14, 15), (2**15, 16), (2**16 - 1, 16), (2**30, 31)]
)
def test_classes_are_powers_of_two_and_small_sizes_are_alike(nbytes: float, place: int) -> None:
    assert size_class(nbytes) == place


@pytest.mark.parametrize("nbytes", [2.0**20, 1.9 * 2**20])
def test_tasks_of_the_same_size_count(nbytes: float) -> None:
    assert BOTH.of_size(nbytes) is _SMALL


@pytest.mark.parametrize(
    ("nbytes", "like", "scale"), [(2.0**21, _SMALL, 2), (2.0**25, _LARGE, 1 / 2), (2.0**23, _LARGE, 1 / 8)]
)
def test_other_sizes_are_scaled_from_the_nearest_class(nbytes: float, like: Averages, scale: float) -> None:
    found = BOTH.of_size(nbytes)
    assert found.duration_s == pytest.approx(scale * like.duration_s)
    assert (found.nbytes, found.most_nbytes) == (scale * like.nbytes, scale * like.most_nbytes)


def test_durations_are_scaled_by_eight_at_most() -> None:
    assert BOTH.of_size(2.0**36).duration_s == 8 * _LARGE.duration_s
    assert BOTH.of_size(0.0).duration_s == _SMALL.duration_s / 8


def test_results_larger_than_their_inputs_do_not_grow_with_them() -> None:
    source = Averages(0.1, by_size={15: Averages(0.1, 2.0**20, 2.0**20, 0.0)})
    found = source.of_size(2.0**20)
    assert (found.nbytes, found.most_nbytes) == (2**20, 2**20)
    assert source.of_size(2.0**22).nbytes == 2**22  # it may hand its inputs on


def test_sizes_that_are_declared_are_not_scaled() -> None:
    found = BOTH.of_size(2.0**23, 1000.0)
    assert (found.nbytes, found.most_nbytes) == (1000, 1000)
    assert BOTH.of_size(2.0**20, 1000.0) is _SMALL  # measured of such tasks


@pytest.mark.parametrize(("declared", "most"), [(100.0, 100), (8.0, 16), (16.0, 16)])
def test_a_larger_declared_size_counts_if_sizes_are_unknown(declared: float, most: float) -> None:
    assert Averages(1.0, 8.0, 16.0).of_size(0.0, declared).most_nbytes == most


def _read(*keys: str) -> list[TaskRef]:
    return [TaskRef(key) for key in keys]


def test_sizes_are_followed_through_a_graph() -> None:
    tasks = [
        DataNode("data", 1),
        Task("load", int, *_read("data")),
        Alias("same", "load"),
        Task("half", int, *_read("same", "elsewhere")),
        Task("odd", int, *_read("half")),
        Task("end", int, *_read("odd", "half")),
    ]
    load = Averages(0.2, 2.0**20, 2.0**21)
    half = Averages(0.0, by_size={22: Averages(0.3, 2.0**19, 2.0**19, 2.0**21)})
    found = expected(
        tasks,
        [None, load, None, half, None, BOTH],
        [[], [0], [1], [2], [3], [3, 4]],
        [0, 0, 0, 2.0**20, 0, 0],
        {"end": 2.0**19},
        guess_s=0.5,
    )
    assert found.costs_s == [0, 0.2, 0, 0.3, 0.5, 0.01]
    assert found.nbytes == [0, 2**20, 2**20, 2**19, 0, 8]
    assert found.most_nbytes == [0, 2**21, 2**21, 2**19, 0, 16]
    assert found.size_classes == [15, 15, 15, 22, 15, 21]
    assert found.unknown == [4]
