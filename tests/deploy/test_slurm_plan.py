"""A plan on a real Slurm with two sections: what it proposes meets the deadline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import answer
from plans import GRAPH, SETTINGS, planned, sections
from slurm_clusters import SCHEDULER, no_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("slurm")]


def test_what_a_plan_proposes_meets_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy, deadline_s = tmp_path / "s.json", 6.0
    best = planned(tmp_path, "--deadline", f"{deadline_s}s", "-o", strategy)["plan"]
    assert (best["section"], best["nodes"]) == ("wide", 2)
    common = {**SETTINGS["slurm"], "log-directory": str(tmp_path), "scheduler-options": SCHEDULER}
    config = sections(tmp_path, **{**SETTINGS, "slurm": common})
    jobs = ("--cluster", "slurm", "--config", config, "--section", best["section"], "--jobs", best["nodes"])
    text = answer("run", *GRAPH, *jobs, "--strategy", strategy, "--json").output
    facts = json.loads(text.splitlines()[-1])
    assert facts["executed_ops"] == 13
    # The ops sleep, 3 s on each worker: a busy machine changes little of that, and 6 s are allowed.
    print(f"deadline {deadline_s} s, predicted {best['predicted_s']:.3f} s, run {facts['makespan_s']:.3f} s")
    assert 3 < facts["makespan_s"] <= deadline_s
    assert no_jobs()
