"""Options and preparations of commands that simulate clusters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import click

from ferroflow_dask.cli.sections import cluster_option
from ferroflow_dask.deploy.calibration import topology_file
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.topology import Topology, load_topology, preset_names

F = TypeVar("F", bound=Callable[..., Any])

topology_option = cluster_option(
    "--topology",
    default="this-machine",
    show_default=True,
    metavar="FILE|PRESET",
    help=f"A YAML file, `calibrated` (by `ferroflow calibrate`), or one of: {', '.join(preset_names())}.",
)


def choices_option(
    flag: str, parameter: str, names: Iterable[str], purpose: str, end: str = "all if left out"
) -> Callable[[F], F]:
    """Return an option that chooses some of all names, all by default; each is given once."""
    known = list(names)
    return click.option(
        flag,
        parameter,
        multiple=True,
        type=click.Choice(known),
        default=known,
        callback=lambda _context, _option, chosen: list(dict.fromkeys(chosen)),
        help=f"{purpose}; {end}. Repeatable.",
    )


#: The option `--graph` of a benchmark: some of its graphs.
graphs_option = partial(choices_option, "--graph", "graphs")


def topology_named(name: str) -> Topology:
    """Return a topology from a file, a preset, or the last calibration."""
    if name != "calibrated":
        return load_topology(name)
    file = topology_file()
    if not file.is_file():
        raise UsageError("--topology calibrated needs a calibration; run `ferroflow calibrate` first")
    return load_topology(file)


def worker_counts(text: str) -> list[int]:
    """Return the numbers of workers in a text like `2,4,8`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--workers must be numbers like 2,4,8; got {text!r}") from error


def quiet_schedulers() -> None:
    """Log only warnings of schedulers: each one logs that it starts."""
    logging.getLogger("distributed.scheduler").setLevel(logging.WARNING)
