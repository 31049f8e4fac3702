"""Pytest plugin with which tests of coiled/benchmarks run on any cluster, without the checkout's conftest.

It has the fixtures of the conftest, and replaces the module `coiled`, which starts clusters in a cloud. A
test runs in the process that holds the client; the clock runs while the test function does. A test with
clusters of its own measures the part within `benchmark_all`.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import yaml
from distributed import Client, LocalCluster

from ferroflow_dask.bench.public.base import Clock
from ferroflow_dask.bench.public.coiled_data import get_mapper, open_zarr, read_parquet
from ferroflow_dask.bench.public.coiled_values import Values

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Of random numbers that have no seed of their own.
_SEED = 0
#: A machine with two cores, so that no test is left out as too small for the cluster.
_MACHINE = "m6i.large"
#: Neither settings nor plugins of the checkout, of this project or of the user; nothing is written.
_OPTIONS = ["-c", "/dev/null", "--noconftest", "--assert=plain", "--runxfail", "-s", "-q"]
_WITHOUT = ("cacheprovider", "warnings", "logging", "threadexception", "unraisableexception")
_OPTIONS += ["-p", __name__, *(f"-pno:{name}" for name in _WITHOUT)]


# Fixtures of the checkout's conftest


@pytest.fixture(scope="session")
def cluster_kwargs() -> dict[str, dict[str, Any]]:
    """Return the sizes of clusters by name."""
    described: dict[str, dict[str, Any]] = import_module("tests.conftest").load_cluster_kwargs()
    return described


@pytest.fixture(scope="session")
def dask_env_variables() -> dict[str, str]:
    """Return settings for a cloud."""
    return {}


@pytest.fixture(scope="session")
def github_cluster_tags() -> dict[str, str]:
    """Return labels for a cloud."""
    return {}


@pytest.fixture(params=["uncompressible", "compressible"])
def new_array(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that makes random arrays; in the second, every other number is 0."""
    if request.param == "uncompressible":
        random: Callable[..., Any] = da.random.random
        return random

    def every_other_is_zero(block: NDArray[np.float64]) -> NDArray[np.float64]:
        numbers = block.ravel()
        numbers[::2] = 0
        return numbers.reshape(block.shape)

    return lambda *arguments, **options: da.random.random(*arguments, **options).map_blocks(
        every_other_is_zero, dtype=float
    )


@pytest.fixture(params=[0.1, 1])
def memory_multiplier(request: pytest.FixtureRequest) -> float:
    """Return the size of a frame, in memories of the cluster."""
    multiplier: float = request.param
    return multiplier


@pytest.fixture(params=["tasks", "p2p"])
def configure_shuffling(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose how frames are shuffled."""
    with dask.config.set({"dataframe.shuffle.method": request.param}):
        yield


@pytest.fixture
def test_name_uuid(request: pytest.FixtureRequest) -> str:
    """Return a name for a cluster."""
    return str(request.node.name)


@pytest.fixture
def wait_for_workers() -> Callable[..., None]:
    """Return a function that waits for workers."""
    return lambda client, n_workers, timeout: client.wait_for_workers(n_workers, timeout=timeout)


# One run


class CoiledPlugin:
    """Pytest plugin for one run of pytest.

    Parameters
    ----------
    checkout : Path
    client : distributed.Client, optional
        Tests run on its cluster. Without one, tests are collected only.
    clock : Clock, optional
    """

    def __init__(self, checkout: Path, client: Client | None = None, clock: Clock | None = None) -> None:
        self._checkout, self._running, self._clock = checkout, client, clock
        self._values = Values()
        self._is_called = False
        #: Reason why pytest skips a test, or "", by the test's id.
        self.collected: dict[str, str] = {}
        #: What has failed.
        self.error: BaseException | None = None
        #: Why the test was skipped while it ran.
        self.skipped = ""
        #: Values of the test that ran.
        self.answer: dict[str, Any] = {}

    # Hooks of pytest

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Find tests that are always skipped."""
        for item in items:
            skips = [*item.iter_markers("skip")]
            skips += [mark for mark in item.iter_markers("skipif") if True in mark.args]
            reasons = [str(mark.kwargs.get("reason") or (*mark.args, "")[0]) for mark in skips]
            self.collected[item.nodeid] = reasons[0] or "skipped" if reasons else ""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Iterator[None]:
        """Run the clock around the test function, and keep its values."""
        assert self._clock is not None
        _forget()
        self._values.forget()
        self._is_called = True
        try:
            with nullcontext() if _measures_itself(item) else self._clock:
                yield
            self.answer = self._values.answer()
        finally:
            self._is_called = False
            self._values.release()

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """Keep an error of a test, of a fixture or of an import."""
        if self.error is None and call.excinfo is not None:
            self.error = call.excinfo.value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reason of a skip."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped = report.longrepr[2].removeprefix("Skipped: ")

    # Fixtures that need the client or the clock

    @pytest.fixture
    def client(self) -> Client | None:
        """Return the client of the running cluster, although the test names one of its own."""
        return self._running

    @pytest.fixture
    def small_client(self) -> Client | None:
        """Return the client of the running cluster."""
        return self._running

    @pytest.fixture
    def benchmark_all(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        """Return a context in which the clock runs, if the test asks for it."""
        clock = self._clock if _measures_itself(request.node) else None
        return lambda _client: clock or nullcontext()

    # Modules of the checkout

    @contextmanager
    def replacements(self) -> Iterator[None]:
        """Replace modules and functions that need a cloud, or that have no seed."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
                patch.delenv(name, raising=False)
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            patch.setattr(sys, "dont_write_bytecode", True)
            patch.setattr("xarray.open_zarr", open_zarr)
            patch.setattr("fsspec.get_mapper", get_mapper)
            patch.setattr("dask.dataframe.read_parquet", read_parquet)
            # Fixtures restart the workers for each run of a test; `coiled.run` does it once for all runs.
            patch.setattr(Client, "restart", lambda *_, **__: None)
            patch.setitem(vars(pytest.mark), "client", lambda *_, **__: lambda test: test)
            for name in _modules_of_tests():
                patch.delitem(sys.modules, name)
            patch.syspath_prepend(str(self._checkout))
            patch.setitem(sys.modules, "coiled", _module("coiled", Cluster=self._cluster))
            patch.setitem(sys.modules, "tests.conftest", self._conftest())
            try:
                utils_test = import_module("tests.utils_test")
                patch.setattr(utils_test, "timeseries_of_size", _seeded(utils_test.timeseries_of_size))
                self._values.replace(patch, utils_test)
                yield
            finally:
                for name in _modules_of_tests():
                    del sys.modules[name]

    def _conftest(self) -> ModuleType:
        always = pytest.mark.skipif(False, reason="")
        return _module(
            "tests.conftest",
            load_cluster_kwargs=self._cluster_kwargs,
            dump_cluster_kwargs=lambda *_: None,
            **{f"requires_p2p_{name}": always for name in ("memory", "rechunk", "shuffle")},
        )

    def _cluster_kwargs(self) -> dict[str, dict[str, Any]]:
        """Return the sizes of clusters: the file's for a test's own cluster, the running one's for others."""
        described = yaml.safe_load((self._checkout / "cluster_kwargs.yaml").read_text())
        n_workers = len(self._workers()) or 1
        return {
            name: {
                "n_workers": section["n_workers"] if name.startswith("test_") else n_workers,
                "worker_vm_types": [_MACHINE],
            }
            for name, section in described.items()
            if "n_workers" in section
        }

    def _workers(self) -> dict[str, Any]:
        return dict(self._running.scheduler_info()["workers"]) if self._running else {}

    def _cluster(self, *_: Any, n_workers: int, **__: Any) -> Any:
        """Return the running cluster to a fixture, and start a cluster of such workers for a test."""
        assert self._running is not None
        address = self._running.scheduler_info()["address"]
        if not self._is_called:
            return _RunningCluster(address)
        worker = next(iter(self._workers().values()))
        return LocalCluster(
            n_workers=n_workers,
            threads_per_worker=worker["nthreads"],
            memory_limit=worker["memory_limit"],
            processes=not address.startswith("inproc:"),
            dashboard_address="127.0.0.1:0",
        )


class _RunningCluster(str):
    """Address of a scheduler that goes on running."""

    __slots__ = ()

    def __enter__(self) -> _RunningCluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def scale(self, n: int) -> None:
        """Keep the workers, since tests ask for as many as there are."""


def run_pytest(plugin: CoiledPlugin, checkout: Path, tests: Sequence[str], *options: str) -> int:
    """Run pytest in this process; its output is discarded. Returns its exit status."""
    arguments = [*_OPTIONS, "--rootdir", str(checkout), *options, *(str(checkout / test) for test in tests)]
    with plugin.replacements(), redirect_stdout(io.StringIO()):
        return int(pytest.main(arguments, plugins=[plugin]))


def collect(checkout: str, *files: str) -> None:
    """Print the tests in files of a checkout as JSON: reasons of skips by id, and an error."""
    plugin = CoiledPlugin(Path(checkout))
    run_pytest(plugin, Path(checkout), files, "--collect-only")
    error = f"{type(plugin.error).__name__}: {plugin.error}" if plugin.error else ""
    print(json.dumps({"collected": plugin.collected, "error": error}))


def _measures_itself(item: Any) -> bool:
    return "benchmark_all" in inspect.signature(item.function).parameters


def _modules_of_tests() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "tests"]


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _forget() -> None:
    """Make a run independent of earlier ones in this process."""
    from dask.dataframe.dask_expr import _shuffle

    np.random.seed(_SEED)  # noqa: NPY002 -- tests use it
    da.random.seed(_SEED)
    # Not public. With the seeds of an earlier run, Dask would remember the quantiles of a frame.
    getattr(_shuffle, "divisions_lru", {}).clear()


def _seeded(timeseries_of_size: Callable[..., Any]) -> Callable[..., Any]:
    """Give each call without a seed the next number; the same one for all would make equal frames."""
    seeds = count(1)

    def with_seed(*arguments: Any, seed: int | None = None, **options: Any) -> Any:
        return timeseries_of_size(*arguments, seed=next(seeds) if seed is None else seed, **options)

    return with_seed
