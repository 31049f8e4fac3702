"""The command line: `ferroflow`, which is also `dask ferroflow`."""

from __future__ import annotations

from importlib import import_module

import click

import ferroflow_dask
from ferroflow_dask.cli.errors import OneLineErrors

#: The module of each command, which has its name. What a command needs is imported when it is given.
_COMMANDS = {
    "bench": "bench",
    "calibrate": "calibrate",
    "doctor": "doctor",
    "explain": "explain",
    "info": "info",
    "learned": "learned",
    "plan": "plan",
    "report": "report",
    "run": "run",
    "search": "search",
    "simulate": "simulate",
    "slurm": "slurm",
    "top": "looks",
}


class _Commands(OneLineErrors):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, if there is one of the name."""
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"ferroflow_dask.cli.{_COMMANDS[cmd_name]}"), cmd_name)
        return command


@click.group(cls=_Commands, name="ferroflow", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ferroflow_dask.__version__, prog_name="ferroflow")
def main() -> None:
    """Run tensor DAGs and ONNX models on Dask, scheduled by ferroflow's policy."""
