"""`ferroflow bench ablation`: what each feature of the plugin gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click

from ferroflow_dask.bench.ablation import (
    CLASSES,
    ablation_table,
    noise_line,
    put_between,
    real_ratios,
)
from ferroflow_dask.bench.ablation_virtual import GROUPS, Ratio, cpu_ratios, virtual_ratios
from ferroflow_dask.bench.baselines import AGAIN, OURS, WITHOUT
from ferroflow_dask.bench.machine import stamp
from ferroflow_dask.bench.plan import Case, Plan, make_cases
from ferroflow_dask.bench.schema import Shape
from ferroflow_dask.bench.workloads import get_workload
from ferroflow_dask.cli.bench_runs import rows_of, rows_option
from ferroflow_dask.cli.files import check_folder
from ferroflow_dask.cli.simulations import choices_option, quiet_schedulers
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.scheduler.features import BUILT_IN

#: Four processes of one thread, as the suite has them.
_SHAPE = Shape(4, 1, True)
#: Repetitions, and how long a run takes with what is done around it, about [s].
_QUICK, _FULL, _RUN_S = 5, 15, 1.5
#: Virtual runs of all features take about so long [s].
_VIRTUAL_S = 600


@click.command()
@choices_option("--feature", "features", [kind.name for kind in BUILT_IN], "Feature that is switched off")
@choices_option("--class", "classes", [*CLASSES, *GROUPS], "Class of programs; the last ones are virtual")
@click.option("--quick/--full", "is_quick", default=True, help="One program of each class, or all.")
@click.option("--virtual", "is_virtual", is_flag=True, help="Only what runs in virtual time.")
@rows_option("ferroflow-ablation.jsonl")
@click.option(
    "--write",
    "document",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Document whose table is replaced, such as docs/mechanisms.md.",
)
def ablation(
    features: list[str],
    classes: list[str],
    *,
    is_quick: bool,
    is_virtual: bool,
    file: Path,
    document: Path | None,
) -> None:
    """Switch each feature of the plugin off alone, and print what that costs.

    Numbers are a measure without the feature divided by the same with it. Real runs are interleaved on one
    cluster of four processes; virtual ones are exact.
    """
    check_folder("--rows", file)
    if document is not None:
        _text_with(document, "")
    plan = Plan(
        [] if is_virtual else _cases(features, classes, is_quick), _SHAPE, _QUICK if is_quick else _FULL
    )
    groups = [name for name in GROUPS if name in classes]
    seconds = plan.n_runs * _RUN_S + _VIRTUAL_S * len(groups) / len(GROUPS)
    click.echo(f"{plan.n_runs} runs, about {seconds / 60:.0f} minutes", err=True)
    ratios = list(_virtual(features, groups))
    if plan.cases:
        ratios += real_ratios(rows_of(plan, file), features)
    where = stamp()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    made = f"{datetime.now(UTC):%Y-%m-%d}, {versions}; {where['machine']}"
    text = "\n\n".join(filter(None, [ablation_table(ratios), noise_line(ratios), f"Measured: {made}."]))
    click.echo(text)
    if document is not None:
        document.write_text(_text_with(document, text), encoding="utf-8")


def _cases(features: Sequence[str], classes: Sequence[str], is_quick: bool) -> list[Case]:
    policies = (OURS, AGAIN, *(WITHOUT + name for name in features))
    cases: list[Case] = []
    for name in classes:
        programs = CLASSES.get(name, ())
        for program in programs[:1] if is_quick else programs:
            workload = get_workload(program.workload)
            sized = [(workload, workload.arguments(program.sizes))]
            made = make_cases(sized, policies, [program.costs])
            cases += [case for case in made if case.lowering == workload.lowerings[0]]
    return cases


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
