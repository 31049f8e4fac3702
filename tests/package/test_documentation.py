"""Documentation: doctests, the examples of README.md and docs/, and the example programs run as shown."""

from __future__ import annotations

import doctest
import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from distributed import Client

import ferroflow_dask
from ferroflow_dask.cli import main

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", *sorted(str(page.relative_to(REPOSITORY)) for page in REPOSITORY.glob("docs/*.md"))]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(ferroflow_dask.__path__, prefix="ferroflow_dask.")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    failures, _ = doctest.testmod(module, extraglobs={"generate": ferroflow_dask.generate})
    assert failures == 0


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "arguments", "pattern"),
    [
        ("existing_dask_code.py", (), r"^Dask: \d+\.\d\d s\nferroflow: \d+\.\d\d s\n$"),
        (
            "short_tasks.py",
            ("--quick",),
            r"^(.* (tasks|result|partitions|chunks): Dask \d+\.\d{3} s, ferroflow \d+\.\d{3} s\n){6}$",
        ),
        ("mlp.py", (), r"^wrote ./mlp.onnx and ./x.npy\n$"),
    ],
)
def test_the_example_runs(name: str, arguments: tuple[str, ...], pattern: str, tmp_path: Path) -> None:
    assert re.match(pattern, run(tmp_path, str(REPOSITORY / "examples" / name), *arguments))


@pytest.mark.cluster
def test_the_example_of_pytorch_gives_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is for the examples only")
    pytest.importorskip("onnxscript", reason="onnxscript is for the examples only")
    printed = run(tmp_path, str(REPOSITORY / "examples/pytorch_model.py"))
    found = re.search(r"^64 images, 10 scores each; difference from PyTorch: (.*)$", printed, re.MULTILINE)
    assert found
    assert float(found[1]) < 1e-4


@pytest.mark.cluster
@pytest.mark.parametrize(("model", "way"), [("mlp.onnx", "map_blocks"), ("texts", "map_partitions")])
def test_the_example_of_batches_compares_equal_results(model: str, way: str, tmp_path: Path) -> None:
    run(tmp_path, str(REPOSITORY / "examples/mlp.py"))
    sizes = ("--rows", "8", "--batch", "3", "--repeat", "1")
    printed = run(tmp_path, "-W", "ignore::Warning", str(REPOSITORY / "examples/batches.py"), model, *sizes)
    found = re.findall(r"^(one session|map_\w+).*: [\d,.]+ rows/s \(", printed, re.MULTILINE)
    assert found == ["one session", way, "map_batches"]


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """Return language and text of the code blocks of a page, without those that are marked as not run."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.findall(r"(<!-- not run: [^\n]+ -->\n)?^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(language, body) for mark, language, body in found if language in languages and not mark]


def test_a_page_shows_the_example_as_it_is() -> None:
    code = (REPOSITORY / "examples/existing_dask_code.py").read_text(encoding="utf-8")
    body = code.split('"""\n', 1)[1]
    assert ("python", body.lstrip()) in blocks("docs/existing-dask-code.md", "python")


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_have_a_known_language(page: str) -> None:
    languages = re.findall(r"^```(\w*)\n.*?^```$", (REPOSITORY / page).read_text("utf-8"), re.DOTALL | re.M)
    assert set(languages) <= {"console", "diff", "json", "pycon", "python", "text", "yaml"}


def fit(data: float, i: int) -> float:
    return data * i


@pytest.mark.cluster
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "pycon")])
def test_the_python_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ferroflow_client: Client
) -> None:
    run(tmp_path, str(REPOSITORY / "examples/mlp.py"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs", "ferroflow_dask": ferroflow_dask, "fit": fit, "data": 1.0}
    names |= {"client": ferroflow_client, "cluster": ferroflow_client.cluster}
    runner = doctest.DocTestRunner(verbose=False)
    for language, code in blocks(page, "python", "pycon"):
        if language == "python":
            exec(compile(code, page, "exec"), names)
            if names["client"] is not ferroflow_client:
                names.pop("client").close()
                names["client"] = ferroflow_client
        else:
            test = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
            runner.run(test, clear_globs=False)
            names |= test.globs
    assert runner.failures == 0


def commands(page: str) -> list[str]:
    shown = "".join(body for _, body in blocks(page, "console"))
    lines = re.findall(r"^\$ (.+)$", shown, re.MULTILINE)
    return [part.strip() for line in lines for part in line.split("&&")]


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, line) for page in PAGES for line in commands(page) if line.startswith("ferroflow ")],
)
def test_a_shown_command_parses(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlp.onnx", "light_resnet50.onnx", "x.npy"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.partition(" > ")[0])[1:]
    context = click.Context(main)
    found: click.Command = main
    while isinstance(found, click.Group):
        _, next_command, words = found.resolve_command(context, words)
        assert next_command is not None
        found = next_command
    found.make_context(str(found.name), words, parent=context)


def test_options_in_the_table_of_run_are_its_options() -> None:
    table = (REPOSITORY / "docs/command-line.md").read_text(encoding="utf-8")
    section = table.partition("## Options of `run`")[2].partition("\n## ")[0]
    shown = set(re.findall(r"`(--[a-z-]+)", section))
    command = main.get_command(click.Context(main), "run")
    assert command is not None
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    assert len(shown) > 20
    assert shown <= options


def settings_table() -> str:
    """Return the table that the site shows on the page of settings."""
    spec = importlib.util.spec_from_file_location("site_hooks", REPOSITORY / "docs/site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (REPOSITORY / "docs/configuration.md").read_text(encoding="utf-8")
    assert hooks._SETTINGS in page
    table: str = hooks.settings_table()
    return table


def settings_of(defaults: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in defaults.items():
        name = f"{prefix}.{key}"
        found |= settings_of(value, name) if isinstance(value, dict) else {name: value}
    return found


def test_the_page_of_settings_has_each_with_its_default() -> None:
    text = (REPOSITORY / "ferroflow_dask/ferroflow.yaml").read_text(encoding="utf-8")
    defaults = settings_of(yaml.safe_load(text)["ferroflow"], "ferroflow")
    shown = dict(re.findall(r"^\| `(ferroflow\.[\w.-]+)` \| `([^`]*)` \|", settings_table(), re.MULTILINE))
    assert shown == {name: written(value) for name, value in defaults.items()}


def written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, list) and value else str(value)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_settings_that_are_mentioned_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    defaults = (REPOSITORY / "ferroflow_dask/ferroflow.yaml").read_text(encoding="utf-8")
    known = settings_of(yaml.safe_load(defaults)["ferroflow"], "ferroflow")
    assert set(re.findall(r"`(ferroflow\.[\w.-]+)`", text)) <= known.keys()


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    for command in (
        "pip install . && ferroflow run --dag imbalanced --workers 8",
        "pip install '.[test]' && pytest",
    ):
        assert command in README
        assert command in ci
