"""A policy decides by what it is told alone: told the same again, it says the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from random_clusters import Story, stories
from replay import RecordedPolicy, Recording, recording_view, replay

from ferroflow_dask.policy import make_policy
from ferroflow_dask.policy.instructions import AssignTask, DeclineSteal, SetPriority, StealTask
from ferroflow_dask.scheduler import extension


def recorded(story: Story, name: str) -> Recording:
    recording = Recording()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "ClusterView", recording_view(recording))
        cluster = story.cluster(RecordedPolicy(make_policy(name), recording))
        cluster.run()
        cluster.check()
    return recording


@pytest.mark.parametrize("name", ["ferroflow", "ring", "static", "random"])
def test_a_replay_gives_the_same_instructions(name: str) -> None:
    kinds, others_differ = set(), False

    @settings(max_examples=30)
    @given(stories())
    def replay_gives_the_same(story: Story) -> None:
        nonlocal others_differ
        recording = recorded(story, name)
        assert replay(recording, make_policy(name)) == recording.instructions
        other = make_policy("ferroflow" if name == "static" else "static")
        others_differ |= replay(recording, other) != recording.instructions
        kinds.update(type(instruction) for instruction in recording.instructions)

    replay_gives_the_same()
    assert others_differ
    assert AssignTask in kinds
    if name == "ferroflow":
        assert kinds == {AssignTask, SetPriority, StealTask, DeclineSteal}
