"""Models: the public way to compute a graph, and random ones that agree with onnxruntime."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from random_models import disagreement
from random_operators import problems

from ferroflow_dask import ClusterProfile, GraphBuilder, Model, generate
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.lowering.collection import BoundGraph

X = np.float32([1, 2])
Y = np.float32([3, 4])


def difference(first: str = "x", second: str = "y") -> Model:
    """Return a model of two inputs, which yields what the first is more than the second."""
    builder = GraphBuilder("difference")
    builder.output(d=builder.op("Sub", *(builder.input(name, "float32", (2,)) for name in (first, second))))
    return builder.build()


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        pytest.param((), {"x": X, "y": Y}, id="keywords"),
        pytest.param(({"x": X, "y": Y},), {}, id="a dict"),
        pytest.param(({"y": Y},), {"x": X}, id="both"),
    ],
)
def test_inputs_are_given_by_name(positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    model = difference()
    bound = model.bind(*positional, **keywords)
    assert isinstance(bound, BoundGraph)
    assert bound.compute(scheduler="sync")["d"].tolist() == [-2, -2]
    assert model.evaluate(*positional, **keywords)["d"].tolist() == [-2, -2]


@pytest.mark.parametrize("names", [("gpu_0/data", "self"), ("inputs", "named"), ("costs", "profile")])
def test_a_dict_takes_names_that_keywords_cannot(names: tuple[str, str]) -> None:
    model = difference(*names)
    given = dict(zip(names, (X, Y), strict=True))
    found = model.bind(given, profile=ClusterProfile((1,))).compute(scheduler="sync")
    assert found["d"].tolist() == model.evaluate(given)["d"].tolist() == [-2, -2]


def test_an_input_named_like_an_option_is_refused_as_a_keyword() -> None:
    with pytest.raises(UsageError, match=r"'costs' is an input .*: bind\(\{'costs': costs\}\)"):
        difference("costs").bind(costs=X, y=Y)


@pytest.mark.parametrize("function", ["bind", "evaluate"])
def test_an_input_given_twice_is_refused(function: str) -> None:
    with pytest.raises(UsageError, match="'x' is given twice, in the dict and as a keyword"):
        getattr(difference(), function)({"x": X, "y": Y}, x=X)


def test_a_model_is_pickled_with_its_graph() -> None:
    model = generate("uniform", n=2, dim=2)
    copy = pickle.loads(pickle.dumps(model))
    assert repr(copy) == repr(model)
    for name, value in model.evaluate().items():
        np.testing.assert_array_equal(copy.evaluate()[name], value)


N, PART = 60, 12
#: Models with all operators: of one node, and of up to thirty.
N_EACH, N_MANY = 40, 10


@pytest.mark.parametrize("first", range(0, N, PART))
def test_random_models_agree_with_onnxruntime(first: int) -> None:
    found = {seed: disagreement(seed) for seed in range(first, first + PART)}
    assert not {seed: told for seed, told in found.items() if told}
    assert sum(told == "" for told in found.values()) >= PART // 2


@pytest.mark.parametrize(("n", "is_each"), [(N_EACH, True), (N_MANY, False)], ids=["one node", "many nodes"])
@pytest.mark.filterwarnings("ignore")
def test_models_of_all_operators_agree_with_onnxruntime_or_the_reference(n: int, is_each: bool) -> None:
    found = [problems(seed, is_each) for seed in range(n)]
    assert not [wrong for wrong, _, _ in found if wrong]
    assert sum(is_run for _, _, is_run in found) >= 0.8 * n
