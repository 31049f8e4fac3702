"""How commands fail: one line on stderr; status 2 for wrong input, 130 for Ctrl-C, 1 for all else."""

from __future__ import annotations

import errno
import logging
import sys
from typing import Any

import click

from ferroflow_dask.exceptions import FerroflowError, UsageError

#: Raised by click from 8.2 on.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class Failure(click.ClickException):
    """Something failed; told in one line."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the one line."""
        click.echo(f"ferroflow: {' '.join(self.message.split())}", file=file, err=True)


class Refusal(Failure):
    """What the user gave is not allowed; told in one line, without usage text."""

    exit_code = 2


class Interrupted(Failure):
    """Ctrl-C; told in one line, and with the status that shells have for it."""

    exit_code = 130

    def show(self, file: Any = None) -> None:
        """Print the one line, on a terminal below the ^C that it shows."""
        if sys.stderr.isatty():
            click.echo(file=file, err=True)
        super().show(file)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is not of how distributed ends tasks of its own when results are given up."""
    return record.exc_info is None or type(record.exc_info[1]).__name__ != "AllExit"


class OneLineErrors(click.Group):
    """A group whose commands tell each error in one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Tell an unknown option in one line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise Refusal(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and tell what is wrong in one line."""
        logging.getLogger("asyncio").addFilter(_is_news)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
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
