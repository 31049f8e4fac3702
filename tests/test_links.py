"""The bandwidth of links within a host and between hosts, as Dask has measured it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ferroflow_dask.plugin.links import Links

A, B, C = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.0.2:1"


def scheduler(*hosts: str, **measured: float) -> Any:
    pairs = {"near": (A, B), "far": (A, C), "far_too": (C, B), "farthest": (B, C)}
    return SimpleNamespace(
        bandwidth=1e8,
        host_info=dict.fromkeys(hosts),
        bandwidth_workers={pairs[name]: bandwidth for name, bandwidth in measured.items()},
    )


def test_on_one_host_it_is_dasks_mean() -> None:
    assert Links(scheduler("10.0.0.1", near=1e9)).bandwidths(0.0) == (1e8, 1e8)


def test_each_class_has_the_median_of_its_pairs_and_dasks_mean_until_there_are_any() -> None:
    hosts = ("10.0.0.1", "10.0.0.2")
    assert Links(scheduler(*hosts)).bandwidths(0.0) == (1e8, 1e8)
    assert Links(scheduler(*hosts, near=1e9)).bandwidths(0.0) == (1e9, 1e8)
    assert Links(scheduler(*hosts, near=1e9, far=1e6, far_too=3e6, farthest=9e9)).bandwidths(0.0) == (
        1e9,
        3e6,
    )


def test_pairs_are_looked_at_once_a_second() -> None:
    known = scheduler("10.0.0.1", "10.0.0.2", near=1e9)
    links = Links(known)
    links.bandwidths(0.0)
    known.bandwidth_workers[A, B] = 2e9
    assert links.bandwidths(0.9)[0] == 1e9
    assert links.bandwidths(1.0)[0] == 2e9
