"""Completeness of the matrix: each public name of distributed has a row, or a reason why it has none."""

from __future__ import annotations

import inspect
import re

import distributed
import distributed.scheduler
import distributed.spans
import distributed.worker
import pytest
from distributed import Client, Future, NannyPlugin, SchedulerPlugin, WorkerPlugin, as_completed

from matrix.row import BUNDLED, DIVIDED, OBSERVER, SEPARATE
from matrix.rows import MODULES, ROWS

_CLASSES = (Client, Future, as_completed, SchedulerPlugin, WorkerPlugin, NannyPlugin)
#: Where distributed reads annotations of tasks.
_READERS = (distributed.scheduler, distributed.spans, distributed.worker)
_READ = re.compile(r"annotations(?:\.get\(|\[)\s*\"(\w+)\"")

#: Public names without a row, each with the reason.
EXEMPT = {
    "Client.benchmark_hardware": "measures memory, disks and networks for seconds, and sends no tasks",
    "Client.start": "called by the constructor",
    "CondaInstall": "installs packages into an environment that the tests share",
    "InstallPlugin": "the base class of plugins that install packages",
    "PipInstall": "installs packages into an environment that the tests share",
    "SSHCluster": "starts workers over SSH, which the machine of the tests does not offer",
    "SpecCluster": "the base class of `LocalCluster`",
    "SubprocessCluster": "starts the processes of `LocalCluster` by command",
    "UploadDirectory": "copies files as `UploadFile` does",
    "connect": "messages between servers, which send no tasks",
    "local_client": "the former name of `worker_client`",
    "rpc": "messages between servers, which send no tasks",
    "widgets": "draws in notebooks",
    "as_completed.condition": "the lock of an iterator",
}


def _public(cls: type) -> set[str]:
    return {f"{cls.__name__}.{name}" for name in dir(cls) if not name.startswith("_")}


def _annotations() -> set[str]:
    """Return the annotations that distributed reads."""
    return {f"annotation {name}" for module in _READERS for name in _READ.findall(inspect.getsource(module))}


_NAMES = set(distributed.__all__).union(*map(_public, _CLASSES), _annotations())
_COVERED = {name for row in ROWS.values() for name in row.covers}


@pytest.mark.parametrize("name", sorted(_NAMES))
def test_the_name_has_a_row_or_a_reason(name: str) -> None:
    assert (name in _COVERED) != (name in EXEMPT)


def test_the_annotations_that_clients_set_are_found() -> None:
    assert {"annotation priority", "annotation span", "annotation executor"} <= _annotations()


def test_rows_cover_names_that_exist() -> None:
    assert {name for name in _COVERED if not name.startswith("annotation ")} <= _NAMES
    assert EXEMPT.keys() <= _NAMES


@pytest.mark.parametrize("name", ROWS)
def test_the_letters_of_a_row_are_known(name: str) -> None:
    assert set(ROWS[name].letters) <= {BUNDLED, SEPARATE, DIVIDED, OBSERVER}


def test_each_module_has_rows() -> None:
    assert {row.run.__module__ for row in ROWS.values()} == {module.__name__ for module in MODULES}
