"""Look at a run while it goes on, and keep what was seen: options of `ferroflow run`, and `ferroflow top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from distributed import Client
from rich.console import Console

from ferroflow_dask.bench import versions
from ferroflow_dask.cli.cluster_options import Duration, client_of, connect_timeout, scheduler_address
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.sections import output_option
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler import check_scheduler

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Kept:
    """What is told of a run that is looked at.

    Parameters
    ----------
    begin_run : callable
        Notes that a measured run begins.

    Attributes
    ----------
    told : (str, sequence of str) or None
        Title and lines of a report.
    """

    begin_run: Callable[[], None]
    told: tuple[str, Sequence[str]] | None = field(default=None, init=False)

    def __call__(self, title: str, lines: Sequence[str]) -> None:
        """Keep the title and the lines of a report."""
        self.told = title, lines


@dataclass(frozen=True, slots=True)
class Looks:
    """How a run is looked at.

    Parameters
    ----------
    is_live : bool
        In the terminal, while it goes on.
    report, trace : str or None
        Files to write.

    is_online : bool, optional
        Whether the report loads Bokeh's scripts from the network.

    Attributes
    ----------
    unwritten : list of str
        Options whose files could not be written, which the user has been told.
    """

    is_live: bool
    report: str | None
    trace: str | None
    is_online: bool = False
    unwritten: list[str] = field(default_factory=list, init=False)

    def __bool__(self) -> bool:
        """Whether it is looked at at all."""
        return self.is_live or self.report is not None or self.trace is not None

    def check(self, policy: str) -> None:
        """Refuse what cannot be done, before anything runs."""
        if self and policy == "sequential":
            raise UsageError(
                "--dashboard, --report and --trace look at a cluster; --policy sequential has none"
            )
        for option, file in (("--report", self.report), ("--trace", self.trace)):
            if file is not None:
                check_folder(option, file)

    @contextmanager
    def at(self, client: Client) -> Iterator[Kept]:
        """Look at a cluster while the context lasts; then write the files, if a title and lines were kept."""
        if not self:
            yield Kept(lambda: None)
            return
        from ferroflow_dask.dashboard.remote import begin_run, recording
        from ferroflow_dask.dashboard.terminal import watching

        with recording(client) as look, recording(client, is_summary=True) as glance:
            shown = watching(glance, Console(stderr=True)) if self.is_live else nullcontext()
            kept = Kept(partial(begin_run, client))
            with shown:
                yield kept
            if kept.told is not None and (self.report is not None or self.trace is not None):
                client.sync(self._write, look(), *kept.told)

    async def _write(self, recorded: Any, title: str, lines: Sequence[str]) -> None:
        """Write the files on the event loop, where no page of this process is brought up to date meanwhile.

        Such an update turns Bokeh's checks off in all threads, and a column of colours would become a colour.
        """
        from ferroflow_dask.dashboard.report import write_report, write_trace

        def report(path: Path) -> None:
            write_report(path, title, lines, versions(), recorded, is_online=self.is_online)

        def trace(path: Path) -> None:
            write_trace(path, recorded)

        for option, file, write in (("--report", self.report, report), ("--trace", self.trace, trace)):
            try:
                if file is not None:
                    write(Path(file))
            except OSError as error:  # the run was right all the same: its result is still to be shown
                self.unwritten.append(option)
                told = f"{option} {file!r} cannot be written: {error.strerror or error}"
                click.echo(f"ferroflow: {told}", err=True)


def look_options(function: F) -> F:
    """Add the options of how a run is looked at."""
    for option in (
        output_option(
            "--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing."
        ),
        output_option(
            "--report-online",
            "is_online",
            is_flag=True,
            help="The page of --report loads Bokeh's scripts (some MB) from its servers.",
        ),
        output_option("--report", metavar="FILE.html", help="Write timeline, steals and summary to a page."),
        output_option(
            "--dashboard", "is_live", is_flag=True, help="Show the workers while it runs; q ends that."
        ),
    ):
        function = option(function)
    return function


@click.command()
@scheduler_address
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    default=None,
    help="How long to show it [s]; by default until q or Ctrl-C.",
)
@connect_timeout
def top(address: str | None, seconds: float | None, connect_timeout: float) -> None:
    """Show what the workers of a running cluster do; a line a second where output is no terminal."""
    from ferroflow_dask.dashboard.remote import recording
    from ferroflow_dask.dashboard.terminal import watch

    until_s = float("inf") if seconds is None else time.monotonic() + seconds
    with client_of(address, connect_timeout) as client:
        check_scheduler(client)
        with recording(client, is_summary=True) as look:
            watch(look, Console(), lambda: time.monotonic() > until_s)
