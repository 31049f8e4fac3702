"""Names of dask-jobqueue and distributed that `deploy.slurm` uses and that may go."""

from __future__ import annotations

import inspect

import pytest
from dask_jobqueue.core import Job, JobQueueCluster
from dask_jobqueue.slurm import SLURMJob
from distributed import Scheduler, SpecCluster
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster

NAMES = [
    (SpecCluster, "_correct_state"),
    (SpecCluster, "_correct_state_internal"),
    (SpecCluster, "_start"),
    (SpecCluster, "_close"),
    (Cluster, "_update_worker_status"),
    (Cluster, "_repr_html_"),
    (Cluster, "_scaling_status"),
    (SLURMJob, "_call"),
    (SLURMJob, "start"),
    (SLURMJob, "close"),
    (SLURMJob, "job_script"),
    (SLURMJob, "default_config_name"),
    (Scheduler, "workers_to_close"),
    (Scheduler, "retire_workers"),
    (Adaptive, "target"),
    (Adaptive, "workers_to_close"),
    (Adaptive, "scale_down"),
    (Adaptive, "stop"),
]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_name_is_there(owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None)), f"{owner.__name__}.{name} is gone"


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (JobQueueCluster, "_job_kwargs"),
        (SpecCluster, "_futures"),
        (SpecCluster, "worker_spec"),
        (Cluster, "periodic_callbacks"),
        (Cluster, "scheduler_info"),
    ],
)
def test_attribute_is_set(owner: type, attribute: str) -> None:
    assert f"self.{attribute} =" in inspect.getsource(owner.__init__).replace(": dict", "")


@pytest.mark.parametrize("owner", [JobQueueCluster, Job])
def test_the_section_is_asked_for_before_it_is_read(owner: type) -> None:
    source = inspect.getsource(owner.__init__)
    assert 0 < source.find(".default_config_name()") < source.find("dask.config.get(")
