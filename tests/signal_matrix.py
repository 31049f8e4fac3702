"""Signals at every command, at every moment, in a terminal, with pipes and in batch jobs, with a real Slurm.

    python tests/signal_matrix.py [PART OF A CASE'S NAME]

It prints each case, and exits with 1 if one fails. A case passes if the command exits with the status of the
signal, if its last line is "ferroflow: interrupted" without a traceback, and if neither a job nor a process
is left ten seconds later. A signal that comes after the result of a run may find Python itself ending, or its
end: the status is then that of shells for a signal, or 0, and the line is missing. Such cases are marked.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import yaml
from command_line import INTERRUPTED, TERMINATED
from distributed import LocalCluster
from real_slurm import ask, queue, running_slurm, states
from slurm_clusters import sections
from waiting import soon

#: Runs a command and creates a file at a moment.
PROGRAM = """
import fcntl, multiprocessing, os, pathlib, signal, sys, termios, threading, time
from distributed import Client, Status
from distributed.deploy.spec import SpecCluster

def starting():
    return True

def launching():
    return bool(multiprocessing.active_children())

def pending():
    return any(getattr(cluster, "workers", None) for cluster in list(SpecCluster._instances))

def computing():
    clients = [client for client in list(Client._instances) if client.status == "running"]
    return any(any(client.processing().values()) for client in clients)

def connected():
    return any(client.status == "running" for client in list(Client._instances))

def closing():
    return any(cluster.status == Status.closing for cluster in list(SpecCluster._instances))

def wait(is_time, path):
    while not is_time():
        time.sleep(0.001)
    pathlib.Path(path).touch()

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells have it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
from ferroflow_dask.__main__ import main
moment, path = globals()[sys.argv.pop(1)], sys.argv.pop(1)
threading.Thread(target=wait, args=[moment, path], daemon=True).start()
main()
"""
#: The last line of a run's result.
_RESULT = "steals asked"
LONG = ("run", "--dag", "imbalanced", "--n-heavy", "400", "--heavy-ms", "500", "--policy", "dask")
SHORT = ("run", "--dag", "wide", "--policy", "dask")
LOCAL, SLURM = ("--workers", "2"), ("--cluster", "slurm")
#: Moments of each command.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": ((*LONG, *LOCAL), ("starting", "launching", "computing")),
    "run short": ((*SHORT, *LOCAL), ("closing",)),
    "run on Slurm": ((*LONG, *SLURM), ("starting", "pending", "computing")),
    "run on Slurm, jobs wait": ((*LONG, *SLURM, "--section", "later"), ("pending",)),
    "run short on Slurm": ((*SHORT, *SLURM), ("closing",)),
    "bench": (("bench", "run", "imbalanced", "--rows", "rows.jsonl"), ("starting", "computing")),
    "calibrate": (("calibrate",), ("starting", "computing")),
    "top": (("top",), ("connected",)),
}
SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
Environment = dict[str, str]
_MOST_S, _END_S, _LEFT_S = 120.0, 60.0, 10.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; a negative number is a signal that Python did not handle."""

    returned: int | None
    text: str

    def is_over(self, number: signal.Signals) -> bool:
        """Whether the command had ended before the signal, but for Python itself."""
        return _RESULT in self.text and self.returned in (0, -number)


def in_terminal(command: list[str], moment: Path, number: signal.Signals, environment: Environment) -> Ended:
    """Press Ctrl-C, or terminate the process."""
    main_end, terminal = os.openpty()
    program = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=environment,
        cwd=moment.parent,
    )
    os.close(terminal)
    os.set_blocking(main_end, False)
    text = b""

    def is_read(done: bool) -> bool:
        nonlocal text
        try:
            text += os.read(main_end, 1 << 16)
        except (BlockingIOError, OSError):
            return done
        return False

    soon(lambda: is_read(done=moment.exists() or program.poll() is not None), _MOST_S)
    if number == signal.SIGINT:
        os.write(main_end, b"\x03")
    else:
        program.send_signal(number)
    soon(lambda: is_read(done=program.poll() is not None), _END_S)
    os.close(main_end)
    return Ended(program.poll(), text.decode(errors="replace"))


def in_pipe(command: list[str], moment: Path, number: signal.Signals, environment: Environment) -> Ended:
    """Send SIGINT to the process group, as a terminal does with a pipeline; SIGTERM to the process."""
    with (moment.parent / "out.txt").open("wb+") as out:
        program = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env=environment, cwd=moment.parent
        )
        soon(lambda: moment.exists() or program.poll() is not None, _MOST_S)
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            program.send_signal(number)
        soon(lambda: program.poll() is not None, _END_S)
    return Ended(program.poll(), (moment.parent / "out.txt").read_text(errors="replace"))


def in_batch_job(command: list[str], moment: Path, number: signal.Signals, environment: Environment) -> Ended:
    """Let Slurm send the signal to the job of the command."""
    script = moment.parent / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(command)}\n")
    options = ("--parsable", "--output=out.txt", "--error=out.txt", "--mem=900", "--time=10")
    submit = ["sbatch", *options, str(script)]
    done = subprocess.run(
        submit, capture_output=True, text=True, check=True, env=environment, cwd=moment.parent
    )
    job = done.stdout.strip()
    soon(lambda: moment.exists() or job not in queue(), _MOST_S)
    # It fails if the job has ended.
    subprocess.run(
        ["scancel", f"--signal={number.name.removeprefix('SIG')}", "--full", job],
        capture_output=True,
        check=False,
    )
    soon(lambda: job not in queue(), _END_S)
    found = re.search(r"ExitCode=(\d+):(\d+)", ask("scontrol", "show", "job", job))
    returned = int(found[1]) or -int(found[2]) if found and states()[job] != "RUNNING" else None
    return Ended(returned, (moment.parent / "out.txt").read_text(errors="replace"))


WAYS = {"terminal": in_terminal, "pipe": in_pipe, "batch script": in_batch_job}


def left(mark: str) -> list[str]:
    """Return the jobs that are left, and the processes whose environment has a mark."""
    found = [f"job {job}" for job in (queue() if "SLURM_CONF" in os.environ else ())]
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:80])
        except psutil.Error:
            continue
    return found


def faults(ended: Ended, number: signal.Signals, mark: str) -> Iterator[str]:
    if not ended.is_over(number):
        if ended.returned != SIGNALS[number]:
            yield f"status {ended.returned}"
        last = (ended.text.replace("\r", "\n").strip().splitlines() or [""])[-1]
        if not re.search("ferroflow: interrupted($|; )", last):
            yield f"last line {last!r}"
    if "Traceback" in ended.text:
        yield "a traceback"
    soon(lambda: not left(mark), _LEFT_S)
    yield from left(mark)


Case = tuple[str, str, signal.Signals, str]


def end_case(case: Case, folder: Path, watched: str = "") -> tuple[Ended, list[str]]:
    """Run a case in a folder; return how it ended, and what is wrong with that."""
    name, moment, number, way = case
    write_sections(folder)
    mark, at = uuid.uuid4().hex, folder / "moment"
    to = ("--connect", watched) if name == "top" else ()
    command = [sys.executable, "-c", PROGRAM, moment, str(at), *CASES[name][0], *to]
    environment = {**os.environ, "SIGNAL_MATRIX": mark, "HOME": str(folder)}
    ended = WAYS[way](command, at, number, environment)
    return ended, [*([] if at.exists() else ["the moment never came"]), *faults(ended, number, mark)]


def run_case(case: Case, folder: Path, watched: str) -> bool:
    """Run a case in a folder, print how it ended, and return whether it failed."""
    ended, found = end_case(case, folder, watched)
    name, moment, number, way = case
    title = " · ".join((name, moment, number.name, way))
    title += " (over)" if ended.is_over(number) else ""
    print("FAILED" if found else "ok    ", title, "; ".join(found), flush=True)
    if found:
        print(ended.text[-2000:], flush=True)
    for job in queue():
        ask("scancel", job)
    return bool(found)


def main() -> int:
    """Run all cases, or those whose names contain the argument."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = [
        (name, moment, number, way)
        for (name, (_, moments)), number, way in product(CASES.items(), SIGNALS, WAYS)
        for moment in moments
        if part in f"{name} · {moment} · {number.name} · {way}"
    ]
    with (
        running_slurm(),
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=1, processes=False, protocol="tcp", dashboard_address=":0") as cluster,
    ):
        to = cluster.scheduler_address
        failed = [run_case(case, Path(tempfile.mkdtemp(dir=folder)), to) for case in cases]
    print(f"{len(cases)} cases, {sum(failed)} failed")
    return int(any(failed) or not cases)


def write_sections(folder: Path) -> None:
    """Write a section of jobs that start at once, and one of jobs that start in an hour."""
    path = sections(folder, **{"scheduler-options": {"host": "127.0.0.1", "dashboard_address": ":0"}})
    settings = yaml.safe_load(path.read_text())
    cpu = settings["jobqueue"]["cpu"]
    settings["jobqueue"]["later"] = {**cpu, "job-extra-directives": ["--begin=now+1hour"]}
    path.write_text(yaml.safe_dump(settings))


if __name__ == "__main__":
    sys.exit(main())
