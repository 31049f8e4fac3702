"""Shapes after descriptions by others: their answers, and results that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from conftest import checked_client
from distributed import Client

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("xarray")
pytest.importorskip("flox")

from ferroflow_dask import install
from ferroflow_dask.bench.public import geospatial, workloads
from ferroflow_dask.bench.public.base import Clock, Options
from ferroflow_dask.bench.public.shapes import SUITE
from ferroflow_dask.bench.public.workloads import program_of
from ferroflow_dask.bench.workloads import WORKLOADS
from ferroflow_dask.exceptions import ResultError

PROGRAMS = {program.name: program for program in SUITE.programs(Options())}
GEOSPATIAL = ("zonal_average", "climatology", "rechunking", "circulation")


@pytest.fixture(scope="module", params=["stock", "plugin"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with checked_client(2, processes=False, set_as_default=False) as client:
        if request.param == "plugin":
            install(client)
        yield client


@pytest.mark.cluster
@pytest.mark.parametrize(
    "name", ["merge", "tree", "scale_up", "double_diff", "dataframe_shuffle", *GEOSPATIAL]
)
def test_an_answer_is_the_expected_one(name: str, client: Client) -> None:
    program, clock = PROGRAMS[name], Clock()
    assert not program.differs(program.run(client, clock), program.expected())
    assert clock.seconds > 0


def test_there_is_each_shape_once() -> None:
    names = [program.name for program in SUITE.programs(Options(is_full=True))]
    assert len(names) == len(set(names)) == len(PROGRAMS)
    assert {"wordbag", "straggler", "rechunk", "dataframe_merge", *GEOSPATIAL} < set(names)
    assert all(not program.skipped and program.source for program in PROGRAMS.values())


@pytest.mark.cluster
def test_a_wrong_result_is_said(client: Client) -> None:
    def build(request: Any) -> Any:
        return replace(WORKLOADS["tree"].build(request), check=check)

    def check(_: Any) -> None:
        raise ResultError("result 3 is 4; it must be 5")

    workload = replace(WORKLOADS["tree"], build=build)
    program = program_of(workload, workload.arguments({}, is_small=True))
    answer = program.run(client, Clock())
    assert program.differs(answer, program.expected()) == "result 3 is 4; it must be 5"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("more", "problem"), [(0, ""), (-1, "executed 11 ops of 12"), (1, "executed 13 ops of 12")]
)
def test_ops_are_counted(more: int, problem: str, client: Client) -> None:
    def build(request: Any) -> Any:
        instance = WORKLOADS["wide"].build(request)
        return replace(instance, count_executed=lambda client: instance.count_executed(client) + more)

    workload = replace(WORKLOADS["wide"], build=build)
    program = program_of(workload, workload.arguments({}, is_small=True), lowering="root a task, one name")
    answer = program.run(client, Clock())
    assert program.differs(answer, program.expected()) == problem
    assert program.fields(answer) == {
        "ops": 12,
        "executed": 12 + more,
        "bound_s": pytest.approx(0.75 * 0.001 * 12, rel=1),
    }


def test_a_program_without_its_packages_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "find_spec", lambda _: None)
    monkeypatch.setattr(geospatial, "find_spec", lambda _: None)
    skipped = {program.name: program.skipped for program in SUITE.programs(Options()) if program.skipped}
    assert skipped["dataframe_merge"] == "needs pandas, pyarrow"
    assert skipped["circulation"] == "needs pandas, xarray"
    assert "rechunking" not in skipped


# Geospatial answers on inputs whose result is plain


def test_a_climatology_smooths_one_day_over_its_neighbours() -> None:
    series = np.zeros((2 * 8 * 4, 1, 1))
    series[[3 * 4, (8 + 3) * 4]] = 4.0  # hour 0 of day 3 in both years
    means = geospatial._smoothed_means(series, days=8, window=5).reshape(8, 4)
    assert means[:, 0].tolist() == [0, 0, 1, 2, 1, 0, 0, 0]
    assert not means[:, 1:].any()


def test_a_wave_carries_momentum_only_where_its_winds_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    longitude = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    waves = {0: np.sin(longitude) + 5, 1: np.sin(longitude), 2: np.cos(longitude), 3: -np.sin(longitude)}

    def field(_: str, shape: tuple[int, ...], chunks: tuple[int, ...], *, index: int) -> Any:
        return da.from_array(np.broadcast_to(waves[index], shape), chunks)

    monkeypatch.setattr(geospatial, "_field", field)
    answer = geospatial._circulation("", days=1, steps=2, side=16).compute(scheduler="sync")
    expected = {"U": 5, "V": 0, "W": 0, "T": 0, "UV": 0.5, "VT": -0.5, "UW": 0}
    assert set(answer) == set(expected)
    for name, value in expected.items():
        assert answer[name].to_numpy() == pytest.approx(np.full((1, 2, 16), value))


def test_zones_have_the_mean_of_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = np.arange(2 * 16.0).reshape(2, 4, 4)
    monkeypatch.setattr(geospatial, "_field", lambda _, shape, chunks: da.from_array(cells, (1, 4, 4)))
    zones = geospatial._zones(4, 3)
    answer = geospatial._zonal_average("", times=2, side=4, zones=3).compute(scheduler="sync")
    for zone in np.unique(zones):
        assert answer[0, zone] == cells[0][zones == zone].mean()
