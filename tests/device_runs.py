"""Runs of graphs on an emulated device."""

from __future__ import annotations

from typing import Any

from ferroflow_dask.devices import DeviceRunner
from ferroflow_dask.graph import Graph
from ferroflow_dask.kernels import make_plan

PROVIDERS = ("synthetic", "array", "onnxruntime", "reference")


def ignore(_ids: tuple[int, ...], _seconds: float, _is_on_device: bool) -> None:
    pass


def run(runner: DeviceRunner, graph: Graph, note: Any = ignore, **more: Any) -> dict[str, Any]:
    names = list(graph.constants)
    plan = make_plan(graph, graph.live_ops, names, list(graph.outputs))
    found = runner.run(plan, [graph.constants[name] for name in names], PROVIDERS, note, **more)
    return dict(zip(graph.outputs, found, strict=True))
