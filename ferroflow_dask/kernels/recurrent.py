"""LSTM, GRU and RNN in all that they do, of which `onnx.reference` misses parts.

It ignores lengths of sequences, bounds (`clip`), coupled gates and most activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx.reference.op_run import OpRun

from ferroflow_dask.kernels.precision import wide

#: Computes the states after a step from what is read in it and the states before; the first is the output.
Step = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]


class _Activation(NamedTuple):
    """A function of a value, alpha and beta, with their defaults; () where it has none of that name."""

    function: Callable[..., Any]
    alpha: tuple[float | None, ...] = ()
    beta: tuple[float | None, ...] = ()


#: By ONNX's names in lower case. Defaults are those of the operators so named, None where those have none.
_ACTIVATIONS: Mapping[str, _Activation] = {
    "relu": _Activation(lambda x: np.maximum(x, 0)),
    "tanh": _Activation(np.tanh),
    "sigmoid": _Activation(lambda x: 1 / (1 + np.exp(-x))),
    "affine": _Activation(lambda x, alpha, beta: alpha * x + beta, (None,), (None,)),
    "leakyrelu": _Activation(lambda x, alpha: np.where(x >= 0, x, alpha * x), (0.01,)),
    "thresholdedrelu": _Activation(lambda x, alpha: np.where(x >= alpha, x, 0), (1.0,)),
    "scaledtanh": _Activation(lambda x, alpha, beta: alpha * np.tanh(beta * x), (None,), (None,)),
    "hardsigmoid": _Activation(lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1), (0.2,), (0.5,)),
    "elu": _Activation(lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))), (1.0,)),
    "softsign": _Activation(lambda x: x / (1 + np.abs(x))),
    "softplus": _Activation(lambda x: np.logaddexp(0, x)),
}


def _activations(
    names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> list[Callable[[Any], Any]]:
    """Return the functions of these names; those that have an alpha or a beta take the next one each."""
    left = list(alphas or ()), list(betas or ())
    functions: list[Callable[[Any], Any]] = []
    for name in names:
        found = _ACTIVATIONS.get(name.lower())
        if found is None:
            raise ValueError(f"activation {name!r}; choose one of: {', '.join(_ACTIVATIONS)}")
        given = [
            values.pop(0) if values else default[0]
            for values, default in zip(left, (found.alpha, found.beta), strict=True)
            if default
        ]
        if None in given:
            raise ValueError(f"activation {name!r} needs activation_alpha and activation_beta")
        functions.append(partial(_applied, found.function, given))
    return functions


def _applied(function: Callable[..., Any], given: Sequence[float | None], x: Any) -> Any:
    return function(x, *given)


def _sweep(x: Any, lengths: Any, is_reverse: bool, states: tuple[Any, ...], step: Step) -> tuple[Any, ...]:
    """Return the outputs of all steps, (steps, batch, hidden), and the last states of each sample.

    A sample stays as it is behind its length, where outputs are zeros; backwards it is read from its end.
    """
    n_steps, batch = x.shape[:2]
    outputs = np.zeros((n_steps, *states[0].shape), x.dtype)
    samples = np.arange(batch)
    for i in range(n_steps):
        is_live = i < lengths
        at = np.where(is_live, lengths - 1 - i, 0) if is_reverse else np.full(batch, i)
        after = step(x[at, samples], states)
        states = tuple(np.where(is_live[:, None], new, old) for new, old in zip(after, states, strict=True))
        outputs[at[is_live], samples[is_live]] = states[0][is_live]
    return outputs, *states


class _Recurrent(OpRun):
    """What the three have in common."""

    op_domain = ""
    n_gates = 1
    n_states = 1
    #: Not `activations`: OpRun keeps a node's attributes under their names.
    usual: Sequence[str] = ()

    def _step(self, weights: Sequence[Any], functions: Sequence[Any], clip: Any, given: Any) -> Step:
        """Return what computes a step in one direction; weights are W, R, B and P of it."""
        raise NotImplementedError

    def _run(  # noqa: PLR0917 - ONNX's operands
        self,
        x: Any,
        w: Any,
        r: Any,
        b: Any = None,
        lengths: Any = None,
        initial_h: Any = None,
        initial_c: Any = None,
        p: Any = None,
        *,
        direction: str = "forward",
        layout: int = 0,
        clip: float | None = None,
        activations: Sequence[str] | None = None,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        dtype = x.dtype
        x, w, r, b, p, *initial = (
            None if v is None else wide(v) for v in (x, w, r, b, p, initial_h, initial_c)
        )
        if layout:
            x = x.swapaxes(0, 1)
            initial = [None if state is None else state.swapaxes(0, 1) for state in initial]
        n_steps, batch = x.shape[:2]
        n_directions, hidden = len(w), r.shape[-1]
        _check_direction(direction, n_directions)
        names = activations or (*self.usual, *self.usual)
        functions = _activations(names, activation_alpha, activation_beta)
        n_functions = len(self.usual)
        if len(functions) < n_functions * n_directions:
            raise ValueError(f"{n_functions * n_directions} activations are needed, not {len(functions)}")
        lengths = np.full(batch, n_steps) if lengths is None else np.asarray(lengths, np.int64)
        if ((lengths < 0) | (lengths > n_steps)).any():
            raise ValueError(f"sequence_lens {lengths.tolist()} do not fit {n_steps} steps")
        b = np.zeros((n_directions, 2 * self.n_gates * hidden), x.dtype) if b is None else b
        p = np.zeros((n_directions, 3 * hidden), x.dtype) if p is None else p
        nothing = np.zeros((n_directions, batch, hidden), x.dtype)
        initial_states = [nothing if state is None else state for state in initial[: self.n_states]]
        swept = []
        for i in range(n_directions):
            own = functions[i * n_functions : (i + 1) * n_functions]
            step = self._step((w[i].T, r[i].T, b[i], p[i]), own, _clipping(clip), given)
            is_reverse = direction == "reverse" or i == 1
            swept.append(_sweep(x, lengths, is_reverse, tuple(state[i] for state in initial_states), step))
        y, *last = (np.stack(parts) for parts in zip(*swept, strict=True))  # directions first
        if layout:
            results = y.transpose(2, 1, 0, 3), *(state.swapaxes(0, 1) for state in last)
        else:
            results = y.swapaxes(0, 1), *last
        return tuple(value.astype(dtype) for value in results)[: len(self.onnx_node.output)]


def _check_direction(direction: str, n_directions: int) -> None:
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ValueError(f"direction {direction!r}; choose one of: forward, reverse, bidirectional")
    if n_directions != (2 if direction == "bidirectional" else 1):
        raise ValueError(f"weights of {n_directions} directions do not fit {direction!r}")


def _clipping(most: float | None) -> Callable[[Any], Any]:
    """Return what bounds the arguments of activations; a bound of zero stands for none, as in onnxruntime."""
    return (lambda x: np.clip(x, -most, most)) if most else lambda x: x


class RNN(_Recurrent):
    """RNN, opset 1 on."""

    usual = ("Tanh",)

    def _step(self, weights: Sequence[Any], functions: Sequence[Any], clip: Any, given: Any) -> Step:  # noqa: ARG002
        w, r, b, _ = weights
        bias = sum(np.split(b, 2))
        (f,) = functions
        return lambda x, states: (f(clip(x @ w + states[0] @ r + bias)),)


class GRU(_Recurrent):
    """GRU, opset 1 on; opset 1 and 3 lack only attributes."""

    n_gates = 3
    usual = ("Sigmoid", "Tanh")

    def _step(self, weights: Sequence[Any], functions: Sequence[Any], clip: Any, given: Any) -> Step:
        w, r, b, _ = weights
        r_zr, r_h = np.split(r, [2 * r.shape[0]], axis=1)
        wb, rb = np.split(b, 2)
        rb_zr, rb_h = np.split(rb, [2 * r.shape[0]])
        f, g = functions
        is_linear = bool(given.get("linear_before_reset"))

        def step(x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
            (h,) = states
            of_x = x @ w + wb
            x_zr, x_h = np.split(of_x, [2 * r.shape[0]], axis=1)
            z, reset = np.split(f(clip(x_zr + h @ r_zr + rb_zr)), 2, axis=1)
            of_h = reset * (h @ r_h + rb_h) if is_linear else (reset * h) @ r_h + rb_h
            return ((1 - z) * g(clip(x_h + of_h)) + z * h,)

        return step


class LSTM(_Recurrent):
    """LSTM, opset 1 on."""

    n_gates = 4
    n_states = 2
    usual = ("Sigmoid", "Tanh", "Tanh")

    def _step(self, weights: Sequence[Any], functions: Sequence[Any], clip: Any, given: Any) -> Step:
        w, r, b, p = weights
        bias = sum(np.split(b, 2))
        p_i, p_o, p_f = np.split(p, 3)
        f, g, last = functions
        is_coupled = bool(given.get("input_forget"))

        def step(x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
            h, c = states
            i, o, forget, cell = np.split(x @ w + h @ r + bias, 4, axis=1)
            i = f(clip(i + p_i * c))
            forget = 1 - i if is_coupled else f(clip(forget + p_f * c))
            c = forget * c + i * g(clip(cell))
            return f(clip(o + p_o * c)) * last(c), c

        return step
