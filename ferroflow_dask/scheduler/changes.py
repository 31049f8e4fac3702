"""Registry of changes: every change to Dask's scheduler and workers is a named entry that can be undone.

Entries are undone in reverse order, each guarded by itself: if one fails, the others are undone all the same.
An entry that fails stays in the registry, so that a second `undo` repairs. An entry restores a value only
while that value is still ours: another plugin may have replaced it since.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any
from weakref import WeakMethod

logger = logging.getLogger("ferroflow_dask")

#: Exceptions that are failures of the plugin. In a synchronous hook nothing can be cancelled, so a
#: CancelledError is one, too; KeyboardInterrupt and SystemExit pass.
FAILURES = (Exception, asyncio.CancelledError)

#: A step that undoes something is tried so many times: each attempt continues where the last one failed.
ATTEMPTS = 3

_ABSENT = object()


def attempt(step: Callable[[], object], failed: str) -> bool:
    """Call a step that undoes something, again if it fails; return whether it has succeeded.

    Each failure is logged as `failed`.
    """
    for _ in range(ATTEMPTS):
        try:
            step()
        except FAILURES:
            logger.warning("ferroflow: %s", failed, exc_info=True)
        else:
            return True
    return False


def call_later(loop: Any, seconds: float, method: Callable[[], None]) -> None:
    """Call a method from an event loop, unless its object is gone by then: the loop does not keep it."""
    loop.call_later(seconds, _call, WeakMethod(method))


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    if (present := method()) is not None:
        present()


class Guard:
    """Runs code of the plugin so that an exception in it ends the plugin, not the scheduler.

    Parameters
    ----------
    on_failure : callable
        Called once, after the first exception.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        #: The first exception.
        self.error: BaseException | None = None
        #: Whether the plugin is uninstalled. Other plugins may still call functions of it that they wrap.
        self.is_closed = False

    def fail(self, error: BaseException) -> None:
        """Note a failure; from now on, guarded functions do nothing."""
        if self.error is None:
            self.error = error
            try:
                self._on_failure()
            except FAILURES:  # it must not reach Dask; the periodic callback of the extension recovers, too
                logger.warning("ferroflow: the recovery is delayed", exc_info=True)

    def __call__(self, function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        """Return the function guarded: it returns `default` when it fails, and after any failure."""

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                return default
            try:
                return function(*args, **kwargs)
            except FAILURES as error:
                self.fail(error)
                return default

        return guarded


class Change(ABC):
    """A change that can be undone.

    Parameters
    ----------
    name : str
        Owner and attribute, handler, plugin or topic that is changed.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {'applied' if self.is_applied else 'not applied'}>"

    @property
    @abstractmethod
    def is_applied(self) -> bool:
        """Whether the change is in effect."""

    @abstractmethod
    def apply(self) -> None:
        """Make the change; do nothing if it is in effect."""

    @abstractmethod
    def undo(self) -> None:
        """Restore the state before the change; do nothing if it is not in effect."""

    async def settled(self) -> None:  # noqa: B027 -- most changes are made at once
        """Wait for the coroutines that `apply` and `undo` have started."""


class ItemChange(Change):
    """An item of a mapping: a handler, an extension, or an attribute of an instance by its `vars`.

    Parameters
    ----------
    name : str
    mapping : mutable mapping
    key : str
    value : object
    """

    def __init__(self, name: str, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        super().__init__(name)
        self._mapping = mapping
        self._key = key
        self._value = value
        self._before: Any = _ABSENT

    @property
    def is_applied(self) -> bool:
        """Whether the mapping holds our value."""
        present = self._mapping.get(self._key, _ABSENT)
        # Each access makes a new bound method: compare by equality, but numbers and arrays by identity.
        return present is self._value or (callable(present) and bool(present == self._value))

    def apply(self) -> None:
        """Put our value into the mapping."""
        if not self.is_applied:
            self._before = self._mapping.get(self._key, _ABSENT)
            self._mapping[self._key] = self._value

    def undo(self) -> None:
        """Put the earlier value back."""
        if not self.is_applied:
            return
        if self._before is _ABSENT:
            del self._mapping[self._key]
        else:
            self._mapping[self._key] = self._before


class CallChange(Change):
    """A change made and undone by two functions.

    Parameters
    ----------
    name : str
    apply, undo : callable
        Both without arguments. `undo` must be safe to call again after it has raised.
    """

    def __init__(self, name: str, apply: Callable[[], object], undo: Callable[[], object]) -> None:
        super().__init__(name)
        self._apply = apply
        self._undo = undo
        self._is_applied = False

    @property
    def is_applied(self) -> bool:
        """Whether `apply` was called, and `undo` has not succeeded since."""
        return self._is_applied

    def apply(self) -> None:
        """Call `apply`."""
        if not self._is_applied:
            self._is_applied = True  # a function that fails halfway is undone, too
            self._apply()

    def undo(self) -> None:
        """Call `undo`."""
        if self._is_applied:
            self._undo()
            self._is_applied = False


class Changes:
    """The changes in effect, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[Change] = []
        # Those that the event loop makes and undoes.
        self._settling: list[Change] = []

    @property
    def names(self) -> list[str]:
        """Names of the changes in effect."""
        return [change.name for change in self._made]

    def make(self, change: Change) -> None:
        """Make a change; one that fails is undone, and the error is raised."""
        self._made.append(change)
        if type(change).settled is not Change.settled:
            self._settling.append(change)
        try:
            change.apply()
        except FAILURES:
            self.undo(change)
            raise

    def undo(self, change: Change) -> None:
        """Undo one change, with several attempts; a change that cannot be undone stays in the registry."""
        if attempt(change.undo, f"{change.name} could not be restored"):
            self._made = [other for other in self._made if other is not change]

    def undo_all(self) -> None:
        """Undo all changes, the latest first."""
        for change in reversed(self._made):
            self.undo(change)

    async def settled(self) -> None:
        """Wait until the event loop has made or undone all changes."""
        for change in self._settling:
            await change.settled()
