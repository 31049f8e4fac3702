"""Ctrl-C: one line and status 130, whatever a command is doing, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from command_line import INTERRUPTED, assert_one_line

from ferroflow_dask.deploy.interrupts import interrupts_deferred

#: A terminal sends the signal to all processes of a group.
SCRIPT = """
import multiprocessing, os, signal, sys, threading, time
from distributed import Client
from ferroflow_dask.cli import main

def is_starting():
    return len(multiprocessing.active_children()) == 2

def is_computing():
    clients = [client for client in list(Client._instances) if client.status == "running"]
    return any(any(client.processing().values()) for client in clients)

def interrupt(is_time):
    while not is_time():
        time.sleep(0.001)
    os.killpg(0, signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, args=[globals()[sys.argv.pop(1)]], daemon=True).start()
main()
"""
LONG = ("run", "--dag", "imbalanced", "--heavy-ms", "60000", "--workers", "2")


@pytest.mark.cluster
@pytest.mark.parametrize("when", ["is_starting", "is_computing"])
def test_an_interrupted_run_says_so_in_one_line(when: str) -> None:
    arguments = (*LONG, "--policy", "dask")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when, *arguments],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert_one_line(done.returncode, done.stderr, INTERRUPTED, "^ferroflow: interrupted$")


def test_an_interrupt_is_deferred_to_the_end_of_a_start() -> None:
    seen: list[str] = []

    def start() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            asked = [sys.executable, "-c", "import signal; print(*map(int, signal.pthread_sigmask(0, [])))"]
            seen.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert seen == [str(int(signal.SIGINT))]  # blocked in what was started meanwhile
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_start_without_an_interrupt_or_in_another_thread_is_as_any() -> None:
    def start() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
    start()
    assert found[0] != found[1]
    assert signal.getsignal(signal.SIGINT) is found[0]
