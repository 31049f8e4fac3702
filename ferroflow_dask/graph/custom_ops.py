"""Libraries with custom operators of onnxruntime: the setting `ferroflow.kernels.custom-op-libraries`."""

from __future__ import annotations

from typing import Any

from ferroflow_dask import config
from ferroflow_dask.exceptions import UsageError

_SETTING = "kernels.custom-op-libraries"


def libraries() -> tuple[str, ...]:
    """Return the paths of the libraries."""
    return config.get_names(_SETTING)


def register(options: Any) -> None:
    """Add the custom operators to the options of a session.

    Raises
    ------
    UsageError
        onnxruntime cannot load one of the libraries.
    """
    for path in libraries():
        try:
            options.register_custom_ops_library(path)
        except Exception as error:
            told = " ".join(str(error).split())
            raise UsageError(
                f"the setting ferroflow.{_SETTING} has {path!r}, which onnxruntime cannot load: {told}"
            ) from error
