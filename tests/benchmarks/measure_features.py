"""Gain of each feature of the plugin: `python tests/benchmarks/measure_features.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
from ablation import CLASSES, Program, ablation_table, noise_line, put_between, real_ratios
from ablation_virtual import GROUPS, Ratio, cpu_ratios, virtual_ratios

from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.public.base import Options
from ferroflow_dask.bench.public.host import Place
from ferroflow_dask.bench.public.policies import OURS, OURS_AGAIN, WITHOUT, sides_of
from ferroflow_dask.bench.public.sides import Rules
from ferroflow_dask.bench.public.workloads import suites_of
from ferroflow_dask.bench.rows import Rows, read_rows
from ferroflow_dask.bench.workloads import get_workload
from ferroflow_dask.cli.bench_runs import rows_of, rows_option
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.simulations import choices_option, quiet_schedulers
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler.features import BUILT_IN

#: Workers with one thread each.
_WORKERS = 4
#: Rounds, and about the duration of a run with its preparations [s].
_QUICK, _FULL, _RUN_S = 5, 15, 1.5
#: Virtual runs of all features take about so long [s].
_VIRTUAL_S = 600


@click.command()
@choices_option("--feature", "names", [kind.name for kind in BUILT_IN], "Feature that is switched off")
@choices_option("--class", "classes", [*CLASSES, *GROUPS], "Class of programs; the last ones are virtual")
@click.option("--quick/--full", "is_quick", default=True, help="One program of each class, or all.")
@click.option("--virtual", "is_virtual", is_flag=True, help="Only runs in virtual time.")
@rows_option("ferroflow-ablation.jsonl")
@click.option(
    "--write",
    "document",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Document whose table is replaced, such as docs/mechanisms.md.",
)
def features(
    names: list[str],
    classes: list[str],
    *,
    is_quick: bool,
    is_virtual: bool,
    file: Path,
    document: Path | None,
) -> None:
    """Switch off each feature of the plugin alone, and print the cost.

    Numbers are a measure without the feature divided by the same with it. In real runs each side has a
    cluster of four processes, and the sides take turns. Virtual runs are exact.
    """
    check_folder("--rows", file)
    if document is not None:
        _text_with(document, "")
    programs = [] if is_virtual else _programs(classes, is_quick)
    groups = [name for name in GROUPS if name in classes]
    rounds = _QUICK if is_quick else _FULL
    n_runs = len(programs) * rounds * (len(names) + 2)
    seconds = n_runs * _RUN_S + _VIRTUAL_S * len(groups) / len(GROUPS)
    click.echo(f"{n_runs} runs, about {seconds / 60:.0f} minutes", err=True)
    ratios = list(_virtual(names, groups))
    if programs:
        ratios += real_ratios(_measured(programs, names, rounds, file), names)
    where = stamp()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    made = f"{datetime.now(UTC):%Y-%m-%d}, {versions}; {where['machine']}"
    text = "\n\n".join(filter(None, [ablation_table(ratios), noise_line(ratios), f"Measured: {made}."]))
    click.echo(text)
    if document is not None:
        document.write_text(_text_with(document, text), encoding="utf-8")


def _programs(classes: Sequence[str], is_quick: bool) -> list[Program]:
    chosen = [CLASSES[name] for name in classes if name in CLASSES]
    return [program for programs in chosen for program in (programs[:1] if is_quick else programs)]


def _measured(programs: Sequence[Program], features: Sequence[str], rounds: int, file: Path) -> Rows:
    """Make the real runs that a file does not have, and return its rows."""
    sides = sides_of((OURS, OURS_AGAIN, *(WITHOUT + name for name in features)))
    for is_first in (False, True):
        chosen = [
            (one.workload, get_workload(one.workload).arguments(one.sizes))
            for one in programs
            if one.is_first is is_first
        ]
        suites = suites_of(chosen)
        plain = (one.name for suite in suites for one in suite.programs(Options()) if _is_plain(one))
        options = Options(workers=_WORKERS, only=tuple(plain))
        for seed in range(rounds if is_first else 1):
            # A first run has new clusters, so that nothing is learned.
            rules = Rules(Place(_WORKERS), 0 if is_first else rounds, is_first, seed=seed, sides=sides)
            rows_of(suites, options, rules, file)
    return read_rows([file])


def _is_plain(program: Any) -> bool:
    """Return whether a program is the first of the ways in which its workload can be written."""
    return program.sizes.get("lowering", "") in ("", get_workload(program.name.split()[0]).lowerings[0])


def _virtual(features: Sequence[str], groups: Sequence[str]) -> Iterator[Ratio]:
    if not groups:
        return
    quiet_schedulers()
    on_run = partial(click.echo, err=True)
    yield from virtual_ratios(features, groups, on_run)
    yield from cpu_ratios(features, on_run)


def _text_with(document: Path, text: str) -> str:
    try:
        return put_between(document.read_text(encoding="utf-8"), text)
    except ValueError as error:
        raise UsageError(f"--write: {document} must have the place of a table; it has {error}") from None


#: Errors are one line, as those of `ferroflow`.
main = OneLineErrors(commands={"features": features})

if __name__ == "__main__":
    main(["features", *sys.argv[1:]])
