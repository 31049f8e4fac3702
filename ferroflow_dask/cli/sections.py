"""Help in sections: the options of a command under headings, where there are too many for one list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

#: Where options are that name no section.
_ELSE = "Options"


class SectionOption(click.Option):
    """An option that is told in a section of the help.

    Parameters
    ----------
    section : str
        Its heading.
    """

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def _option_of(section: str) -> Callable[..., Callable[[F], F]]:
    """Return what takes the place of `click.option` for options of a section."""
    return partial(click.option, cls=SectionOption, section=section)


graph_option = _option_of("Graph")
how_option = _option_of("How it is computed")
cluster_option = _option_of("Cluster")
slurm_option = _option_of("SLURM")
device_option = _option_of("Devices")
output_option = _option_of("Output")
size_option = _option_of("Sizes of built-in graphs")
workload_option = _option_of("Sizes of workloads")


class SectionCommand(click.Command):
    """A command whose help has its options in sections, in the order in which these begin."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            told = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if told is not None:
                sections.setdefault(getattr(param, "section", _ELSE), []).append(told)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl(lines)
