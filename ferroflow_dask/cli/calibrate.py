"""`ferroflow calibrate`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import click
import yaml
from rich.console import Console
from rich.table import Table

from ferroflow_dask.bench.markdown import count
from ferroflow_dask.cli.cluster_options import check_address, connect_timeout, size_options
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.progress import late_bar
from ferroflow_dask.deploy import (
    Calibration,
    calibration_of,
    connect,
    local_client,
    profiles_file,
    save_profile,
)
from ferroflow_dask.deploy.calibration import N_STEPS, topology_file
from ferroflow_dask.deploy.measured import measured_topology
from ferroflow_dask.deploy.rates import Rates
from ferroflow_dask.scheduler import check_scheduler, install, installed, uninstall
from ferroflow_dask.whole_files import write_text

#: Rates of workers that differ by no more than this factor are told as one.
_ALIKE = 1.2


@click.command()
@size_options
@click.option(
    "--connect", "address", metavar="ADDRESS", help="Measure a running cluster, like tcp://10.0.0.1:8786."
)
@connect_timeout
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: the profile, and what was measured where.",
)
@click.option(
    "--topology",
    "topology_path",
    metavar="FILE",
    help="Write the cluster as a topology for `simulate` to this YAML file, too.",
)
def calibrate(
    *,
    workers: int,
    threads: int,
    processes: bool,
    address: str | None,
    connect_timeout: float,
    as_json: bool,
    topology_path: str | None,
) -> None:
    """Measure what a task, a message and a byte cost on a cluster, and keep it for `run`.

    The cluster should be idle. It is measured with the plugin installed, as `run` uses it, and what is
    kept serves clusters of as many workers like these; if they are local, on this machine. Rates are
    medians of up to four workers of each kind, of different hosts if there are several. The costs of Dask
    itself are measured, too: `ferroflow simulate --topology calibrated` uses them.
    """
    check_address(address)
    if topology_path is not None:
        check_folder("--topology", topology_path)
    with ExitStack() as stack:
        if address is None:
            client = stack.enter_context(local_client(workers, threads, processes))
        else:
            client = stack.enter_context(connect(address, connect_timeout))
            check_scheduler(client)
        if installed(client) is None:
            install(client)
            stack.callback(uninstall, client)
        with late_bar("measurements", "measurements", N_STEPS, is_shown=not as_json) as update:
            found = calibration_of(client, lambda n_done: update(n_done, N_STEPS))
        is_kept = save_profile(client, found.profile)
        topology = measured_topology(client, found)
        document = yaml.safe_dump(topology.as_dict(), sort_keys=False)
        if topology_path is not None:
            write_text(topology_path, document)
        with suppress(OSError):  # as for the profile, of which it is said
            write_text(topology_file(), document)
    if as_json:
        measured = {"rates": found.rates, "gpu_rates": found.gpu_rates, "bandwidths": found.bandwidths}
        click.echo(json.dumps(found.profile.as_dict() | {"measured": measured}))
        return
    table = Table(show_header=False, box=None)
    for what, value in _told(found):
        table.add_row(what, value)
    Console().print(table)
    click.echo(f"{'kept' if is_kept else 'could not be kept'} in {profiles_file()}", err=True)


def _told(found: Calibration) -> Iterator[tuple[str, str]]:
    profile = found.profile
    yield "workers, threads", f"{len(profile.threads)}, {profile.n_threads}"
    yield "one more task", f"{profile.task_s * 1e3:.3g} ms"
    yield "task to task", f"{profile.round_trip_s * 1e3:.3g} ms"
    yield "compute to result", f"{profile.submit_s * 1e3:.3g} ms"
    ways = [f"{bandwidth / 1e6:,.0f} MB/s {where}" for where, bandwidth in found.bandwidths.items()]
    yield "worker to worker", ", ".join(ways) or "there is one worker"
    yield from _rates_told(found, "", found.rates, "a thread")
    if found.gpu_rates:
        yield from _rates_told(found, "gpu_", found.gpu_rates, "a GPU")
    memory = f"{profile.memory_nbytes / 2**30:.1f} GiB" if profile.memory_nbytes else "no limit"
    yield "least memory", memory


def _rates_told(found: Calibration, prefix: str, rates: Rates, of_what: str) -> Iterator[tuple[str, str]]:
    n_hosts = len({found.hosts.get(address, address) for address in rates})
    where = f"{count(len(rates), 'worker')} on {count(n_hosts, 'host')}"
    of_gpus = " of GPUs" if prefix else ""
    yield f"rates{of_gpus} measured on", where
    for title, name, unit in (
        ("matrix product", "flop_rate", "GFLOP/s"),
        ("memory", "memory_bandwidth", "GB/s"),
    ):
        known = [of_one[prefix + name] / 1e9 for of_one in rates.values()]
        low, high = min(known), max(known)
        between = f" ({low:,.1f}–{high:,.1f})" if high > _ALIKE * low else ""
        yield f"{title}{of_gpus}", f"{statistics.median(known):,.1f} {unit} {of_what}{between}"
