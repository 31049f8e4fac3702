"""Version skew: client, scheduler and workers with different versions of this package, or without it.

`python tests/skew.py` runs all combinations; `--old COMMIT` adds a real older state of the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]
#: Let a process be without the package although the environment has it.
_WITHOUT = """
import importlib.metadata, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ferroflow_dask":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
find = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name == "ferroflow-dask":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
"""
#: Runs on a client; prints an object.
_CLIENT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from distributed import Client
found = {}
def told(name, function):
    try:
        found[name] = function()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
def model():
    import numpy as np
    graph = ferroflow_dask.generate("matmul-chain", n_ops=3, m=8)
    client.compute(graph.bind(granularity="ops")).result(timeout=60)
    return "works"
def installs():
    ferroflow_dask.install(client)
    return "works"
def plain():
    assert client.gather(client.map(abs, range(40), pure=False)) == list(range(40))
    return "works"
def uninstalls():
    ferroflow_dask.uninstall(client)
    return "works"
with Client(sys.argv[1], timeout=30) as client:
    client.wait_for_workers(2, timeout=60)
    try:
        import ferroflow_dask
    except ModuleNotFoundError:
        found["package"] = "none"
    else:
        told("install", installs)
    told("plain", plain)
    if "package" not in found:
        told("model", model)
        if len(sys.argv) > 2:
            told("uninstall", uninstalls)
            told("plain again", plain)
print(json.dumps(found))
"""


def versions(folder: Path, old: str | None) -> dict[str, Path]:
    """Return a folder for `PYTHONPATH` for each version."""
    found = {"same": folder / "same", "newer": folder / "newer", "none": folder / "none"}
    for name, version in (("same", "5.0.0"), ("newer", "9.9.9")):
        shutil.copytree(_REPOSITORY / "ferroflow_dask", found[name] / "ferroflow_dask")
        _describe(found[name], version)
    found["none"].mkdir()
    (found["none"] / "sitecustomize.py").write_text(_WITHOUT)
    if old is not None:
        found["older"] = folder / "older"
        command = ["git", "-C", str(_REPOSITORY), "archive", old, "ferroflow_dask"]
        found["older"].mkdir()
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(found["older"])], input=archive, check=True)
        _describe(found["older"], "4.0.0")
    return found


def _describe(folder: Path, version: str) -> None:
    about = folder / f"ferroflow_dask-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ferroflow-dask\nVersion: {version}\n")


@contextmanager
def _process(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *arguments], env=_environment(path), **quiet)  # type: ignore[call-overload]
    try:
        yield process  # type: ignore[misc]
    finally:
        process.kill()
        process.wait()


def _environment(path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(path)}


@contextmanager
def _cluster(folder: Path, scheduler: Path, workers: Path) -> Iterator[str]:
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    with ExitStack() as stack:
        common = ("--scheduler-file", str(file), "--no-dashboard")
        here = ("--port", "0", "--host", "127.0.0.1")
        stack.enter_context(_process(scheduler, "-m", "distributed.cli.dask_scheduler", *common, *here))
        while not file.exists():
            time.sleep(0.05)
        one_thread = ("-m", "distributed.cli.dask_worker", *common, "--no-nanny", "--nthreads", "1")
        for _ in range(2):
            stack.enter_context(_process(workers, *one_thread))
        yield json.loads(file.read_text())["address"]


def _client(path: Path, address: str, *more: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT, address, *more],
        env=_environment(path),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode:
        return {"client": f"FAILED: {done.stderr[-500:]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems_of(found: dict[str, str]) -> list[str]:
    """Return what is neither working nor one clear line of this package."""
    wrong = []
    for name, outcome in found.items():
        is_clear = outcome.startswith(("ClusterError: ", "UsageError: ")) and "\n" not in outcome
        if (outcome not in ("works", "none") and not is_clear) or (
            name.startswith("plain") and outcome != "works"
        ):
            wrong.append(f"{name}: {outcome}")
    return wrong


def outcomes(
    folder: Path, old: str | None, schedulers: Sequence[str] | None = None
) -> Iterator[tuple[tuple[str, str, str], dict[str, str]]]:
    """Yield what each client finds on each cluster.

    A client of the scheduler's version installs the plugin before the others come, and uninstalls it last.
    """
    paths = versions(folder, old)
    for scheduler in schedulers or paths:
        for workers in paths:
            with _cluster(folder, paths[scheduler], paths[workers]) as address:
                _client(paths[scheduler], address)
                for client in (*(name for name in paths if name != scheduler), scheduler):
                    found = _client(paths[client], address, *(["last"] if client == scheduler else []))
                    yield (client, scheduler, workers), found


def main() -> None:
    """Print each combination, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old")
    options = parser.parse_args()
    n = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for names, found in outcomes(Path(folder), options.old):
            n += 1
            problems = problems_of(found)
            wrong += bool(problems)
            print("client {} · scheduler {} · workers {}: ".format(*names), end="")
            print(
                "; ".join(problems) or ", ".join(f"{k} {v.partition(':')[0]}" for k, v in found.items()),
                flush=True,
            )
    print(f"{n} combinations, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
