"""Suite `taps`: applications of TaPS, each a subprocess that gets the scheduler's address.

TaPS is the Task Performance Suite of J. Gregory Pauloski et al. ("TaPS: A Performance Evaluation Suite for
Task-based Execution Frameworks", eScience 2024; github.com/proxystore/taps, MIT). It submits each task by
`Client.submit` (`taps/executor/dask.py`). A checkout runs in place. Its own duration counts: from the first
submission to the last result, without the start of Python.

TaPS checks no values. So answers are the number of submitted tasks and, for `mapreduce`, the counts of
words. `failures` ends with the error of an injected failure.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version

from ferroflow_dask.bench.public.base import Clock, Options, Program, Suite
from ferroflow_dask.exceptions import ResultError, UsageError
from ferroflow_dask.scheduler.installation import installed
from ferroflow_dask.whole_files import write_text

if TYPE_CHECKING:
    from distributed import Client

#: The commit whose options and log lines are used here.
COMMIT = "6167964"
#: From this version on, TaPS cannot read its own command line (a note in its pyproject.toml).
FIRST_BAD_SETTINGS = Version("2.13.0")
#: Duration after which a subprocess is ended [s].
LONGEST_S = 900.0

#: Files of `mapreduce`, words in each, and tasks that read them.
FILES, WORDS, MAPS = 64, 20_000, 32
#: Words of the lines, and of the vocabulary; each word is rarer than the one before it.
LINE, VOCABULARY = 20, 500
#: Most frequent words that TaPS prints.
TOP = 10

#: Error of an injected failure, and a line of the log.
INJECTED = "ParentDependencyError"
_FINISHED = re.compile(r"Finished app \(elapsed=([\d.]+)s\)")
_TASKS = re.compile(r"Finished benchmark \(.*tasks=(\d+)\)")
_WORDS = re.compile(r"\(taps\.apps\.mapreduce\) > (\w+) \(([\d,]+)\)$", re.MULTILINE)
_TOTAL = re.compile(r"Total number of words: ([\d,]+)")
_ERROR = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): ", re.MULTILINE)
_TIMES = re.compile(r"^\[([\d .:-]+)\] \w+ +\(taps\.run\) > (?:Running app|Caught unhandled)", re.MULTILINE)


# Subprocesses that are clients of a running cluster


def preloads(client: Client) -> dict[str, str]:
    """Return the environment in which a client of the same cluster loads the plugin if this one has it."""
    if installed(client) is None:
        return {}
    return {"DASK_DISTRIBUTED__CLIENT__PRELOAD": '["ferroflow_dask.preload"]'}


def driven(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], *, own_group: bool = False
) -> tuple[int, str]:
    """Run a command and return its exit status and its output.

    Parameters
    ----------
    command : sequence of str
    folder : Path
        Where it runs.
    environment : mapping of str to str
        Added to this process's.
    own_group : bool, optional
        For programs that leave processes behind, which are killed then.

    Raises
    ------
    ResultError
        It takes longer than `LONGEST_S`.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=own_group,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise ResultError(f"{command[2]} must end within {LONGEST_S:g} s, got no end") from error
    finally:
        process.kill()
        if own_group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


# Where TaPS is


@dataclass(frozen=True, slots=True)
class Taps:
    """TaPS: its version, and the paths by which Python finds it."""

    version: str
    paths: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that runs TaPS."""
        found = [path for path in (*self.paths, os.environ.get("PYTHONPATH", "")) if path]
        return {"PYTHONPATH": os.pathsep.join(found)}


def find_taps(options: Options) -> Taps:
    """Return the TaPS of the checkout.

    Raises
    ------
    UsageError
        The folder is no working tree of TaPS, or a package is too new for it.
    """
    if find_spec("pydantic_settings") and Version(version("pydantic-settings")) >= FIRST_BAD_SETTINGS:
        found = version("pydantic-settings")
        raise UsageError(
            f"pydantic-settings must be older than {FIRST_BAD_SETTINGS}, got {found}; "
            f"pip install 'pydantic-settings<{FIRST_BAD_SETTINGS}'"
        )
    checkout = Path(options.checkouts["taps"]).resolve()
    if not (checkout / "taps" / "engine").is_dir():
        raise UsageError(
            f"--checkout taps must be a working tree of github.com/proxystore/taps, got {checkout} "
            "without taps/engine; --checkout taps=PATH"
        )
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, number = project["name"], project["version"]
    # TaPS asks for its version as an installed package would have it.
    site = (options.data / "taps" / number).resolve()
    metadata = site / f"{name}-{number}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    write_text(metadata, f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return Taps(number, (str(site), str(checkout)))


def _import_taps(paths: Sequence[str]) -> None:
    """Make this process ready for functions of TaPS."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    import_module("taps.engine")


# Applications


@dataclass(frozen=True, slots=True)
class App:
    """An application of TaPS with its options, and a function that returns the expected answer."""

    name: str
    options: Mapping[str, str]
    expected: Callable[[], Mapping[str, Any]]


def _apps(options: Options) -> list[App]:
    words = _words(options)
    found = []
    for factor in (1, 10) if options.is_full else (1,):
        n = 200 * factor
        tiles = 10 if factor == 1 else 20
        # For each column of tiles: one potrf, `m` trsm, and a syrk and a gemm for each tile of a triangle.
        n_cholesky = sum(1 + m + m * (m + 1) for m in range(tiles))
        app = {"matrix-size": str(100 * tiles), "block-size": "100"}
        found.append(App(f"cholesky-{n_cholesky}", app, partial(dict, tasks=n_cholesky)))
        for structure, extra in (("bag", 0), ("diamond", 2), ("reduce", 1), ("sequential", 0)):
            app = {"structure": structure, "task-count": str(n), "task-sleep": "0.02"}
            app |= {"task-data-bytes": "10000"}
            if structure == "bag":
                app["bag-max-running"] = "16"
            found.append(App(f"synthetic-{structure}-{n + extra}", app, partial(dict, tasks=n + extra)))
    app = {"data-dir": str(words), "map-tasks": str(MAPS)}
    found.append(App(f"mapreduce-{MAPS + 1}", app, partial(_counts, words)))
    config = f'{{"data_dir": "{words}", "map_tasks": {MAPS}}}'
    app = {"base": "mapreduce", "config": config, "failure-type": "DEPENDENCY", "failure-rate": "1"}
    return [*found, App(f"failures-{2 * (MAPS + 1)}", app, partial(dict, error=INJECTED))]


def _words(options: Options) -> Path:
    """Return the folder with the texts, which is written once."""
    folder = (options.data / "taps" / "words").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = np.array([f"word{i}" for i in range(VOCABULARY)])
    chances = 1 / np.arange(1, VOCABULARY + 1)
    for i in range(FILES):
        path = folder / f"{i:03}.txt"
        if not path.exists():
            rng = np.random.default_rng(i)
            lines = rng.choice(names, (WORDS // LINE, LINE), p=chances / chances.sum())
            write_text(path, "\n".join(map(" ".join, lines.tolist())))
    return folder


def _counts(folder: Path) -> dict[str, Any]:
    """Return the answer of `mapreduce`.

    The last task of TaPS leaves out the last file (`_chunkify` in `taps/apps/mapreduce.py`), in the order in
    which the file system lists them.
    """
    counts: Counter[str] = Counter()
    for path in [path for path in folder.glob("**/*") if path.is_file()][:-1]:
        counts.update(path.read_text(encoding="utf-8").split())
    return {"tasks": MAPS + 1, "words": dict(counts.most_common(TOP)), "total": counts.total()}


def _read(output: str) -> tuple[dict[str, Any], float]:
    """Return the answer in the output of TaPS, and the duration that it measured [s]."""
    finished, tasks, total = _FINISHED.search(output), _TASKS.search(output), _TOTAL.search(output)
    if finished is None:
        errors = _ERROR.findall(output)
        times = [datetime.fromisoformat(text) for text in _TIMES.findall(output)]
        if not errors or len(times) != 2:
            last = output.strip().rpartition("\n")[-1]
            raise ResultError(f"TaPS must log its end, got {last:.200}")
        # Parsl reports the injected error as a failed dependency.
        error = INJECTED if INJECTED in output else errors[-1]
        return {"error": error}, (times[1] - times[0]).total_seconds()
    answer: dict[str, Any] = {"tasks": int(tasks[1]) if tasks else None}
    if total is not None:
        answer["words"] = {word: _number(count) for word, count in _WORDS.findall(output)}
        answer["total"] = _number(total[1])
    return answer, float(finished[1])


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def command(app: App, executor: str, **settings: str) -> list[str]:
    """Return the command that runs an application on an executor; its run folder is `run`."""
    found = [sys.executable, "-m", "taps.run", "--app", app.name.partition("-")[0]]
    for name, value in app.options.items():
        found += [f"--app.{name}", value]
    found += ["--engine.executor", executor, "--run.dir-format", "run"]
    for name, value in settings.items():
        found += [f"--engine.executor.{name.replace('_', '-')}", value]
    return found


def run_app(app: App, taps: Taps, client: Client, clock: Clock) -> dict[str, Any]:
    """Run an application on the cluster of a client; return its answer."""
    client.run(_import_taps, taps.paths)
    client.run_on_scheduler(_import_taps, taps.paths)  # which unpickles graphs
    dask = command(app, "dask", scheduler=client.scheduler_info()["address"])
    with clock:
        answer, seconds = _driven(dask, {**taps.environment, **preloads(client)})
    clock.set(seconds)
    return answer


def _driven(
    command: Sequence[str], environment: Mapping[str, str], *, own_group: bool = False
) -> tuple[dict[str, Any], float]:
    with TemporaryDirectory() as folder:
        return _read(driven(command, Path(folder), environment, own_group=own_group)[1])


def run_elsewhere(
    app: App, taps: Taps, executor: str, settings: Mapping[str, str], clock: Clock
) -> dict[str, Any]:
    """Run an application without a cluster; return its answer, and set a clock to the duration."""
    answer, seconds = _driven(command(app, executor, **settings), taps.environment, own_group=True)
    clock.set(seconds)
    return answer


# The suite


def programs(options: Options) -> Sequence[Program]:
    """Return the applications, each with other executors of TaPS as anchors."""
    taps = find_taps(options)
    n = str(options.workers)
    executors: dict[str, Mapping[str, str]] = {"process-pool": {"max_processes": n}}
    executors["parsl-local"] = {"workers": n}
    if find_spec("ray") is not None:
        executors["ray"] = {"num_cpus": n}
    return [
        Program(
            suite="taps",
            name=app.name,
            source=f"TaPS {taps.version}, MIT",
            run=partial(run_app, app, taps),
            sizes={"tasks": int(app.name.rpartition("-")[2])},
            expected=app.expected,
            anchors={
                executor: partial(run_elsewhere, app, taps, executor, settings)
                for executor, settings in executors.items()
            },
        )
        for app in _apps(options)
    ]


SUITE = Suite(
    "taps",
    f"TaPS, the Task Performance Suite (Pauloski et al., eScience 2024, commit {COMMIT}, MIT). It submits "
    "each task by `Client.submit`, so bundles cannot help.",
    programs,
    needs=("globus_compute_sdk", "parsl", "proxystore", "psutil", "pydantic", "pydantic_settings", "tomli_w"),
)
