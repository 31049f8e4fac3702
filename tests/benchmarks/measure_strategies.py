"""Found strategies on this machine: `python tests/benchmarks/measure_strategies.py --help`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from found_strategies import Measured, accounts_table, measure, strategies_table
from strategy_models import cnn, transformer
from strategy_order import Ordered, order, order_table

from ferroflow_dask.cli.cluster_options import Count, Duration, repeat_type
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.simulations import choices_option
from ferroflow_dask.exceptions import UsageError

#: The largest result has the square of this [numbers].
_MOST_LENGTH, _MEMORY = 2**14, "results are in memory"
_MODELS = ("block", "stack", "cnn")


@click.command()
@choices_option("--model", "models", _MODELS, "A transformer block, a stack of eight, or a CNN")
@click.option("--repeat", type=repeat_type(2), default=5, show_default=True, help="Runs of each way.")
@click.option(
    "--order",
    "n_ordered",
    type=click.IntRange(min=2),
    help="Compare so many strategies of each model by predicted and by measured time instead. Parts sleep.",
)
@click.option("--seconds", type=Duration(), default=10.0, show_default=True, help="Budget of a search [s].")
@click.option("--seq-len", type=Count(2, _MOST_LENGTH, _MEMORY), default=512, show_default=True)
@click.option("--d-model", type=Count(16, _MOST_LENGTH, _MEMORY), default=1024, show_default=True)
@click.option(
    "--image",
    type=Count(16, _MOST_LENGTH, _MEMORY),
    default=1024,
    show_default=True,
    help="Pixels along a side.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each model.")
def strategies(
    *,
    models: list[str],
    repeat: int,
    n_ordered: int | None,
    seconds: float,
    seq_len: int,
    d_model: int,
    image: int,
    as_json: bool,
) -> None:
    """Measure found strategies on two processes of one thread.

    They take turns with the whole model in one session and with `granularity="auto"`. Two matrix products at
    a time show what the two processes reach together. In further runs, each part sleeps as long as it costs.
    """
    if d_model % 16:
        raise UsageError(f"--d-model must be a multiple of its 16 heads, got {d_model}")
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Sending large graph")
    made = {
        "block": partial(transformer, 1, seq_len, d_model),
        "stack": partial(transformer, 8, seq_len, d_model),
        "cnn": partial(cnn, image),
    }
    chosen = {name: made[name] for name in models}
    progress = partial(click.echo, err=True)
    found: Iterable[Measured | Ordered]
    if n_ordered is None:
        found = measure(chosen, repeat, seconds, progress)
    else:
        found = order(chosen, n_ordered, repeat, seconds, progress)
    rows: list[Any] = []
    for row in found:
        rows.append(row)
        if as_json:
            click.echo(json.dumps(asdict(row)))
    if not as_json:
        click.echo(strategies_table(rows) if n_ordered is None else order_table(rows))
        if n_ordered is None:
            click.echo(f"\nbusiest worker, predicted → fastest run:\n\n{accounts_table(rows)}")


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={strategies.name: strategies})

if __name__ == "__main__":
    main([str(strategies.name), *sys.argv[1:]])
