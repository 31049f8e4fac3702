"""Errors of commands: one line on stderr and an exit status.

The status is 2 for wrong input, 130 for SIGINT (Ctrl-C), 143 for SIGTERM and 1 for other failures.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
from typing import Any

import click

from ferroflow_dask.cli.limits import Expired
from ferroflow_dask.deploy.interrupts import number_of, signals_raised
from ferroflow_dask.deploy.stuck import ended_if_stuck
from ferroflow_dask.exceptions import FerroflowError, UnknownNameError, UsageError
from ferroflow_dask.printable import printable

#: Raised by click from 8.2 on.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())

#: What a command prints, and its status, if a signal does not end it in time.
_ENDINGS: dict[int, tuple[str, int]] = {
    signal.SIGINT: ("ferroflow: interrupted", 128 + signal.SIGINT),
    signal.SIGTERM: ("ferroflow: interrupted", 128 + signal.SIGTERM),
    signal.SIGALRM: (f"ferroflow: {Expired.line}", 1),
}


class Failure(click.ClickException):
    """A failure, printed as one line."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the one line."""
        click.echo(f"ferroflow: {printable(' '.join(self.message.split()))}", file=file, err=True)


class Refusal(Failure):
    """Wrong input, printed as one line without usage text."""

    exit_code = 2


class Interrupted(Failure):
    """SIGINT or SIGTERM, printed as one line; the exit status is the one that shells use for the signal.

    Parameters
    ----------
    error : KeyboardInterrupt
    details : str, optional
        End of the line.
    """

    def __init__(self, error: KeyboardInterrupt, details: str = "") -> None:
        super().__init__(f"interrupted{details}")
        # click has it on the class only.
        self.exit_code = 128 + number_of(error)  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print the line, on a terminal below the ^C that the terminal shows."""
        if sys.stderr.isatty():
            click.echo(file=file, err=True)
        super().show(file)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for records of `AllExit`, which distributed raises when a client drops results."""
    return record.exc_info is None or type(record.exc_info[1]).__name__ != "AllExit"


class OneLineErrors(click.Group):
    """A group whose commands print each error as one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Report an unknown option in one line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise Refusal(error.format_message()) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is meant; the error for an unknown one names the nearest and all others."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownNameError.of("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and report an error in one line."""
        logging.getLogger("asyncio").addFilter(_is_news)
        try:
            with signals_raised(), ended_if_stuck(_ENDINGS):
                return super().invoke(ctx)
        except Expired:
            raise Failure(Expired.line) from None
        except KeyboardInterrupt as error:
            raise Interrupted(error) from None
        except UsageError as error:
            raise Refusal(str(error)) from error
        except FerroflowError as error:
            raise Failure(str(error)) from error
        except _HELP:  # a group without a command: its help is shown as it is
            raise
        except click.UsageError as error:
            raise Refusal(error.format_message()) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has had enough, which click knows
            where = "" if error.filename is None else f"{error.filename}: "
            raise Failure(f"{where}{error.strerror or error}") from error
