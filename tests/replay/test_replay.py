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
    kinds = set()

    @settings(max_examples=30)
    @given(stories())
    def replay_gives_the_same(story: Story) -> None:
        recording = recorded(story, name)
        assert replay(recording, make_policy(name)) == recording.instructions
        kinds.update(type(instruction) for instruction in recording.instructions)

    replay_gives_the_same()
    assert AssignTask in kinds
    if name == "ferroflow":
        assert kinds == {AssignTask, SetPriority, StealTask, DeclineSteal}


def test_another_policy_says_something_else() -> None:
    said = []

    @settings(max_examples=10)
    @given(stories())
    def compare(story: Story) -> None:
        recording = recorded(story, "ferroflow")
        said.append(replay(recording, make_policy("static")) != recording.instructions)

    compare()
    assert any(said)
