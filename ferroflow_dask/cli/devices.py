"""Options of the devices that ops run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click

from ferroflow_dask.cli.cluster_options import is_given
from ferroflow_dask.cli.sections import device_option
from ferroflow_dask.deploy import DeviceChoice
from ferroflow_dask.exceptions import UsageError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Devices:
    """What options say of devices.

    Parameters
    ----------
    choice : DeviceChoice
    matmul_threshold : int or None
        Elements of the result from which on matrix products run on GPUs, and all else does not.
    """

    choice: DeviceChoice
    matmul_threshold: int | None


#: What CPUs compute in.
_PRECISION = "fp32"

_OPTIONS = (
    device_option(
        "--device",
        default=None,
        help="cpu; cuda, or cuda:N for one GPU: workers with GPUs only; auto: GPUs if there are any, CPU "
        "workers beside them, and each op where it ends first; emulated: a GPU that is none, to try things "
        "out.  [default: cpu; auto with --gpu-jobs]",
    ),
    device_option(
        "--precision",
        default=_PRECISION,
        show_default=True,
        help="On GPUs, of products of single-precision matrices: fp32; tf32, faster, fewer digits; fp16 or "
        "bf16, which round operands further.",
    ),
    device_option(
        "--gpu-matmul-threshold",
        type=click.IntRange(min=1),
        help="Elements of the result from which on matrix products run on GPUs, and nothing else does; "
        "where it ends first if left out.",
    ),
)


def device_options(function: F) -> F:
    """Add the options of devices; the command gets `devices`, None for CPUs only."""

    @wraps(function)
    def with_devices(
        *, device: str | None, precision: str, gpu_matmul_threshold: int | None, **others: Any
    ) -> Any:
        slurm = others.get("slurm")
        has_gpu_jobs = slurm is not None and slurm.gpu_jobs > 0
        choice = DeviceChoice.parse(device or ("auto" if has_gpu_jobs else "cpu"), precision)
        if choice is None and gpu_matmul_threshold is not None:
            raise UsageError("--gpu-matmul-threshold needs GPUs; give --device auto or --device cuda")
        if choice is None and precision != _PRECISION:
            raise UsageError(f"--precision {precision} needs GPUs; give --device auto or --device cuda")
        if choice is not None and others.get("policy") == "sequential":
            raise UsageError("--policy sequential runs in this process, on the CPU; leave --device out")
        if choice is not None and slurm is not None and choice.kind != "auto":
            raise UsageError(
                f"--device {choice} is for this machine; with SLURM give --gpu-jobs N and --device auto"
            )
        if choice is not None and not others.get("processes", True):
            raise UsageError(
                "--no-processes: with --device each worker is a process of its own; leave one of them out"
            )
        devices = None if choice is None else Devices(choice, gpu_matmul_threshold)
        if choice is not None and choice.kind != "auto" and not is_given("workers"):
            others["workers"] = 0  # no CPU worker unless somebody asks for some
        return function(devices=devices, **others)

    for option in reversed(_OPTIONS):
        with_devices = option(with_devices)
    return with_devices  # type: ignore[return-value]
