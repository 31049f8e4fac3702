"""Sections of `jobqueue.yaml`: where they are read from, and the jobs that each describes.

This module starts nothing and does not import dask-jobqueue.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
import yaml

from ferroflow_dask.deploy.slurm.kinds import JobKind
from ferroflow_dask.deploy.slurm.settings import job_arguments
from ferroflow_dask.exceptions import UnknownNameError, UsageError

_FILE = "jobqueue.yaml"
_FIRST_FILE = f"`ferroflow slurm template > {_FILE}` writes a file to start from"
#: The section of jobs without GPUs if the caller names none.
DEFAULT_SECTION = "cpu"
#: dask-jobqueue's own section: defaults of the settings that other sections leave out.
_COMMON_SECTION = "slurm"
#: The section from which dask-jobqueue reads the defaults of `job.Job`; users do not write it.
OWN_SECTION = "_ferroflow"

#: Settings of the cluster, not of its jobs.
_OF_CLUSTER = ("shared_temp_directory", "scheduler_options", "protocol")


def slurm_template() -> str:
    """Return the text of a commented `jobqueue.yaml` to start from."""
    package = Path(__file__).parents[2]
    places = (package / _FILE, package.parent / _FILE)  # of an installed package, and of a working tree
    return next(path for path in places if path.is_file()).read_text(encoding="utf-8")


def job_kind(section: str, config_file: str | Path | None = None) -> JobKind:
    """Return the jobs that a section of `jobqueue.yaml` describes; see `slurm_cluster`."""
    return described(section, config_file, {})[0]


def described(
    section: str, config_file: str | Path | None, given: Mapping[str, Any]
) -> tuple[JobKind, dict[str, Any]]:
    """Return the jobs that a section describes, and the section's settings of the cluster."""
    settings, where = _section(section, config_file)
    told = f"section jobqueue.{section} of {where}"
    arguments = job_arguments(settings, given, told)
    of_cluster = {name: arguments.pop(name) for name in _OF_CLUSTER if name in arguments}
    of_cluster.setdefault("shared_temp_directory", str(Path.cwd()))
    return JobKind(section, arguments, told, frozenset(given)), of_cluster


def default_section(config_file: str | Path | None = None) -> str:
    """Return the section of jobs without GPUs if the caller names none; see `slurm_cluster`."""
    sections, _ = _sections(config_file)
    # If there are other sections, it only holds their defaults.
    return _COMMON_SECTION if sections.keys() == {_COMMON_SECTION} else DEFAULT_SECTION


def section_names(config_file: str | Path | None = None) -> list[str]:
    """Return the names of all sections that describe jobs, in order.

    Raises
    ------
    UsageError
        There is none.
    """
    sections, where = _sections(config_file)
    names = [name for name in sections if name != _COMMON_SECTION] or list(sections)
    if not names:
        raise UsageError(f"{where} must have a section of jobs, got none; {_FIRST_FILE}")
    return names


def _sections(config_file: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the sections by name, and the name of their source."""
    here = Path(_FILE)
    if config_file is not None:
        return _read(Path(config_file)), str(config_file)
    if "DASK_CONFIG" not in os.environ and here.is_file():
        return {**_configured(), **_read(here)}, f"./{_FILE}"
    return _configured(), os.environ.get("DASK_CONFIG", "Dask's configuration")


def _section(section: str, config_file: str | Path | None) -> tuple[dict[str, Any], str]:
    """Return the settings of a section, and the name of their source."""
    sections, where = _sections(config_file)
    found = sections.get(section)
    if found is not None and not isinstance(found, Mapping):
        raise UsageError(
            f"section jobqueue.{section} of {where} is {found!r}; it must hold settings, like cores: 4"
        )
    if found is None:
        has = f"it has: {', '.join(sorted(map(str, sections)))}" if sections else "it has none"
        raise UnknownNameError(f"there is no section jobqueue.{section} in {where}; {has}; {_FIRST_FILE}")
    defaults = sections.get(_COMMON_SECTION)
    known = defaults if isinstance(defaults, Mapping) else {}
    return {**known, **found}, where


def _configured() -> dict[str, Any]:
    """Return the sections in Dask's configuration, the same before and after dask-jobqueue is imported."""
    found = dask.config.get("jobqueue", None)
    if not isinstance(found, Mapping):
        return {}
    added = dask.config.merge(*dask.config.defaults).get("jobqueue", {})
    return {name: settings for name, settings in _user_settings(found, added).items() if name != OWN_SECTION}


def _user_settings(found: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a user made in a configuration, without the defaults that packages add."""
    made: dict[str, Any] = {}
    for key, value in found.items():
        default = added.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _user_settings(value, default):
                made[key] = inner
        elif key not in added or value is not default:  # a user's may be equal: Dask has the very object
            made[key] = value
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(f"{str(path)!r} is no YAML: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # also text that is no UTF-8, and dates that are none
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not text"
        raise UsageError(f"{str(path)!r} is no YAML{place}: {problem}") from error
    sections = content.get("jobqueue") if isinstance(content, Mapping) else None
    if not isinstance(sections, Mapping):
        raise UsageError(f"{str(path)!r} has no section 'jobqueue'; `ferroflow slurm template` shows one")
    return dict(sections)
