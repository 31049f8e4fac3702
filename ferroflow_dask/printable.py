"""Text for terminals and logs: names may hold control characters, which a terminal would obey."""

from __future__ import annotations

_ALLOWED = "\n\t"


def printable(text: str) -> str:
    r"""Return a text with escapes in place of control characters; newlines and tabs stay.

    Examples
    --------
    >>> print(printable("red \x1b[31m"))
    red \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _ALLOWED else repr(one)[1:-1] for one in text)
