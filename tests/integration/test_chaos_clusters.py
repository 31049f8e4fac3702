"""Faults on real clusters: `pytest -m chaos --minutes 15`; `--chaos-seed N` chooses others."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress

import pytest
from chaos import Chaos
from proxy import Proxy

_S_PER_MIN = 60.0
#: Faults a minute, at least: else the test has no effect.
_LEAST = 20
#: Runs of a program, of which one must be right.
_ENOUGH = 10


@pytest.mark.chaos
@pytest.mark.cluster
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("with_plugin", [True, False], ids=["plugin", "stock"])
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_programs_are_right_or_fail_for_a_reason(
    processes: bool, with_plugin: bool, pytestconfig: pytest.Config
) -> None:
    minutes, seed = pytestconfig.getoption("--minutes"), pytestconfig.getoption("--chaos-seed")
    with Chaos(seed, processes=processes, with_plugin=with_plugin).open() as chaos:
        chaos.run(minutes * _S_PER_MIN)
    print(f"{chaos.faults.total()} faults: {dict(chaos.faults)}")
    print(f"{chaos.outcomes.total()} programs: {dict(chaos.outcomes)}")
    assert chaos.problems == []
    assert chaos.faults.total() > _LEAST * minutes
    # A program that is never right shows nothing.
    runs = Counter(outcome.partition(":")[0] for outcome in chaos.outcomes.elements())
    assert [name for name, n in runs.items() if n >= _ENOUGH and not chaos.outcomes[f"{name}: right"]] == []


def test_a_proxy_forwards_pauses_and_cuts() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(server.getsockname()[1])
    host, port = proxy.address.removeprefix("tcp://").split(":")
    near = socket.create_connection((host, int(port)))
    far, _ = server.accept()
    near.sendall(b"one")
    assert far.recv(10) == b"one"
    proxy.pause()
    far.sendall(b"two")
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.recv(10)
    threading.Timer(0.1, proxy.resume).start()
    near.settimeout(10)
    assert near.recv(10) == b"two"
    proxy.cut(0.5)
    with suppress(ConnectionResetError):
        assert near.recv(10) == b""
    near.close()
    far.close()
    proxy.close()
    server.close()
