"""Clusters on this machine: the interfaces on which their ports are open, and starts that fail."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import dask
import psutil
import pytest
from distributed import Client

from ferroflow_dask.deploy import DeviceChoice, device_client, local_client
from ferroflow_dask.deploy.local import check_main
from ferroflow_dask.exceptions import UsageError

pytestmark = pytest.mark.cluster


def listening() -> set[tuple[int, str, int]]:
    """Return process, address and port of each listening socket of this process and its children."""
    me = psutil.Process()
    return {
        (process.pid, *connection.laddr)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def processes() -> AbstractContextManager[Client]:
    return local_client(1)


def threads() -> AbstractContextManager[Client]:
    return local_client(1, processes=False)


def devices() -> AbstractContextManager[Client]:
    choice = DeviceChoice.parse("emulated", "fp32")
    assert choice is not None
    return device_client(choice, 0)


@pytest.mark.parametrize("start", [processes, threads, devices])
def test_all_ports_are_on_the_loopback_interface(start: object) -> None:
    assert callable(start)
    before = listening()
    with start() as client:
        opened = listening() - before
        dashboard = client.scheduler_info()["services"]["dashboard"]
    assert dashboard in {port for _, _, port in opened}
    assert {address for _, address, _ in opened} == {"127.0.0.1"}


@pytest.mark.parametrize("start", [processes, devices])
def test_a_worker_that_fails_to_start_raises_an_error(start: object) -> None:
    assert callable(start)
    with (
        dask.config.set({"distributed.worker.preload": ["no_such_module"]}),
        pytest.raises(RuntimeError, match="Nanny failed to start"),
        start(),
    ):
        pass


# The module `__main__` of worker processes

HERE = __file__
PIPE = "/dev/fd/63"
#: File and name of `__main__`, and how processes start.
IMPORTED: dict[str, tuple[str | None, str | None, str]] = {
    "a script": (HERE, None, "spawn"),
    "python -m module": (HERE, "package.module", "spawn"),
    "python -m package, a folder or an archive": ("no/such/__main__.py", "package.__main__", "spawn"),
    "python -c, an interactive session or a notebook": (None, None, "spawn"),
    "standard input, and workers are forked": ("<stdin>", None, "fork"),
}
NOT_IMPORTED: dict[str, tuple[str | None, str | None, str]] = {
    "standard input": ("<stdin>", None, "spawn"),
    "standard input, and a server forks workers": ("<stdin>", None, "forkserver"),
    "a pipe of the shell": (PIPE, None, "spawn"),
}


def check(patch: pytest.MonkeyPatch, file: str | None, name: str | None, method: str) -> None:
    """Check a module that stands for `__main__`."""
    main = ModuleType("__main__")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file
    with dask.config.set({"distributed.worker.multiprocessing-method": method}), patch.context() as patched:
        patched.setitem(sys.modules, "__main__", main)
        check_main()


@pytest.mark.parametrize("name", IMPORTED)
def test_workers_can_import(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(monkeypatch, *IMPORTED[name])


@pytest.mark.parametrize("name", NOT_IMPORTED)
def test_workers_cannot_import(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    message = f"must be a file for worker processes, got '{NOT_IMPORTED[name][0]}'"
    with pytest.raises(UsageError, match=message):
        check(monkeypatch, *NOT_IMPORTED[name])


def test_a_frozen_program_has_main_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    check(monkeypatch, "no/such/program.py", None, "spawn")


PROGRAM = """
from ferroflow_dask.deploy import DeviceChoice, device_client, local_client
with {start} as client:
    client.submit(sum, [1, 2]).result()
"""
MESSAGE = (
    "ferroflow_dask.exceptions.UsageError: __main__ must be a file for worker processes, got '<stdin>'; "
    "save the program and run: python program.py"
)


@pytest.mark.parametrize("start", ["local_client(2)", "device_client(DeviceChoice('emulated'), 1)"])
def test_a_program_from_standard_input_ends_with_an_error(start: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-"],
        input=PROGRAM.format(start=start),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, MESSAGE)


def test_a_program_from_standard_input_may_have_its_workers_in_threads(tmp_path: Path) -> None:
    program = PROGRAM.format(start="local_client(2, processes=False)")
    subprocess.run([sys.executable, "-"], input=program, cwd=tmp_path, text=True, timeout=60, check=True)
