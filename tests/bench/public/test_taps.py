"""Suite `taps`: where TaPS is found, how it is driven, and how its log is read."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dask.utils import key_split
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

from ferroflow_dask import install
from ferroflow_dask.bench.public import taps
from ferroflow_dask.bench.public.base import Clock, Options
from ferroflow_dask.bench.public.taps import SUITE, App, find_taps, run_app, run_elsewhere
from ferroflow_dask.exceptions import ResultError, UsageError

#: A working tree of TaPS, for the tests that run it.
CHECKOUT = os.environ.get("TAPS_CHECKOUT", "")
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="TAPS_CHECKOUT is not set")

#: Stands for TaPS: has its name, its command line and its log, and says how its client was started.
PROGRAM = """
import sys
from distributed import Client
from ferroflow_dask import installed
import taps
from taps.engine import double
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--engine.executor.scheduler" in options:
    with Client(options["--engine.executor.scheduler"]) as client:
        futures = [client.submit(double, i) for i in range(3)]
        assert client.gather(futures) == [0, 2, 4]
        in_charge = installed(client) is not None and "ferroflow_dask.preload" in sys.modules
else:
    in_charge = False
prefix = "[2026-11-27 17:54:41.179] APP   (taps.apps.mapreduce) > "
print(prefix + f"preload ({1 if in_charge else 0})")
print(prefix + "Total number of words: 1,234")
print("[2026-11-27 17:54:41.179] RUN   (taps.run) > Finished app (elapsed=0.354s)")
print(f"[x] RUN   (taps.run) > Finished benchmark (app={options['--app']}, elapsed=0.368s, tasks=3)")
"""
APP = App("mapreduce-3", {"data-dir": "words"}, dict)

FAILED = """\
[2026-11-27 17:59:11.100] RUN   (taps.run) > Running app...
[2026-11-27 17:59:11.649] ERROR (concurrent.futures) > exception calling callback
concurrent.futures._base.InvalidStateError: FINISHED
[2026-11-27 17:59:11.657] ERROR (taps.run) > Caught unhandled exception
taps.apps.failures.types.{error}: Simulated failure in parent task.
"""


@contextmanager
def tcp_client(n_workers: int) -> Iterator[Client]:
    """Start workers in this process that other processes can reach."""
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address=":0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "checkout"
    for part in ("engine", "run"):
        (folder / "taps" / part).mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "taps"\nversion = "0.2.3dev1"\n')
    (folder / "taps" / "__init__.py").write_text("from importlib.metadata import version\nversion('taps')\n")
    (folder / "taps" / "engine" / "__init__.py").write_text("def double(i): return 2 * i\n")
    (folder / "taps" / "run" / "__init__.py").touch()
    (folder / "taps" / "run" / "__main__.py").write_text(PROGRAM)
    with own_modules(monkeypatch):
        yield folder


class own_modules:  # noqa: N801 -- a context manager
    """Takes back the paths and modules of TaPS that a cluster in this process imports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __enter__(self) -> None:
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "taps"]:
            del sys.modules[name]


def options_of(checkout: Path, tmp_path: Path) -> Options:
    return Options(checkouts={"taps": checkout}, data=tmp_path / "data")


@pytest.mark.cluster
@pytest.mark.parametrize("is_ours", [False, True], ids=["stock", "plugin"])
def test_the_client_of_a_subprocess_has_the_preload_if_the_plugin_is_in_charge(
    is_ours: bool, checkout: Path, tmp_path: Path
) -> None:
    found = find_taps(options_of(checkout, tmp_path))
    clock = Clock()
    with tcp_client(2) as client:
        if is_ours:
            install(client)
        answer = run_app(APP, found, client, clock)
    assert answer == {"tasks": 3, "words": {"preload": int(is_ours)}, "total": 1234}
    assert clock.seconds == 0.354, "the duration that TaPS has measured"


def test_other_executors_have_the_same_answer(checkout: Path, tmp_path: Path) -> None:
    found, clock = find_taps(options_of(checkout, tmp_path)), Clock()
    answer = run_elsewhere(APP, found, "process-pool", {"max_processes": "2"}, clock=clock)
    assert answer == {"tasks": 3, "words": {"preload": 0}, "total": 1234}
    assert clock.seconds == 0.354


def test_programs_are_applications_with_their_numbers_of_tasks(checkout: Path, tmp_path: Path) -> None:
    programs = {program.name: program for program in SUITE.programs(options_of(checkout, tmp_path))}
    assert set(programs) == {
        *("cholesky-385", "mapreduce-33", "failures-66"),
        *("synthetic-bag-200", "synthetic-diamond-202", "synthetic-reduce-201", "synthetic-sequential-200"),
    }
    assert programs["cholesky-385"].expected() == {"tasks": 385}
    assert programs["mapreduce-33"].expected()["total"] == (taps.FILES - 1) * taps.WORDS
    assert len(programs["mapreduce-33"].expected()["words"]) == taps.TOP
    assert "process-pool" in programs["cholesky-385"].anchors


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be a working tree .* without taps/engine"):
        SUITE.programs(Options(checkouts={"taps": tmp_path}, data=tmp_path))


def test_settings_that_taps_cannot_use_are_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "find_spec", lambda name: name)
    monkeypatch.setattr(taps, "version", lambda _: "2.13.1")
    with pytest.raises(UsageError, match=r"older than 2\.13\.0, got 2\.13\.1; pip install"):
        find_taps(options_of(checkout, tmp_path))


@pytest.mark.parametrize("error", ["ParentDependencyError", "KilledWorker"])
def test_the_error_of_a_failed_run_is_its_answer(error: str) -> None:
    if error == taps.INJECTED:
        assert taps._read(FAILED.format(error=error)) == ({"error": error}, 0.557)
    else:
        assert taps._read(FAILED.format(error=error))[0] != {"error": taps.INJECTED}


def test_a_run_without_an_end_is_no_answer() -> None:
    with pytest.raises(ResultError, match="must log its end, got Segmentation fault"):
        taps._read("[2026-11-27 17:59:11.100] RUN   (taps.run) > Running app...\nSegmentation fault\n")


class Recorder(SchedulerPlugin):
    """Counts tasks by their name and the names of their parents."""

    def __init__(self, client: Client) -> None:
        self.tasks: dict[Any, tuple[str, tuple[str, ...]]] = {}
        self._scheduler = client.cluster.scheduler
        self._scheduler.add_plugin(self, name="edges")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "released" and finish not in ("forgotten", "released"):
            parents = (key_split(parent.key) for parent in self._scheduler.tasks[key].dependencies)
            self.tasks[key] = (key_split(key), tuple(sorted(parents)))


@needs_checkout
@pytest.mark.cluster
def test_edges_on_the_scheduler_are_those_of_the_application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("cholesky-30", {"matrix-size": "40", "block-size": "10"}, dict)
    found = find_taps(options_of(Path(CHECKOUT), tmp_path))
    with own_modules(monkeypatch), tcp_client(2) as client:
        recorder = Recorder(client)
        assert run_app(app, found, client, Clock()) == {"tasks": 30}
    expected: Counter[Any] = Counter()
    for m in (3, 2, 1, 0):
        expected["potrf", ()] += 1
        expected["trsm", ("potrf",)] += m
        expected["syrk", ("trsm",)] += m * (m + 1) // 2
        expected["gemm", ("syrk", "trsm")] += m  # on the diagonal both are the same
        expected["gemm", ("syrk", "trsm", "trsm")] += m * (m - 1) // 2
    assert Counter(recorder.tasks.values()) == +expected
