"""SIGINT and SIGTERM: a command prints one line, exits with the signal's status and leaves no process."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import onnx
import onnx.parser
import psutil
import pytest
from command_line import TERMINATED, answer, assert_one_line, ferroflow
from signal_matrix import CASES, end_case
from signal_matrix import SIGNALS as STATUS
from waiting import soon

from ferroflow_dask.cli.limits import Expired
from ferroflow_dask.deploy.interrupts import (
    Terminated,
    closed_undisturbed,
    interrupts_deferred,
    signals_raised,
)


@pytest.fixture(autouse=True)
def _sigint_is_not_ignored() -> Iterator[None]:
    """Let the signal end this process and those that it starts, also where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ended(program: str) -> tuple[int, str]:
    """Run a program; return its status and what it writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("moment", ["launching", "computing"])
def test_a_local_run_ends_in_one_line(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    ended, faults = end_case(("run", moment, number, "pipe"), tmp_path)
    assert (ended.text, faults) == ("ferroflow: interrupted\n", [])


@pytest.mark.cluster
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("moment", "number"), [("pending", signal.SIGINT), ("computing", signal.SIGTERM)])
def test_a_slurm_run_cancels_its_jobs_and_ends_in_one_line(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    ended, faults = end_case(("run on Slurm", moment, number, "pipe"), tmp_path)
    assert faults == []
    assert re.fullmatch(r"submitted .*\nferroflow: interrupted\n", ended.text), ended.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (("run", "--dag", "wide"), "run.client_for"),
        (("calibrate",), "calibrate.local_client"),
        (("top", "--connect", "tcp://127.0.0.1:1"), "looks.client_of"),
        (("bench", "run", "wide", "--rows", "rows.jsonl"), "bench_runs.run_suites"),
    ],
    ids=["run", "calibrate", "top", "bench"],
)
def test_every_command_that_takes_long_ends_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    called: str,
    number: signal.Signals,
) -> None:
    monkeypatch.chdir(tmp_path)
    module, _, name = called.partition(".")
    command = importlib.import_module(f"ferroflow_dask.cli.{module}")
    monkeypatch.setattr(command, name, lambda *_, **__: signal.raise_signal(number))
    before = [signal.getsignal(other) for other in STATUS]
    done = ferroflow(*arguments)
    assert_one_line(done.exit_code, done.stderr, STATUS[number], "^ferroflow: interrupted($|; 0 of )")
    assert [signal.getsignal(other) for other in STATUS] == before


#: A loop that does not end, in C: signals cannot interrupt it.
ENDLESS = """
<ir_version: 8, opset_import: ["" : 17]>
endless (float[2] x) => (float[2] y) {
  n = Constant <value_int = 1000000000000> ()
  more = Constant <value = bool {1}> ()
  y = Loop (n, more, x) <body = step (int64 i, bool c, float[2] v) => (bool d, float[2] w)
    { d = Identity (c) w = Cos (v) }>
}
"""


@pytest.mark.parametrize("is_limited", [False, True], ids=["SIGTERM", "--timeout"])
@pytest.mark.parametrize("how", ["--policy sequential", "--workers 1 --no-processes"])
def test_a_kernel_that_does_not_end_is_stopped(tmp_path: Path, how: str, is_limited: bool) -> None:
    onnx.save(onnx.parser.parse_model(ENDLESS), tmp_path / "endless.onnx")
    limit = ("--timeout", "6") if is_limited else ()
    with subprocess.Popen(
        [sys.executable, "-m", "ferroflow_dask", "run", "--model", "endless.onnx", *how.split(), *limit],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        if not is_limited:
            process = psutil.Process(program.pid)
            assert soon(lambda: process.cpu_times().user > 4.0, 60.0)  # imports take less
            program.terminate()
        _, stderr = program.communicate(timeout=60)
    *_, last = stderr.splitlines()
    if is_limited:
        assert (program.returncode, last) == (1, f"ferroflow: {Expired.line}")
    else:
        assert (program.returncode, last) == (TERMINATED, "ferroflow: interrupted")


def test_a_signal_that_a_destructor_swallows_is_raised_again() -> None:
    class Fragile:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def wait() -> None:
        Fragile()
        threading.Event().wait(30)

    with signals_raised(), pytest.raises(Terminated):
        wait()


def test_an_interrupt_is_deferred_to_the_end_of_a_start() -> None:
    seen: list[str] = []

    def begin() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            asked = [sys.executable, "-c", "import signal; print(*map(int, signal.pthread_sigmask(0, [])))"]
            seen.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert seen == [str(int(signal.SIGINT))]  # blocked in what was started meanwhile
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_start_without_an_interrupt_or_in_another_thread_is_as_any() -> None:
    def begin() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
    begin()
    assert found[0] != found[1]
    assert signal.getsignal(signal.SIGINT) is found[0]


@pytest.mark.parametrize("fails", [False, True])
def test_termination_is_deferred_even_if_the_start_fails(fails: bool) -> None:
    seen: list[str] = []

    def begin() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            seen.append("goes on")
            if fails:
                raise RuntimeError("sbatch was terminated, too")

    with signals_raised(), pytest.raises(Terminated):
        begin()
    assert seen == ["goes on"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_cluster_closes_is_raised_once_it_is_closed(number: signal.Signals) -> None:
    seen: list[str] = []

    def close() -> None:
        os.kill(os.getpid(), number)
        seen.append("closed")

    with signals_raised(), pytest.raises(KeyboardInterrupt), closed_undisturbed() as stack:
        stack.callback(close)
    assert seen == ["closed"]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_signal_that_ends_a_command_silences_what_distributed_logs_of_it(
    caplog: pytest.LogCaptureFixture, deferred: bool
) -> None:
    logger = logging.getLogger("distributed.scheduler")

    def end() -> None:
        with interrupts_deferred() if deferred else nullcontext():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                logger.error("lost workers")

    with signals_raised(), pytest.raises(Terminated):
        end()
    assert caplog.messages == []
    logger.error("after the command")
    assert caplog.messages == ["after the command"]


#: The program, with a command line that sends its process a signal: what imports and the end of Python are.
WITHOUT_A_COMMAND = """
import os, sys, types
from ferroflow_dask.__main__ import main
sys.modules["ferroflow_dask.cli"] = types.SimpleNamespace(main=lambda **_: os.kill(os.getpid(), {:d}))
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_and_after_a_command_ends_the_program_in_one_line(number: signal.Signals) -> None:
    assert ended(WITHOUT_A_COMMAND.format(number)) == (STATUS[number], "ferroflow: interrupted\n")


@pytest.mark.parametrize(("status", "logged"), [(0, "late\n"), (TERMINATED, "")])
def test_after_a_signal_nothing_is_logged_while_python_ends(status: int, logged: str) -> None:
    program = f"""
import atexit, logging, sys, types
from ferroflow_dask.__main__ import main
atexit.register(logging.getLogger("asyncio").error, "late")
sys.modules["ferroflow_dask.cli"] = types.SimpleNamespace(main=lambda **_: sys.exit({status}))
main()
"""
    assert ended(program) == (status, logged)


def test_a_signal_to_the_process_group_does_not_reach_the_commands_of_slurm() -> None:
    from ferroflow_dask.deploy.slurm.job import Job

    told = asyncio.run(Job._call([sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid())"]))
    assert told == "True\n"


@pytest.mark.parametrize("name", CASES)
def test_options_of_the_signal_matrix_exist(name: str) -> None:
    answer(*CASES[name][0], "--help")
