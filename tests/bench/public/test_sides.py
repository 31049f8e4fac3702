"""Sides of a comparison: policies, features that are off, and clusters of jobs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from planted import FAULTS
from public_suites import SUITE, Pickled, chosen_suite

from ferroflow_dask.bench.public.base import Clock, Options, Program, Suite
from ferroflow_dask.bench.public.host import Place, plugin
from ferroflow_dask.bench.public.jobs import Jobs
from ferroflow_dask.bench.public.policies import Settings, names, sides_of
from ferroflow_dask.bench.public.runner import run_suites
from ferroflow_dask.bench.public.sides import SIDES, Rules, Sides
from ferroflow_dask.bench.schema import OK
from ferroflow_dask.deploy import local_client
from ferroflow_dask.exceptions import ClusterError, UnknownNameError
from ferroflow_dask.scheduler.features import found_features

OPTIONS = Options(workers=1)


def test_names_are_unique_and_include_our_policy_without_each_feature() -> None:
    assert len(set(names())) == len(names())
    without = {f"ferroflow-without-{kind.name}" for kind in found_features()}
    assert {*SIDES, "ferroflow-again", "static"} | without <= {*names()}


def test_sides_are_stock_dask_the_plugin_or_settings_of_it() -> None:
    chosen = ("dask", "dask-again", "ferroflow", "ferroflow-again", "ferroflow-without-prefetch", "ring")
    assert sides_of((*chosen, "dask")) == {
        "dask": None,
        "dask-again": None,
        "ferroflow": plugin,
        "ferroflow-again": plugin,
        "ferroflow-without-prefetch": Settings({"FEATURES__PREFETCH": "False"}),
        "ring": Settings({"POLICY": "ring", "FEATURES__BUNDLES": "False"}),
    }
    with pytest.raises(UnknownNameError, match="unknown policy 'greedy'; choose one of: dask"):
        sides_of(["greedy"])


def in_charge() -> Suite:
    """Return a suite of one program, whose answer is the policy in charge and the features that are off."""

    def run(client: Client, clock: Clock) -> Any:
        def seen(dask_scheduler: Any) -> Any:
            from ferroflow_dask.scheduler import extension_on

            extension = extension_on(dask_scheduler)
            return extension and (type(extension.placement.policy).__name__, set(extension.off))

        with clock:
            return client.run_on_scheduler(seen)

    def programs(options: Options) -> list[Program]:
        return [Program(suite="charge", name="charge", source="written here", run=run)]

    return chosen_suite(Suite("charge", "written here", programs), OPTIONS)


OF_BUNDLES = {"bundles", "plain_shuffles", "samples", "sharing", "stages"}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "policy", "off", "is_separate"),
    [
        ("ferroflow", "StealingPolicy", set(), False),
        ("ferroflow-without-prefetch", "StealingPolicy", {"prefetch"}, False),
        ("ferroflow-without-bundles", "StealingPolicy", OF_BUNDLES, True),
        ("ring", "RingPolicy", OF_BUNDLES | {"prefetch"}, False),
    ],
)
def test_the_policy_of_a_side_is_in_charge_without_the_features_that_are_off(
    *, name: str, policy: str, off: set[str], is_separate: bool
) -> None:
    suite = in_charge()
    (program,) = suite.programs(OPTIONS)
    with Sides([suite], OPTIONS, Rules(Place(1, is_separate=is_separate), sides=sides_of([name]))) as shared:
        outcome = shared.run(name, program, 0)
    assert outcome.status == OK
    # No setting names a file of learned numbers.
    assert pickle.loads(outcome.answer) == (policy, {"kept_numbers"} | off)


# Jobs


def jobs(folder: Path, problem: str = "") -> Jobs:
    """Stand for jobs of a batch system: while a cluster is there, so is its file."""

    @contextmanager
    def start() -> Iterator[Client]:
        if problem:
            raise ClusterError(problem)
        with local_client(1) as client:
            (file := folder / str(os.getpid())).touch()
            try:
                yield client
            finally:
                file.unlink()

    return Jobs(Pickled(start), section="large", is_encrypted=True)


@pytest.mark.cluster
def test_each_side_has_jobs_of_its_own_which_end_with_it(tmp_path: Path) -> None:
    rules = Rules(Place(1), rounds=1, is_new_for_each=False, jobs=jobs(tmp_path))
    suite = chosen_suite(SUITE, OPTIONS, "prepared")
    n_clusters = []
    rows = list(
        run_suites([suite], OPTIONS, rules, on_step=lambda _: n_clusters.append(len(os.listdir(tmp_path))))
    )
    assert [row.status for row in rows] == [OK] * 3
    assert {(row.cluster, row.section, row.tls) for row in rows} == {("slurm", "large", True)}
    assert n_clusters == [0, 3, 3, 3]
    assert not os.listdir(tmp_path)


@pytest.mark.cluster
def test_jobs_of_a_side_that_hangs_are_cancelled(tmp_path: Path) -> None:
    suite = chosen_suite(SUITE, OPTIONS, "sums")
    (program,) = suite.programs(OPTIONS)
    rules = Rules(Place(1), timeout_s=0.5, sides={"a hang": FAULTS["a hang"]}, jobs=jobs(tmp_path))
    with Sides([suite], OPTIONS, rules) as shared:
        assert shared.run("a hang", program, 0).status == "no result within 0.5 s"
        assert not os.listdir(tmp_path)


def test_jobs_that_do_not_start_are_said_in_a_line(tmp_path: Path) -> None:
    rules = Rules(sides={"dask": None}, jobs=jobs(tmp_path, "no job has started"))
    line = "the cluster of dask did not start: ClusterError: no job has started"
    with pytest.raises(ClusterError, match=line), Sides([SUITE], OPTIONS, rules):
        pytest.fail("there is no cluster")


@pytest.mark.cluster
def test_a_second_signal_while_one_side_ends_leaves_none() -> None:
    sides = Sides([SUITE], OPTIONS, Rules(Place(workers=1), sides=dict.fromkeys(("dask", "dask-again"))))
    processes: list[Any] = []

    def join(timeout: float | None = None) -> None:
        del processes[-1].join  # of the instance; the next call waits
        raise KeyboardInterrupt

    def end() -> None:
        with sides:
            processes.extend(side._process for side in sides._sides.values())
            processes[-1].join = join  # contexts end in the reverse order

    with pytest.raises(KeyboardInterrupt):
        end()
    assert [process.is_alive() for process in processes] == [False, False]
    sides.__exit__()  # again: nothing is left to do
