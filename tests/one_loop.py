"""A scheduler, workers and a client on one event loop, on which tests can stop the world and look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import dask
from distributed import Client, Scheduler, Worker
from distributed.stealing import WorkStealing
from waiting import comes, pause

from ferroflow_dask import FerroflowPlugin
from ferroflow_dask.policy.instructions import StealTask
from ferroflow_dask.scheduler.lifecycle import PLUGIN_NAME


class Cluster:
    """A scheduler with workers and a client on one event loop; the plugin is installed."""

    def __init__(self, scheduler: Scheduler, workers: list[Worker], client: Client) -> None:
        self.scheduler, self.workers, self.client = scheduler, workers, client

    @property
    def stealing(self) -> Any:
        return self.scheduler.extensions["stealing"]

    def map(self, n: int, seconds: float = 0.02, **options: Any) -> list[Any]:
        return self.client.map(pause, range(n), seconds=seconds, pure=False, **options)

    def pinned(self, n: int, seconds: float = 0.02, **options: Any) -> list[Any]:
        """Submit tasks that prefer the first worker."""
        return self.map(n, seconds, workers=[self.workers[0].address], allow_other_workers=True, **options)

    async def processing(self, future: Any) -> Any:
        """Wait until the scheduler has sent a task to a worker, and return the task."""
        sent = ("processing", "memory", "erred")
        await comes(lambda: (ts := self.scheduler.tasks.get(future.key)) and ts.state in sent)
        return self.scheduler.tasks[future.key]

    def ask(self, ts: Any, victim: Worker, thief: Worker) -> None:
        """Ask for a steal as the policy would."""
        assert (
            self.stealing.parts.steals.request(StealTask(ts.key, victim.address, thief.address, "test"))
            is not None
        )

    def seen(self) -> list[int]:
        return [self.stealing.view.workers[worker.address].n_tasks for worker in self.workers]

    def assert_stock(self) -> None:
        assert type(self.stealing) is WorkStealing
        assert "stealing" in self.scheduler.periodic_callbacks
        assert "is_rootish" not in vars(self.scheduler)
        assert PLUGIN_NAME not in self.scheduler.plugins
        assert sum(isinstance(plugin, WorkStealing) for plugin in self.scheduler.plugins.values()) == 1


def on_cluster(
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    resources: tuple[dict[str, float] | None, ...] = (None, None),
    config: dict[str, Any] | None = None,
    plugin: bool = True,
    limit_s: float = 60,
    **scheduler_options: Any,
) -> None:
    """Run a test on a fresh cluster whose stealing never acts by the clock."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                Scheduler(dashboard=False, dashboard_address=":0", port=0, **scheduler_options)
            )
            workers = [
                await stack.enter_async_context(Worker(scheduler.address, nthreads=1, resources=amounts))
                for amounts in resources
            ]
            client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
            if plugin:
                await client.register_plugin(FerroflowPlugin())
            await test(Cluster(scheduler, workers, client))

    checked = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    never = {
        "distributed.scheduler.work-stealing-interval": "5m",
        "distributed.scheduler.dashboard.link": "",
    }
    with dask.config.set({**checked, **never, **(config or {})}):
        asyncio.run(asyncio.wait_for(run(), limit_s))
