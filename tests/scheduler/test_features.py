"""Features: the list, a feature of another package, and failures of features."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from dask import delayed
from distributed import Client
from in_charge import assert_stock, scheduler_of, stealing_of
from waiting import soon, until

from ferroflow_dask import config, install, installed, uninstall
from ferroflow_dask.bundling.snapshot import FEATURES
from ferroflow_dask.dashboard.figure import choice
from ferroflow_dask.dashboard.recorder import start_recording, stop_recording
from ferroflow_dask.dashboard.tables import Features
from ferroflow_dask.scheduler import FerroflowPlugin, features
from ferroflow_dask.scheduler.changes import Change, ItemChange
from ferroflow_dask.scheduler.features.base import Feature
from ferroflow_dask.scheduler.features.kept_numbers import KeptNumbers  # off unless a file is named
from ferroflow_dask.scheduler.features.low_latency_messages import LowLatencyMessages
from ferroflow_dask.scheduler.features.metrics import _COLLECTOR
from ferroflow_dask.scheduler.hooks import Hooks

Add = Callable[[type[Feature]], None]


class Clients(Feature):
    """Counts clients, and changes an attribute of the scheduler."""

    name = "visitors"
    summary = "Clients that have come and gone"

    n_joined = n_left = 0

    def changes(self) -> Iterable[Change]:
        yield ItemChange("Scheduler.ours", vars(self.core.scheduler), "ours", 1)

    def add_client(self, client: str) -> None:
        self.n_joined += 1

    def remove_client(self, client: str) -> None:
        self.n_left += 1

    def counts(self) -> dict[str, int]:
        return {"joined": self.n_joined, "left": self.n_left}


class Failing(Clients):
    """Fails when a client joins."""

    def add_client(self, client: str) -> None:
        raise ZeroDivisionError("planned")


class Unavailable(Feature):
    """Fails when it is installed."""

    name = "unavailable"
    summary = "Nothing"

    def changes(self) -> Iterable[Change]:
        yield ItemChange("Scheduler.ours", vars(self.core.scheduler), "ours", 1)
        raise ZeroDivisionError("planned")


@pytest.fixture(name="add")
def _add(monkeypatch: pytest.MonkeyPatch) -> Add:
    """Return a function that adds a feature as an entry point of another package does."""
    known = features.entry_points

    def add(feature: type[Feature]) -> None:
        point = SimpleNamespace(name=feature.name, load=lambda: feature)
        monkeypatch.setattr(features, "entry_points", lambda group: [*known(group=group), point])

    return add


def feature_on(client: Client, kind: type[Feature]) -> Any:
    return next(one for one in stealing_of(client).features if isinstance(one, kind))


def test_each_feature_is_a_file_of_its_name_with_a_sentence_about_it() -> None:
    for feature in features.BUILT_IN:
        assert feature.__module__ == f"ferroflow_dask.scheduler.features.{feature.name}"
        assert feature.summary[0].isupper()
        assert "\n" not in feature.summary
    assert len({feature.name for feature in features.BUILT_IN}) == len(features.BUILT_IN)


def test_only_methods_that_a_feature_defines_are_called() -> None:
    feature = Clients(SimpleNamespace())  # type: ignore[arg-type] -- events need no core
    hooks = Hooks()
    hooks.connect([feature], Feature)
    assert {name: calls for name, calls in vars(hooks).items() if calls} == {
        "add_client": (feature.add_client,),
        "remove_client": (feature.remove_client,),
    }


def test_each_hook_is_a_method_of_features() -> None:
    assert all(callable(getattr(Feature, name)) for name in vars(Hooks()))


def test_the_built_in_features_and_the_page_are_installed(thread_client: Client) -> None:
    install(thread_client)
    names = [feature.name for feature in stealing_of(thread_client).features]
    assert names == [*(feature.name for feature in features.BUILT_IN if feature is not KeptNumbers), "page"]


def test_a_feature_of_another_package_hears_of_events_and_leaves_nothing_behind(
    thread_client: Client, add: Add
) -> None:
    pytest.importorskip("prometheus_client")
    add(Clients)
    install(thread_client)
    scheduler = scheduler_of(thread_client)
    assert scheduler.ours == 1
    with Client(thread_client.cluster):
        pass
    ours = feature_on(thread_client, Clients)
    assert ours.counts() == {"joined": 1, "left": 1}
    (shown,) = [one for one in _COLLECTOR._families() if one.name == "dask_scheduler_ferroflow_visitors"]
    assert {(one.labels["what"], one.value) for one in shown.samples} == {("joined", 1), ("left", 1)}
    uninstall(thread_client)
    assert not hasattr(scheduler, "ours")
    assert_stock(thread_client)


def test_a_feature_that_fails_in_an_event_leaves_dask_as_stock(thread_client: Client, add: Add) -> None:
    add(Failing)
    install(thread_client)
    with pytest.warns(UserWarning, match="planned"), Client(thread_client.cluster) as other:
        assert other.submit(sum, (1, 2)).result() == 3
    assert not hasattr(scheduler_of(thread_client), "ours")


def test_a_feature_that_cannot_be_installed_is_left_out(
    thread_client: Client, add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    add(Unavailable)
    with caplog.at_level(logging.WARNING, "ferroflow_dask"):
        install(thread_client)
    assert "unavailable is not available" in caplog.text
    assert not hasattr(scheduler_of(thread_client), "ours")
    assert not any(isinstance(one, Unavailable) for one in stealing_of(thread_client).features)
    assert thread_client.submit(sum, (1, 2)).result() == 3
    uninstall(thread_client)
    assert_stock(thread_client)


def test_what_is_no_feature_is_left_out(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point = SimpleNamespace(name="wrong", load=lambda: len)
    monkeypatch.setattr(features, "entry_points", lambda group: [point])
    with caplog.at_level(logging.WARNING, "ferroflow_dask"):
        install(thread_client)
    assert "wrong must be a class derived from Feature, got <built-in function len>" in caplog.text
    assert len(stealing_of(thread_client).features) == len(features.BUILT_IN) - len({KeptNumbers})


def test_the_next_installation_inherits_from_the_one_before(thread_client: Client) -> None:
    install(thread_client)
    followers = feature_on(thread_client, LowLatencyMessages).state()
    assert followers == {thread_client.id}
    install(thread_client, "static")
    assert feature_on(thread_client, LowLatencyMessages).state() == followers


def test_the_features_that_plans_know_exist() -> None:
    assert {kind.name for kind in features.BUILT_IN} >= FEATURES


def test_the_settings_have_a_switch_for_each_feature() -> None:
    names = {kind.name for kind in features.found_features()}
    assert set(config.get("features")) == names


@pytest.mark.parametrize("name", [*(kind.name for kind in features.BUILT_IN), "page"])
def test_without_one_feature_programs_have_the_same_values(name: str, thread_client: Client) -> None:
    plugin = installed_without(thread_client, name)
    assert plugin.features[name] == "it was installed without"
    others = {state for one, state in plugin.features.items() if one not in (name, "kept_numbers")}
    assert others <= {"on", f"it needs {name}, which is off"}
    tasks = [delayed(sum)([i, 1], dask_key_name=f"one-{i}") for i in range(50)]
    total = delayed(sum)(tasks)
    assert thread_client.compute(total).result() == sum(range(1, 51))
    chain = thread_client.submit(int)
    for _ in range(20):
        chain = thread_client.submit(sum, [chain, 1])
    assert chain.result() == 20
    assert thread_client.gather(thread_client.map(abs, range(100))) == [*range(100)]
    uninstall(thread_client)
    assert_stock(thread_client)


def installed_without(client: Client, *names: str) -> FerroflowPlugin:
    install(client, without=names)
    plugin = installed(client)
    assert plugin is not None
    return plugin


class Needing(Clients):
    """Needs another feature."""

    name = "needing"
    needs = ("prefetch",)


def test_a_feature_is_off_by_its_setting_or_without_what_it_needs(thread_client: Client, add: Add) -> None:
    add(Needing)
    with dask.config.set({"ferroflow.features.prefetch": False}):
        install(thread_client)
    plugin = installed(thread_client)
    assert plugin.features["prefetch"] == "the setting ferroflow.features.prefetch is false"
    assert plugin.features["needing"] == "it needs prefetch, which is off"
    assert not hasattr(scheduler_of(thread_client), "ours")
    install(thread_client)
    assert installed(thread_client).features["needing"] == "on"


def test_a_feature_of_another_package_is_switched_off_by_its_name(thread_client: Client, add: Add) -> None:
    add(Clients)
    for switch in ({"ferroflow.features.visitors": False}, {}):
        with dask.config.set(switch):
            install(thread_client, without=() if switch else ["visitors"])
        assert "visitors" not in [one.name for one in stealing_of(thread_client).features]
        assert not hasattr(scheduler_of(thread_client), "ours")


def documented() -> type[Feature]:
    """Return the feature of the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (program,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(Feature)" in one]
    names: dict[str, Any] = {}
    exec(program, names)
    found = names["FailedTasks"]
    assert issubclass(found, Feature)
    return found


def feature_panel(client: Client) -> str:
    """Return the table of features on the page of the dashboard."""
    scheduler = client.cluster.scheduler
    panel = Features(start_recording(scheduler, "a test"), choice())
    panel.refresh()
    stop_recording(scheduler, "a test")
    return str(panel.content.text)


def test_the_feature_of_the_documentation_counts(thread_client: Client, add: Add) -> None:
    pytest.importorskip("prometheus_client")
    kind = documented()
    add(kind)
    install(thread_client)
    failing = [delayed(abs)("no number", dask_key_name=f"abs-{i}") for i in range(3)]
    for future in thread_client.compute(failing):
        assert isinstance(future.exception(), TypeError)
    until(lambda: feature_on(thread_client, kind).counts() == {"failed": 3})
    assert installed(thread_client).features["failed_tasks"] == "on"
    shown = [one for one in _COLLECTOR._families() if one.name == "dask_scheduler_ferroflow_failed_tasks"]
    assert [(one.labels, one.value) for one in shown[0].samples] == [({"what": "failed"}, 3)]
    assert f"<td>{kind.summary}</td><td>3 failed</td>" in feature_panel(thread_client)
    install(thread_client, without=["failed_tasks"])
    assert "<td>failed_tasks</td><td>off: it was installed without</td>" in feature_panel(thread_client)
    assert installed(thread_client).features["failed_tasks"] == "it was installed without"
    uninstall(thread_client)
    assert_stock(thread_client)


def raising(hook: str) -> type[Feature]:
    """Return a feature that fails in one of its hooks."""

    def fail(self: Feature, *_: Any) -> Any:
        raise ZeroDivisionError(f"{hook} is planned")

    placed = {("inc", i) for i in range(100)} | {f"one-{i}" for i in range(50)}
    return type("Raising", (Feature,), {"name": "raising", "summary": "Fails", "placed": placed, hook: fail})


@pytest.mark.parametrize("step", ["__init__", "unavailable", "changes", "watches"])
def test_a_feature_that_fails_as_it_is_installed_is_left_out(
    step: str, thread_client: Client, add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    add(raising(step))
    with caplog.at_level(logging.WARNING, "ferroflow_dask"):
        install(thread_client)
    assert "raising is not available" in caplog.text
    assert "raising" not in [one.name for one in stealing_of(thread_client).features]
    assert thread_client.submit(sum, (1, 2)).result() == 3


@pytest.mark.parametrize("step", ["state", "inherit"])
def test_a_feature_that_fails_between_installations_does_not_prevent_the_next(
    step: str, thread_client: Client, add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    kind = raising(step)
    if step == "inherit":
        kind.state = lambda _: 1  # type: ignore[method-assign]
    add(kind)
    with caplog.at_level(logging.WARNING, "ferroflow_dask"):
        install(thread_client)
        install(thread_client)
    assert f"{step} is planned" in caplog.text
    assert thread_client.submit(sum, (1, 2)).result() == 3


def test_a_feature_that_fails_as_the_cluster_restarts_ends_the_plugin(
    thread_client: Client, add: Add
) -> None:
    add(raising("restart"))
    install(thread_client)
    with pytest.warns(UserWarning, match="restart is planned"):
        assert ends_in_a_restart(thread_client)
    assert thread_client.submit(sum, (1, 2)).result() == 3


def ends_in_a_restart(client: Client) -> bool:
    client.run_on_scheduler(restart)
    return soon(lambda: installed(client) is None, 10.0)


def restart(dask_scheduler: Any) -> None:
    dask_scheduler.extensions["stealing"].restart(dask_scheduler)


@pytest.mark.parametrize("hook", [one for one in vars(Hooks()) if one != "watches"])
def test_a_feature_that_fails_in_a_hook_loses_nothing(hook: str, thread_client: Client, add: Add) -> None:
    add(raising(hook))
    install(thread_client, without=["bundles"])
    with warnings.catch_warnings(record=True):
        chains = [thread_client.submit(abs, i, key=f"one-{i}") for i in range(50)]
        for _ in range(3):
            chains = [thread_client.submit(sum, [one, one], pure=False) for one in chains]
        assert thread_client.gather(chains) == [8 * i for i in range(50)]
        with Client(thread_client.cluster) as other:
            assert other.submit(sum, (1, 2)).result() == 3
        uninstall(thread_client)
    assert_stock(thread_client)
