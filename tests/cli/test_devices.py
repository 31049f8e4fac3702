"""`ferroflow run` on devices: emulated ones, none, and options that make no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import LocalCluster

from ferroflow_dask.cli import main

pytestmark = pytest.mark.cluster


class TestCommandLine:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(main, ["run", "--dag", "matmul-parallel", "--n-branches", "4", *arguments])

    def test_emulated(self) -> None:
        assert "GPUs: " in self.run("--device", "emulated", "--workers", "1").stdout
        result = self.run("--device", "emulated", "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["workers"] == 1
        assert record["device"]["ops"] == record["executed_ops"] == 32
        assert record["device"]["mean_batch"] == 4

    def test_no_gpu(self) -> None:
        result = self.run("--device", "cuda")
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert "run in the clone: pip install '.[gpu]'" in result.stderr or "finds no GPU" in result.stderr

    def test_a_cluster_without_gpus(self) -> None:
        with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
            result = self.run("--device", "cuda", "--connect", cluster.scheduler_address)
        assert result.exit_code == 1
        told = "ferroflow: --device cuda: no worker of this cluster has the resource GPU; start some by: dask"
        assert result.stderr.splitlines()[-1].startswith(told)

    def test_auto_is_cpu_without_a_gpu(self) -> None:
        result = self.run("--device", "auto", "--workers", "2", "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert (record["workers"], record["device"]) == (2, None)
