"""What every policy keeps to, whoever wrote it: placed, at a graph's arrival, and stolen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from policy_contract import CONTRACT, HELD, THERE, Make
from pure_policy import Cluster

from ferroflow_dask.policy import make_policy, policy_names


@pytest.mark.parametrize("keeps", CONTRACT, ids=lambda keeps: keeps.__name__)
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_keeps_the_contract(name: str, keeps: Callable[[Make], None]) -> None:
    keeps(lambda: make_policy(name))


@pytest.mark.parametrize("name", policy_names())
def test_our_policies_use_all_workers_that_they_may(name: str) -> None:
    cluster = Cluster(make_policy(name))
    assert set(cluster.ready(cluster.task(i, **THERE) for i in range(20))) == {"w1", "w3"}


@pytest.mark.parametrize("name", policy_names())
def test_our_policies_use_a_worker_that_was_paused(name: str) -> None:
    cluster = Cluster(make_policy(name), workers=3)
    cluster.view.set_running("w1", False)
    assert "w1" not in cluster.ready(cluster.task(i, **HELD) for i in range(20))
    cluster.view.set_running("w1", True)
    assert "w1" in cluster.ready(cluster.task(100 + i, **HELD) for i in range(20))
