"""Tests that are coroutine functions, each on a fresh cluster."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any


def runs_on(
    run: Callable[..., None], **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Let `run(test, **options)` give a test its first argument, a cluster; the others are fixtures."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_test(**fixtures: Any) -> None:
            run(functools.partial(test, **fixtures), **options)

        _, *fixtures = inspect.signature(test).parameters.values()
        run_test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined] -- pytest reads it
        return run_test

    return decorate
