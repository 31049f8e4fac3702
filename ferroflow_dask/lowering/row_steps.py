"""Rows through a model: functions before and after it, batches of a chosen size, rows that fail.

This module does not know what chunks are made of; see `forms`.
"""

from __future__ import annotations

import functools
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from dask.sizeof import sizeof
from numpy.typing import NDArray
from zict import LRU

from ferroflow_dask.exceptions import BindError, UsageError
from ferroflow_dask.graph.nodes import TensorSpec
from ferroflow_dask.kernels.choice import one_line
from ferroflow_dask.lowering.batch_model import LoadedModel, RunModel, nbytes_of
from ferroflow_dask.lowering.fitting import Inputs
from ferroflow_dask.lowering.forms import Columns, Form, Output, form_of

#: Functions that a process keeps, built from classes.
_KEPT = 16
_built: LRU[str, Any] = LRU(_KEPT, {})

#: The names of classes, by which processes know that they have built one.
_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class BuiltOnce:
    """A class whose instance is built once in each process, and is called with each batch.

    Parameters
    ----------
    token : str
    build : callable
        The class, or a `functools.partial` of it.
    """

    token: str
    build: Callable[[], Any]

    def __call__(self, batch: Any) -> Any:
        """Call the instance."""
        return self.instance()(batch)

    def instance(self) -> Any:
        """Return the instance of this process, which is built if there is none."""
        with _built.lock:
            if self.token not in _built:
                _built[self.token] = self.build()
            return _built[self.token]


def function_of(name: str, given: Any) -> Callable[[Any], Any] | None:
    """Return the function that `preprocess` or `postprocess` means.

    Raises
    ------
    UsageError
        It is no function and no class.
    """
    if given is None:
        return None
    if not callable(given):
        raise UsageError(
            f"{name} must be a function or a class, got {given!r}; pass {name}=lambda batch: batch"
        )
    is_class = isinstance(given, type)
    if not is_class and not (isinstance(given, functools.partial) and isinstance(given.func, type)):
        return given  # type: ignore[no-any-return]
    token = _tokens.setdefault(given, uuid.uuid4().hex)
    return BuiltOnce(token, given)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What happens to the rows of a chunk.

    Parameters
    ----------
    form : Form
        Of the chunks.
    columns : Columns
    preprocess, postprocess : callable, optional
        Get a batch of the data, and a batch of the result.
    batch_size : int, optional
        Rows that the model gets at once. The default is all rows of a chunk.
    has_nulls : bool
        Whether rows that fail become null.
    """

    form: Form | None = None
    columns: Columns = None
    preprocess: Callable[[Any], Any] | None = None
    postprocess: Callable[[Any], Any] | None = None
    batch_size: int | None = None
    has_nulls: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the model gets chunks as they are."""
        has_functions = not (self.preprocess is None and self.postprocess is None)
        return not (has_functions or self.has_nulls or self.batch_size is not None)

    def prepared(self, chunk: Any) -> tuple[Form, Any]:
        """Return the rows that go to the model, with their form."""
        if self.preprocess is None:
            return self.form or form_of(chunk, "data"), chunk
        found = self.preprocess(chunk)
        return form_of(found, "the result of preprocess"), found

    def read(self, chunk: Any, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """Return the inputs that the rows of a chunk are."""
        form, rows = self.prepared(chunk)
        return form.read(rows, inputs, None if self.preprocess else self.columns)

    def written(self, chunk: Any, rows: Any, outputs: Mapping[str, Output]) -> Any:
        """Return the outputs in the form of the data, before `postprocess`.

        Outputs are added to the rows that `preprocess` returned if these have the form of the data.
        """
        own, other = self.form or form_of(chunk, "data"), form_of(rows, "the result of preprocess")
        n_rows = len(next(iter(outputs.values())).value)
        base = rows if type(other) is type(own) else chunk
        if own.n_rows(base) != n_rows and own.adds_outputs:
            raise BindError(
                f"preprocess returned {n_rows} rows for {own.n_rows(base)}, so that outputs cannot be added "
                f"to them; return a {type(chunk).__name__} from preprocess"
            )
        return own.write(base, outputs)


@dataclass(frozen=True, slots=True, eq=False)
class MapChunk:
    """Computes a model on one chunk of any form.

    Parameters
    ----------
    model : RunModel or LoadedModel
        If its weights are on the cluster, they are the first argument of a call.
    steps : Steps
    specs : mapping of str to TensorSpec
        Of the outputs.
    names : tuple of str
        Of the arrays that make up a chunk; none if a chunk is one value.
    """

    model: RunModel | LoadedModel
    steps: Steps
    specs: Mapping[str, TensorSpec]
    names: tuple[str, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of a chunk."""
        own = () if isinstance(self.model, LoadedModel) else arguments[:1]
        arguments = arguments[len(own) :]
        n_values = len(self.names) or 1
        chunk = dict(zip(self.names, arguments, strict=False)) if self.names else arguments[0]
        others, steps = arguments[n_values:], self.steps
        if (
            not self.names
            and not isinstance(chunk, np.ndarray | Mapping | list)
            and hasattr(chunk, "__next__")
        ):
            chunk = list(chunk)  # a partition of a bag may be an iterator
        form = steps.form or form_of(chunk, "data")
        n_rows = form.n_rows(chunk)
        size = steps.batch_size or max(n_rows, 1)
        found, n_failed, reason = [], 0, ""
        for at in range(0, max(n_rows, 1), size):
            batch = chunk if size >= n_rows else form.rows(chunk, at, at + size)
            result, failed, why = self._batch(own, batch, others, form)
            found.append(result)
            n_failed, reason = n_failed + failed, reason or why
        if n_failed:
            rows, name = f"{n_failed} of {n_rows} rows of a chunk", self._run.graph.name
            _warn(f"{rows} failed in model {name!r}; outputs are null: {reason}")
        return found[0] if len(found) == 1 else form_of(found[0], "the result").joined(found)

    @property
    def _run(self) -> RunModel:
        return self.model.run if isinstance(self.model, LoadedModel) else self.model

    def _batch(self, own: Any, batch: Any, others: Any, form: Form) -> tuple[Any, int, str]:
        """Return the result of a batch, how many rows failed and why the first did."""
        steps, n_failed, reason = self.steps, 0, ""
        pieces: list[tuple[Any, tuple[Any, ...] | None]]
        try:
            pieces = [self._computed(own, batch, others)]
        except MemoryError:
            raise
        except Exception as error:
            if not steps.has_nulls:
                raise
            pieces, reason = [], one_line(error)
            for i in range(form.n_rows(batch)):
                row = form.rows(batch, i, i + 1)
                try:
                    pieces.append(self._computed(own, row, others))
                except MemoryError:
                    raise
                except Exception as of_row:  # noqa: BLE001 -- of a function of the user, or the model
                    reason = one_line(of_row) if not n_failed else reason
                    n_failed += 1
                    pieces.append((row, None))
        outputs = self._outputs([values for _, values in pieces])
        rows = [rows for rows, _ in pieces]
        # Rows that failed are as they came: they join the others in the form of the data only.
        if len({type(form_of(piece, "data")) for piece in rows}) > 1:
            rows = [form.rows(batch, i, i + 1) for i in range(form.n_rows(batch))]
        base = rows[0] if len(rows) == 1 else form_of(rows[0], "data").joined(rows)
        result = steps.written(batch, base, outputs)
        return (result if steps.postprocess is None else steps.postprocess(result)), n_failed, reason

    def _computed(self, own: Any, batch: Any, others: Any) -> tuple[Any, tuple[Any, ...]]:
        form, rows = self.steps.prepared(batch)
        run = self._run
        if others:  # arrays, which were checked
            arrays = dict(rows) if isinstance(rows, Mapping) else {next(iter(run.inputs)): rows}
        else:
            specs = {name: run.graph.inputs[name] for name in run.inputs}
            arrays = form.read(rows, specs, None if self.steps.preprocess else self.steps.columns)
        given = [arrays[name] for name in run.inputs[: len(run.inputs) - len(others)]]
        return rows, self.model(*own, *given, *others).values

    def _outputs(self, found: Sequence[tuple[Any, ...] | None]) -> dict[str, Output]:
        """Return the outputs of pieces joined; a piece without values has failed."""
        good = [values for values in found if values is not None]
        failed = None
        if self.steps.has_nulls:
            sizes = [1 if values is None else len(values[0]) for values in found]
            failed = np.repeat([values is None for values in found], sizes)
        outputs = {}
        for i, (name, spec) in enumerate(self.specs.items()):
            parts = [values[i] for values in good]
            outputs[name] = Output(_spread(parts, failed, spec), spec, failed)
        return outputs


def _spread(parts: Sequence[Any], failed: NDArray[np.bool_] | None, spec: TensorSpec) -> Any:
    """Return rows at their places, with anything in the places of those that failed."""
    if failed is None or not failed.any():
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    shape = tuple(dim if isinstance(dim, int) else 1 for dim in (spec.shape or ())[1:])
    good = np.concatenate(parts) if parts else np.zeros((0, *shape), spec.dtype or object)
    whole = np.zeros((len(failed), *good.shape[1:]), good.dtype)
    whole[~failed] = good
    return whole


def _warn(message: str) -> None:
    try:
        from distributed import warn  # which clients see, too
    except ImportError:
        warnings.warn(message, stacklevel=2)
    else:
        warn(message, stacklevel=2)


sizeof.register(MapChunk, lambda chunk: nbytes_of(chunk.model))
