"""What a bundle holds at a time: bytes counted by hand."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ferroflow_dask.graph import Op
from ferroflow_dask.lowering.bundles import _peak_nbytes

#: Of each value [B]; `x` and `y` come from elsewhere.
NBYTES = {"x": 100, "y": 1000, "a": 10, "b": 20, "c": 40}


def made(*reads: str) -> list[Op]:
    """Return ops that make `a`, `b` and `c`, one after another, of the values named by letters."""
    return [
        Op(i, out, "f", tuple(read), (out,)) for i, (read, out) in enumerate(zip(reads, "abc", strict=True))
    ]


@pytest.mark.parametrize(
    ("ops", "kept", "expected"),
    [
        (made("x", "a", "b"), "", 100 + 20 + 40),  # at the end; `a` is gone by then
        (made("xy", "a", "b"), "", 100 + 1000 + 20 + 40),
        (made("x", "a", "bx"), "", 100 + 20 + 40),
        (made("x", "a", "ab"), "", 100 + 10 + 20 + 40),
        (made("x", "a", "b"), "a", 100 + 10 + 20 + 40),
        (made("x", "aa", "b"), "", 100 + 20 + 40),
        (made("", "", "a"), "c", 10 + 20 + 40),
    ],
    ids=[
        "one after another",
        "of two from elsewhere",
        "what comes from elsewhere stays until the end",
        "what is read again stays until then",
        "what others read stays",
        "what one op reads twice goes once",
        "of nothing from elsewhere",
    ],
)
def test_a_bundle_holds_what_is_still_read_and_what_others_read(
    ops: list[Op], kept: Collection[str], expected: int
) -> None:
    assert _peak_nbytes(ops, NBYTES, kept) == expected


def test_the_most_may_be_held_before_the_end() -> None:
    assert _peak_nbytes(made("", "a", "b"), {"a": 10, "b": 500, "c": 1}, "c") == 510
    assert _peak_nbytes(made("", "a", "b"), {"a": 400, "b": 100, "c": 1}, "c") == 500
