"""Plans of a graph that sleeps for twelve seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from command_line import answer

#: Twelve seconds of sleep.
GRAPH = ("--dag", "imbalanced", "--n-heavy", "12", "--heavy-ms", "1000", "--n-fast", "1")


SETTINGS = {
    "slurm": {"cores": 1, "memory": "900 MiB", "walltime": "00:30:00"},
    "narrow": {"name": "ff-narrow"},
    "wide": {"name": "ff-wide", "cores": 2, "processes": 2, "memory": "1800 MiB"},
}


def sections(folder: Path, **settings: Any) -> Path:
    """Write a section of jobs with one worker, and one of jobs with two."""
    path = folder / "jobqueue.yaml"
    path.write_text(yaml.safe_dump({"jobqueue": settings or SETTINGS}), encoding="utf-8")
    return path


def planned(folder: Path, *options: object) -> dict[str, Any]:
    fast = ("--costs", "analytic", "--steps", "40", "--nodes", "4")
    text = answer("plan", *GRAPH, *fast, "--config", sections(folder), *options, "--json").output
    facts: dict[str, Any] = json.loads(text)
    return facts
