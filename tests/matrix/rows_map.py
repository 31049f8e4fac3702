"""Rows of `Client.submit` and `Client.map` with their options."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from distributed import Actor, wait

from matrix.row import no_more, row
from matrix.tasks import (
    PlannedError,
    add,
    arrived,
    blocked,
    error_of,
    inc,
    low_before_high,
    note,
    noted,
    noting_inc,
    open_gate,
    outcomes,
    pause_ms,
    runs,
)
from matrix.trial import Trial


@row("submit", "S", "one task; 100 tasks that read each other", covers=("Client.submit", "Client", "Future"))
def submit_tasks(trial: Trial) -> Any:
    client = trial.client
    one = client.submit(inc, 1, key="one")
    chain = [client.submit(noting_inc, 0, trial.folder, 0, key="chain-0")]
    for i in range(1, 100):
        chain.append(client.submit(noting_inc, chain[-1], trial.folder, i, key=f"chain-{i}"))
    return one.result(), client.gather(chain), runs(trial.folder)


@row("map", "B", "100 importable calls; 100 calls of a lambda", covers=("Client.map",))
def map_tasks(trial: Trial) -> Any:
    client = trial.client
    importable = client.map(noting_inc, range(100), folder=trial.folder)
    anonymous = client.map(lambda x: 2 * x, range(100))
    return client.gather(importable), client.gather(anonymous), runs(trial.folder)


@row("map, iterables of unequal length", "B", "`range(40)` and `range(50)`")
def map_unequal(trial: Trial) -> Any:
    futures = trial.client.map(add, range(40), range(50))
    return len(futures), trial.client.gather(futures)


def _size(x: int, values: Any, names: dict[str, int]) -> Any:
    return x, len(values), names["a"]


@row("map, keyword arguments", "B", "a small dict, and an array of 80 kB")
def map_keywords(trial: Trial) -> Any:
    import numpy as np

    futures = trial.client.map(_size, range(60), values=np.zeros(10_000), names={"a": 7})
    return trial.client.gather(futures)


@row("map, a large keyword argument", "", "an array of 1 MB, which becomes a task", cluster={})
def map_large_keyword(trial: Trial) -> Any:
    import numpy as np

    try:
        return trial.client.gather(trial.client.map(_size, range(60), values=np.zeros(2**17), names={"a": 7}))
    except Exception as error:  # noqa: BLE001 -- Dask 2026.8.0 raises an `AssertionError`: the task has no priority
        return type(error).__name__


@row("map, own keys", "B", "`key=list` with tuples as keys; `key=` a name")
def map_keys(trial: Trial) -> Any:
    client = trial.client
    tuples = client.map(inc, range(40), key=[("mine", i) for i in range(40)])
    named = client.map(inc, range(40), key="named")
    keys = [future.key for future in tuples], [str(future.key)[:6] for future in named]
    return keys, client.gather(tuples), client.gather(named), len({future.key for future in named})


def _draw(_: int) -> float:
    return random.SystemRandom().random()


@row("map(pure=False)", "B", "random numbers twice")
def map_impure(trial: Trial) -> Any:
    client = trial.client
    found = [client.gather(client.map(_draw, range(50), pure=False)) for _ in range(2)]
    return len({number for numbers in found for number in numbers})


@row("map(batch_size=)", "B", "400 calls in batches of 100")
def map_batches(trial: Trial) -> Any:
    futures = trial.client.map(inc, range(400), batch_size=100)
    return len({future.key for future in futures}), trial.client.gather(futures)


def _start(name: str, folder: str) -> None:
    note(folder, name)


#: Tasks of a lower priority that are in progress while others with a higher priority start.
_RUNNING = 12


@row(
    "map(priority=)",
    "B",
    "two maps, the second one with a higher priority",
    is_timed=True,
    compare=no_more("low first", slack=_RUNNING),
    covers=("annotation priority",),
)
def map_priority(trial: Trial) -> Any:
    client, gate = trial.client, blocked(trial)
    low = client.map(_start, [f"low-{i}" for i in range(40)], folder=trial.folder, priority=0)
    high = client.map(_start, [f"high-{i}" for i in range(40)], folder=trial.folder, priority=10)
    arrived(trial, high)
    open_gate(trial.folder)
    wait([*low, *high, *gate])
    return {"low first": low_before_high(trial.folder), "runs": runs(trial.folder)}


def _flaky(x: int, folder: str) -> int:
    note(folder, x)
    if x % 10 == 3 and noted(folder).count(str(x)) < 3:
        raise PlannedError(x)
    return x


@row("map(retries=2)", "S", "flaky tasks that fail twice", covers=("annotation retries",))
def map_retries(trial: Trial) -> Any:
    futures = trial.client.map(_flaky, range(40), folder=trial.folder, retries=2)
    return outcomes(futures), runs(trial.folder)


@row(
    "map(workers=), allow_other_workers",
    "S",
    "two of the workers; a worker that does not exist",
    covers=("annotation workers", "annotation allow_other_workers"),
)
def map_workers(trial: Trial) -> Any:
    client, allowed = trial.client, trial.workers[:2]
    placed = client.gather(client.map(_where, range(40), workers=allowed, pure=False))
    anywhere = client.map(inc, range(40), workers=["tcp://127.0.0.1:9"], allow_other_workers=True)
    return {*placed} <= {*allowed}, client.gather(anywhere)


def _where(_: int) -> str:
    from distributed import get_worker

    return str(get_worker().address)


def _alone(x: int, folder: str) -> int:
    lock = Path(folder, "alone")
    lock.touch(exist_ok=False)
    lock.unlink()
    return x


@row(
    "map(resources=)",
    "S",
    "one unit on one worker: never two tasks at once",
    cluster={"n_workers": 1, "threads_per_worker": 4, "resources": {"unit": 1}},
    covers=("annotation resources",),
)
def map_resources(trial: Trial) -> Any:
    return trial.client.gather(
        trial.client.map(_alone, range(40), folder=trial.folder, resources={"unit": 1})
    )


@row(
    "map(fifo_timeout=)",
    "B",
    "two graphs within the time, and beyond it",
    is_timed=True,
    compare=no_more("second first", "second first, beyond", slack=_RUNNING),
)
def map_fifo_timeout(trial: Trial) -> Any:
    found: dict[str, Any] = {}
    for name, timeout in (("second first", "1h"), ("second first, beyond", "0s")):
        folder = Path(trial.folder, name)
        folder.mkdir()
        inner = Trial(trial.policy, trial.cluster, trial.client, str(folder))
        gate = blocked(inner)
        # `low_before_high` counts those of the later graph here.
        late = [f"low-{i}" for i in range(40)]
        first = trial.client.map(_start, [f"high-{i}" for i in range(40)], folder=str(folder))
        second = trial.client.map(_start, late, folder=str(folder), fifo_timeout=timeout)
        arrived(inner, second)
        open_gate(str(folder))
        wait([*first, *second, *gate])
        found[name] = low_before_high(str(folder))
        found[f"runs, {name}"] = runs(str(folder))
    return found


class Counter:
    """An actor."""

    n = 0  # clients read attributes that the class has

    def __init__(self, start: int) -> None:
        self.n = start

    def count(self) -> int:
        """Return how often this was called."""
        self.n += 1
        return self.n


@row("map(actor=True)", "S", "ten counters", covers=("Actor", "ActorFuture", "BaseActorFuture"))
def map_actors(trial: Trial) -> Any:
    # Two graphs: Dask's scheduler queues more tasks than 2 × threads, and then finds that actors cannot be.
    futures = [*_counters(trial, range(5)), *_counters(trial, range(5, 10))]
    actors = trial.client.gather(futures)
    assert all(isinstance(actor, Actor) for actor in actors)
    return [[actor.count().result() for _ in range(3)] for actor in actors], [actor.n for actor in actors]


def _counters(trial: Trial, starts: range) -> list[Any]:
    return trial.client.map(Counter, starts, actor=True, key=[f"{starts.start}-counter-{i}" for i in starts])


@row("submit(key=) of a key in a bundle", "B", "a second definition of a key while the first one is wanted")
def submit_same_key(trial: Trial) -> Any:
    client = trial.client
    futures = client.map(inc, range(40), key=[f"same-{i}" for i in range(40)])
    again = client.submit(pause_ms, 100, key="same-7")
    return again.result(), client.gather(futures)


@row("map of a failing iterable", "", "an iterable that raises an exception, and no iterable")
def map_failing(trial: Trial) -> Any:
    found = []
    for arguments in ((x // (x - 3) for x in range(6)), 7):
        try:
            trial.client.map(inc, arguments)
        except Exception as error:  # noqa: BLE001 -- any is an observation
            found.append(error_of(error))
    return found
