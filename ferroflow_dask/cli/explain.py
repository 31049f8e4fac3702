"""`ferroflow explain`."""

from __future__ import annotations

import click

from ferroflow_dask.cli.cluster_options import client_of, connect_timeout, scheduler_address
from ferroflow_dask.printable import printable
from ferroflow_dask.scheduler import check_scheduler
from ferroflow_dask.scheduler import explain as decisions_about


@click.command()
@click.argument("key")
@scheduler_address
@connect_timeout
def explain(key: str, address: str | None, connect_timeout: float) -> None:
    """Say where a task was placed and why, and which steals of it were asked for or declined.

    KEY is the task's key, as Dask's dashboard shows it.
    """
    with client_of(address, connect_timeout) as client:
        check_scheduler(client)
        decisions = decisions_about(client, key)
    for decision in decisions:
        click.echo(f"{decision.time - decisions[0].time:+9.3f} s · {printable(str(decision))}")
