"""Policies that `bench` measures, and which of them bundle graphs."""

from __future__ import annotations

import pytest
from distributed import Client

from ferroflow_dask.bench.baselines import is_in_charge, names, put_in_charge
from ferroflow_dask.scheduler import extension_on
from ferroflow_dask.scheduler.features import found_features


def test_names_are_unique_and_include_our_policy_without_each_feature() -> None:
    assert len(set(names())) == len(names())
    without = {f"ferroflow-without-{kind.name}" for kind in found_features()}
    assert {"dask", "ferroflow", "ferroflow-again"} | without <= {*names()}


@pytest.mark.cluster
def test_only_our_policy_bundles_graphs(thread_client: Client) -> None:
    scheduler = thread_client.cluster.scheduler
    for policy, off in (
        ("ferroflow", set()),
        ("ferroflow-again", set()),
        ("ferroflow-without-bundles", {"bundles", "plain_shuffles", "samples", "sharing", "stages"}),
        ("ferroflow-without-prefetch", {"prefetch"}),
        ("ring", {"bundles", "plain_shuffles", "samples", "sharing", "stages", "prefetch"}),
    ):
        for _ in range(2):
            put_in_charge(thread_client, policy, seed=0)
            assert is_in_charge(thread_client, policy)
            extension = extension_on(scheduler)
            assert extension is not None
            # No setting names a file of learned numbers.
            assert extension.off.keys() == {"kept_numbers"} | off
            # Each change is made in the same cluster: no worker may end with it.
            assert thread_client.submit(len, "abc", pure=False).result(timeout=30) == 3
    put_in_charge(thread_client, "dask", seed=0)
    assert extension_on(scheduler) is None
