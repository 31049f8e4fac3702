"""The command line: `ferroflow`, which is also `dask ferroflow`."""

from __future__ import annotations

import click

import ferroflow_dask
from ferroflow_dask.cli.bench import bench
from ferroflow_dask.cli.calibrate import calibrate
from ferroflow_dask.cli.errors import OneLineErrors
from ferroflow_dask.cli.explain import explain
from ferroflow_dask.cli.info import info
from ferroflow_dask.cli.looks import top
from ferroflow_dask.cli.report import report
from ferroflow_dask.cli.run import run
from ferroflow_dask.cli.slurm import slurm


@click.group(cls=OneLineErrors, name="ferroflow", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ferroflow_dask.__version__, prog_name="ferroflow")
def main() -> None:
    """Run tensor DAGs and ONNX models on Dask, scheduled by ferroflow's policy."""


for _command in (run, info, explain, calibrate, bench, report, slurm, top):
    main.add_command(_command)
