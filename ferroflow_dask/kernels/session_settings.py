"""Settings of onnxruntime's sessions that users choose, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferroflow_dask.exceptions import UsageError

#: Short names of onnxruntime's levels of optimization.
_LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session is opened with.

    Parameters
    ----------
    n_threads : int, optional
        Threads that one run may use. The default is `OMP_NUM_THREADS` where the session is opened, which
        Dask sets to 1.
    fields : tuple of (str, object)
        Attributes of onnxruntime's `SessionOptions`. Names with a dot are configuration entries.
    """

    n_threads: int | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, n_threads: int | None) -> SessionSettings:
        """Check and return what a user has given.

        Raises
        ------
        UsageError
            onnxruntime has no such option, or does not take the value.
        """
        if options is not None and not isinstance(options, Mapping):
            raise UsageError(
                "session_options must be a dict of fields of onnxruntime's SessionOptions like "
                f"{{'graph_optimization_level': 'basic'}}, got {options!r}"
            )
        is_count = isinstance(n_threads, int) and not isinstance(n_threads, bool) and n_threads > 0
        if n_threads is not None and not is_count:
            raise UsageError(f"intra_op_num_threads must be an integer, at least 1, got {n_threads!r}")
        settings = cls(n_threads, tuple(sorted((options or {}).items())))
        settings.apply()
        return settings

    def apply(self, session_options: Any = None) -> None:
        """Set these fields of onnxruntime's options; without an argument, only check them."""
        if session_options is None and not self.fields:
            return
        import onnxruntime

        target = onnxruntime.SessionOptions() if session_options is None else session_options
        for name, value in self.fields:
            known = [field for field in dir(target) if not field.startswith("_")]
            known = [field for field in known if not callable(getattr(target, field))]
            try:
                if "." in name:
                    target.add_session_config_entry(name, str(value))
                elif name in known:
                    setattr(target, name, _value_of(onnxruntime, name, value))
                else:
                    raise UsageError(
                        f"unknown session option {name!r}; choose one of: {', '.join(known)}, or a "
                        "configuration entry such as 'session.intra_op.allow_spinning'"
                    )
            except TypeError as error:
                wanted = type(getattr(target, name)).__name__
                raise UsageError(f"session option {name!r} must be a {wanted}, got {value!r}") from error

    @property
    def threads(self) -> int:
        """Threads that one run may use, if the session is opened here."""
        if self.n_threads is not None:
            return self.n_threads
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdecimal() and int(given) > 0 else 1


def _value_of(onnxruntime: Any, name: str, value: Any) -> Any:
    if name != "graph_optimization_level" or not isinstance(value, str):
        return value
    if value not in _LEVELS:
        raise UsageError(f"graph_optimization_level must be one of {', '.join(_LEVELS)}, got {value!r}")
    return getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[value])


#: Those of a session for which a user has chosen nothing.
DEFAULT = SessionSettings()
