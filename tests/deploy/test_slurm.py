"""Clusters of SLURM jobs, on a real Slurm: what they compute, and how they grow and shrink."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from command_line import FAILURE, USAGE, answer, assert_one_line, ferroflow
from models import mlp
from real_slurm import ask, queue, states
from slurm_clusters import SCHEDULER, client_of, n_workers, no_jobs, ours, sections, soon
from terminal import terminal

import ferroflow_dask
from ferroflow_dask.exceptions import ClusterError
from ferroflow_dask.scheduler import installed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("slurm")]


def functions() -> tuple[Callable[[float], str], Callable[[int], str | None]]:
    """Return functions that workers, who do not have this module, are sent whole."""

    def node(seconds: float) -> str:
        time.sleep(seconds)
        return os.environ["SLURMD_NODENAME"]

    def device(_: int) -> str | None:
        time.sleep(0.02)
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    return node, device


node_after, device_of = functions()


def test_four_jobs_run_a_graph_and_a_model_by_our_policy(tmp_path: Path) -> None:
    imbalanced = ferroflow_dask.generate("imbalanced", n_heavy=2, heavy_ms=50.0, n_fast=20)
    model = ferroflow_dask.load_onnx(mlp())
    x = np.random.default_rng(0).standard_normal((5, 784), dtype=np.float32)
    with ours(tmp_path) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=4)
        cluster.wait_for_jobs()
        assert n_workers(client) == 4
        assert installed(client) is not None
        assert len(set(client.run(os.getenv, "SLURM_JOB_ID").values())) == 4
        assert len(set(client.run(os.getenv, "SLURMD_NODENAME").values())) > 1
        bound = imbalanced.bind()
        outputs = client.compute(bound).result()
        assert {name: value.tolist() for name, value in outputs.items()} == {
            name: value.tolist() for name, value in imbalanced.evaluate().items()
        }
        assert ferroflow_dask.executed(client, bound.run).executed_ops == 23 - 1
        y = client.compute(model.bind(x=x)).result()["y"]
        np.testing.assert_allclose(y, model.evaluate(x=x)["y"], rtol=1e-5)
        placed = [
            decision for key in bound.__dask_keys__() for decision in ferroflow_dask.explain(client, key)
        ]
        assert any(decision.what == "placed" for decision in placed)


def test_scaling_down_takes_the_jobs_that_have_not_started(tmp_path: Path) -> None:
    with ours(tmp_path, cores=4, memory="3 GiB") as cluster, client_of(cluster) as client:
        cluster.scale(jobs=4)
        cluster.wait_for_jobs()
        cluster.scale(jobs=6)  # two more than fit
        assert soon(lambda: len(queue()) == 6)
        waiting = set(ask("squeue", "-h", "-t", "PENDING", "-o", "%i").split())
        cluster.scale(jobs=4)
        assert soon(lambda: not waiting & set(queue()))
        assert n_workers(client) == 4
        held = client.map(node_after, [0.0] * 40, pure=False)
        client.gather(held)
        cluster.scale(2)
        assert soon(lambda: n_workers(client) == 2)
        # What the others held is here now, and was not computed again.
        assert len(client.gather(held)) == 40
        keys = [future.key for future in held]
        assert client.run_on_scheduler(_times_computed, keys=keys) == [1] * 40


def test_adapt_comes_and_goes_in_whole_jobs_and_keeps_what_is_held(tmp_path: Path) -> None:
    with ours(tmp_path, cores=2, processes=2) as cluster, client_of(cluster) as client:
        adaptive = cluster.adapt(maximum_jobs=3, interval="200ms", wait_count=2, target_duration="500ms")
        futures = client.map(node_after, [0.1] * 60, pure=False)
        assert soon(lambda: all(future.done() for future in futures))
        assert soon(lambda: len(queue()) == 1)
        with counting(adaptive) as looks:
            assert soon(lambda: len(looks) > 3 * 2)  # thrice as many as a job is given up after
        assert all(future.status == "finished" for future in futures)
        assert len(cluster.worker_spec) == len(queue()) == 1  # holds the results
        assert len(client.gather(futures)) == 60
        # Each was computed once.
        keys = [future.key for future in futures]
        assert client.run_on_scheduler(_times_computed, keys=keys) == [1] * 60
        futures.clear()
        assert no_jobs()
        assert client.submit(node_after, 0, pure=False).result(timeout=60)  # and up again


@contextmanager
def counting(adaptive: Any) -> Iterator[list[int]]:
    """Yield what grows by the target of each look of an adaptive; when one begins, all before have acted."""
    looks: list[int] = []
    recommend = adaptive.recommendations

    async def noted(target: int) -> Any:
        looks.append(target)
        return await recommend(target)

    adaptive.recommendations = noted
    try:
        yield looks
    finally:
        del adaptive.recommendations


def _times_computed(dask_scheduler: Any, keys: list[str]) -> list[int]:
    stories = {key: dask_scheduler.story(key) for key in keys}
    return [sum(event[1:3] == ("processing", "memory") for event in stories[key]) for key in keys]


def test_cpu_and_gpu_jobs_in_one_cluster(tmp_path: Path) -> None:
    with ours(tmp_path, "gpu") as cluster, client_of(cluster) as client:
        cluster.scale(jobs=2, gpu_jobs=2)
        cluster.wait_for_jobs()
        devices = client.run(os.getenv, "CUDA_VISIBLE_DEVICES")
        assert sorted(filter(None, devices.values())) in (["0", "0"], ["0", "1"])
        with dask.annotate(resources={"GPU": 1}):
            on_gpu = client.map(device_of, range(8), pure=False)
        anywhere = client.map(device_of, range(8), pure=False)
        assert all(client.gather(on_gpu))
        assert len(client.gather(anywhere)) == 8
        cluster.scale(gpu_jobs=0)
        assert soon(lambda: n_workers(client) == 2)
        assert not any(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())


def test_adapt_asks_for_gpus_only_where_tasks_need_them(tmp_path: Path) -> None:
    with ours(tmp_path, "gpu") as cluster, client_of(cluster) as client:
        cluster.adapt(
            maximum_jobs=2, maximum_gpu_jobs=2, interval="200ms", wait_count=2, target_duration="200ms"
        )
        plain = client.map(device_of, range(20), pure=False)
        assert not any(client.gather(plain))
        del plain
        assert no_jobs()
        with dask.annotate(resources={"GPU": 1}):
            on_gpu = client.map(device_of, range(4), pure=False)
        assert all(client.gather(on_gpu))
        assert len(cluster.jobs_of("cpu")) == 0
        del on_gpu
        assert no_jobs()


def test_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "of a project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with ferroflow_dask.slurm_cluster(
        "cpu",
        config_file=sections(tmp_path),
        security=True,
        scheduler_options={"host": "127.0.0.1", "dashboard_address": ":0"},
    ) as cluster:
        cluster.scale(jobs=1)
        cluster.wait_for_jobs()
        assert cluster.scheduler_address.startswith("tls://")
        assert list(folder.glob(".dask-jobqueue.worker.*"))
        with client_of(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3
    assert not list(folder.glob(".dask-jobqueue.worker.*"))
    assert no_jobs()


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("ferroflow")
    return subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("cpu", "message"),
    [
        (
            {"queue": "nowhere"},
            r"sbatch refused the job 'ff-cpu': invalid partition specified: nowhere / Batch job submission "
            r"failed: Invalid partition name specified; change `queue: nowhere` in section jobqueue\.cpu of "
            r"\./jobqueue\.yaml$",
        ),
        (
            {"memory": "900 GiB"},
            r"sbatch refused the job 'ff-cpu': .*(Memory|node conf).*; change .*`memory: 900 GiB` in",
        ),
        (
            {"cores": 64},
            r"job \d+ will never start: PENDING \(PartitionConfig\); change .*`cores: 64` or .* in section",
        ),
        (
            {"walltime": "12:00:00", "queue": "short"},
            r"job \d+ will never start: PENDING \(PartitionTimeLimit\); change `walltime: 12:00:00` or "
            r"`queue: short` in section",
        ),
    ],
)
def test_a_job_that_slurm_refuses_is_told_in_its_words(
    tmp_path: Path, cpu: dict[str, Any], message: str
) -> None:
    sections(tmp_path, **cpu, **{"scheduler-options": {"host": "127.0.0.1"}})
    done = command(tmp_path, "run", "--dag", "wide", "--cluster", "slurm")
    *_, last = done.stderr.splitlines(keepends=True)
    assert_one_line(done.returncode, last, 1, message)
    assert len(re.findall(message, done.stderr)) == 1
    assert no_jobs()


def test_folders_with_spaces(tmp_path: Path) -> None:
    folders = {"log-directory": str(tmp_path / "my logs"), "local-directory": str(tmp_path / "my scratch")}
    with ours(tmp_path, **folders) as cluster, client_of(cluster) as client:
        cluster.scale(jobs=1)
        cluster.wait_for_jobs()
        (worker,) = client.scheduler_info(n_workers=-1)["workers"].values()
        assert worker["local_directory"].startswith(folders["local-directory"])
        assert sorted(path.suffix for path in Path(folders["log-directory"]).iterdir()) == [".err", ".out"]


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ours(tmp_path) as cluster:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ClusterError, match="no such command here; run this on a login"):
            cluster.scale(jobs=1)
        monkeypatch.undo()


def test_workers_that_never_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ours(tmp_path, **{"job-extra-directives": ["--begin=now+1hour"]}) as cluster:
        cluster.scale(jobs=2)
        with pytest.raises(
            ClusterError,
            match=r"2 of 2 workers have not connected within 1 s: job \d+ is PENDING \(BeginTime\)",
        ):
            cluster.wait_for_jobs(timeout=1)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            with pytest.raises(ClusterError, match=r"connected within 0 s: Slurm does not answer"):
                cluster.wait_for_jobs(timeout=0)


def test_status_lists_jobs_and_cancel_ends_them_and_their_program(tmp_path: Path) -> None:
    sections(tmp_path, **{"scheduler-options": SCHEDULER})
    sleepers = ("--dag", "imbalanced", "--n-heavy", "400", "--heavy-ms", "500", "--policy", "dask")
    # A client tries so long to find its scheduler again.
    environment = {**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
    with subprocess.Popen(
        [sys.executable, "-m", "ferroflow_dask", "run", *sleepers, "--cluster", "slurm", "--jobs", "2"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stderr is not None
        submitted = re.findall(r"\d+", program.stderr.readline().partition(";")[0])
        row = r"^{} +ff-cpu +RUNNING +1 +\d+:\d\d +n\d +tcp://127\.0\.0\.1:\d+$"
        rows = [re.compile(row.format(job), re.MULTILINE) for job in submitted]
        assert soon(lambda: all(row.search(answer("slurm", "status").stdout) for row in rows))
        refused = ferroflow("slurm", "cancel", "999999")
        assert_one_line(refused.exit_code, refused.stderr, USAGE, "job 999999 must be a job of ferroflow")
        assert answer("slurm", "cancel").stdout == f"cancelled {', '.join(submitted)}\n"
        _, stderr = program.communicate(timeout=60)
    assert re.search("^ferroflow: the scheduler closed during the run", stderr, re.MULTILINE), stderr
    assert program.returncode == FAILURE
    assert no_jobs()
    for command_name in ("status", "cancel"):
        assert answer("slurm", command_name).stdout == "no jobs of ferroflow are pending or running\n"


def test_waiting_for_jobs_is_shown_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferroflow_dask.deploy.slurm.replacing._POLL_S", 0.2)
    monkeypatch.setattr("ferroflow_dask.deploy.slurm.queue_line._LINE_S", 0.5)
    held = {"job-extra-directives": ["--begin=now+1hour"], "scheduler-options": SCHEDULER}
    config = sections(tmp_path, **held)
    where = ("--cluster", "slurm", "--jobs", "2", "--config", config, "--job-timeout", "3")
    done = ferroflow("run", "--dag", "wide", *where)
    submitted, *lines, last = done.stderr.splitlines()
    ids = re.match(r"submitted (\d+, \d+); dashboard", submitted)[1]
    assert lines[-1] == f"0 of 2 jobs running; {ids} PENDING (BeginTime); Ctrl-C to stop"
    assert len(lines) < 7  # and no more often
    assert re.search(r"2 of 2 workers have not connected within 3 s: job \d+ is PENDING \(BeginTime\)", last)
    assert done.exit_code == FAILURE
    assert no_jobs()


def test_waiting_for_jobs_is_one_line_on_a_terminal(tmp_path: Path) -> None:
    sections(tmp_path, **{"job-extra-directives": ["--begin=now+1hour"], "scheduler-options": SCHEDULER})
    program = f"{sys.executable} -m ferroflow_dask run --dag wide --cluster slurm --jobs 2"
    with terminal(tmp_path, f"cd {tmp_path} && {program}") as shown:
        line = r"0 of 2 jobs running; \d+, \d+ PENDING \(BeginTime\); Ctrl-C to stop"
        assert soon(lambda: re.search(line, shown.screen())), shown.screen()
        shown.press("C-c")
        assert soon(lambda: "ended with 130" in shown.screen()), shown.screen()
        text = shown.screen()
    assert "interrupted" in text
    assert not re.search(line, text)  # it was a status line, which is gone
    assert "Traceback" not in text
    assert soon(no_jobs)


def counted(name: str, calls: Counter[str]) -> Callable[[Any], Any]:
    """Return what has a name, which counts how often it was called to the end."""
    method = pkgutil.resolve_name(name)

    async def counting(self: Any) -> Any:
        result = await method(self)
        calls[name] += 1
        return result

    return counting


def test_jobs_that_fail_are_tried_no_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[str] = Counter()
    monkeypatch.setattr("ferroflow_dask.deploy.slurm.replacing._POLL_S", 0.2)
    for name in ("replacing.ReplacingCluster._look", "adaptive.JobAdaptive.target"):
        monkeypatch.setattr(
            f"ferroflow_dask.deploy.slurm.{name}", counted(f"ferroflow_dask.deploy.slurm.{name}", looks)
        )
    with ours(tmp_path, python="/nowhere/python") as cluster:
        cluster.scale(jobs=1)
        with pytest.raises(
            ClusterError,
            match=r"job \d+ ended before its workers connected: FAILED; .*\.err ends: .*/nowhere/python",
        ):
            cluster.wait_for_jobs(timeout=60)
        assert len(cluster.failures) == 3
        cluster.adapt(minimum_jobs=1, maximum_jobs=1, interval="200ms")
        assert soon(lambda: len(cluster.failures) == 6)
        looks.clear()
        assert soon(lambda: len(looks) == 2 and min(looks.values()) > 3)
        assert len(cluster.failures) == 6


def test_srun_example(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "srun.sh"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sbatch", "--parsable", "--ntasks=4", f"--output={tmp_path}/out.txt", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    job = done.stdout.strip()
    assert soon(lambda: job not in queue(), 120)  # `sbatch --wait` would look ever less often
    told = (tmp_path / "out.txt").read_text()
    assert states()[job] == "COMPLETED", told
    assert re.search(r"204 ops in \d+\.\d+ s on 2 workers", told)


def test_gpu_example(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "gpu.sh"
    programs = tmp_path / "env" / "bin"  # instead of the measurements, which take minutes
    programs.mkdir(parents=True)
    for name in ("python", "ferroflow"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" on GPU $CUDA_VISIBLE_DEVICES\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    sites = {"BASH_FUNC_module%%": '() { echo module "$@"; }', "FERROFLOW_ENV": str(tmp_path / "env")}
    here = ("--gres=gpu:fake:1", "--cpus-per-task=1", "--mem=200")  # as one overrides them for Nibi
    done = subprocess.run(
        ["sbatch", "--parsable", "--account=def-someuser", *here, script, "--repeat", "3"],
        cwd=tmp_path,
        env={**os.environ, **sites, "FERROFLOW_CLONE": "/clone"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    job = done.stdout.strip()
    assert soon(lambda: job not in queue(), 120)
    assert (tmp_path / f"ferroflow-gpu-{job}.out").read_text().splitlines() == [
        "module load StdEnv/2023 python/3.11 cuda/12.6",
        "python /clone/examples/gpu.py --cpus 8 --repeat 3 on GPU 0",
        "ferroflow report gpu.jsonl on GPU 0",
    ]
    assert states()[job] == "COMPLETED"


def test_each_side_of_a_benchmark_has_jobs_of_its_own(tmp_path: Path) -> None:
    where = ("--cluster", "slurm", "--config", sections(tmp_path), "--rows", tmp_path / "rows.jsonl")
    sizes = ("stencil_1d", "--width", "2", "--steps", "3", "--task-ms", "1", "--repeat", "1")
    policies = ("--policy", "dask", "--policy", "ferroflow")
    text = answer("bench", "run", *sizes, *policies, *where).stdout
    assert "1 worker × 1 thread, SLURM jobs, section cpu; " in text
    assert "\n| stencil_1d width=2 steps=3 task_ms=1.0 | 6 | " in text
    assert no_jobs()
