"""Fixtures shared by all tests: clusters that are started once, and a policy of one's choice on them."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import onnx
import pytest
from bundled import Gate, gates
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context
from hypothesis import HealthCheck, settings
from models import mlp
from real_slurm import missing, running_slurm

import ferroflow_dask

# Always the same examples, so that a failure is of the change at hand; no limits on time, which others share.
settings.register_profile(
    "ferroflow", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ferroflow")

#: Modules that workers import. Not our own: the server would import them from the working tree.
_PRELOADED = ("distributed", "dask.array", "dask.dataframe", "numpy", "onnx", "onnxruntime", "pandas", "yaml")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `pytest -m chaos`."""
    parser.addoption("--minutes", type=float, default=1.0, help="Duration of each test with faults [min].")
    parser.addoption("--chaos-seed", type=int, default=0, help="Seed of the faults.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a file that waits for jobs of Slurm come first, and the next one later: others run meanwhile."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = {item.path for item in items if "slurm" in getattr(item, "fixturenames", ())}
    others = [path for path in files if path not in waiting]
    for i, path in enumerate(sorted(waiting)):
        others.insert(i * len(files) // len(waiting), path)
    items[:] = [item for path in others for item in files[path]]


@contextmanager
def checked_client(
    n_workers: int, *, processes: bool, set_as_default: bool, nthreads: int = 1, **options: Any
) -> Iterator[Client]:
    """Start workers, whose state machines check themselves as the scheduler's does."""
    with (
        dask.config.set({"distributed.scheduler.validate": True, "distributed.worker.validate": True}),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=nthreads,
            processes=processes,
            dashboard_address=":0",
            silence_logs=logging.ERROR,
            **options,
        ) as cluster,
        Client(cluster, set_as_default=set_as_default) as client,
    ):
        yield client


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure of clusters, and what dask-jobqueue writes, out of the user's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(dask.config, "PATH", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forked(_own_cache: None) -> Iterator[None]:
    """Fork worker processes from a server that has imported their modules: a new interpreter takes a second.

    Commands that tests start in processes of their own start workers as users do.
    """
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload([*_PRELOADED])
        yield


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_this_file() -> Iterator[None]:
    """Let collections of garbage look only at what this file makes, not at all tests and what others left.

    A benchmark asks for all of it again and again, which then waits for the end of the file.
    """
    gc.collect()
    gc.freeze()
    asked = False

    def unfreeze() -> None:
        nonlocal asked
        asked = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", unfreeze)
        yield
    if asked:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_setting_of_a_closed_client() -> None:
    """Forget that a client is to compute, which it set when it opened, if there is none any more.

    Dask takes the setting back only if clients close in the reverse order.
    """
    if dask.config.get("scheduler", None) == "dask.distributed":
        try:
            Client.current()
        except ValueError:
            dask.config.config.pop("scheduler")


@pytest.fixture(scope="session")
def process_client() -> Iterator[Client]:
    """A client of two worker processes, the same for all tests."""
    with checked_client(2, processes=True, set_as_default=False) as client:
        yield client


@pytest.fixture
def _copies_stay(process_client: Client) -> Iterator[None]:
    """Keep Dask's active memory manager from dropping copies for which no task waits."""
    process_client.amm.stop()
    yield
    process_client.amm.start()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Slurm of the tests' own, with a home folder of its own."""
    if lacking := missing():
        why = f"Slurm is not installed: there is no {', '.join(lacking)}"
        pytest.fail(why) if os.environ.get("FERROFLOW_REQUIRE_SLURM") else pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with running_slurm():
            yield


@pytest.fixture
def thread_client() -> Iterator[Client]:
    """A client of three workers in this process, fresh for each test."""
    with checked_client(3, processes=False, set_as_default=True) as client:
        yield client


@pytest.fixture
def ferroflow_client(thread_client: Client) -> Iterator[Client]:
    """The client of three workers, with the plugin installed."""
    ferroflow_dask.install(thread_client)
    yield thread_client
    ferroflow_dask.uninstall(thread_client)


@pytest.fixture
def mlp_files(tmp_path: Path) -> Path:
    """A folder with mlp.onnx and an input for it, x.npy."""
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).standard_normal((5, 784), dtype=np.float32))
    return tmp_path


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Return a gate, which opens at the end of the test."""
    with gates() as make:
        yield make()
