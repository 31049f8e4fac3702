"""Hooks of the documentation site: pages from files outside of `docs/`, and the table of settings."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Pages of the site that lie at the top of the repository.
_TOP_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_SETTINGS = "<!-- settings -->"
#: A line of the gallery that names a program.
_PROGRAM = re.compile(r"^Program: \[(examples/\S+\.(?:py|ipynb))\]\(\.\./\S+\)\.?$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository and the examples."""
    from mkdocs.structure.files import File

    for name in _TOP_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name.lower(), content=text))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Let links point to the files of the site, and fill in what is made from other files."""
    if page.file.src_uri == "gallery.md":
        markdown = _PROGRAM.sub(lambda found: f"{found[0]}\n\n{_listing(found[1])}", markdown)
    markdown = markdown.replace("](../examples/", "](examples/").replace("](docs/", "](")
    for name in _TOP_PAGES:
        markdown = markdown.replace(f"](../{name}", f"]({name.lower()}").replace(
            f"]({name}", f"]({name.lower()}"
        )
    return markdown.replace(_SETTINGS, settings_table())


def settings_table() -> str:
    """Return the table of all settings, from their schema and their defaults."""
    package = ROOT / "ferroflow_dask"
    schema = yaml.safe_load((package / "ferroflow-schema.yaml").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((package / "ferroflow.yaml").read_text(encoding="utf-8"))
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    lines += _settings(schema["properties"]["ferroflow"], defaults["ferroflow"], "ferroflow")
    return "\n".join(lines)


def _settings(schema: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, one in schema["properties"].items():
        key, default = f"{prefix}.{name}", defaults[name]
        if "properties" in one:
            yield from _settings(one, default, key)
            continue
        values = " or ".join(f"`{value}`" for value in one.get("enum", ()) if isinstance(value, str))
        kinds = one.get("type", ())
        values = values or " or ".join([kinds] if isinstance(kinds, str) else kinds)
        shown = ", ".join(default) if isinstance(default, list) and default else _written(default)
        yield f"| `{key}` | `{shown}` | {values} | {one['description']} [More]({one['x-page']}) |"


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listing(name: str) -> str:
    """Return the code of a program, folded; of a notebook also what its cells printed."""
    path = ROOT / name
    if path.suffix == ".py":
        return _folded(path.name, f"```python\n{path.read_text(encoding='utf-8')}```")
    cells = _executed(path, path.stat().st_mtime)
    return _folded(path.name, "\n\n".join(part for cell in cells for part in _cell(cell)))


@cache
def _executed(path: Path, _: float) -> Sequence[Mapping[str, Any]]:
    """Run a notebook, and return its cells with their outputs; an error ends the build."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    cells: Sequence[Mapping[str, Any]] = notebook.cells
    return cells


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield re.sub(r"^#+ (.+)$", r"**\1**", source, flags=re.MULTILINE)  # headings are those of the page
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![Output](data:image/png;base64,{''.join(data['image/png']).strip()})"
        elif text := "".join(output.get("text", data.get("text/plain", ()))).rstrip():
            yield f"```text\n{text}\n```"


def _folded(title: str, content: str) -> str:
    body = "\n".join(f"    {line}" if line else "" for line in content.splitlines())
    return f'??? example "{title}"\n\n{body}\n'
