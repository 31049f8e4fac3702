"""Show a graph: DOT for Graphviz, HTML for a notebook, lines of text for a terminal."""

from __future__ import annotations

import html
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ferroflow_dask.exceptions import FerroflowError, UsageError
from ferroflow_dask.graph.analysis import levels
from ferroflow_dask.graph.ir import Graph
from ferroflow_dask.graph.nodes import with_specs
from ferroflow_dask.whole_files import replacing

#: Formats that Graphviz writes for us; anything else is an error rather than a surprise.
_RENDERED = (".pdf", ".png", ".svg")
#: How many defaults and outputs a notebook shows.
_SHOWN = 8


def to_dot(graph: Graph, marks: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Return the graph in Graphviz's DOT language: ops are boxes, sources ellipses.

    Parameters
    ----------
    graph : Graph
    marks : mapping of str to mapping of str to str, optional
        Attributes of Graphviz by the names of ops, in place of the usual ones or in addition to them.
    """

    def quote(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'

    lines = [f"digraph {quote(graph.name)} {{", "  rankdir=BT;"]
    for source in graph.sources:
        lines.append(f"  {quote(source.name)} [shape=ellipse, tooltip={quote(str(source.spec))}];")
    for op in graph.ops:
        attributes = {"label": op.kind, "tooltip": op.name, **(marks or {}).get(op.name, {})}
        shown = ", ".join(f"{name}={quote(value)}" for name, value in attributes.items())
        lines.append(f"  {quote(f'op {op.id}')} [shape=box, {shown}];")
    for op in graph.ops:
        for value in op.operands:
            origin = graph.producers.get(value)
            start = value if origin is None else f"op {origin.id}"
            lines.append(
                f"  {quote(start)} -> {quote(f'op {op.id}')} [tooltip={quote(str(graph.spec(value)))}];"
            )
    return "\n".join([*lines, "}"]) + "\n"


def write(dot: str, filename: str) -> None:
    """Write DOT to a file, rendered by Graphviz where the suffix is .svg, .png or .pdf.

    Raises
    ------
    UsageError
        The suffix is none of these or .dot, or Graphviz's `dot` program is not installed.
    FerroflowError
        The file cannot be written, or Graphviz failed.
    """
    path = Path(filename)
    if path.suffix == ".dot":
        _write(path, dot.encode())
        return
    if path.suffix not in _RENDERED:
        raise UsageError(
            f"cannot write a graph as {filename!r}; choose a suffix: .dot, {', '.join(_RENDERED)}"
        )
    program = shutil.which("dot")
    if program is None:
        raise UsageError(
            f"{path.suffix} needs Graphviz's program 'dot'; install graphviz or write a .dot file"
        )
    try:
        drawn = subprocess.run(
            [program, f"-T{path.suffix[1:]}"], input=dot.encode(), check=True, capture_output=True
        ).stdout
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.decode(errors="replace").split()) or f"status {error.returncode}"
        raise FerroflowError(f"{filename!r} cannot be drawn: Graphviz's dot says: {said}") from error
    _write(path, drawn)


def _write(path: Path, content: bytes) -> None:
    try:
        with replacing(path) as beside:
            beside.write_bytes(content)
    except OSError as error:
        raise FerroflowError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def kind_counts(graph: Graph) -> dict[str, int]:
    """Return how many ops of each kind there are, most frequent first."""
    return dict(Counter(op.kind for op in graph.ops).most_common())


def to_html(graph: Graph) -> str:
    """Return a table with counts, inputs, defaults and outputs, as a notebook shows it."""
    depth = max(levels(graph).values(), default=0)
    rows = {
        "ops": f"{len(graph.ops)} in {depth} levels, {graph.n_edges} edges",
        "kinds": ", ".join(f"{kind} × {count}" for kind, count in kind_counts(graph).items()),
        "inputs": with_specs(graph.inputs) or "none",
        "defaults": with_specs(graph.defaults, _SHOWN) or "none",
        "constants": f"{len(graph.constants)}",
        "outputs": with_specs({name: graph.spec(name) for name in graph.outputs}, _SHOWN),
    }
    left = "style='text-align:left'"
    body = "".join(
        f"<tr><th {left}>{head}</th><td {left}>{html.escape(cell)}</td></tr>" for head, cell in rows.items()
    )
    return f"<table><caption>Model {html.escape(graph.name)}</caption>{body}</table>"
