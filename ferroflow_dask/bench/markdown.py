"""Markdown tables and numbers for people: what reports are written with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

#: What stands where there is no value.
NOTHING = "–"
#: What stands where the runs failed that would give one.
BROKEN = "**BROKEN**"
#: Digits of a measured number that mean something; the next one is noise on any machine.
_SIGNIFICANT = 3


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> str:
    r"""Return a markdown table; the columns named in `right` hold numbers.

    Examples
    --------
    >>> print(table(("policy", "time"), [("dask", "1.20"), ("a|b", "0.90")], right=("time",)))
    | policy | time |
    | --- | ---: |
    | dask | 1.20 |
    | a\|b | 0.90 |
    """
    numeric = set(right)
    lines = [
        _line(header),
        _line(["---:" if name in numeric else "---" for name in header]),
        *(_line([text(cell) for cell in row]) for row in rows),
    ]
    return "\n".join(lines)


def text(value: object) -> str:
    """Return a value as text that cannot break a table, and that can be printed."""
    # File names that are not UTF-8 come as surrogates, which no output takes.
    printable = str(value).encode(errors="backslashreplace").decode()
    return " ".join(printable.split()).replace("|", "\\|")


def number(value: float | None) -> str:
    """Return a number with three significant digits, never in exponents.

    Examples
    --------
    >>> number(0.25), number(0.001234), number(28838.6), number(9.996), number(0), number(None)
    ('0.250', '0.00123', '28,839', '10.0', '0', '–')
    """
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{_SIGNIFICANT - 1}e}")  # 9.996 has its first digit before the point in 10.0
    decimals = max(0, _SIGNIFICANT - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def percent(value: float | None) -> str:
    """Return a fraction in whole per cent."""
    return NOTHING if value is None else f"{value:.0%}"


def count(n: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
