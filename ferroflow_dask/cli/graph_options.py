"""Options of the commands that take a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import TOPOLOGIES, Graph, generate, load_onnx

F = TypeVar("F", bound=Callable[..., Any])

#: Flag → argument of `generate`, where they differ.
_FLAGS = {"matrix_size": "m"}
_TOPOLOGY_OPTIONS: tuple[tuple[str, type], ...] = (
    *((name, int) for name in ("seq_len", "d_model", "n_heads", "layers", "channels", "width", "depth")),
    ("skew", float),
    *((name, int) for name in ("n_ops", "n_branches", "ops_per_branch", "matrix_size", "n", "dim")),
    ("factor", float),
    ("n_heavy", int),
    ("heavy_ms", float),
    ("n_fast", int),
    ("fast_ms", float),
)
#: What sizes are, where their names do not tell.
_SIZES = {"skew": "Slow part of the chains", "factor": "Duration [ms] of the slow half"}


class GraphCommand(click.Command):
    """A command with `graph_options`, which tells those who leave the option's name out."""

    allow_extra_args = True  # so that they are told here

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse arguments without an option, with the call that is probably meant."""
        rest = super().parse_args(ctx, args)
        if rest and (ctx.params["dag"] or ctx.params["model"]):
            raise UsageError(f"{rest[0]!r} belongs to no option; --help lists them")
        if rest:
            option = "--dag" if rest[0] in TOPOLOGIES else "--model"
            raise UsageError(
                f"{rest[0]!r} belongs to no option; give a graph as --dag NAME or --model FILE, like "
                f"{option} {rest[0]}"
            )
        return rest


def graph_options(function: F) -> F:
    """Add the options that name a graph and its sizes."""
    for name, kind in reversed(_TOPOLOGY_OPTIONS):
        argument = _FLAGS.get(name, name)
        sizes = ", ".join(
            f"{dag} ({topology.defaults[argument]:g})"
            for dag, topology in TOPOLOGIES.items()
            if argument in topology.defaults
        )
        told = f"{_SIZES.get(name, 'Size')} of: {sizes}."
        function = click.option(_flag(name), name, type=kind, default=None, help=told)(function)
    function = click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random numbers."
    )(function)
    function = click.option("--model", metavar="FILE", help="An ONNX model.")(function)
    return click.option("--dag", metavar="NAME", help=f"A built-in graph: {', '.join(TOPOLOGIES)}.")(function)


def load_graph(dag: str | None, model: str | None, seed: int, sizes: Mapping[str, Any]) -> Graph:
    """Return the graph that `graph_options` name."""
    given = {_FLAGS.get(name, name): value for name, value in sizes.items() if value is not None}
    if (dag is None) == (model is None):
        raise UsageError("give either --dag NAME or --model FILE")
    if dag is not None:
        try:
            return generate(dag, seed=seed, **given)
        except UsageError as error:
            raise UsageError(_ARGUMENT.sub(lambda found: _FLAG_OF[found[0]], str(error))) from error
    if given:
        raise UsageError(
            f"--model takes no sizes, but {', '.join(_FLAG_OF[name] for name in given)} was given"
        )
    return load_onnx(str(model))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


#: How arguments of `generate`, which its errors name, are called here.
_FLAG_OF = {_FLAGS.get(name, name): _flag(name) for name, _ in _TOPOLOGY_OPTIONS}
_ARGUMENT = re.compile(rf"\b(?:{'|'.join(_FLAG_OF)})\b")
