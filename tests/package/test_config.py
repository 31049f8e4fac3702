"""Settings: defaults and schema say the same, and what the user sets wins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import dask
import jsonschema
import pytest
import yaml
from distributed import Client

from ferroflow_dask import config
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler import FerroflowPlugin

DEFAULTS = yaml.safe_load((files("ferroflow_dask") / "ferroflow.yaml").read_text(encoding="utf-8"))
SCHEMA = yaml.safe_load((files("ferroflow_dask") / "ferroflow-schema.yaml").read_text(encoding="utf-8"))


def test_the_schema_is_complete_and_refuses_unknown_settings() -> None:
    def compare(defaults: dict[str, Any], schema: dict[str, Any]) -> None:
        assert defaults.keys() == schema["properties"].keys()
        for key, value in defaults.items():
            if isinstance(value, dict):
                compare(value, schema["properties"][key])

    compare(DEFAULTS, SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="policies"):
        jsonschema.validate({"ferroflow": {"policies": "static"}}, SCHEMA)


@pytest.mark.cluster
def test_times_are_read_when_the_plugin_starts_and_not_later(
    thread_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    seconds = config.get_seconds

    def noted(key: str) -> float:
        read.append(key)
        return seconds(key)

    plugin = FerroflowPlugin()  # which checks the settings where the client is, too
    monkeypatch.setattr(config, "get_seconds", noted)
    thread_client.register_plugin(plugin)
    assert sorted(set(read)) == ["latency", "policy-limit"]
    n_read = len(read)
    assert thread_client.submit(sum, [1, 2]).result() == 3
    assert len(read) == n_read


def test_what_the_user_sets_wins_and_all_else_has_its_default() -> None:
    assert config.get("policy") == "ferroflow"
    with dask.config.set({"ferroflow.policy": "static"}):
        config.load_defaults()
        assert config.get("policy") == "static"
    with dask.config.set({"ferroflow": {"policy": "static"}}):  # all defaults were cleared
        assert config.get("policy") == "static"
        assert config.get("latency") == DEFAULTS["ferroflow"]["latency"]


WRONG: list[tuple[str, list[object], str]] = [
    ("inline-limit", ["blah", "3 parsecs", None, [], True, -1, math.inf], "which is no size; write"),
    ("latency", ["blah", "3 parsecs", None, []], ""),
    ("features.prefetch", [None, "", "maybe", 2, 0.5, []], "it must be true or false"),
    ("learned", ["", 3, True, [], "a\0b", "a\nb"], "it must be a path, or null for none"),
    ("kernels.providers", ["array", None, 5, {}, ["array", 5]], "it must be a list"),
]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [(key, value, told) for key, values, told in WRONG for value in values],
    ids=repr,
)
def test_a_value_that_makes_no_sense_is_told(key: str, value: object, told: str) -> None:
    with (
        dask.config.set({f"ferroflow.{key}": value}),
        pytest.raises(UsageError, match=rf"{re.escape(key)} is {re.escape(repr(value))}.*{told}"),
    ):
        config.get_names(key) if key == "kernels.providers" else FerroflowPlugin()


@pytest.mark.parametrize(
    ("read", "key", "value", "expected"),
    [
        *(
            (config.get_bytes, "inline-limit", *pair)
            for pair in (("16kiB", 16384), ("1 MB", 10**6), (100, 100), ("0", 0))
        ),
        *((config.get_seconds, "latency", *pair) for pair in (("1ms", 0.001), ("2s", 2.0), (0.5, 0.5))),
        *((config.is_on, "features.prefetch", value, True) for value in (True, 1, "on", "Yes")),
        *((config.is_on, "features.prefetch", value, False) for value in (False, 0, "off")),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_values_are_read_with_or_without_unit(
    read: Callable[[str], object], key: str, value: object, expected: object
) -> None:
    with dask.config.set({f"ferroflow.{key}": value}):
        assert read(key.removeprefix("features.")) == expected


@pytest.mark.parametrize(
    ("without", "told"),
    [
        (["bundle"], "without must name features, got 'bundle'; did you mean 'bundles'?"),
        (["prefetch", 3], "without must name features, got 3; there are queue_depth, lean_transitions,"),
        (
            "prefetch",
            "without must be names of features, got 'prefetch'; install(client, without=['prefetch'])",
        ),
        (True, "without must be names of features, got True; install("),
    ],
)
def test_a_feature_that_there_is_not_is_refused(without: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(told)}"):
        FerroflowPlugin(without=without)


def test_a_path_may_begin_with_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.get_path("learned") is None
    monkeypatch.setenv("HOME", "/somewhere")
    with dask.config.set({"ferroflow.learned": "~/learned.json"}):
        assert config.get_path("learned") == Path("/somewhere/learned.json")


@pytest.mark.parametrize(("value", "expected"), [("respect", True), ("ignore", False)])
def test_observers_are_respected_or_ignored(value: str, expected: bool) -> None:
    with dask.config.set({"ferroflow.observers": value}):
        assert config.respects_observers() is expected


@pytest.mark.parametrize("value", ["no", None, True, 2, []], ids=repr)
def test_another_word_for_observers_is_refused(value: object) -> None:
    message = rf"observers must be 'respect' or 'ignore', got {re.escape(repr(value))}; dask.config.set"
    with dask.config.set({"ferroflow.observers": value}), pytest.raises(UsageError, match=message):
        FerroflowPlugin()


def test_the_plugin_shows_how_it_was_made() -> None:
    assert repr(FerroflowPlugin()) == "FerroflowPlugin()"
    plugin = FerroflowPlugin("ring", without=["bundles"])
    assert repr(plugin) == "FerroflowPlugin(policy='ring', without=('bundles',))"


def test_a_policy_is_told_its_seed_is_none() -> None:
    with pytest.raises(UsageError, match="seed is -1; it must be a whole number, at least 0"):
        FerroflowPlugin("random", seed=-1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"ferroflow.low-latency-stream": False},
            "no setting ferroflow.low-latency-stream; write ferroflow.features.low_latency_messages",
        ),
        (
            {"ferroflow.prefetch": False, "ferroflow.bundle": "off"},
            "no setting ferroflow.prefetch; write ferroflow.features.prefetch; "
            "there is no setting ferroflow.bundle; write ferroflow.features.bundles",
        ),
        (
            {"ferroflow.features.prefetching": False},
            "no setting ferroflow.features.prefetching; did you mean ferroflow.features.prefetch?",
        ),
        (
            {"ferroflow.kernels.provider": ["array"], "ferroflow.polcy": "ring"},
            "no setting ferroflow.kernels.provider; did you mean ferroflow.kernels.providers?; "
            "there is no setting ferroflow.polcy; did you mean ferroflow.policy?",
        ),
    ],
    ids=str,
)
def test_a_setting_that_there_is_not_is_told_once_with_the_nearest(
    settings: dict[str, Any], told: str
) -> None:
    with (
        dask.config.set(settings),
        pytest.warns(UserWarning, match=f"^ferroflow: there is {re.escape(told)}") as warned,
    ):
        FerroflowPlugin()
    assert len(warned) == 1


def test_settings_of_policies_of_others_are_left_to_them() -> None:
    with dask.config.set({"ferroflow.acme": {"patience": 3}}):
        assert config.unknown_settings() == []
        FerroflowPlugin()


def test_settings_as_environment_variables_have_them_are_known() -> None:
    variables = {"DASK_FERROFLOW__FEATURES__LOW_LATENCY_MESSAGES": "off", "DASK_FERROFLOW__INLINE_LIMIT": "3"}
    with dask.config.set(dask.config.collect_env(variables)):
        assert config.is_on("low_latency_messages") is False
        assert config.get_bytes("inline-limit") == 3
        assert config.unknown_settings() == []
        FerroflowPlugin()
