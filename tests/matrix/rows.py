"""All rows of the matrix."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from matrix.row import Row, row

#: Modules with rows; their task functions can be pickled by value.
MODULES: list[ModuleType] = [
    import_module(f"matrix.{path.stem}") for path in sorted(Path(__file__).parent.glob("rows_*.py"))
]
ROWS: dict[str, Row] = row.by_name
