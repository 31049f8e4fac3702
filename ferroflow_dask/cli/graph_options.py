"""Options of the commands that take a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from ferroflow_dask.cli.sections import SectionCommand, graph_option, size_option
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.graph import TOPOLOGIES, Graph, generate_graph, graph_from_onnx
from ferroflow_dask.graph.files import read_graph

F = TypeVar("F", bound=Callable[..., Any])

#: Flag → argument of `generate`, where they differ.
_FLAGS = {"matrix_size": "m"}
#: Values of the original ferroflow's `--scheduler` that have another name here.
_POLICY_OF = {"work-stealing": "ring"}
_SIZES: tuple[tuple[str, type, str], ...] = (
    ("n_heavy", int, "Long ops"),
    ("heavy_ms", float, "Duration of a long op [ms]"),
    ("n_fast", int, "Short ops"),
    ("fast_ms", float, "Duration of a short op [ms]"),
    ("width", int, "Chains"),
    ("depth", int, "Ops of a chain"),
    ("skew", float, "Part of the chains that is slow, from 0 to 1"),
    ("factor", float, "Duration of the slow half of the ops [ms]"),
    ("layers", int, "Transformer blocks"),
    ("seq_len", int, "Length of the sequence"),
    ("d_model", int, "Width of the model"),
    ("n_heads", int, "Attention heads"),
    ("channels", int, "Rows and columns of the matrices"),
    ("n_branches", int, "Chains"),
    ("ops_per_branch", int, "Matrix products of a chain"),
    ("n_ops", int, "Matrix products"),
    ("matrix_size", int, "Rows and columns of the matrices"),
    ("n", int, "Ops"),
    ("dim", int, "Rows and columns of the matrices"),
)


class SizeCommand(SectionCommand):
    """A command with an option for each size; it refuses other spellings, with the option that is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse sizes as `generate` and other programs spell them."""
        given = tuple(args)  # parsing empties the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flags = {flag for param in self.params for flag in param.opts}
            if (meant := _meant(error.option_name, given, flags)) is None:
                raise
            raise UsageError(meant) from error


class GraphCommand(SizeCommand):
    """A command with `graph_options`; it refuses a graph without an option, with the call that is meant."""

    allow_extra_args = True  # this class refuses them

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse arguments without an option, with the call that is probably meant."""
        rest = super().parse_args(ctx, args)
        if rest and (ctx.params["dag"] or ctx.params["model"]):
            raise UsageError(f"{rest[0]!r} belongs to no option; --help lists them")
        if rest and rest[0].endswith(".py"):
            raise UsageError(
                f"{rest[0]!r} is a Python program; add `ferroflow_dask.install(client)` to it and run it "
                f"with `python {rest[0]}`"
            )
        if rest:
            option = "--dag" if rest[0] in TOPOLOGIES else "--model"
            raise UsageError(
                f"{rest[0]!r} belongs to no option; give a graph as --dag NAME or --model FILE, like "
                f"{option} {rest[0]}"
            )
        return rest


def _meant(option: str, args: Sequence[str], flags: Collection[str]) -> str | None:
    """Return the message about an unknown option that is a size in another spelling; None for others."""
    name, value = option, _value_of(option, args)
    if option == "--scheduler":  # of the original ferroflow
        policy = _POLICY_OF.get(value, value or "ferroflow")
        return f"there is no option --scheduler here; give --policy {policy}"
    if option == "--size":
        name, _, value = value.partition("=")
    flag = flag_of(name.lstrip("-").replace("-", "_"))
    if flag in flags:
        return f"there is no option {option} here; give {f'{flag} {value}'.rstrip()}"
    if option == "--size":
        return "there is no option --size here; each size has its own, like --width 8: --help lists them"
    return None


def flag_of(argument: str) -> str:
    """Return the option of a size, by its name as an argument of `generate`."""
    name = next((name for name, other in _FLAGS.items() if other == argument), argument)
    return "--" + name.replace("_", "-")


def _value_of(option: str, args: Sequence[str]) -> str:
    """Return what follows an option on a command line; nothing where that is another option, or the end."""
    for text, following in zip(args, (*args[1:], ""), strict=True):
        if text == option:
            return "" if following.startswith("--") else following
        if text.startswith(f"{option}="):
            return text.removeprefix(f"{option}=")
    return ""


def graph_options(function: F) -> F:
    """Add the options that name a graph."""
    for option in (
        graph_option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random numbers."
        ),
        graph_option("--model", metavar="FILE", help="An ONNX model: a path or a URL."),
        graph_option(
            "--dag",
            metavar="NAME|FILE.json",
            help=f"A built-in graph: {', '.join(TOPOLOGIES)}. Or a graph that `info --output` wrote.",
        ),
    ):
        function = option(function)
    return function


def graph_sizes(function: F) -> F:
    """Add the options that give the sizes of built-in graphs."""
    for name, kind, told in reversed(_SIZES):
        argument = _FLAGS.get(name, name)
        defaults = ", ".join(
            f"{dag} {topology.defaults[argument]:g}"
            for dag, topology in TOPOLOGIES.items()
            if argument in topology.defaults
        )
        function = size_option(
            flag_of(argument), name, type=kind, default=None, help=f"{told}.  [default: {defaults}]"
        )(function)
    return function


def load_graph(dag: str | None, model: str | None, seed: int, sizes: Mapping[str, Any]) -> Graph:
    """Return the graph that `graph_options` and `graph_sizes` name."""
    given = {_FLAGS.get(name, name): value for name, value in sizes.items() if value is not None}
    if (dag is None) == (model is None):
        raise UsageError("give either --dag NAME or --model FILE")
    from_file = "--model" if dag is None else "--dag FILE" if dag.endswith(".json") else ""
    if given and from_file:
        raise UsageError(f"{from_file} takes no sizes, but {', '.join(map(flag_of, given))} was given")
    if dag is not None and from_file:
        return read_graph(dag)
    if dag is not None and dag.endswith((".onnx", ".ort")):
        raise UsageError(f"--dag takes a built-in graph, and {dag!r} is a model; give --model {dag}")
    if dag is not None:
        try:
            return generate_graph(dag, seed=seed, **given)
        except UsageError as error:
            raise UsageError(_ARGUMENT.sub(lambda found: flag_of(found[0]), str(error))) from error
    return graph_from_onnx(str(model))


#: Arguments of `generate`, which its errors name.
_ARGUMENT = re.compile(rf"\b(?:{'|'.join(_FLAGS.get(name, name) for name, *_ in _SIZES)})\b")
