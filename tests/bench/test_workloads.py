"""What every workload of the registry keeps to, and what is particular to graphs and scenarios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from conftest import checked_client
from distributed.utils import key_split
from measured import THREADS, Cluster, Ran, build

from ferroflow_dask.annotations import COST_ANNOTATION, RANK_ANNOTATION
from ferroflow_dask.bench.workloads import WORKLOADS, Workload, get_workload
from ferroflow_dask.bench.workloads.dags import DAGS, duration_prefix, numpy_outputs, with_checkpoints
from ferroflow_dask.bench.workloads.scenarios import SCENARIOS, SUBMISSIONS
from ferroflow_dask.bench.workloads.task_bench import TASK_BENCH
from ferroflow_dask.exceptions import KernelNotFoundError, ResultError, UnknownNameError, UsageError
from ferroflow_dask.graph import TOPOLOGIES, Builder, Graph, bounds, generate_graph

WAYS = [(name, lowering) for name, workload in WORKLOADS.items() for lowering in workload.lowerings]
OURS = (*DAGS, *TASK_BENCH, *SCENARIOS, *SUBMISSIONS)
#: Prefixes of constants that Dask itself names by their content.
CONSTANTS = {"shuffle-taker"}

#: Workloads of results that differ. Others have one, or the same many times: ops that sleep pass a root's
#: result through, and branches of products are alike.
OF_SEVERAL = {
    *("skewed", "large-transformer", "xlarge-transformer"),
    *("trivial", "no_comm", "stencil_1d", "fft", "task_bench_tree", "dom", "all_to_all"),
    *("nearest", "spread", "random_nearest"),
    *("heavy_tail", "lognormal", "straggler", "two_speeds", "trivial_fanout"),
    *("mapped", "one_by_one"),
}

each_way = pytest.mark.parametrize(("name", "lowering"), WAYS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with checked_client(THREADS, processes=False, set_as_default=False) as client:
        yield Cluster(client)


@pytest.fixture(scope="module")
def ran(cluster: Cluster) -> Callable[[str, str, str], Ran]:
    """Runs a workload of a name, in a lowering, with costs; once each."""

    @cache
    def once(name: str, lowering: str, costs: str) -> Ran:
        workload = WORKLOADS[name]
        for package in workload.needs:
            pytest.importorskip(package)
        instance = build(workload, lowering=lowering, costs=costs, salt=f"salt of {costs}")
        return cluster.run(instance)

    return once


Runs = Callable[[str, str, str], Ran]


# All workloads


@each_way
def test_the_result_passes_the_check_and_nothing_is_left_on_the_cluster(
    name: str, lowering: str, ran: Runs
) -> None:
    run = ran(name, lowering, "learned")
    run.instance.check(run.results)
    assert 1 <= run.instance.n_ops <= len(run.submitted.keys)
    t1_s, t_inf_s = run.instance.t1_s, run.instance.t_inf_s
    assert (t1_s is None) == (t_inf_s is None)
    assert t1_s is None or 0 < t_inf_s <= t1_s


@pytest.mark.parametrize("name", [workload.name for workload in DAGS])
def test_a_graph_runs_each_op_once(name: str, cluster: Cluster) -> None:
    run = cluster.run(build(WORKLOADS[name], salt="counted"))
    assert run.instance.count_executed is not None
    assert run.instance.count_executed(cluster.client) == run.instance.n_ops


def wrong(result: Any) -> Any:
    """Return a result of the same kind with another value, where we know how; else none at all."""
    match result:
        case np.ndarray() | int() | float():
            return 2 * result + 1
        case (int(t), int(i), *more):
            return (t, i + 1, *more)
    return None


@each_way
def test_a_wrong_result_fails_the_check(name: str, lowering: str, ran: Runs) -> None:
    run = ran(name, lowering, "learned")
    for at in (0, -1):
        results = list(run.results)
        results[at] = wrong(results[at])
        with pytest.raises(ResultError):
            run.instance.check(results)


@each_way
def test_a_result_that_is_missing_or_too_many_fails_the_check(name: str, lowering: str, ran: Runs) -> None:
    run = ran(name, lowering, "learned")
    for results in ([], run.results[:-1], [*run.results, run.results[-1]], [None] * len(run.results)):
        with pytest.raises(ResultError):
            run.instance.check(results)


@each_way
def test_some_results_can_be_told_apart(name: str, lowering: str, ran: Runs) -> None:
    results = ran(name, lowering, "learned").results
    assert (len(results) > 1 and not np.array_equal(results[0], results[-1])) == (name in OF_SEVERAL)


@pytest.mark.parametrize(("name", "lowering"), [way for way in WAYS if way[0] in OF_SEVERAL])
def test_swapped_results_fail_the_check(name: str, lowering: str, ran: Runs) -> None:
    run = ran(name, lowering, "learned")
    first, *more, last = run.results
    with pytest.raises(ResultError):
        run.instance.check([last, *more, first])


@each_way
def test_instances_of_different_salts_share_no_key(name: str, lowering: str, ran: Runs) -> None:
    first, second = (ran(name, lowering, costs).submitted.keys for costs in ("learned", "known"))
    assert {key_split(key) for key in first & second} <= CONSTANTS


@each_way
def test_dask_sees_the_same_prefixes_whatever_the_salt(name: str, lowering: str, ran: Runs) -> None:
    if name == "bag":
        pytest.skip("which of its tasks Dask fuses, and so their names, depends on the order of a set")
    runs = [ran(name, lowering, costs).submitted.keys for costs in ("learned", "known")]
    first, second = (Counter(map(key_split, keys)) for keys in runs)
    assert first == second


@each_way
def test_nothing_is_declared_unless_costs_are_known(name: str, lowering: str, ran: Runs) -> None:
    assert {COST_ANNOTATION, RANK_ANNOTATION}.isdisjoint(ran(name, lowering, "learned").submitted.annotations)


@each_way
def test_known_costs_are_declared_and_add_up_to_the_work(name: str, lowering: str, ran: Runs) -> None:
    run = ran(name, lowering, "known")
    run.instance.check(run.results)
    if run.instance.t1_s is not None:
        costs = run.submitted.annotations[COST_ANNOTATION]
        assert sum(costs.values()) == pytest.approx(run.instance.t1_s)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_small_sizes_are_sizes(workload: Workload) -> None:
    assert workload.small.keys() <= workload.defaults.keys()
    for size, value in workload.small.items():
        assert type(value) is type(workload.defaults[size])
    assert workload.summary
    assert "\n" not in workload.summary


def test_the_registry_has_every_workload_once() -> None:
    assert {workload.name for workload in OURS} <= WORKLOADS.keys()
    assert all(name == workload.name for name, workload in WORKLOADS.items())
    assert all(WORKLOADS[workload.name] is workload for workload in OURS)
    assert get_workload("imbalanced") is DAGS[0]


def test_an_unknown_workload_is_answered_with_all_that_there_are() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"unknown workload 'wide-x'.*did you mean .* Choose one of: .*imbalanced.*wide",
    ):
        get_workload("wide-x")


# Sizes


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("wide", {"width": 0}, "width is 0; it must be a whole number, at least 1"),
        ("wide", {"branches": 3}, "'wide' has no size 'branches'; its sizes are: width, depth, skew"),
        ("wide", {"width": "many"}, "size 'width' of 'wide' is 'many'; it must be int, like 8"),
        ("transformer", {"n_heads": 5}, "d_model 32 is no multiple of n_heads 5"),
        ("stencil_1d", {"width": 0}, "size 'width' of 'stencil_1d' is 0; it must be 1 or more"),
        ("stencil_1d", {"task_ms": -1}, "'task_ms' of 'stencil_1d' is -1.0; it must be 0 or more"),
        ("stencil_1d", {"task_ms": "inf"}, "'task_ms' of 'stencil_1d' is inf; it must be 0 or more"),
        ("stencil_1d", {"radix": 3}, "'stencil_1d' has no size 'radix'"),
        ("nearest", {"radix": 0}, "size 'radix' of 'nearest' is 0; it must be 1 or more"),
        ("random_nearest", {"fraction": "nan"}, "'fraction'.* is nan; it must be between 0 and 1"),
        ("task_bench_tree", {"steps": 0}, "size 'steps' of 'task_bench_tree' is 0"),
        ("trivial_fanout", {"n": 0}, "size 'n' of 'trivial_fanout' is 0; it must be 1 or more"),
        ("scale_up", {"task_ms": "nan"}, "size 'task_ms' of 'scale_up' is nan"),
        ("lognormal", {"shrink": 0}, "size 'shrink' of 'lognormal' is 0.0; it must be 1 or more"),
        ("heavy_tail", {"heavy_fraction": 2}, "'heavy_fraction'.* is 2.0; it must be between 0 and 1"),
        ("straggler", {"slowdown": 0.5}, "size 'slowdown' of 'straggler' is 0.5; it must be 1 or more"),
        ("two_speeds", {"n": -1}, "size 'n' of 'two_speeds' is -1"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        build(WORKLOADS[name], arguments=sizes)
    assert "\n" not in str(error.value)


# Graphs


def test_every_built_in_graph_is_a_workload_of_its_own_sizes() -> None:
    assert {workload.name: workload.defaults for workload in DAGS} == {
        name: topology.defaults for name, topology in TOPOLOGIES.items()
    }


@pytest.mark.parametrize("workload", DAGS, ids=[workload.name for workload in DAGS])
def test_a_graph_has_bounds_and_names_by_duration_where_its_ops_declare_durations(workload: Workload) -> None:
    graph = generate_graph(workload.name, **workload.arguments({}, is_small=True))
    instance = build(workload)
    assert instance.n_ops == len(graph.ops)
    durations = {op.id: op.attributes.get("duration") for op in graph.ops}
    if None in durations.values():
        assert workload.lowerings == ("constants scattered", "constants as tasks")
        assert instance.t1_s is None
    else:
        assert workload.lowerings[0] == "root scattered, one name"
        assert len(workload.lowerings) == 4
        expected = bounds(graph, durations)
        assert (instance.t1_s, instance.t_inf_s) == (expected.work, expected.critical_path)


@pytest.mark.parametrize("lowering", WORKLOADS["imbalanced"].lowerings)
def test_lowerings_differ_in_the_root_and_in_names(lowering: str, ran: Runs) -> None:
    names = Counter(key_split(key) for key in ran("imbalanced", lowering, "learned").submitted.keys)
    roots = {"source": 1} if "a task" in lowering else {"ferroflow-scattered": 1}
    ops = {"slow_16ms": 2, "slow_1ms": 20} if "by duration" in lowering else {"slow": 22}
    assert names == roots | ops


@pytest.mark.parametrize(
    ("duration", "prefix"),
    [(0.001, "slow_1ms"), (0.005, "slow_4ms"), (0.2, "slow_256ms"), (0.0002, "slow_0.25ms"), (0, "slow_0ms")],
)
def test_names_by_duration_go_by_powers_of_two(duration: float, prefix: str) -> None:
    graph = generate_graph("imbalanced", n_heavy=1, heavy_ms=duration * 1e3, n_fast=0)
    assert duration_prefix(graph.ops[0]) == prefix


def test_placed_constants_must_be_placed_first(cluster: Cluster) -> None:
    instance = build(WORKLOADS["resnet"])
    with pytest.raises(UsageError, match="constants of 'resnet' are not on the cluster; call `prepare`"):
        instance.submit(cluster.client)


def test_constants_that_are_tasks_need_no_preparation() -> None:
    instance = build(WORKLOADS["resnet"], lowering="constants as tasks")
    assert instance.prepare is instance.restore is None


def test_an_unknown_lowering_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown lowering 'backwards'; choose one of: constants"):
        build(WORKLOADS["resnet"], lowering="backwards")


@pytest.mark.parametrize("name", [workload.name for workload in DAGS])
def test_values_depend_on_the_seed(name: str, ran: Runs) -> None:
    run = ran(name, WORKLOADS[name].lowerings[0], "learned")
    with pytest.raises(ResultError, match="differs by"):
        build(WORKLOADS[name], seed=2).check(run.results)


def test_a_product_in_half_of_the_digits_fails_the_check(ran: Runs) -> None:
    run = ran("matmul-chain", "constants scattered", "learned")
    with pytest.raises(ResultError, match="differs by"):
        run.instance.check([result.astype(np.float16).astype(np.float32) for result in run.results])


def unknown_to_all() -> Graph:
    builder = Builder()
    builder.output(y=builder.op("Softsign", builder.constant(np.float32([1]), "x")))
    return builder.to_graph()


def test_the_reference_knows_the_built_in_graphs_only() -> None:
    with pytest.raises(KernelNotFoundError, match="Softsign"):
        numpy_outputs(unknown_to_all())


def in_double_precision(graph: Graph) -> Graph:
    return replace(graph, sources=tuple(replace(s, value=s.value.astype(np.float64)) for s in graph.sources))


def test_a_deep_transformer_is_checked_block_by_block_since_rounding_errors_grow_with_depth() -> None:
    workload = WORKLOADS["xlarge-transformer"]
    arguments = {"layers": 32}
    graph = generate_graph(workload.name, seed=1, **workload.arguments(arguments, is_small=True))
    exact = numpy_outputs(in_double_precision(with_checkpoints(graph)))
    results = [value.astype(np.float32) for value in exact.values()]
    assert len(results) == 32
    (last,) = numpy_outputs(graph).values()
    assert np.abs(results[-1] - last).max() > 0.1 * np.abs(last).max()
    instance = build(workload, arguments=arguments)
    instance.check(results)
    results[16] = np.roll(results[16], 1, axis=0)
    with pytest.raises(ResultError, match="'layernorm_289' differs by"):
        instance.check(results)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_only_stacked_blocks_have_stages(name: str) -> None:
    sizes = WORKLOADS[name].arguments({}, is_small=True)
    graph = generate_graph(name, **sizes)
    stages = with_checkpoints(graph).outputs[: -len(graph.outputs)]
    assert len(stages) == sizes.get("layers", 1) - 1
    assert with_checkpoints(graph).outputs[len(stages) :] == graph.outputs
