"""Rows of the table of models: as text, as a CSV file, and summed up in Markdown.

    python tests/model_rows.py FILE.csv …

prints the summary of files that `tests/model_table.py --save` wrote.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

GRANULARITIES = ("default", "whole", "bundles", "ops", "map_batches")
#: The bound of the default: times a session's CPU time, and more [s].
MOST_RATIO, MOST_MORE_S = 1.15, 5e-3
FIELDS = ("group", "model", "granularity", "right", "ms", "session_ms", "ratio", "note")
#: In the column `right`.
_RIGHT, _UNOPTIMISED, _WRONG, _MISSING = "yes", "without optimisations", "no", "no model"


@dataclass
class Row:
    """A model in the table.

    Parameters
    ----------
    name : str
    group : str
        Models of one line of the summary.
    session_s : float
        CPU time of one session.
    right : list of str
        Granularities that are right.
    seconds : dict of str to float
        CPU times by granularity.
    wrong : list of str
        Granularities that are not.
    unoptimised : list of str
        Granularities whose results are those of a session without optimisations.
    reason : str
        Why the default is over the bound, or why there is no model; else empty.
    """

    name: str
    group: str
    session_s: float
    right: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unoptimised: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether there is no such model, or onnxruntime does not run it."""
        return not (self.right or self.wrong)

    @property
    def ratios(self) -> dict[str, float]:
        """CPU times as multiples of the session's."""
        return {way: found / self.session_s for way, found in self.seconds.items()}

    @property
    def is_within(self) -> bool:
        """Whether the default takes hardly longer than the session."""
        return self.seconds.get("default", float("inf")) <= MOST_RATIO * self.session_s + MOST_MORE_S

    def __str__(self) -> str:
        if self.is_missing:
            return f"{self.name:48} no model: {self.reason}"
        stars = {way: "*" * (way in self.unoptimised) for way in self.right}
        cells = [
            f"{way}{stars[way]} {1e3 * seconds:.2f} ms = {self.ratios[way]:.2f}"
            for way, seconds in self.seconds.items()
        ]
        cells += [f"{way}{stars[way]}" for way in self.right if way not in self.seconds]
        cells += [f"{way} WRONG" for way in self.wrong]
        return f"{self.name:48} {1e3 * self.session_s:8.2f} ms  {', '.join(cells)}  {self.reason}"

    def cells(self) -> Iterator[tuple[object, ...]]:
        """Yield a line of the table for each granularity."""
        if self.is_missing:
            yield self.group, self.name, None, _MISSING, None, None, None, self.reason
        for way in (*self.right, *self.wrong):
            right = _WRONG if way in self.wrong else _UNOPTIMISED if way in self.unoptimised else _RIGHT
            ms = [round(1e3 * seconds, 4) for seconds in (self.seconds.get(way, np.nan), self.session_s)]
            yield self.group, self.name, way, right, *ms, round(ms[0] / ms[1], 3), self.reason


def table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a line for each model and granularity."""
    return pd.DataFrame([cells for row in rows for cells in row.cells()], columns=FIELDS)


def save(row: Row, path: str) -> None:
    """Append a row to a CSV file."""
    table([row]).to_csv(path, mode="a", index=False, header=not Path(path).exists())


def summary(cells: pd.DataFrame) -> str:
    """Return a table in Markdown, totals, and why models are missing."""
    cells = cells.assign(note=cells.note.astype(object).fillna(""))
    found = cells[cells.right != _MISSING]
    reasons = found[found.note != ""].drop_duplicates(["group", "model"])
    missing = Counter(f"{row.group}: {row.note}" for row in cells[cells.right == _MISSING].itertuples())
    lines = [
        "| models | number | right | within the bound | session | default | default ÷ session | worst |",
        f"|{'---|' * 8}",
        *(_line(str(group), of_group) for group, of_group in found.groupby("group", sort=False)),
        f"{_of_all(found)} are right, {(found.right == _UNOPTIMISED).sum()} as without optimisations",
        f"the default is within the bound for {_n_within(found)} of {_n_models(found)} models",
        *(_ratios(way, found[found.granularity == way]) for way in GRANULARITIES),
        *(f"{row.model}: {row.note}" for row in reasons.itertuples()),
        *(f"no model, {number} times: {reason}" for reason, number in missing.most_common()),
    ]
    return "\n".join(lines)


def _of_all(cells: pd.DataFrame) -> str:
    return f"{(cells.right != _WRONG).sum()} of {len(cells)}"


def _n_models(cells: pd.DataFrame) -> int:
    return len(cells.drop_duplicates(["group", "model"]))


def _n_within(cells: pd.DataFrame) -> int:
    default = cells[cells.granularity == "default"]
    return int((default.ms <= MOST_RATIO * default.session_ms + 1e3 * MOST_MORE_S).sum())


def _line(group: str, cells: pd.DataFrame) -> str:
    timed = cells[(cells.granularity == "default") & cells.ms.notna()]
    shown = ["–"] * 4
    if len(timed):
        ratios = timed.ms / timed.session_ms
        shown = [f"{times.min():.2f}–{times.max():.0f} ms" for times in (timed.session_ms, timed.ms)]
        shown += [f"{ratios.median():.2f}", f"{ratios.max():.2f}"]
    return f"| {' | '.join([group, str(_n_models(cells)), _of_all(cells), str(_n_within(cells)), *shown])} |"


def _ratios(way: str, cells: pd.DataFrame) -> str:
    ratios = (cells.ms / cells.session_ms).dropna()
    if not len(ratios):
        return f"{way}: not timed"
    return f"{way} ÷ session: median {ratios.median():.2f} of {len(ratios)}, most {ratios.max():.2f}"


if __name__ == "__main__":
    print(summary(pd.concat(map(pd.read_csv, sys.argv[1:]))))
