"""A real terminal, by tmux: runs a command, sends keys, and shows what is on the screen."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Terminal:
    """A tmux server with one window.

    Parameters
    ----------
    socket : pathlib.Path
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *arguments: str) -> str:
        """Run a command of tmux; return what it prints."""
        command = ("tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments)
        # The size is the terminal's; what runs tests side by side says one of its own.
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=30
        )
        return done.stdout

    def screen(self) -> str:
        """Return the text on the screen."""
        return self.tmux("capture-pane", "-p")

    def press(self, key: str) -> None:
        """Press a key."""
        self.tmux("send-keys", key)


@contextmanager
def terminal(folder: Path, command: str, width: int = 120, height: int = 40) -> Iterator[Terminal]:
    """Run a command in a terminal; skip the test if there is no tmux."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    found = Terminal(folder / "s")
    size = ("-x", str(width), "-y", str(height))
    found.tmux("-u", "new-session", "-d", *size, f"{command}; echo ended with $?; sleep 60")
    try:
        yield found
    finally:
        found.tmux("kill-server")
