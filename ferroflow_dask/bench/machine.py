"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("ferroflow-dask", "dask", "distributed", "numpy", "onnx")
#: Either may be what `import onnxruntime` finds.
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
_GIB = 2**30


@cache
def machine() -> str:
    """Return the processor, the cores that this process may use, and the memory."""
    cores = len(os.sched_getaffinity(0))
    named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    processor = named[1].strip() if named else "unknown processor"
    return f"{processor}, {cores} cores, {round(psutil.virtual_memory().total / _GIB)} GiB"


@cache
def commit() -> str:
    """Return the commit of the working tree that this package is part of; "" where it is of none."""
    here = Path(__file__)
    # An environment in a user's own repository is no part of it.
    if not git(here.parent, "ls-files", "--error-unmatch", here.name):
        return ""
    return git(here.parent, "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+")


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints in a folder; "" if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on, of packages that are installed as such."""
    found = {"python": platform.python_version()}
    for names in (*((package,) for package in _PACKAGES), _RUNTIMES):
        for name in names:
            with suppress(PackageNotFoundError):
                found[name] = version(name)
                break
    return found


def stamp() -> dict[str, Any]:
    """Return what each row says of where and with what it was measured."""
    return {"versions": versions(), "commit": commit(), "machine": machine()}
