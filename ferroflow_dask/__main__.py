"""The program `ferroflow`, also `python -m ferroflow_dask`: its signals before and after a command."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> None:
    """Run the command line; SIGINT and SIGTERM end it in one line at any moment.

    While a command runs, it handles the signals itself. Before, Python imports packages, and afterwards it
    ends: an exception there would be a traceback, and there is no cluster to close.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    from ferroflow_dask.cli import main as command_line

    try:
        command_line(prog_name="ferroflow")
    except SystemExit as end:
        if end.code in {128 + number for number in (signal.SIGINT, signal.SIGTERM)}:
            import logging

            logging.disable()  # asyncio logs lost connections of workers when its futures are collected
        raise


def _leave(number: int, _: object) -> NoReturn:
    start = b"\n" if os.isatty(2) else b""  # below the ^C that the terminal shows
    os.write(2, start + b"ferroflow: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
