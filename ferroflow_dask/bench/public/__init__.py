"""Suites of programs that others wrote, run under Dask and under the plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ferroflow_dask.exceptions import UnknownNameError, UsageError

if TYPE_CHECKING:
    from ferroflow_dask.bench.public.base import Options, Suite

#: Names of the suites, in the order in which they run; each is `SUITE` of the module of its name.
NAMES = ("tasks", "shapes", "workflows", "tpch", "coiled", "taps")
#: Suites whose programs are in a working tree that the user has.
OF_CHECKOUTS = ("coiled", "taps")


def get_suite(name: str) -> Suite:
    """Return the suite of that name.

    Raises
    ------
    UnknownNameError
        There is none; the message lists all.
    """
    if name not in NAMES:
        raise UnknownNameError.of("suite", name, NAMES)
    suite: Suite = import_module(f"{__name__}.{name}").SUITE
    return suite


def chosen_suites(names: Sequence[str], options: Options, on_missing: Callable[[str], object]) -> list[Suite]:
    """Return the suites of some names, or all that can run here.

    Parameters
    ----------
    names : sequence of str
        None for all.
    options : Options
    on_missing : callable
        Takes a line about a suite that cannot run, if no names are given.

    Raises
    ------
    UsageError
        A named suite cannot run, or none can.
    """
    suites = []
    for name in names or NAMES:
        suite = get_suite(name)
        if not (problem := _problem(suite, options)):
            suites.append(suite)
        elif names:
            raise UsageError(problem)
        else:
            on_missing(f"left out: {problem}")
    if not suites:
        raise UsageError("no suite can run; run in the clone: pip install '.[public]'")
    return suites


def _problem(suite: Suite, options: Options) -> str:
    """Return why a suite cannot run, in one line; "" if it can."""
    from ferroflow_dask.bench.public.base import missing

    if lacking := missing(suite):
        return f"{suite.name} needs {', '.join(lacking)}; run in the clone: pip install '.[public]'"
    if suite.name in OF_CHECKOUTS and suite.name not in options.checkouts:
        return f"{suite.name} needs a working tree of its source; give --checkout {suite.name}=PATH"
    try:
        suite.programs(options)
    except UsageError as error:
        return f"{suite.name}: {error}"
    return ""
