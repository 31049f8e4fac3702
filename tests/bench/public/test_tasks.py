"""Programs of small tasks: their answers, under stock Dask and under the plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import checked_client
from distributed import Client

from ferroflow_dask import install
from ferroflow_dask.bench.public import tasks
from ferroflow_dask.bench.public.base import Clock, Options
from ferroflow_dask.bench.public.tasks import SUITE, Api, DaskApi, SmallTasks, small_tasks

#: Sizes of the tests; a tree needs a power of two less one.
SMALL = {"tree": 7}
KINDS = {program.kind: program for program in small_tasks(is_full=False)}
WAYS = [(kind, is_advised) for kind in KINDS for is_advised in (False, True)[: 1 + (kind in DaskApi.advised)]]


@pytest.fixture(scope="module", params=["stock", "plugin"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with checked_client(2, processes=False, set_as_default=False) as client:
        if request.param == "plugin":
            install(client)
        yield client


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "is_advised"), WAYS)
def test_an_answer_is_the_expected_one(
    kind: str, is_advised: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TOTAL_S", 0.05)
    program, n, clock = KINDS[kind], SMALL.get(kind, 250), Clock()
    answer = tasks._run(program.way(is_advised), n, client, clock)
    assert answer == program.expected(n)
    assert clock.seconds > 0


class Inline(Api):
    """Calls functions at once, without batches and without `put`."""

    def submit(self, function, *arguments):
        return function(*arguments)

    def results(self, futures):
        return list(futures)


@pytest.mark.parametrize("program", KINDS.values(), ids=KINDS)
def test_an_api_needs_only_submit_and_results(program: SmallTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TOTAL_S", 0.0)
    for is_advised in (False, True):
        answer, _ = program.way(is_advised)(Inline(), SMALL.get(program.kind, 250))
        assert answer == program.expected(SMALL.get(program.kind, 250))


def test_the_full_form_has_all_sizes() -> None:
    names = [program.name for program in SUITE.programs(Options(is_full=True))]
    assert len(names) == len(set(names))
    assert {"empty-10000", "sleep-100", "sleep-1000", "sleep-10000", "first-100000"} < set(names)
    assert {"one-by-one-100", "tree-1023", "readers-1000", "readers-1000-advised"} < set(names)


def test_a_wrong_answer_is_found() -> None:
    for program in SUITE.programs(Options()):
        expected = program.expected()
        wrong = expected + 1 if isinstance(expected, int) else [*expected[:-1], -1]
        assert program.differs(wrong, expected)
