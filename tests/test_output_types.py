"""Outputs of types that NumPy's files do not have are written with the same values."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ferroflow_dask.array_files import write_outputs


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("int4", "int8"),
        ("uint4", "uint8"),
    ],
)
def test_what_only_ml_dtypes_has_is_written_wider(tmp_path: Path, written: str, read: str) -> None:
    values = np.float32([[0, 1, 3], [2, 7, 4]])
    write_outputs(str(tmp_path / "y.npz"), {"y": values.astype(getattr(ml_dtypes, written))})
    with np.load(tmp_path / "y.npz") as file:
        assert file["y"].dtype == read
        np.testing.assert_array_equal(file["y"], values)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "bool", "complex64"])
def test_what_numpy_has_is_written_as_it_is(tmp_path: Path, dtype: str) -> None:
    write_outputs(str(tmp_path / "y.npz"), {"y": np.ones(3, dtype)})
    with np.load(tmp_path / "y.npz") as file:
        assert file["y"].dtype == dtype
