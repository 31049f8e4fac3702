"""FlexFlow's evaluation in simulation: `python examples/flexflow/evaluate.py --help`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import click
from flexflow_networks import NETWORKS
from flexflow_training import CLUSTERS, DEVICES, Setting, compare, flexflow_table
from pictures import check_picture, write_picture

from ferroflow_dask.cli.cluster_options import Count, Duration, simulated_workers
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.simulations import choices_option
from ferroflow_dask.search.training import SYNCHRONIZATIONS


@click.command()
@choices_option("--network", "networks", NETWORKS, "Network")
@choices_option("--topology", "topologies", CLUSTERS, "Preset", "both if left out")
@click.option(
    "--devices",
    multiple=True,
    type=simulated_workers,
    default=DEVICES,
    help="Number of devices; 4, 16 and 64 if left out, as far as the cluster has them. Repeatable.",
)
@click.option(
    "--seconds", type=Duration(), default=10.0, show_default=True, help="Budget of each search [s]."
)
@click.option(
    "--synchronization",
    type=click.Choice(SYNCHRONIZATIONS),
    default="server",
    show_default=True,
    help="How gradients are summed up: by parameter servers, or in a ring.",
)
@click.option(
    "--samples",
    type=Count(1, 4096, "larger graphs take long"),
    default=64,
    show_default=True,
    help="Samples of each device; AlexNet has four times as many.",
)
@click.option(
    "--microbatches",
    type=Count(1, 64, "each one is simulated"),
    default=1,
    show_default=True,
    help="Most microbatches of an iteration that the search may choose.",
)
@click.option(
    "--plot", metavar="FILE.png", help="Also write a plot to this picture, by selenium and a browser."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each comparison.")
def flexflow(
    *,
    networks: list[str],
    topologies: list[str],
    devices: tuple[int, ...],
    seconds: float,
    synchronization: str,
    samples: int,
    microbatches: int,
    plot: str | None,
    as_json: bool,
) -> None:
    """Simulate the training of FlexFlow's six networks on its two clusters.

    A found strategy is compared with data-parallel training and with the strategy of experts.
    """
    if plot is not None:
        check_folder("--plot", plot)
        check_picture(plot)
    setting = Setting(synchronization, samples, microbatches)
    rows = []
    chosen = (networks, topologies, list(dict.fromkeys(devices)))
    progress = partial(click.echo, err=True)
    for row in compare(*chosen, seconds, setting=setting, progress=progress):
        rows.append(row)
        if as_json:
            click.echo(json.dumps(asdict(row)))
    if not as_json:
        click.echo(flexflow_table(rows))
    if plot is not None:
        from flexflow_plot import flexflow_plot

        write_picture(flexflow_plot(rows), plot)


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={flexflow.name: flexflow})

if __name__ == "__main__":
    main([str(flexflow.name), *sys.argv[1:]])
