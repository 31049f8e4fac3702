"""Sections of jobqueue.yaml, and the batch scripts that come of them; nothing is submitted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
from command_line import INTERRUPTED, USAGE, answer, assert_one_line, ferroflow
from slurm_clusters import SCHEDULER

from ferroflow_dask.cli.slurm import SlurmOptions
from ferroflow_dask.deploy import default_section, job_kind, job_scripts, slurm_cluster, slurm_template
from ferroflow_dask.deploy.slurm.settings import walltime_s
from ferroflow_dask.exceptions import FerroflowError, UsageError

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "jobqueue.yaml"
WORKER = f"{sys.executable} -m distributed.cli.dask_worker tcp://<scheduler>:8786 --name <job>"
CUDA_WORKER = f"{sys.executable} -m dask_cuda.cli tcp://<scheduler>:8786 --name <job>"

CPU = f"""#!/usr/bin/env bash

#SBATCH -J ferroflow-cpu
#SBATCH -e ferroflow-logs/ferroflow-cpu-%J.err
#SBATCH -o ferroflow-logs/ferroflow-cpu-%J.out
#SBATCH -n 1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH -t 01:00:00
#SBATCH --comment="ferroflow tcp://<scheduler>:8786 <job>"
export DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION=3120s
export DASK_DISTRIBUTED__WORKER__LIFETIME__STAGGER=180s
{WORKER} --nthreads 4 --memory-limit 8.00GiB --nanny --death-timeout 120
"""

GPU = f"""#!/usr/bin/env bash

#SBATCH -J ferroflow-gpu
#SBATCH -e ferroflow-logs/ferroflow-gpu-%J.err
#SBATCH -o ferroflow-logs/ferroflow-gpu-%J.out
#SBATCH -n 1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH -t 01:00:00
#SBATCH --gres=gpu:1
#SBATCH --comment="ferroflow tcp://<scheduler>:8786 <job>"
export DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION=3120s
export DASK_DISTRIBUTED__WORKER__LIFETIME__STAGGER=180s
{CUDA_WORKER} --nthreads 1 --memory-limit 16.00GiB --death-timeout 120 --resources GPU=1
"""

NARVAL = f"""#!/usr/bin/env bash

#SBATCH -J ferroflow-narval
#SBATCH -e ferroflow-logs/ferroflow-narval-%J.err
#SBATCH -o ferroflow-logs/ferroflow-narval-%J.out
#SBATCH -A def-someuser
#SBATCH -n 1
#SBATCH --cpus-per-task=12
#SBATCH --mem=120G
#SBATCH -t 03:00:00
#SBATCH --gres=gpu:a100:1
#SBATCH --comment="ferroflow tcp://<scheduler>:8786 <job>"
module load StdEnv/2023 python/3.11 cuda/12.6
source ~/ferroflow/bin/activate
export DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION=9960s
export DASK_DISTRIBUTED__WORKER__LIFETIME__STAGGER=540s
{CUDA_WORKER} --nthreads 1 --memory-limit 120.00GiB --death-timeout 120 \
--local-directory $SLURM_TMPDIR --resources GPU=1 --interface ib0
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASK_CONFIG", raising=False)


@pytest.mark.parametrize(("section", "expected"), [("cpu", CPU), ("gpu", GPU), ("narval", NARVAL)])
def test_batch_scripts_of_the_template(section: str, expected: str) -> None:
    (script,) = job_scripts([section], TEMPLATE)
    assert script == expected.replace("$TEMPLATE", str(TEMPLATE))


def test_jobs_of_a_whole_node_fit_it() -> None:
    sections = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))["jobqueue"]
    # GPUs, cores and memory of a node, as the sections say.
    for section, n_gpus, n_cores, nbytes in (("narval", 4, 48, 498 * 2**30), ("nibi", 8, 112, 2 * 10**12)):
        assert n_gpus * sections[section]["job-cpu"] <= n_cores
        assert n_gpus * dask.utils.parse_bytes(sections[section]["memory"]) <= nbytes


def test_the_template_is_what_the_command_writes() -> None:
    assert slurm_template() == TEMPLATE.read_text(encoding="utf-8")
    assert answer("slurm", "template").stdout == slurm_template()


def test_job_script_prints_what_would_be_submitted(tmp_path: Path) -> None:
    (tmp_path / "jobqueue.yaml").write_text(slurm_template(), encoding="utf-8")
    told = answer(
        "run", "--dag", "uniform", "--cluster", "slurm", "--gpu-jobs", "1", "--jobs", "2", "--job-script"
    )
    assert told.stdout == f"{CPU}\n{GPU}"
    assert [path.name for path in tmp_path.iterdir()] == ["jobqueue.yaml"]  # and no folder for logs


@pytest.mark.parametrize("section", ["slurm", "cpu", "gpu", "narval", "nibi"])
def test_each_section_serves_dask_jobqueue_itself(section: str) -> None:
    from dask_jobqueue.slurm import SLURMJob

    sections = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))["jobqueue"]
    complete = {**dask.config.get("jobqueue.slurm"), **sections[section]}
    with dask.config.set({f"jobqueue.{section}": complete}):
        script = SLURMJob("tcp://127.0.0.1:8786", name="job", config_name=section).job_script()
    assert f"#SBATCH -t {sections[section]['walltime']}" in script


def write(path: Path, **sections: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"jobqueue": sections}), encoding="utf-8")
    return path


def test_the_first_place_that_is_named_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cores() -> Any:
        return job_kind("mine").arguments["cores"]

    user = {"jobqueue": {"mine": {"cores": 1, "memory": "1 GiB"}}}
    with dask.config.set(user):
        assert cores() == 1
        write(tmp_path / "jobqueue.yaml", mine={"cores": 2, "memory": "1 GiB"})
        assert cores() == 2
        monkeypatch.setenv("DASK_CONFIG", "elsewhere.yaml")  # Dask has read it when it was imported
        assert cores() == 1
        other = write(tmp_path / "other.yaml", mine={"cores": 3, "memory": "1 GiB"})
        assert job_kind("mine", other).arguments["cores"] == 3


def test_what_a_section_leaves_out_is_as_in_slurm(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.yaml", slurm={"cores": 2, "memory": "1 GiB", "queue": "all"}, mine={"cores": 8}
    )
    arguments = job_kind("mine", file).arguments
    assert (arguments["cores"], arguments["memory"], arguments["queue"]) == (8, "1 GiB", "all")
    # Told always: dask-jobqueue groups the workers of a job only then.
    assert arguments["processes"] == 1


#: What a user's own jobqueue.yaml, in ~/.config/dask, may say.
USERS = {"account": "def-me", "queue": "mine", "walltime": "02:00:00", "job-extra-directives": ["--mine"]}


@pytest.mark.parametrize(
    "also", [{}, {"queue": None, "job-extra-directives": None}], ids=["left out", "null"]
)
def test_a_file_that_is_named_counts_alone(tmp_path: Path, also: dict[str, Any]) -> None:
    file = write(tmp_path / "site.yaml", slurm={"cores": 1, "memory": "1 GiB"}, site=also)
    with dask.config.set({f"jobqueue.slurm.{key}": value for key, value in USERS.items()}):
        (script,) = job_scripts(["site"], file)
        with slurm_cluster("site", config_file=file, scheduler_options=SCHEDULER) as cluster:
            submitted = cluster.job_script()
    for told in (script, submitted):
        asked = [line.split()[1] for line in told.splitlines() if line.startswith("#SBATCH")]
        assert asked == ["-J", "-n", "--cpus-per-task=1", "--mem=1G", '--comment="ferroflow']


def test_the_section_of_dask_jobqueue_serves_where_there_is_no_other(tmp_path: Path) -> None:
    def script(*more: str) -> Any:
        return ferroflow("run", "--dag", "uniform", "--cluster", "slurm", "--job-script", *more)

    own = {"cores": 2, "memory": "1 GiB", "queue": "short"}
    file = write(tmp_path / "q.yaml", slurm=own)
    told = script("--config", str(file))
    assert "#SBATCH -p short" in told.stdout
    assert told.stderr == "there is no section jobqueue.cpu; jobs are as jobqueue.slurm says\n"
    with dask.config.set({f"jobqueue.slurm.{name}": value for name, value in own.items()}):
        assert script().stdout == told.stdout
        with slurm_cluster(scheduler_options=SCHEDULER) as cluster:
            assert "#SBATCH -p short" in cluster.job_script()
        for named, section in ((("--section", "cpu"), "cpu"), (("--gpu-jobs", "1"), "gpu")):
            refused = script(*named)
            message = f"no section jobqueue.{section} .* it has: slurm;"
            assert_one_line(refused.exit_code, refused.stderr, USAGE, message)
    write(file, slurm=own, cpu={"queue": "long"})
    assert (script("--config", str(file)).stderr, default_section(file)) == ("", "cpu")
    # Beside others it has what they leave out, which may be no job at all.
    write(file, slurm={"account": "a"}, narval=own)
    refused = script("--config", str(file))
    message = r"no section jobqueue\.cpu in .*; it has: narval, slurm;"
    assert_one_line(refused.exit_code, refused.stderr, USAGE, message)


def test_that_another_section_serves_is_told_once_and_before_anything_fails_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "there is no section jobqueue.cpu; jobs are as jobqueue.slurm says\n"
    file = write(tmp_path / "q.yaml", slurm={"account": "a"})
    refused = ferroflow("run", "--dag", "uniform", "--cluster", "slurm", "--batch", "2", "--config", file)
    assert refused.stderr.startswith(f"{told}ferroflow: ")
    write(file, slurm={"cores": 2, "memory": "1 GiB"})

    def run_suites(suites: Any, options: Any, rules: Any, **more: Any) -> Iterator[Any]:
        for _ in rules.sides:
            with pytest.raises(FerroflowError, match="no Slurm here"), rules.jobs.start():
                pass
        yield from ()
        raise KeyboardInterrupt

    def cluster(options: SlurmOptions) -> Any:
        raise FerroflowError("no Slurm here")

    monkeypatch.setattr(importlib.import_module("ferroflow_dask.cli.bench_runs"), "run_suites", run_suites)
    monkeypatch.setattr(SlurmOptions, "cluster", cluster)
    where = ("--cluster", "slurm", "--config", file, "--rows", tmp_path / "rows.jsonl")
    stopped = ferroflow("bench", "run", "wide", *where)
    assert (stopped.exit_code, stopped.stderr.count(told)) == (INTERRUPTED, 1)


def test_null_takes_off_what_slurm_says(tmp_path: Path) -> None:
    common = {"cores": 1, "memory": "1 GiB", "queue": "all", "walltime": "01:00:00"}
    file = write(tmp_path / "q.yaml", slurm=common, mine={"queue": None, "walltime": None})
    (script,) = job_scripts(["mine"], file)
    assert not {"-p", "-t"} & set(script.split())
    assert "LIFETIME" not in script


def test_sections_are_the_same_once_dask_jobqueue_is_imported(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FIRST_AND_SECOND],
        env={**os.environ, "DASK_CONFIG": str(tmp_path)},
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert told == ""


FIRST_AND_SECOND = """
import signal

import dask
from ferroflow_dask.deploy import job_kind, job_scripts
from ferroflow_dask.exceptions import UsageError

mine = {"cores": 1, "memory": "1 GiB"}
said = "".join(["00:", "30:00"])  # as dask-jobqueue's own, and yet said
with dask.config.set({"jobqueue.mine": mine, "jobqueue.slurm.death-timeout": 9}):
    first = job_kind("mine")
    assert "#SBATCH -t" not in job_scripts(["mine"])[0]
    assert job_kind("mine") == first
    with dask.config.set({"jobqueue.slurm.walltime": said}):
        assert job_kind("mine").arguments["walltime"] == said
        assert "LIFETIME" in job_scripts(["mine"])[0]
for section in ("slurm", "_ferroflow"):
    try:
        print(job_kind(section))
    except UsageError as error:
        assert "has none" in str(error), error
# The import of dask-jobqueue makes Ctrl-C end the process with status 0.
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_section_may_serve_both_kinds_of_jobs(tmp_path: Path) -> None:
    file = write(tmp_path / "q.yaml", gpu={"cores": 1, "memory": "1 GiB", "extra": None})
    options = ("--section", "gpu", "--jobs", "2", "--config", str(file), "--job-script")
    assert "#SBATCH" in answer("run", "--dag", "uniform", "--cluster", "slurm", *options).stdout


def test_variables_in_the_name_of_the_log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    mine = {"cores": 1, "memory": "1 GiB", "log-directory": "$SCRATCH/logs"}
    file = write(tmp_path / "q.yaml", mine=mine)
    assert job_kind("mine", file).arguments["log_directory"] == "/scratch/me/logs"


def test_a_user_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    file = write(tmp_path / "q.yaml", mine={"cores": 1, "memory": "1 GiB", "log-directory": "~/logs"})
    assert job_kind("mine", file).arguments["log_directory"] == "~/logs"


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("02:00:00", 7200),
        ("1-12", 36 * 3600),
        ("1-12:30", 36.5 * 3600),
        ("1-00:00:01", 86401),
    ],
)
def test_walltime_is_read_as_slurm_does(walltime: str, seconds: float) -> None:
    assert walltime_s(walltime) == seconds


@pytest.mark.parametrize("walltime", ["", "an hour", "1:2:3:4", "-5", "9" * 5000, 3600])
def test_walltime_that_makes_no_sense(walltime: object) -> None:
    with pytest.raises(UsageError, match=r"walltime is .* write it in quotes"):
        walltime_s(walltime)


@pytest.mark.parametrize(
    ("mine", "lines"),
    [
        ({"walltime": "00:10:00"}, ["DURATION=510s", "STAGGER=30s"]),
        ({"walltime": "00:01:00"}, ["DURATION=27s", "STAGGER=3s"]),
        ({"walltime": "7-00:00:00"}, ["DURATION=603900s", "STAGGER=600s"]),
        ({"walltime": "00:00:30"}, []),
        *(
            ({"walltime": "01:00:00", "worker-extra-args": words}, [])
            for words in (["--lifetime", "5m"], ["--lifetime=5m"], ["--lifetime 5m"])
        ),
        (
            {"walltime": "01:00:00", "worker-extra-args": ["--lifetime-stagger", "5m"]},
            ["DURATION=3120s", "STAGGER=180s"],
        ),
    ],
)
def test_workers_leave_before_the_walltime_ends(
    tmp_path: Path, mine: dict[str, Any], lines: list[str]
) -> None:
    file = write(tmp_path / "q.yaml", mine={"cores": 1, "memory": "1 GiB", **mine})
    prologue = job_kind("mine", file).arguments.get("job_script_prologue", [])
    assert [line.rpartition("__")[2] for line in prologue] == lines


def test_certificates_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"\(--tls\) needs the package cryptography: pip install"):
        slurm_cluster("cpu", config_file=TEMPLATE, security=True)
    result = ferroflow("run", "--dag", "wide", "--cluster", "slurm", "--config", str(TEMPLATE), "--tls")
    assert_one_line(result.exit_code, result.stderr, USAGE, "needs the package cryptography")
    options = ("--cluster", "slurm", "--config", str(TEMPLATE), "--tls", "--job-script")
    result = ferroflow("run", "--dag", "wide", *options)
    assert_one_line(result.exit_code, result.stderr, USAGE, "needs the package cryptography")


def test_files_that_make_no_sense(tmp_path: Path) -> None:
    def run(*more: str) -> Any:
        return ferroflow("run", "--dag", "uniform", "--cluster", "slurm", "--job-script", *more)

    broken = tmp_path / "broken.yaml"
    broken.write_text("jobqueue:\n  cpu: [1\n  x", encoding="utf-8")
    other = tmp_path / "other.yaml"
    other.write_text("a: 1", encoding="utf-8")
    odd = tmp_path / "odd.yaml"
    odd.write_text("jobqueue: {5: {}, b: 1, cpu: [1]}", encoding="utf-8")
    for arguments, message in (
        (("--config", str(broken)), r"'.*broken.yaml' is no YAML, line \d"),
        (("--config", str(other)), "has no section 'jobqueue'"),
        (("--config", str(odd)), r"section jobqueue.cpu of .*odd.yaml is \[1\]; it must hold settings"),
        (("--config", str(odd), "--section", "fat"), "no section jobqueue.fat in .* it has: 5, b, cpu"),
        (("--config", str(tmp_path / "none.yaml")), "cannot be read: No such file"),
        (
            ("--config", str(TEMPLATE), "--section", "fat"),
            "no section jobqueue.fat in .* it has: cpu, gpu, narval",
        ),
        (("--section", "cpu"), "no section jobqueue.cpu in Dask's configuration; .* slurm template"),
    ):
        result = run(*arguments)
        assert_one_line(result.exit_code, result.stderr, USAGE, message)
