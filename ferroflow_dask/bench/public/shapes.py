"""Suite of shapes: programs written here after descriptions by others, for readers without a checkout.

Those of `bench.workloads` check their own results, since each run's differ; their answer is what is wrong.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ferroflow_dask.bench.public import geospatial
from ferroflow_dask.bench.public.base import Clock, Options, Program
from ferroflow_dask.bench.workloads.arrays import ARRAYS
from ferroflow_dask.bench.workloads.base import Cluster, Request, Workload
from ferroflow_dask.bench.workloads.frames import FRAMES
from ferroflow_dask.bench.workloads.rsds import RSDS
from ferroflow_dask.bench.workloads.scenarios import SCENARIOS
from ferroflow_dask.exceptions import ResultError

if TYPE_CHECKING:
    from distributed import Client

#: Sizes of the quick form, of which a run takes about a second; of other workloads the small ones.
_QUICK: Mapping[str, Mapping[str, Any]] = {
    "merge": {"n": 500},
    "groupby": {"days": 1},
    "tensordot": {},
    "lognormal": {"n": 50},
    "straggler": {"n": 200},
}
_COILED = "after coiled/benchmarks (BSD-3)"
_OWN = frozenset({"straggler", "heavy_tail", "two_speeds"})
_SEED = 0


def _run(workload: Workload, sizes: Mapping[str, Any], client: Client, clock: Clock) -> str:
    """Run a new instance of a workload, and return what is wrong with its results; "" if nothing is."""
    threads = client.nthreads()
    # Keys depend on the salt: no run finds the results of another.
    instance = workload.build(Request(sizes, _SEED, uuid.uuid4().hex, sum(threads.values())))
    cluster = Cluster(client, len(threads))
    if instance.prepare is not None:
        instance.prepare(cluster)
    try:
        with clock:
            futures = instance.submit(client)
            if instance.during is not None:
                instance.during(cluster)
            results = instance.collect(client, futures) if instance.collect else client.gather([*futures])
        instance.check(results)
    except ResultError as error:
        return str(error)
    finally:
        if instance.restore is not None:
            instance.restore(cluster)
    return ""


def _program(workload: Workload, source: str, is_full: bool) -> Program:
    sizes = workload.arguments({} if is_full else _QUICK.get(workload.name, {}))
    if not is_full and workload.name not in _QUICK:
        sizes = workload.arguments({}, is_small=True)
    lacking = [name for name in workload.needs if not find_spec(name)]
    return Program(
        suite="shapes",
        name=workload.name,
        source="ferroflow-dask, MIT" if workload.name in _OWN else source,
        run=partial(_run, workload, sizes),
        sizes=sizes,
        expected=lambda: "",
        differs=lambda found, _: str(found),
        skipped=f"needs {', '.join(lacking)}" if lacking else "",
    )


class _Suite:
    name = "shapes"
    source = "Written here (MIT) after RSDS (Böhm and Beránek, WORKS'20) and after coiled/benchmarks (BSD-3)."
    needs = ()

    def programs(self, options: Options) -> Sequence[Program]:
        """Return the programs: RSDS, stealing, arrays, frames and geospatial."""
        rsds = "after RSDS, arXiv 2010.11105"
        sources = ((RSDS, rsds), *((workloads, _COILED) for workloads in (SCENARIOS, ARRAYS, FRAMES)))
        return [
            *(
                _program(workload, source, options.is_full)
                for workloads, source in sources
                for workload in workloads
            ),
            *geospatial.programs(options.is_full),
        ]


#: The suite.
SUITE = _Suite()
