"""Who may decide in a benchmark: Dask as it is, and our policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed import Client
from distributed.scheduler import TaskPrefix
from distributed.stealing import WorkStealing

from ferroflow_dask.exceptions import UnknownNameError
from ferroflow_dask.policy import Policy, policy_names
from ferroflow_dask.scheduler.extension import FerroflowStealing, extension_on
from ferroflow_dask.scheduler.features import found_features
from ferroflow_dask.scheduler.learned import Learned
from ferroflow_dask.scheduler.settings import configured_policy
from ferroflow_dask.scheduler.steal_exchange import exchange

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

_MEMORY = "_ferroflow_bench_memory"


#: Dask as it is, and once more: the two differ by noise.
BASELINES = ("dask", "dask-again")
#: The plugin as it is, once more, which shows the noise, and without a feature.
OURS = "ferroflow"
AGAIN = f"{OURS}-again"
WITHOUT = f"{OURS}-without-"


def names() -> tuple[str, ...]:
    """Return the names of all that can be measured."""
    without = (f"{WITHOUT}{kind.name}" for kind in found_features())
    return (*BASELINES, *policy_names(), AGAIN, *without)


def _policy_and_features_off(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the policy that a name stands for, and the features that are off. Others are without bundles."""
    if name in (OURS, AGAIN):
        return OURS, ()
    if name.startswith(WITHOUT):
        return OURS, (name.removeprefix(WITHOUT),)
    return name, ("bundles",)


def check_name(name: str) -> None:
    """Raise `UnknownNameError` for what is neither a baseline nor a policy."""
    if name not in names():
        raise UnknownNameError.of("policy", name, names())


def put_in_charge(client: Client, name: str, seed: int = 0) -> None:
    """Let a baseline or a policy decide on a cluster from now on.

    A policy that was in charge before knows what it has learned then.
    """
    check_name(name)
    client.run_on_scheduler(_put_in_charge, name=name, seed=seed)


def forget(client: Client) -> None:
    """Let Dask and all policies know nothing of the past; what is in charge then must be put there anew."""
    client.run_on_scheduler(_forget)


def is_in_charge(client: Client, name: str) -> bool:
    """Return whether what was put in charge still is; a policy that fails leaves the cluster to Dask."""
    return bool(client.run_on_scheduler(_is_in_charge, name=name))


@dataclass(frozen=True, slots=True)
class _Memory:
    """What our policies have learned on a cluster; it outlives their turns."""

    policies: dict[str, Policy] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)


def _memory(dask_scheduler: Scheduler) -> _Memory:
    # Kept where the scheduler is, which may be another process.
    memory: _Memory = vars(dask_scheduler).setdefault(_MEMORY, _Memory())
    return memory


async def _put_in_charge(dask_scheduler: Scheduler, name: str, seed: int) -> None:
    if name not in BASELINES:
        options = {"seed": seed} if name == "random" else {}
        memory = _memory(dask_scheduler)
        chosen, without = _policy_and_features_off(name)
        policy = memory.policies.setdefault(name, configured_policy(chosen, options))

        def make(scheduler: Scheduler) -> FerroflowStealing:
            return FerroflowStealing(scheduler, policy, learned=memory.learned, without=without)

        await exchange(dask_scheduler, make)
        extension = extension_on(dask_scheduler)
        assert extension is not None
        await extension.changes.settled()  # graphs are bundled once the workers have announced themselves
        return
    await exchange(dask_scheduler, WorkStealing)


def _is_in_charge(dask_scheduler: Scheduler, name: str) -> bool:
    extension = dask_scheduler.extensions.get("stealing")
    if name in BASELINES:
        return type(extension) is WorkStealing
    if not isinstance(extension, FerroflowStealing) or extension.error is not None:
        return False
    return extension.placement.policy is _memory(dask_scheduler).policies[name]


def _forget(dask_scheduler: Scheduler) -> None:
    vars(dask_scheduler).pop(_MEMORY, None)
    for name, prefix in dask_scheduler.task_prefixes.items():
        new = TaskPrefix(name)  # what is configured is known even then
        prefix.duration_average, prefix.max_exec_time = new.duration_average, new.max_exec_time
