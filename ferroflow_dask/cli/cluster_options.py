"""Options of the commands that start a local cluster or connect to a running one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

workers_option = click.option(
    "--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Local workers to start."
)
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of each worker."
)
_processes_option = click.option(
    "--processes/--no-processes", default=True, show_default=True, help="One process for each worker."
)

#: How long `--connect` waits.
connect_timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="For --connect [s].",
)


def size_options(function: F) -> F:
    """Add the options that give the size of a local cluster."""
    return workers_option(threads_option(_processes_option(function)))
