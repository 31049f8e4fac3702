"""ferroflow's published matrix products on CPUs and GPUs, and ours in the next columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ferroflow_dask.bench.comparison import STOCK, Case
from ferroflow_dask.bench.markdown import NOTHING, number, table

#: The workload, here as in `examples/gpu.py`.
WORKLOAD = "matmul-parallel"
_CPU, _A100, _H100 = "8 CPU workers", "A100-SXM4-40GB", "H100-80GB-HBM3"
#: Workers of every published run.
_WORKERS = 8
#: The precision of the published products, as `examples/gpu.py` names it.
_PRECISION = "fp32"
#: What `examples/gpu.py` writes for a device that is not one.
_EMULATED = "emulated"

PRODUCTS_SOURCE = (
    "Noah Kostesku, ferroflow, github.com/noahkostesku/ferroflow, docs/benchmarks.md, docs/gpu_results.txt "
    "(all commits) and docs/data/nibi_gpu_results.txt"
)


class PublishedProducts(NamedTuple):
    """One published run of chains of products of square matrices.

    There are `n_branches` chains of `ops_per_branch` products of matrices of `m` rows. `ops_per_s` is as
    printed by the source [1/s]. `mean_batch` is how many products one call of cuBLAS computes, on average;
    None if the source did not batch. `run` is the number of the Slurm job, and the device that was asked for
    if it was not `cuda`.
    """

    n_branches: int
    ops_per_branch: int
    m: int
    device: str
    ops_per_s: float
    mean_batch: float | None
    run: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Sizes that a row must have to be compared."""
        return {"n_branches": self.n_branches, "ops_per_branch": self.ops_per_branch, "m": self.m}

    @property
    def title(self) -> str:
        """The size in words."""
        return f"{self.n_branches}×{self.ops_per_branch}, {self.m}²"


_NARVAL, _NIBI = "Narval 59957529", "Nibi 12970417"
_NARVAL_3, _NARVAL_4, _NARVAL_5 = "Narval 60016134", "Narval 60018340", "Narval 60026347"

#: By size, then by device; runs of one size in the order in which they were made.
PRODUCTS: tuple[PublishedProducts, ...] = (
    PublishedProducts(32, 4, 256, _CPU, 194, None, _NARVAL_4),
    PublishedProducts(32, 4, 256, _CPU, 202, None, _NARVAL_5),
    PublishedProducts(32, 4, 256, _A100, 148, None, _NARVAL_4),
    PublishedProducts(32, 4, 256, _A100, 147, 14.0, _NARVAL_5),
    PublishedProducts(32, 4, 256, _H100, 168, 14.0, _NIBI),
    PublishedProducts(16, 4, 512, _A100, 79, None, _NARVAL_4),
    PublishedProducts(16, 4, 512, _A100, 75, 6.6, _NARVAL_5),
    PublishedProducts(16, 8, 2048, _CPU, 25, None, _NARVAL),
    PublishedProducts(16, 8, 2048, _CPU, 25, None, _NARVAL_3),
    PublishedProducts(16, 8, 2048, _CPU, 26, None, _NIBI),
    PublishedProducts(16, 8, 2048, _A100, 62, None, _NARVAL),
    PublishedProducts(16, 8, 2048, _A100, 47, None, _NARVAL_3),
    PublishedProducts(16, 8, 2048, _A100, 44, None, f"{_NARVAL_4}, auto"),
    PublishedProducts(16, 8, 2048, _A100, 39, 12.4, f"{_NARVAL_5}, auto"),
    PublishedProducts(16, 8, 2048, _H100, 52, 12.6, _NIBI),
    PublishedProducts(16, 8, 2048, _H100, 52, 12.6, f"{_NIBI}, auto"),
    PublishedProducts(64, 1, 2048, _A100, 24, None, f"{_NARVAL_4}, auto"),
    PublishedProducts(8, 8, 4096, _A100, 17, None, _NARVAL),
    PublishedProducts(8, 8, 4096, _A100, 12, None, _NARVAL_3),
)


def products_table(cases: Sequence[Case]) -> str:
    """Return all published runs with ours of the same size in markdown; "" without a run of such a size.

    Parameters
    ----------
    cases : sequence of Case
        Of one setting.
    """
    found = {run: list(_of_size(run, cases)) for run in PRODUCTS}
    if not any(found.values()):
        return ""
    lines = [(*_published(run), *ours) for run in PRODUCTS for ours in _ours(run, found[run])]
    numbers = ("published", "mean batch", "ferroflow-dask", "stock dask")
    header = ("products", "device", *numbers[:2], "job", *numbers[2:], "device here")
    source = (
        f"Throughput in ops/s of single runs, {_WORKERS} workers. Published: {PRODUCTS_SOURCE}. They copy "
        "the inputs and the result of each product between host and GPU; rows of `examples/gpu.py` leave "
        "results on the GPU."
    )
    return f"### Matrix products on CPUs and GPUs\n\n{source}\n\n{table(header, lines, right=numbers)}"


def _published(run: PublishedProducts) -> tuple[str, ...]:
    batch = NOTHING if run.mean_batch is None else f"{run.mean_batch:g}"
    return run.title, run.device, f"{run.ops_per_s:g}", batch, run.run


def _of_size(run: PublishedProducts, cases: Sequence[Case]) -> Iterator[Case]:
    for case in cases:
        arguments = dict(case.arguments)
        if case.workload != WORKLOAD or not run.arguments.items() <= arguments.items():
            continue
        if run.device == _CPU:
            is_alike = "precision" not in arguments and case.shape.n_threads == _WORKERS
        else:
            is_alike = (
                arguments.get("precision") == _PRECISION and arguments.get("gpu", _EMULATED) != _EMULATED
            )
        if is_alike:
            yield case


def _ours(run: PublishedProducts, cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """Yield the columns of each of our cases, or once nothing."""
    if not cases:
        yield (NOTHING, NOTHING, NOTHING)
    for case in cases:
        samples = (case.best("ferroflow"), case.best(STOCK))
        here = str(case.shape) if run.device == _CPU else str(case.arguments["gpu"])
        yield (*(NOTHING if sample is None else number(sample.ops_per_s) for sample in samples), here)
