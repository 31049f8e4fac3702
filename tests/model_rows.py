"""Rows of the table of models: as text, as a CSV file, and summed up in Markdown.

    python tests/model_rows.py FILE.csv …

prints the summary of files that `tests/model_table.py --save` wrote.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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

    def cells(self) -> Iterator[dict[str, str]]:
        """Yield a line of a CSV file for each granularity."""
        common = {"group": self.group, "model": self.name, "note": self.reason}
        if self.is_missing:
            yield {**common, "right": _MISSING}
        common["session_ms"] = f"{1e3 * self.session_s:.4f}"
        for way in (*self.right, *self.wrong):
            right = _WRONG if way in self.wrong else _UNOPTIMISED if way in self.unoptimised else _RIGHT
            found = {}
            if way in self.seconds:
                found = {"ms": f"{1e3 * self.seconds[way]:.4f}", "ratio": f"{self.ratios[way]:.3f}"}
            yield {**common, "granularity": way, "right": right, **found}


def save(row: Row, path: str) -> None:
    """Append a row to a CSV file."""
    is_new = not Path(path).exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(row.cells())


def read(paths: Iterable[str]) -> list[Row]:
    """Return the rows of CSV files."""
    rows: dict[tuple[str, str], Row] = {}
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            for cells in csv.DictReader(file):
                session_s = 1e-3 * float(cells["session_ms"] or "nan")
                made = Row(cells["model"], cells["group"], session_s, reason=cells["note"])
                row, way = rows.setdefault((made.group, made.name), made), cells["granularity"]
                if cells["right"] == _WRONG:
                    row.wrong.append(way)
                elif cells["right"] != _MISSING:
                    row.right.append(way)
                if cells["right"] == _UNOPTIMISED:
                    row.unoptimised.append(way)
                if cells["ms"]:
                    row.seconds[way] = 1e-3 * float(cells["ms"])
    return list(rows.values())


def summary(rows: Iterable[Row]) -> str:
    """Return a table in Markdown, totals, and why models are missing."""
    groups: dict[str, list[Row]] = defaultdict(list)
    missing: Counter[str] = Counter()
    for row in rows:
        if row.is_missing:
            missing[f"{row.group}: {row.reason}"] += 1
        else:
            groups[row.group].append(row)
    lines = [
        "| models | number | right | within the bound | session | default | default ÷ session | worst |",
        f"|{'---|' * 8}",
        *(_line(group, of_group) for group, of_group in groups.items()),
    ]
    found = [row for of_group in groups.values() for row in of_group]
    n_right, n_wrong = sum(len(row.right) for row in found), sum(len(row.wrong) for row in found)
    n_unoptimised = sum(len(row.unoptimised) for row in found)
    lines += [
        f"{n_right} of {n_right + n_wrong} are right, {n_unoptimised} as without optimisations",
        f"the default is within the bound for {sum(row.is_within for row in found)} of {len(found)} models",
        *(_ratios(way, found) for way in GRANULARITIES),
        *(f"{row.name}: {row.reason}" for row in found if row.reason),
        *(f"no model, {number} times: {reason}" for reason, number in missing.most_common()),
    ]
    return "\n".join(lines)


def _line(group: str, rows: list[Row]) -> str:
    n_right = sum(len(row.right) for row in rows)
    n_all = n_right + sum(len(row.wrong) for row in rows)
    timed = [row for row in rows if "default" in row.seconds]
    ratios = [row.ratios["default"] for row in timed]
    times = [[row.session_s for row in timed], [row.seconds["default"] for row in timed]]
    ranges = [f"{1e3 * min(found):.2f}–{1e3 * max(found):.0f} ms" if found else "–" for found in times]
    shown = [f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["–", "–"]
    n_within = sum(row.is_within for row in rows)
    cells = [group, str(len(rows)), f"{n_right} of {n_all}", str(n_within), *ranges, *shown]
    return f"| {' | '.join(cells)} |"


def _ratios(way: str, rows: list[Row]) -> str:
    ratios = [row.ratios[way] for row in rows if way in row.seconds]
    if not ratios:
        return f"{way}: not timed"
    return f"{way} ÷ session: median {statistics.median(ratios):.2f} of {len(ratios)}, most {max(ratios):.2f}"


if __name__ == "__main__":
    print(summary(read(sys.argv[1:])))
