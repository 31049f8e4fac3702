"""A package of somebody else brings a policy along, by an entry point."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from distributed import Client
from in_charge import stealing_of, workers_of

from ferroflow_dask import explain, install, uninstall
from ferroflow_dask.cli import main
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.plugin import installed
from ferroflow_dask.policy import make_policy, policy_names

MODULE = '''
from ferroflow_dask.policy.events import TaskReady
from ferroflow_dask.policy.instructions import AssignTask


class LastWorkerPolicy:
    """Give all tasks to the worker that joined last."""

    places_queued = True

    def __init__(self, label="none"):
        self.label = label

    def handle(self, event, view, now):
        if isinstance(event, TaskReady) and view.running:
            yield AssignTask(event.task.key, view.running[-1].key, f"the last; {self.label}")
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, as pip would have installed it."""
    (tmp_path / "somebodys_policies.py").write_text(MODULE)
    metadata = tmp_path / "somebodys_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-policies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[ferroflow_dask.policies]\n"
        "last = somebodys_policies:LastWorkerPolicy\n"
        "missing = somebodys_other_policies:Policy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return pytest.importorskip("somebodys_policies")


def test_it_is_listed_and_made(package: ModuleType) -> None:
    assert {"last", "missing"} <= set(policy_names())
    policy = make_policy("last", label="mine")
    assert isinstance(policy, package.LastWorkerPolicy)
    with pytest.raises(UsageError, match="'last' does not take the option 'seed'; it takes: label"):
        make_policy("last", seed=1)
    with pytest.raises(UsageError, match="somebodys_other_policies:Policy, which fails: No module"):
        make_policy("missing")


@pytest.mark.cluster
def test_it_schedules_a_cluster(package: ModuleType, thread_client: Client) -> None:
    install(thread_client, "last", label="ours")
    assert installed(thread_client).policy == "last"
    assert thread_client.gather(thread_client.map(lambda i: i + 1, range(30))) == list(range(1, 31))
    (future,) = thread_client.map(str, ["told"])
    assert future.result() == "told"
    placed = explain(thread_client, future.key)
    assert [(decision.what, decision.reason) for decision in placed] == [("placed", "the last; ours")]
    assert stealing_of(thread_client).error is None
    assert list(thread_client.who_has([future])[future.key]) == [placed[0].worker]
    assert placed[0].worker == workers_of(thread_client)[-1].address
    uninstall(thread_client)


@pytest.mark.cluster
def test_the_command_line_takes_it(package: ModuleType) -> None:
    shown = CliRunner().invoke(
        main, ["run", "--dag", "wide", "--policy", "last", "--workers", "2", "--no-processes"]
    )
    assert shown.exit_code == 0, shown.output
    assert "last" in shown.output
