"""A failure of any function of the plugin, at any time, leaves Dask working as without the plugin.

By default a sample of the injections is run; the environment variable FERROFLOW_FAULTS=all runs all of them.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import pytest
import real_faults
import virtual_faults
from fault_injection import BOUNDARY, HANDLED, Injection, Injector, code_of_functions, injections

pytestmark = [pytest.mark.timeout(3600 if os.environ.get("FERROFLOW_FAULTS") == "all" else 300)]

_RUNS_ALL = os.environ.get("FERROFLOW_FAULTS") == "all"
#: Injections of each mode, by default: in virtual time, and on real clusters.
_N_VIRTUAL, _N_REAL, _N_REAL_OF_ALL = 25, 1, 34
#: Functions of arriving graphs, by default.
_N_OF_GRAPHS = 12
_CODES = code_of_functions()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log nothing: each injection logs a traceback, and so does distributed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def sample(possible: list[Injection], n: int, seed: str) -> list[Injection]:
    return possible if _RUNS_ALL else random.Random(seed).sample(possible, n)


def test_boundary_functions_exist() -> None:
    assert set(_CODES) >= set(BOUNDARY)
    assert {code.co_qualname for code in _CODES.values()} >= set(HANDLED)


@pytest.mark.parametrize("mode", virtual_faults.MODES)
def test_in_virtual_time(mode: str) -> None:
    possible = injections(virtual_faults.calls(mode, _CODES))
    found = {}
    for injection in sample(possible, _N_VIRTUAL, mode):
        if problems := virtual_faults.Run(mode, Injector(injection, _CODES)).play():
            found[str(injection)] = problems
    print(f"{mode}: {len(possible)} injections are possible")
    assert found == {}


@pytest.mark.cluster
@pytest.mark.parametrize("mode", real_faults.MODES)
def test_on_one_event_loop(mode: str) -> None:
    counting = Injector(None, _CODES)
    assert real_faults.run_on_one_loop(mode, counting) == []
    found = {}
    possible = injections(counting.calls)
    for injection in random.Random(mode).sample(possible, _N_REAL_OF_ALL if _RUNS_ALL else _N_REAL):
        if problems := real_faults.run_on_one_loop(mode, Injector(injection, _CODES)):
            found[str(injection)] = problems
    assert found == {}


@pytest.mark.cluster
def test_functions_that_an_arriving_graph_calls() -> None:
    counting = Injector(None, _CODES)
    assert real_faults.run_on_one_loop("run", counting) == []
    found = {}
    first_calls = [
        injection
        for injection in injections(counting.calls)
        if (injection.error, injection.n) == (RuntimeError, 1)
        and injection.function.startswith(("scheduler.graphs.", "bundling."))
    ]
    for injection in sample(first_calls, _N_OF_GRAPHS, "graphs"):
        if problems := real_faults.run_on_one_loop("run", Injector(injection, _CODES)):
            found[str(injection)] = problems
    assert found == {}


@pytest.mark.cluster
def test_in_processes() -> None:
    functions = (
        "placement:Placement.worker_of",
        "task_events:TaskEvents._finished",
        "changes:Changes.undo",
    )
    found = {}
    for name in functions if _RUNS_ALL else functions[1:2]:
        injection = Injection(f"scheduler.{name}", RuntimeError, 3)
        if problems := real_faults.run_in_processes(Injector(injection, _CODES)):
            found[str(injection)] = problems
    assert found == {}
