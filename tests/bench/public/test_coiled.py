"""The suite coiled on a small working tree of the same layout."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
from distributed import Client, LocalCluster

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("xarray")

import pandas as pd
import xarray as xr

from ferroflow_dask import install
from ferroflow_dask.bench.public.answers import difference
from ferroflow_dask.bench.public.base import Clock, Options, Program, SkippedError
from ferroflow_dask.bench.public.coiled import SUITE
from ferroflow_dask.bench.public.coiled_data import open_zarr, read_parquet
from ferroflow_dask.bench.public.coiled_values import figures
from ferroflow_dask.exceptions import FerroflowError, UnknownNameError, UsageError

pytestmark = pytest.mark.cluster

UTILS_TEST = """
import dask.array as da
import pytest
from dask.datasets import timeseries

def wait(thing, client, timeout):
    raise AssertionError("is replaced")

def timeseries_of_size(n, *, seed=None):
    return timeseries(end="2000-01-02", freq="1h", partition_freq="12h", dtypes={"x": float}, seed=seed)

class Discards:
    def __setitem__(self, index, block):
        pass

def arr_to_devnull(array):
    return da.store(array, Discards(), lock=False, compute=False)

def run_up_to_nthreads(cluster_name, n):
    from .conftest import load_cluster_kwargs
    return pytest.mark.skipif(load_cluster_kwargs()[cluster_name]["n_workers"] > n, reason="too large")
"""

TEST_ARRAY = """
import dask.array as da
import pytest
from ..utils_test import arr_to_devnull, run_up_to_nthreads, wait

@run_up_to_nthreads("small_cluster", 8)
def test_random(small_client, new_array):
    wait(new_array((60, 60), chunks=30).sum(axis=0), small_client, 60)

def test_discards(small_client, new_array):
    left, right = new_array((60, 60), chunks=10), new_array((60, 60), chunks=10)
    wait(arr_to_devnull(left[1:, 1:] - right[:-1, :-1]), small_client, 60)

@run_up_to_nthreads("small_cluster", 0)
def test_too_large(small_client):
    pass

def test_fails(small_client):
    wait(da.ones(4).map_blocks(lambda block: 1 / 0, dtype=float), small_client, 60)

def test_skips(small_client):
    pytest.skip("too noisy")
"""

TEST_FUTURES = """
import dask.dataframe as dd
import pytest
from dask.distributed import as_completed, wait
from ..utils_test import timeseries_of_size
from ..utils_test import wait as wait_for

def slow(i):
    import time
    time.sleep(0.5)

def test_read(small_client):
    assert small_client.submit(sum, [1, 2]).result() == 3
    small_client.gather(small_client.map(abs, [-1, -2]))

def test_wait(small_client):
    wait(small_client.map(abs, range(-9, 0)))

def test_iterate(small_client):
    for future in as_completed(small_client.map(abs, range(5), pure=False)):
        pass

def test_first(small_client):
    for future in as_completed(small_client.map(slow, range(500), pure=False)):
        return

def test_frames(small_client, memory_multiplier, configure_shuffling):
    left, right = timeseries_of_size(1), timeseries_of_size(1)
    (left.x - right.x).sum().compute()

@pytest.mark.client("large")
def test_in_a_cloud(client):
    df = dd.read_parquet("s3://coiled-datasets/uber-lyft-tlc/", storage_options={"anon": True})
    wait_for(df.partitions[:2].set_index("PULocationID"), client, 60)
"""

TEST_WORK_STEALING = """
from coiled import Cluster
from distributed import Client
import ferroflow_dask
from ..utils_test import wait

def test_work_stealing_on_scaling_up(test_name_uuid, benchmark_all, cluster_kwargs, dask_env_variables):
    kwargs = cluster_kwargs["test_work_stealing_on_scaling_up"]
    with Cluster(name=test_name_uuid, environ=dask_env_variables, **kwargs) as cluster:
        with Client(cluster) as client:
            client.wait_for_workers(kwargs["n_workers"])
            with benchmark_all(client):
                in_charge = client.submit(lambda: 1).result() and ferroflow_dask.installed(client)
            client.submit(int, in_charge is not None).result()
"""

TEST_XARRAY = """
import fsspec
import pytest
import xarray as xr
from coiled import Cluster
from distributed import Client
from ..utils_test import wait

@pytest.fixture(scope="module")
def group_cluster(cluster_kwargs):
    with Cluster(**cluster_kwargs["group_cluster"]) as cluster:
        yield cluster

@pytest.fixture
def group_client(group_cluster, cluster_kwargs, benchmark_all, wait_for_workers):
    with Client(group_cluster) as client:
        group_cluster.scale(3)
        wait_for_workers(client, cluster_kwargs["group_cluster"]["n_workers"], timeout=60)
        client.restart()
        with benchmark_all(client):
            yield client

def test_store(group_client):
    url = "s3://noaa-nwm-retrospective-2-1-zarr-pds/rtout.zarr"
    ds = xr.open_zarr(fsspec.get_mapper(url, anon=True), consolidated=True)
    corner = ds.zwattablrt.isel(x=slice(0, 70), y=slice(0, 35), time=slice(0, 448))
    wait(xr.Dataset({"mean": corner.mean("time"), "largest": corner.max()}), group_client, 60)
"""

#: Starts a cluster of its own.
OWN = "test_work_stealing.py::test_work_stealing_on_scaling_up"

CLUSTERS = """
default: {package_sync: true}
small_cluster: {n_workers: 10}
group_cluster: {n_workers: 20}
test_work_stealing_on_scaling_up: {n_workers: 3}
"""

FILES = {
    "cluster_kwargs.yaml": CLUSTERS,
    "setup.cfg": "[tool:pytest]\naddopts = --no-such-option",
    "tests/__init__.py": "",
    "tests/conftest.py": "import no_such_package",
    "tests/utils_test.py": UTILS_TEST,
    "tests/benchmarks/__init__.py": "",
    "tests/benchmarks/test_array.py": TEST_ARRAY,
    "tests/benchmarks/test_futures.py": TEST_FUTURES,
    "tests/benchmarks/test_work_stealing.py": TEST_WORK_STEALING,
    "tests/benchmarks/test_xarray.py": TEST_XARRAY,
    "tests/benchmarks/test_spill.py": "import no_such_package",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working tree with tests that take milliseconds."""
    root = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def programs(checkout: Path) -> dict[str, Program]:
    """All programs by name."""
    found = {program.name: program for program in SUITE.programs(_options(checkout))}
    assert {str(file.relative_to(checkout)) for file in checkout.rglob("*") if file.is_file()} == set(FILES)
    return found


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of two workers."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _options(checkout: Path) -> Options:
    return Options(checkouts={"coiled": checkout}, is_full=True)


def _run(program: Program, client: Client) -> Any:
    with (clock := Clock()):
        return program.run(client, clock)


def test_a_test_is_a_program_and_files_come_in_the_order_of_the_suite(programs: dict[str, Program]) -> None:
    files = [name.partition("::")[0] for name in programs]
    assert list(dict.fromkeys(files)) == [
        "test_futures.py",
        "test_work_stealing.py",
        "test_array.py",
        "test_xarray.py",
    ]
    assert "test_array.py::test_random[compressible]" in programs
    assert {program.source for program in programs.values()} == {"coiled/benchmarks, BSD-3-Clause"}


def test_tests_that_are_always_skipped_have_a_reason(programs: dict[str, Program]) -> None:
    skipped = {name: program.skipped for name, program in programs.items() if program.skipped}
    assert skipped == {
        "test_array.py::test_too_large": "too large",
    }


def test_tests_that_take_minutes_run_with_full(programs: dict[str, Program], checkout: Path) -> None:
    quick = {
        program.name: program.skipped for program in SUITE.programs(Options(checkouts={"coiled": checkout}))
    }
    long = {name: reason for name, reason in quick.items() if reason != programs[name].skipped}
    assert long == {OWN: "takes minutes; --full runs it"}
    assert {name for name, program in programs.items() if program.timeout_s} == {OWN}


ANSWERS = {
    "test_futures.py::test_read": {"read": np.array([3, 1, 2])},
    "test_futures.py::test_wait": {"waited": [np.arange(9, 0, -1)], "completed": {"finished": 9}},
    "test_futures.py::test_iterate": {"completed": {"finished": 5}},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_values_that_are_waited_for_or_read_are_the_answer(
    name: str, programs: dict[str, Program], client: Client
) -> None:
    answer = _run(programs[name], client)
    assert answer.keys() == ANSWERS[name].keys()
    assert difference(answer, ANSWERS[name]) == ""


SEEDED = (
    "test_array.py::test_random[uncompressible]",
    "test_futures.py::test_frames[0.1-tasks]",
    "test_xarray.py::test_store",
)


@pytest.mark.parametrize("name", SEEDED)
def test_random_numbers_have_seeds_in_each_run(
    name: str, programs: dict[str, Program], client: Client
) -> None:
    first, second = (_run(programs[name], client) for _ in range(2))
    assert difference(first, second) == ""
    numbers = np.concatenate(
        [np.ravel(value) for value in [*first.get("waited", [[]])[0], *first.get("read", [])]]
    )
    assert np.isfinite(numbers).all()
    assert (numbers != 0).any()


def test_corners_of_an_array_that_is_discarded_are_computed(
    programs: dict[str, Program], client: Client
) -> None:
    first, second = (_run(programs["test_array.py::test_discards[uncompressible]"], client) for _ in range(2))
    assert difference(first, second) == ""
    assert [corner.shape for corner in first["corners"]] == [(9, 9), (9, 9)]
    client.run_on_scheduler(_check_empty)


def test_tasks_that_a_test_leaves_are_canceled(programs: dict[str, Program], client: Client) -> None:
    assert _run(programs["test_futures.py::test_first"], client) == {"completed": {"finished": 1}}
    client.run_on_scheduler(_check_empty)


def test_tables_of_a_cloud_are_random(programs: dict[str, Program], client: Client) -> None:
    first, second = (_run(programs["test_futures.py::test_in_a_cloud"], client) for _ in range(2))
    assert difference(first, second) == ""
    assert sum(partition["rows"] for partition in first["waited"][0]) == 100_000


def test_arrays_differ_by_the_parameter(programs: dict[str, Program], client: Client) -> None:
    full, half = (
        _run(programs[f"test_array.py::test_random[{name}]"], client)["waited"][0]
        for name in ("uncompressible", "compressible")
    )
    assert np.sum(half) < 0.8 * np.sum(full)


def test_nothing_is_left_after_a_run(programs: dict[str, Program], client: Client, checkout: Path) -> None:
    path, modules = list(sys.path), {name for name in sys.modules if name.split(".")[0] == "tests"}
    replaced = _replaced()
    _run(programs["test_array.py::test_random[compressible]"], client)
    assert sys.path == path
    assert {name for name in sys.modules if name.split(".")[0] == "tests"} == modules
    assert _replaced() == replaced
    assert not list(checkout.rglob("__pycache__"))
    client.run_on_scheduler(_check_empty)


def _replaced() -> tuple[Any, ...]:
    return (
        xr.open_zarr,
        Client.gather,
        Client.restart,
        distributed.wait,
        sys.dont_write_bytecode,
        "coiled" in sys.modules,
    )


async def _check_empty(dask_scheduler: Any) -> None:
    import asyncio

    async with asyncio.timeout(30):
        while dask_scheduler.tasks:
            await asyncio.sleep(0.01)


def test_a_failed_test_raises_its_error(programs: dict[str, Program], client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        _run(programs["test_array.py::test_fails"], client)


def test_a_test_that_skips_itself_raises_the_reason(programs: dict[str, Program], client: Client) -> None:
    with pytest.raises(SkippedError, match=r"^too noisy$"):
        _run(programs["test_array.py::test_skips"], client)


def test_a_test_that_has_gone_raises(programs: dict[str, Program], client: Client, checkout: Path) -> None:
    file = checkout / "tests/benchmarks/test_array.py"
    file.write_text("")
    try:
        with pytest.raises(FerroflowError, match="ran no test"):
            _run(programs["test_array.py::test_skips"], client)
    finally:
        file.write_text(TEST_ARRAY)


def test_the_clock_runs_once(programs: dict[str, Program], client: Client) -> None:
    for name in ("test_futures.py::test_read", OWN):
        events: list[str] = []
        clock = Clock(lambda: events.append("start"), lambda: events.append("stop"))  # noqa: B023
        programs[name].run(client, clock)
        assert events == ["start", "stop"]
        assert clock.seconds > 0


def test_a_cluster_of_the_test_has_the_plugin_if_the_side_has_it(
    programs: dict[str, Program], checkout: Path
) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert _run(programs[OWN], client)["read"].tolist() == [1, 0]
        expected = {name: _run(programs[name], client) for name in SEEDED}
        install(client)
        assert _run(programs[OWN], client)["read"].tolist() == [1, 1]
        assert {
            name: difference(_run(programs[name], client), expected[name]) for name in SEEDED
        } == dict.fromkeys(SEEDED, "")


# Figures of large values


def _changed(array: Any, index: int, value: float) -> Any:
    changed = array.copy()
    changed[index] = value
    return changed


LARGE = np.random.default_rng(0).random(20_000)
FRAME = pd.DataFrame({"x": LARGE, "word": [f"word {n % 7}" for n in range(len(LARGE))]})
DIFFERENT = {
    "a wrong number": (LARGE, _changed(LARGE, 9, 2.0)),
    "a missing number": (LARGE, _changed(LARGE, 9, np.nan)),
    "numbers in another order": (LARGE, LARGE[::-1]),
    "another type": (LARGE, LARGE.astype("float32")),
    "a wrong number of a frame": (FRAME, FRAME.assign(x=_changed(LARGE, 9, 2.0))),
    "a wrong word": (FRAME, FRAME.replace({"word": {"word 3": "word 4"}})),
    "another index": (FRAME, FRAME.set_index(FRAME.index + 1)),
    "a missing row": (FRAME, FRAME[1:]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_figures_of_different_values_differ(case: str) -> None:
    left, right = map(figures, DIFFERENT[case])
    assert isinstance(left, dict)
    assert difference(right, left)
    assert difference(left, left) == ""


def test_figures_of_a_frame_do_not_depend_on_the_order_of_its_rows() -> None:
    assert difference(figures(FRAME.sample(frac=1, random_state=0)), figures(FRAME)) == ""


def test_small_values_stay() -> None:
    assert figures(7) == 7
    assert figures(LARGE[:9]).tolist() == LARGE[:9].tolist()


# Bad input


def test_data_without_a_replacement_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown Zarr store"):
        open_zarr("s3://no-such-store")
    with pytest.raises(UnknownNameError, match="unknown table"):
        read_parquet("s3://no-such-table")


def test_a_missing_checkout_is_refused() -> None:
    with pytest.raises(UsageError, match="add --checkout coiled=PATH"):
        SUITE.programs(Options())


def test_a_checkout_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without tests/__init__\.py; call: --checkout coiled=PATH"):
        SUITE.programs(_options(tmp_path))


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    for name in ("tests/__init__.py", "tests/utils_test.py", "cluster_kwargs.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "tests/benchmarks").mkdir()
    (tmp_path / "tests/benchmarks/test_join.py").write_text("import no_such_package")
    with pytest.raises(UsageError, match=r"cannot collect the tests of .*no_such_package"):
        SUITE.programs(_options(tmp_path))
