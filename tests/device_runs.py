"""Runs of graphs on emulated devices, some of which are as slow as a test wants, without its waiting."""

from __future__ import annotations

from typing import Any

from ferroflow_dask.devices import DeviceRunner
from ferroflow_dask.devices.emulated import EmulatedDevice
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


class Clock:
    """Time that passes only while somebody sleeps."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def slow_device(launch_s: float = 1e-6) -> EmulatedDevice:
    clock = Clock()
    return EmulatedDevice(launch_s=launch_s, clock=clock, sleep=clock.sleep)
