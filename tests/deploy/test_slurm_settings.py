"""What sections of jobqueue.yaml and arguments may say, and what comes of it; nothing is submitted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferroflow_dask.deploy import JobKind, job_kind, job_scripts, slurm_cluster
from ferroflow_dask.deploy.slurm.refusals import setting_behind
from ferroflow_dask.deploy.slurm.settings import job_arguments
from ferroflow_dask.exceptions import FerroflowError, UsageError

TEMPLATE = Path(__file__).parents[2] / "jobqueue.yaml"
SMALL = {"cores": 1, "memory": "1 GiB"}


def write(path: Path, **sections: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"jobqueue": sections}), encoding="utf-8")
    return path


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory": "1 GiB"}, "does not say cores; add for example `cores: 4`"),
    ({"cores": 1}, "does not say memory"),
    ({"cores": 0, "memory": "1 GiB"}, "has cores 0; it must be a whole number"),
    ({"cores": "four", "memory": "1 GiB"}, "has cores 'four'"),
    ({"cores": 2, "processes": 4, "memory": "1 GiB"}, "4 processes on 2 cores"),
    ({"cores": 1, "memory": "lots"}, "has memory 'lots'; write it like 8 GiB"),
    ({"cores": 1, "memory": float("inf")}, "has memory inf; write it like 8 GiB"),
    ({"cores": 1, "memory": 8}, "has memory 8, which is 8 B"),
    ({"cores": 1, "memory": "1 GiB", "walltime": 3600}, "has walltime 3600; write it in quotes"),
    *(
        (
            {"cores": 1, "memory": "1 GiB", key: "module load x"},
            f"{key} 'module load x'; it must be a list: [\"mod",
        )
        for key in ("job-script-prologue", "job-extra-directives", "job-directives-skip", "worker-extra-args")
    ),
    (
        {"cores": 1, "memory": "1 GiB", "job-script-prologue": [{"a": 1}]},
        """has job-script-prologue [{'a': 1}]; put in quotes what is not text: "{'a': 1}\"""",
    ),
    *(
        (
            {"cores": 1, "memory": "1 GiB", key: value},
            f"mine of q.yaml has {key} {value!r}; it must be {a}",
        )
        for key, values, a in (
            ("log-directory", (5,), "text"),
            ("shared-temp-directory", (5,), "text"),
            ("queue", (["x", "y"], "x y", "", "x#y", True), "one word"),
            ("account", ("my account", 1.5), "one word"),
            ("name", ("my job", '"job"'), "one word"),
            ("name", ("my/job", "%j"), "without / and %"),
            ("interface", ("ib0 lo",), "one word"),
            ("job-mem", ("9 GB",), "one word"),
            ("job-cpu", (0, "4"), "a whole number"),
            ("local-directory", ("/scratch\n/me", ""), "a path"),
            ("log-directory", ('my "logs"', "logs\n"), "a path"),
            ("death-timeout", ("abc", "", 0, -1, float("inf"), [5]), "a number of seconds"),
            ("nanny", ("no",), "true or false"),
        )
        for value in values
    ),
    (
        {"cores": 1, "memory": "1 GiB", "scheduler-options": ["host"]},
        "has scheduler-options ['host']; it must hold settings",
    ),
    *(
        ({"cores": 1, "memory": "1 GiB", "worker-extra-args": words}, f"leave {option} out: {instead}")
        for words, option, instead in (
            (["--nworkers", "2"], "--nworkers", "`processes` is how many workers"),
            (["--nworkers=2"], "--nworkers", "`processes` is how many workers"),
            (["--no-dashboard --nworkers 2"], "--nworkers", "`processes` is how many workers"),
            (["--name", "x"], "--name", "the cluster gives workers their names"),
        )
    ),
    ({"cores": 1, "memory": "1 GiB", "partition": "x"}, "has 'partition', which is called 'queue'"),
    (
        {"cores": 1, "memory": "1 GiB", "env-extra": ["x"]},
        "'env-extra', which is called 'job-script-prologue'",
    ),
    ({"cores": 1, "memory": "1 GiB", "gpus": 1}, "has 'gpus', which dask-jobqueue does not know"),
]


@pytest.mark.parametrize(("mine", "message"), REFUSED)
def test_sections_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.yaml", mine=mine)
    with pytest.raises(UsageError) as caught:
        slurm_cluster("mine", config_file="q.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"job_script_prologue": "module load x"},
            r'^the argument job_script_prologue is .* must be a list: \["module load x"\]',
        ),
        ({"speed": "high"}, "^there is an argument 'speed', which .* it takes: account, cores, .* job_name,"),
        ({"job_extra": ["-x"]}, "^there is an argument 'job_extra', which is called 'job_extra_directives'"),
        ({"gpus": 2}, "^there is an argument 'gpus', which dask-jobqueue does not know"),
        ({"jobs": 2}, r"^there is an argument 'jobs', which is given elsewhere: cluster.scale\(jobs=…\)"),
        ({"dashboard_address": ":0"}, "^there is an argument 'dashboard_address', .*: scheduler_options="),
        (
            {"interface": "ib7"},
            "'ib7' is not a valid network interface.*; change the argument interface='ib7'",
        ),
        ({"cores": "four"}, "^the argument cores is 'four'; it must be a whole number"),
        ({"memory": "lots"}, "^the argument memory is 'lots'; write it like 8 GiB"),
        ({"job_name": "my job"}, "^the argument job_name is 'my job'; it must be one word"),
        ({"job_name": "a", "name": "b"}, "^the arguments name and job_name are the same; give one"),
        ({"policy": "chance"}, "unknown policy 'chance'"),
    ],
)
def test_arguments_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FerroflowError, match=message):
        slurm_cluster("cpu", config_file=TEMPLATE, **given)


@pytest.mark.parametrize("name", ["name", "job_name"])
def test_the_name_of_jobs_as_an_argument(name: str) -> None:
    arguments = job_arguments({**SMALL, "name": "theirs"}, {name: "mine"}, "a section")
    assert arguments["job_name"] == "mine"


GPU_JOB = {"cores": 4, "memory": "8 GiB", "worker-command": "dask_cuda.cli"}


@pytest.mark.parametrize(
    ("directives", "n_gpus"),
    [
        (["--gres=gpu:2"], 2),
        (["--gres gpu:a100:2"], 2),
        (["--gres=gpu:2,lustre:1"], 2),
        (["--gres=gpu:a100:1,gpu:v100:2"], 3),
        (["--gres=gpu"], 1),
        (["--gres=lustre:4"], 1),
        (["--gpus=2"], 2),
        (["--gpus-per-node=a100:4"], 4),
        (["--gpus-per-task 2"], 2),
        (["-G 2"], 2),
        (["-G2"], 2),
        (["--exclusive --gpus=2"], 2),
        (["--gres=gpu:4", "--gres=gpu:2"], 2),
        (["--gres=gpu:2", "--gpus-per-node=2"], 2),
        # What Slurm itself may refuse, and what says nothing of how many there are.
        (["--gres=gpu:2", "--gpus=4"], 1),
        (["--gpus-per-socket=2"], 1),
        (["--gpu-bind=closest"], 1),
        ([], 1),
    ],
    ids=str,
)
def test_dask_cuda_has_a_worker_for_each_gpu(directives: list[str], n_gpus: int) -> None:
    said = {**GPU_JOB, "job-extra-directives": directives}
    assert job_arguments(said, {}, "a section")["processes"] == n_gpus


@pytest.mark.parametrize("command", ["dask_cuda.cli", "dask cuda worker", "dask-cuda-worker"])
@pytest.mark.parametrize("processes", [1, 3])
def test_other_workers_than_gpus_are_refused(tmp_path: Path, command: str, processes: int) -> None:
    said = {"worker-command": command, "job-extra-directives": ["--gres=gpu:2"], "processes": processes}
    file = write(tmp_path / "q.yaml", gpu={**GPU_JOB, **said})
    with pytest.raises(UsageError) as caught:
        job_kind("gpu", file)
    assert str(caught.value) == (
        f"section jobqueue.gpu of {file} has processes {processes}, but dask-cuda starts as many workers as "
        "there are GPUs, 2 by --gres=gpu:2; write `processes: 2`"
    )
    with pytest.raises(UsageError, match=r"^the argument processes is 3, .* write processes=2$"):
        job_arguments({**GPU_JOB, **said}, {"processes": 3}, "a section")
    assert job_arguments({**GPU_JOB, **said, "processes": 2}, {}, "a section")["processes"] == 2


@pytest.mark.parametrize(
    "said",
    [
        {"worker-command": "distributed.cli.dask_worker"},
        {"job-script-prologue": ["export CUDA_VISIBLE_DEVICES=0"]},
        {"python": "env CUDA_VISIBLE_DEVICES=0 python"},
    ],
)
def test_workers_that_do_not_follow_the_gpus(said: dict[str, Any]) -> None:
    section = {**GPU_JOB, "job-extra-directives": ["--gres=gpu:2"], **said}
    assert job_arguments(section, {}, "a section")["processes"] == 1
    assert job_arguments({**section, "processes": 4}, {}, "a section")["processes"] == 4


def test_each_gpu_needs_a_core() -> None:
    section = {**GPU_JOB, "cores": 1, "job-extra-directives": ["--gres=gpu:2"]}
    with pytest.raises(UsageError, match="a section has 2 processes on 1 cores; each needs one"):
        job_arguments(section, {}, "a section")


def test_workers_of_gpus_share_the_memory_of_their_job(tmp_path: Path) -> None:
    file = write(tmp_path / "q.yaml", gpu={**GPU_JOB, "job-extra-directives": ["--gres=gpu:2"]})
    (script,) = job_scripts(["gpu"], file)
    assert "#SBATCH --mem=8G" in script
    assert "--nthreads 2 --memory-limit 4.00GiB" in script


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/scratch/my dir", "/scratch/my dir"),
        ("$SCRATCH/my dir", "/scratch/my dir"),
        ('"$SCRATCH/my dir"', "/scratch/my dir"),
        ("$(echo /scratch)", "/scratch"),
        ("/scratch/my\\ dir", "/scratch/my dir"),
    ],
)
def test_local_directories_are_one_word_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, expected: str
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    said = {**SMALL, "local-directory": folder, "death-timeout": "2 minutes", "python": "printf '%s|'; true"}
    (script,) = job_scripts(["mine"], write(tmp_path / "q.yaml", mine=said))
    *_, line = script.splitlines()
    words = line.partition("; true ")[2].replace("<", "").replace(">", "")
    told = subprocess.run(
        ["bash", "-c", f"printf '%s|' {words}"], capture_output=True, text=True, check=True
    ).stdout.split("|")
    assert told[told.index("--local-directory") + 1] == expected
    assert told[told.index("--death-timeout") + 1] == "2 minutes"


@pytest.mark.parametrize(
    ("folder", "quote"), [("logs", ""), ("my logs", '"'), ("my#logs", '"'), ("it's", '"')]
)
def test_log_folders_are_one_word_for_slurm(tmp_path: Path, folder: str, quote: str) -> None:
    said = {**SMALL, "log-directory": folder, "name": "mine"}
    (script,) = job_scripts(["mine"], write(tmp_path / "q.yaml", mine=said))
    assert f"#SBATCH -e {quote}{folder}/mine-%J.err{quote}\n" in script
    assert f"#SBATCH -o {quote}{folder}/mine-%J.out{quote}\n" in script


@pytest.mark.parametrize(
    ("message", "settings", "given", "told"),
    [
        ("Invalid account", {"account": "me"}, (), "; change `account: me` in section x of q.yaml"),
        ("Invalid account", {"account": "me"}, ("account",), "; change the argument account='me'"),
        ("You must specify an account", {}, (), "; add `account: …` to section x of q.yaml"),
        (
            "Requested node configuration is not available",
            {"cores": 4, "memory": "1 TiB", "job_extra_directives": ["--gres=gpu:9"]},
            ("memory",),
            "; change the argument memory='1 TiB', or `job-extra-directives: [--gres=gpu:9]` or `cores: 4` "
            "in section x of q.yaml",
        ),
        ("Slurm is away", {"account": "me"}, (), ""),
    ],
    ids=["a setting", "an argument", "nothing yet", "several", "another reason"],
)
def test_a_refusal_names_the_setting_to_change(
    message: str, settings: dict[str, Any], given: tuple[str, ...], told: str
) -> None:
    assert setting_behind(message, JobKind("x", settings, "section x of q.yaml", given)) == told
