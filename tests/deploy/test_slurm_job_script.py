"""`ferroflow run … --job-script`: what a run would submit, told without a Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import dask
import pytest
from command_line import SMALL, answer
from slurm_clusters import sections

from ferroflow_dask.cli.slurm import SlurmOptions
from ferroflow_dask.deploy import job_scripts


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("is_encrypted", "protocol"), [(False, None), (False, "tcp"), (True, None), (True, "tls")]
)
def test_job_script_shows_what_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool, protocol: str | None
) -> None:
    if is_encrypted:
        pytest.importorskip("cryptography")
    folder = tmp_path / "of a project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cpu = {"interface": "lo", "protocol": protocol, "scheduler-options": {"dashboard_address": ":0"}}
    options = SlurmOptions(1, 1, "cpu", "gpu", str(sections(tmp_path, **cpu)), is_encrypted, wait_s=1.0)
    with options.cluster() as cluster:
        submitted = [cluster.job_script(kind) for kind in ("cpu", "gpu")]
    told = answer(
        *("run", *SMALL, "--cluster", "slurm", "--gpu-jobs", "1", "--jobs", "1", "--config"),
        *(options.config_file, "--job-script", *(["--tls"] if is_encrypted else [])),
    ).stdout
    placeholders = {
        r"(?<=://)127\.0\.0\.1:\d+": "<scheduler>:8786",
        r"SlurmCluster-[cg]pu-0": "<job>",
        r"(?<=\.dask-jobqueue\.worker\.)(ca_file|cert|key)\.\w+": r"\1.<random>",
    }
    for pattern, placeholder in placeholders.items():
        submitted = [re.sub(pattern, placeholder, script) for script in submitted]
    assert told == "\n".join(submitted)
    assert ("tls://<scheduler>" in told) == is_encrypted
    assert told.count("--tls-key") == 2 * is_encrypted
    assert told.count("--interface lo") == 2  # the other section's, too
    if is_encrypted:  # a path is one word, whatever is in it
        words = shlex.split(told.strip().splitlines()[-1].replace("<", "").replace(">", ""))
        keys = [words[at + 1] for at, word in enumerate(words) if word == "--tls-key"]
        assert [Path(key).parent for key in keys] == [folder]


@pytest.mark.parametrize(
    ("said", "config", "scheme"),
    [
        ({}, {}, "tcp"),
        ({"protocol": "tls"}, {}, "tls"),
        ({"protocol": "tls", "scheduler-options": {"protocol": "ws"}}, {}, "ws"),
        ({}, {"distributed.comm.require-encryption": True}, "tls"),
    ],
)
def test_the_schedulers_protocol(
    tmp_path: Path, said: dict[str, Any], config: dict[str, Any], scheme: str
) -> None:
    file = sections(tmp_path, **said)
    with dask.config.set(config):
        (script,) = job_scripts(["cpu"], file)
    assert f" {scheme}://<scheduler>:8786 " in script
    assert ("--protocol tls" in script) == ("protocol" in said)
