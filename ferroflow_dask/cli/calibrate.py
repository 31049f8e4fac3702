"""`ferroflow calibrate`."""

from __future__ import annotations

import json
from contextlib import ExitStack

import click
from rich.console import Console
from rich.table import Table

from ferroflow_dask.cli.cluster_options import check_address, connect_timeout, size_options
from ferroflow_dask.cost import ClusterProfile
from ferroflow_dask.deploy import calibrate as measure
from ferroflow_dask.deploy import connect, local_client, profiles_file, save_profile
from ferroflow_dask.plugin import check_scheduler, install, installed, uninstall


@click.command()
@size_options
@click.option(
    "--connect", "address", metavar="ADDRESS", help="Measure a running cluster, like tcp://10.0.0.1:8786."
)
@connect_timeout
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    *, workers: int, threads: int, processes: bool, address: str | None, timeout: float, as_json: bool
) -> None:
    """Measure what a task, a message and a byte cost on a cluster, and keep it for `run`.

    The cluster should be idle. It is measured with the plugin installed, as `run` uses it, and what is
    kept serves clusters of as many workers like these; if they are local, on this machine.
    """
    check_address(address)
    with ExitStack() as stack:
        if address is None:
            client = stack.enter_context(local_client(workers, threads, processes))
        else:
            client = stack.enter_context(connect(address, timeout))
            check_scheduler(client)
        if installed(client) is None:
            install(client)
            stack.callback(uninstall, client)
        profile = measure(client)
        is_kept = save_profile(client, profile)
    if as_json:
        click.echo(json.dumps(profile.as_dict()))
        return
    table = Table(show_header=False, box=None)
    for what, value in _told(profile):
        table.add_row(what, value)
    Console().print(table)
    click.echo(f"{'kept' if is_kept else 'could not be kept'} in {profiles_file()}", err=True)


def _told(profile: ClusterProfile) -> list[tuple[str, str]]:
    memory = f"{profile.memory_nbytes / 2**30:.1f} GiB" if profile.memory_nbytes else "no limit"
    return [
        ("workers, threads", f"{len(profile.threads)}, {profile.n_threads}"),
        ("one more task", f"{profile.task_s * 1e3:.3g} ms"),
        ("task to task", f"{profile.round_trip_s * 1e3:.3g} ms"),
        ("compute to result", f"{profile.submit_s * 1e3:.3g} ms"),
        ("worker to worker", f"{profile.bandwidth / 1e6:,.0f} MB/s"),
        ("matrix product", f"{profile.flop_rate / 1e9:,.1f} GFLOP/s a thread"),
        ("memory", f"{profile.memory_bandwidth / 1e9:,.1f} GB/s a thread"),
        ("least memory", memory),
    ]
