"""Tests of coiled/benchmarks as programs: seven files of a working tree that the user has.

A process of its own collects the tests. Each test is a program, which pytest runs in the process that holds
the client, without changing the working tree. Fixtures and replaced modules are in `coiled_plugin`, the
values that are compared in `coiled_values`.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ferroflow_dask.bench.machine import git
from ferroflow_dask.bench.public.base import Clock, Options, Program, SkippedError, Suite
from ferroflow_dask.exceptions import FerroflowError, UsageError

if TYPE_CHECKING:
    from distributed import Client

FOLDER = "tests/benchmarks"
NAMES = ("futures", "work_stealing", "array", "rechunk", "join", "dataframe", "xarray")
FILES = tuple(f"{FOLDER}/test_{name}.py" for name in NAMES)

#: Beginnings of tests that take minutes on four workers: most of the time in `time.sleep`, or in 150 GB of
#: random numbers.
LONG = (
    "test_basic_sum[slow-square]",
    "test_memory_efficient",
    "test_work_stealing_on_inhomogeneous_workload",
    "test_work_stealing_on_scaling_up",
    "test_work_stealing_on_straggling_worker",
    "test_quadratic_mean",
)

_TOO_LONG = "takes minutes; --full runs it"
_CALL = "--checkout coiled=PATH"
_COLLECT = "import sys; from ferroflow_dask.bench.public.coiled_plugin import collect; collect(*sys.argv[1:])"
#: Of the checkout's own tests [s].
_LONG_TIMEOUT_S = 3600.0
#: The last test on the cluster of each client.
_ran: WeakKeyDictionary[Client, str] = WeakKeyDictionary()
#: For imports of all packages that the tests use [s].
_COLLECT_TIMEOUT_S = 300


def programs(options: Options) -> list[Program]:
    """Return a program for each test, in the order of the files."""
    checkout = checked_checkout(options)
    commit = git(checkout, "rev-parse", "--short=7", "HEAD")
    source = f"coiled/benchmarks{f' {commit}' if commit else ''}, BSD-3-Clause"
    return [
        Program(
            suite="coiled",
            name=test.removeprefix(f"{FOLDER}/"),
            source=source,
            run=partial(run, checkout, test),
            timeout_s=_LONG_TIMEOUT_S if _is_long(test) else 0.0,
            skipped=reason or ("" if options.is_full or not _is_long(test) else _TOO_LONG),
        )
        for test, reason in collected(checkout).items()
    ]


SUITE = Suite(
    "coiled",
    "Seven files of coiled/benchmarks (BSD-3-Clause), from the user's working tree. A pytest plugin replaces "
    "the conftest and the module coiled. Workers are not killed for their memory.",
    programs,
    needs=("pytest", "pandas", "pyarrow", "xarray", "flox", "fsspec"),
    memory_limit="1GiB",  # the sizes of most tests follow the memory of the cluster
    # Some chunks have the sizes for workers with 8 GiB. Tasks of `test_vorticity` and of two cases of
    # `test_basic_sum` take up to 1.7 GiB for a moment, and the nanny would kill their workers.
    # A cluster closes the nanny of a worker that is away so long after it was once away (distributed#7312).
    # A restart between two tests may come at that moment.
    settings={
        "distributed.worker.memory.terminate": False,
        "distributed.deploy.lost-worker-timeout": "1 day",
    },
)


def checked_checkout(options: Options) -> Path:
    """Return the working tree.

    Raises
    ------
    UsageError
        The user named none, or another folder.
    """
    if (folder := options.checkouts.get("coiled")) is None:
        raise UsageError(f"the suite coiled needs a working tree of coiled/benchmarks; add {_CALL}")
    needed = ("tests/__init__.py", "tests/utils_test.py", "cluster_kwargs.yaml", FOLDER)
    if absent := [name for name in needed if not (folder / name).exists()]:
        raise UsageError(
            f"the checkout coiled must be a working tree of coiled/benchmarks, got {str(folder)!r} without "
            f"{absent[0]}; call: {_CALL}"
        )
    return folder.resolve()


def collected(checkout: Path) -> dict[str, str]:
    """Collect the tests in a process of its own: why each is always skipped, or "", by its id.

    Raises
    ------
    UsageError
        pytest cannot import a file.
    """
    files = [file for file in FILES if (checkout / file).exists()]
    found = subprocess.run(
        [sys.executable, "-P", "-c", _COLLECT, str(checkout), *files],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=_COLLECT_TIMEOUT_S,
        check=False,
    )
    try:
        report = json.loads(found.stdout)
    except json.JSONDecodeError:
        report = {"error": (found.stderr.strip() or "no output").splitlines()[-1]}
    if report["error"]:
        raise UsageError(f"pytest cannot collect the tests of {str(checkout)!r}: {report['error']}")
    tests: dict[str, str] = report["collected"]
    return tests


def run(checkout: Path, test: str, client: Client, clock: Clock) -> dict[str, Any]:
    """Run a test on the cluster of a client; return the values that the test waits for or reads.

    Clusters of the test's own have the plugin if that of the client has it. Workers are restarted before
    another test, as the checkout's own fixtures do: they would keep memory that Dask does not manage.
    """
    import dask

    from ferroflow_dask.bench.public.coiled_plugin import CoiledPlugin, run_pytest
    from ferroflow_dask.scheduler.installation import installed

    last, _ran[client] = _ran.get(client, test), test
    if last != test and all(one["nanny"] for one in client.scheduler_info()["workers"].values()):
        client.restart()
        client.run(_nothing)  # all have to be up before the next restart (dask/distributed#7312)
    plugin = CoiledPlugin(checkout, client, clock)
    # The preload of a client installs the plugin on its cluster, and lets it follow that of a running one.
    preload = [] if installed(client) is None else ["ferroflow_dask.preload"]
    with client.as_current(), dask.config.set({"distributed.client.preload": preload}):
        status = run_pytest(plugin, checkout, [test])
    gc.collect()  # the futures of the test
    if plugin.error is not None:
        raise plugin.error
    if plugin.skipped:
        raise SkippedError(plugin.skipped)
    if status:
        raise FerroflowError(f"pytest ended with status {status} and ran no test {test!r}")
    return plugin.answer


def _nothing() -> None:
    pass


def _is_long(test: str) -> bool:
    return test.partition("::")[2].startswith(LONG)
