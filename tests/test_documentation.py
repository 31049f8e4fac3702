"""What the documentation shows is what happens: doctests, README and examples."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import dask
import pytest
import yaml

import ferroflow_dask

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(ferroflow_dask.__path__, prefix="ferroflow_dask.")
)


def test_modules_are_found() -> None:
    assert "ferroflow_dask.policy.stealing" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, extraglobs={"generate": ferroflow_dask.generate})
    assert failures == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_owns(name: str) -> None:
    assert importlib.import_module(name).__doc__


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
def test_the_example_of_batches_compares_equal_results(tmp_path: Path) -> None:
    run(tmp_path, str(REPOSITORY / "examples/mlp.py"))
    sizes = ("--rows", "8", "--batch", "3", "--repeat", "1")
    told = run(tmp_path, str(REPOSITORY / "examples/batches.py"), "mlp.onnx", *sizes)
    assert re.findall(r"^(one session|map_blocks|map_batches).*: [\d,.]+ rows/s \(", told, re.MULTILINE) == [
        "one session",
        "map_blocks",
        "map_batches",
    ]


def test_the_readme_shows_the_example_as_it_is() -> None:
    code = (REPOSITORY / "examples/existing_dask_code.py").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    body = code.split('"""\n', 1)[1].strip()
    assert body in [block.strip() for block in shown]


@pytest.mark.cluster
def test_what_the_readme_shows_in_python_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, str(REPOSITORY / "examples/mlp.py"))
    monkeypatch.chdir(tmp_path)
    sessions = "\n".join(re.findall(r"```pycon\n(.*?)```", README, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(sessions, {}, "README.md", "README.md", 0)
    runner = doctest.DocTestRunner(verbose=False)
    with dask.config.set(scheduler="threads"):  # Dask's default, whatever clients other tests have left
        runner.run(test)
    assert runner.tries >= 10
    assert runner.failures == 0


def test_the_readmes_commands_are_those_that_ci_gives() -> None:
    ci = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    for command in (
        "pip install . && ferroflow run --dag imbalanced --workers 8",
        "pip install '.[test]' && pytest",
    ):
        assert command in README
        assert command in ci


def test_jobqueue_yaml_makes_a_batch_script(tmp_path: Path) -> None:
    settings = yaml.safe_load((REPOSITORY / "jobqueue.yaml").read_text(encoding="utf-8"))["jobqueue"]["slurm"]
    code = (
        f"import dask; dask.config.refresh(paths=[{str(REPOSITORY / 'jobqueue.yaml')!r}])\n"
        "from dask_jobqueue.slurm import SLURMJob\n"
        "print(SLURMJob('tcp://127.0.0.1:8786', name='job').job_script())"
    )
    script = run(tmp_path, "-c", code)
    assert f"#SBATCH --cpus-per-task={settings['cores']}" in script
    assert f"#SBATCH -t {settings['walltime']}" in script
    assert f"--nthreads {settings['cores'] // settings['processes']}" in script
