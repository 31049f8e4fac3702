"""Everything that is learned on a scheduler: it outlives the extension that has learned it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ferroflow_dask.bundling.averages import Averages
from ferroflow_dask.bundling.repeats import Repeats
from ferroflow_dask.scheduler.cost_model import CostModel, keep, with_older

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Weight of a graph in the mean excess, its excess at most, and the mean at most.
_WEIGHT_OF_ONE, _MOST_OF_ONE, _MOST_EXCESS = 0.1, 2.0, 4.0


class Known(Mapping[str, Averages | None]):
    """The averages of prefixes at one time: those that are asked for are made, and stay.

    Parameters
    ----------
    costs : CostModel
    separate : collection of str
        Prefixes of tasks that are never bundled, which have None.
    """

    def __init__(self, costs: CostModel, separate: Collection[str]) -> None:
        self._costs = costs
        self._separate = frozenset(separate)
        self._names = costs.names() | self._separate
        self._found: dict[str, Averages | None] = {}

    def __getitem__(self, name: str) -> Averages | None:
        """Return the averages of a prefix."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            self._found[name] = None if name in self._separate else self._costs.of_prefix(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefixes."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self._names)


@dataclass(slots=True, eq=False)
class Learned:
    """Everything that is learned on one scheduler, except the momentary speeds of workers.

    Parameters
    ----------
    costs : CostModel
    round_trip_s : float or None
        Time from the end of a task to the start of the next one that is sent for it [s]; None until measured.
    pause_s : float or None
        Mean time of a thread from the end of a task to the start of the next one that its worker has [s];
        None until measured.
    separate : set of str
        Prefixes of tasks that are never bundled: they asked for their worker or for a client, or iterators
        are passed between them.
    repeats : Repeats
    excess : float
        How many times as long as predicted graphs take, for all cuts alike: machines have other work, too.
    shuffled : dict of str to float
        Sizes of the data of shuffles by their identifiers [B].
    """

    costs: CostModel = field(default_factory=CostModel)
    round_trip_s: float | None = None
    pause_s: float | None = None
    separate: set[str] = field(default_factory=set)
    repeats: Repeats = field(default_factory=Repeats)
    excess: float = 1.0
    shuffled: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def record_excess(self, excess: float) -> None:
        """Learn how many times as long as predicted a graph took; single graphs count little."""
        by_one = min(max(excess, 1 / _MOST_OF_ONE), _MOST_OF_ONE) ** _WEIGHT_OF_ONE
        self.excess = min(max(self.excess * by_one, 1 / _MOST_EXCESS), _MOST_EXCESS)

    def record_shuffle(self, shuffle: str, nbytes: float) -> None:
        """Learn the size of the data of a shuffle [B]."""
        self.shuffled[shuffle] = nbytes
        keep(self.shuffled, shuffle)

    def exported(self) -> dict[str, Any]:
        """Return a copy of what other schedulers can use, as JSON has it."""
        return {
            "round_trip_s": self.round_trip_s,
            "pause_s": self.pause_s,
            "separate": sorted(self.separate),
            "shuffled": {**self.shuffled},
            **self.costs.exported(),
        }

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Take over what was exported on another scheduler; what is known here stays."""
        if self.round_trip_s is None:
            self.round_trip_s = exported["round_trip_s"]
        if self.pause_s is None:
            self.pause_s = exported["pause_s"]
        self.separate.update(exported["separate"])
        # Others hold on to the mapping.
        shuffled = with_older(exported["shuffled"], self.shuffled)
        self.shuffled.clear()
        self.shuffled.update(shuffled)
        self.costs.restore(exported)


_of_schedulers: WeakKeyDictionary[Any, Learned] = WeakKeyDictionary()


def learned_on(scheduler: Scheduler) -> Learned:
    """Return what was learned on a scheduler, by all extensions that it has had."""
    learned = _of_schedulers.get(scheduler)
    if learned is None:
        learned = _of_schedulers[scheduler] = Learned(
            CostModel(getattr(scheduler, "cumulative_worker_metrics", None))
        )
    return learned
