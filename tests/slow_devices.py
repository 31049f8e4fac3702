"""Emulated devices that compute as slowly as a test wants, without its waiting."""

from __future__ import annotations

from ferroflow_dask.devices.emulated import EmulatedDevice


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
