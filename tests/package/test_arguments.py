"""Wrong and closed arguments of the public functions: one line each, of what is wrong and what is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import pytest
from distributed import Client, LocalCluster

from ferroflow_dask import Model, calibrate, explain, generate, install, installed, uninstall, use_gpus
from ferroflow_dask.exceptions import UsageError

X = da.zeros(4, chunks=2)
MODEL = generate("wide", width=2, depth=2)

OF_CLIENTS: dict[str, Callable[[Any], Any]] = {
    "install": install,
    "uninstall": uninstall,
    "installed": installed,
    "explain": lambda client: explain(client, "x"),
    "calibrate": calibrate,
    "use_gpus": use_gpus,
    "scatter": MODEL.scatter,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def closed(cluster: LocalCluster) -> Client:
    with Client(cluster, set_as_default=False) as client:
        pass
    return client


@pytest.mark.parametrize("function", OF_CLIENTS)
@pytest.mark.parametrize(
    ("value", "told"),
    [(None, "None"), ("tcp://127.0.0.1:8786", "'tcp://127.0.0.1:8786'"), (X, "a Array"), (MODEL, "a Model")],
    ids=["nothing", "an address", "an array", "a model"],
)
def test_what_is_no_client_is_told(function: str, value: object, told: str) -> None:
    with pytest.raises(UsageError, match=rf"^{function} takes a distributed.Client.* and not {told}$"):
        OF_CLIENTS[function](value)


@pytest.mark.cluster
@pytest.mark.parametrize("function", OF_CLIENTS)
def test_a_client_that_is_closed_is_told(function: str, closed: Client) -> None:
    with pytest.raises(UsageError, match=f"^{function} needs a Client that is open, and this one is closed$"):
        OF_CLIENTS[function](closed)


@pytest.mark.cluster
def test_a_cluster_that_is_closed_is_told() -> None:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        pass
    for function in (install, uninstall, installed):
        with pytest.raises(UsageError, match="LocalCluster that is open, and this one is closed"):
            function(cluster)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda client: MODEL.scatter(MODEL), "scatter takes a distributed.Client.* and not a Model"),
        (lambda client: Model("mlp.onnx"), "Model takes a Graph; load_onnx.* and not 'mlp.onnx'"),
        (lambda client: MODEL.bind([1]), "bind takes a dict of inputs by name.* and not a list"),
        (lambda client: MODEL.evaluate([1]), "evaluate takes a dict of inputs by name.* and not a list"),
        (
            lambda client: MODEL.bind(providers="array"),
            r"providers is 'array'; it must be a list.*: \['array'\]",
        ),
        (
            lambda client: MODEL.bind(profile=3),
            "bind takes a ClusterProfile, as calibrate.* and not 3",
        ),
        (lambda client: MODEL.bind(profile=client), "bind takes a ClusterProfile.* and not a Client"),
    ],
)
def test_what_is_something_else_is_told(call: Callable[[Any], Any], told: str, client: Client) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        call(client)


@pytest.mark.cluster
def test_whether_it_is_installed_can_be_asked_of_a_cluster(cluster: LocalCluster, client: Client) -> None:
    assert installed(cluster) is None
    install(cluster, "ring")
    try:
        assert installed(cluster).policy == installed(client).policy == "ring"
        assert client.sync(lambda: installed(cluster.scheduler)).policy == "ring"
    finally:
        uninstall(cluster)
