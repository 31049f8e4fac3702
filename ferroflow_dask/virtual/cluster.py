"""The cluster: what a test or a simulator builds, feeds and runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Self, cast

from dask.typing import Key
from distributed.batched import BatchedSend
from distributed.stealing import WorkStealing

from ferroflow_dask.bundling.plan import Plan
from ferroflow_dask.bundling.sequence import TOPIC as BUNDLES
from ferroflow_dask.exceptions import UsageError
from ferroflow_dask.policy import Policy
from ferroflow_dask.scheduler.extension import FerroflowStealing
from ferroflow_dask.scheduler.features.low_latency_worker import shorten
from ferroflow_dask.scheduler.features.working_sets_worker import RESOURCE
from ferroflow_dask.scheduler.graphs.capable import VERSION
from ferroflow_dask.scheduler.remote_worker import TOPIC
from ferroflow_dask.topology import Topology
from ferroflow_dask.virtual.bundled import Bundler
from ferroflow_dask.virtual.check import check_end
from ferroflow_dask.virtual.clock import VirtualLoop, VirtualTime
from ferroflow_dask.virtual.extension import install_stealing
from ferroflow_dask.virtual.fabric import Fabric, ProcessLoad, plain_runtime
from ferroflow_dask.virtual.limits import (
    check_cluster,
    check_members,
    check_positive,
    check_rates,
    check_worker,
)
from ferroflow_dask.virtual.memory import RESTART_S, MemorySpec
from ferroflow_dask.virtual.network import PlainNetwork, Stream
from ferroflow_dask.virtual.record import Record
from ferroflow_dask.virtual.samples import ClientMessages
from ferroflow_dask.virtual.scheduler_cpu import IGNORED, SchedulerCpu
from ferroflow_dask.virtual.sent import FAILURES, annotations_of, averages_by_prefix, sent_graph, specs_of
from ferroflow_dask.virtual.task import VirtualTask, sinks
from ferroflow_dask.virtual.upstream import VirtualScheduler, stealing_interval_s
from ferroflow_dask.virtual.upstream_worker import new_machine
from ferroflow_dask.virtual.worker import Surroundings, VirtualWorker

#: A run goes on for so long after the last thing that happened, in case a periodic look finds work [s].
_PATIENCE_S = 10.0


class VirtualCluster:
    """A scheduler and its workers in virtual time.

    Workers are named 0, 1, … in the order in which they join.

    Parameters
    ----------
    workers : int
        Workers at the start.
    nthreads : int, optional
        Of each of them.
    policy : str, Policy or subclass of WorkStealing, optional
        `dask` for Dask's own stealing, `no-stealing`, the name of one of our policies, a policy, or
        another extension.
    latency_s : float, optional
        Of a message between scheduler and worker, one way [s].
    bandwidth : float, optional
        Of a worker's link, over which it fetches one thing after the other [B/s]. A transfer over a free
        one takes `latency_s + nbytes / bandwidth`.
    host_bandwidth : float, optional
        Of a link, for what comes from a worker of the same host [B/s]; as for others if left out.
    workers_per_host : int, optional
        Workers that join one after the other share a host.
    validate : bool, optional
        Whether the state machines check themselves at each step.
    saturation : float, optional
        `distributed.scheduler.worker-saturation`; from the configuration if left out.
    speeds : mapping of worker to float, optional
        How many times faster than declared some of the first workers are.
    resources : mapping of worker to mapping, optional
        Amounts of abstract resources that some of the first workers have.
    interval_s : float, optional
        Time between two rounds of Dask's stealing; from the configuration if left out [s].
    service_s : float, optional
        Time that the scheduler spends on a worker's message; others wait meanwhile [s].
    batching_s : tuple of float, optional
        Least time between two batches of messages, to and from a worker [s]; distributed's are 5 and 2 ms.
    scheduler_cpu : str, optional
        What is done with the CPU time that the scheduler takes: `ignored`; `measured`, then `cpu.seconds`
        tells it; or `charged`, then the scheduler is also busy for that time, and no run repeats exactly.
    seed : int, optional
        Decides ties that Dask breaks by the order of sets, and workers' choices among equal peers. The
        same seed gives the same run, in any process.
    topology : Topology, optional
        Has its workers at the start; see `on`.
    without : collection of str, optional
        Names of features that are switched off. Graphs are bundled if there is a topology.
    memory : MemorySpec, optional
        Of each worker. Without it workers of a topology have the limits that it gives; others have none.

    Raises
    ------
    UsageError
        A time or an amount is below 0 or not finite, a rate or a speed not above 0 (bandwidths may be
        infinite), or `speeds` or `resources` name workers beyond the first `workers`.

    Examples
    --------
    >>> cluster = VirtualCluster(2, policy="ferroflow", latency_s=0.0)
    >>> cluster.submit({i: VirtualTask(duration_s=1.0) for i in range(4)})
    >>> cluster.run()
    2.0
    >>> cluster.check()
    """

    def __init__(
        self,
        workers: int,
        nthreads: int = 1,
        *,
        policy: str | Policy | type[WorkStealing] = "ferroflow",
        latency_s: float = 0.0005,
        bandwidth: float = 1e9,
        host_bandwidth: float | None = None,
        workers_per_host: int = 1,
        validate: bool = True,
        saturation: float | None = None,
        speeds: Mapping[int, float] | None = None,
        resources: Mapping[int, Mapping[str, float]] | None = None,
        interval_s: float | None = None,
        service_s: float = 0.0,
        batching_s: tuple[float, float] = (0.0, 0.0),
        scheduler_cpu: str = IGNORED,
        seed: int = 0,
        topology: Topology | None = None,
        without: Collection[str] = (),
        memory: MemorySpec | None = None,
    ) -> None:
        check_cluster(workers, workers_per_host, (latency_s, service_s, *batching_s))
        check_rates({"bandwidth": bandwidth, "host_bandwidth": host_bandwidth, "saturation": saturation})
        if interval_s is not None:
            check_positive("interval_s", interval_s)
        check_members("speeds", speeds or (), workers)
        check_members("resources", resources or (), workers)
        self.time = VirtualTime()
        self.record = Record(self.time)
        self.tasks: dict[Key, VirtualTask] = {}
        self.workers: list[VirtualWorker] = []
        self.cpu = SchedulerCpu(self.time, scheduler_cpu)
        self.scheduler = VirtualScheduler(VirtualLoop(self.time, self.cpu.run), validate, seed)
        self.scheduler.bandwidth = bandwidth  # type: ignore[assignment]
        if saturation is not None:
            self.scheduler.WORKER_SATURATION = saturation
        self.scheduler.add_plugin(self.record)
        self.stealing = install_stealing(
            self.scheduler, self.time, policy, latency_s, interval_s=interval_s, without=without
        )
        self._peers: dict[str, VirtualWorker] = {}
        # Tasks on their way to the scheduler, or there.
        self._sent: set[Key] = set()
        if topology is None:
            on_host = bandwidth if host_bandwidth is None else host_bandwidth
            network = PlainNetwork(self.time, latency_s, bandwidth, on_host, workers_per_host)
            self.fabric = Fabric(self.time, network, plain_runtime(service_s, batching_s))
        else:
            self.fabric = Fabric.on(self.time, topology)
        self._around = Surroundings(self.time, self.fabric, self.tasks, self.record, self._peers)
        self._workers_per_host = workers_per_host
        self._memory = memory
        self._seed = seed
        self._messages = ClientMessages(self.time)
        self._bundler: Bundler | None = None
        if topology is not None and "bundles" not in without and isinstance(self.stealing, FerroflowStealing):
            self._bundler = Bundler(self.stealing, topology.profile(), self.cpu.run, self._messages, without)
        for place in range(workers):
            spec = self.fabric.worker(place)
            threads, speed = (
                (nthreads, (speeds or {}).get(place, 1.0)) if spec is None else (spec.threads, spec.speed)
            )
            self._join(threads, speed, (resources or {}).get(place), memory or self.fabric.memory_of(place))

    @classmethod
    def on(
        cls, topology: Topology, *, policy: str | Policy = "ferroflow", seed: int = 0, **options: Any
    ) -> Self:
        """Return a cluster on a topology: processes share cores, transfers share links, and Dask has costs.

        Parameters
        ----------
        topology : Topology
        policy, seed : optional
            As in the constructor.
        **options
            `validate` (off if left out), `without`, `saturation` and `interval_s` of the constructor.
        """
        hosts = topology.host_of
        scheduler = topology.host_number(topology.scheduler)
        return cls(
            len(topology.workers),
            policy=policy,
            latency_s=max(topology.route(scheduler, host).latency_s for host in dict.fromkeys(hosts)),
            bandwidth=topology.profile().bandwidth,
            seed=seed,
            topology=topology,
            **{"validate": False, **options},
        )

    # Workers

    def join(
        self, nthreads: int = 1, speed: float = 1.0, resources: Mapping[str, float] | None = None
    ) -> int:
        """Add a worker now; return its name."""
        if self.fabric.topology is not None:
            raise UsageError("a worker must be one of the topology; build the cluster on a larger topology")
        return self._join(nthreads, speed, resources, self._memory)

    def _join(
        self,
        nthreads: int,
        speed: float,
        resources: Mapping[str, float] | None,
        memory: MemorySpec | None,
    ) -> int:
        check_worker(nthreads, speed, resources or {})
        name = len(self.workers)
        host, place = self.fabric.host_of(name, self._workers_per_host)
        address = f"tcp://10.{host >> 16}.{host >> 8 & 255}.{host & 255}:{1 + place}"
        state = new_machine(address, nthreads, resources or {}, self.scheduler.validate, self._seed)
        runtime, latency_s = self.fabric.runtime, self.fabric.network.message_s(name)
        up_s, down_s = runtime.to_scheduler_s, runtime.to_workers_s
        to_scheduler = Stream(self.time, latency_s, up_s, lambda message: self._arrived(address, message))
        worker = VirtualWorker(name, state, speed, self._around, to_scheduler)
        self.workers.append(worker)
        self._peers[address] = worker
        to_worker = Stream(self.time, latency_s, down_s, worker.receive)
        if memory is not None:
            self._limit(worker, memory)
        limit = 0 if memory is None else memory.nbytes
        self.scheduler.join(address, name, nthreads, resources or {}, to_worker, memory_limit=limit)
        if isinstance(self.stealing, FerroflowStealing):
            if self.fabric.topology is not None:
                shorten(cast(BatchedSend, to_worker), ProcessLoad(self.fabric.scheduler))
                shorten(cast(BatchedSend, to_scheduler), ProcessLoad(worker.process, state.ready))
            for end, number in worker.ends.items():
                self.scheduler.log_worker_event(address, TOPIC, {"feature": end.name, "number": number})
            version = {"worker": address, "version": VERSION}
            self.scheduler.log_worker_event(address, BUNDLES, version)
        ws = self.scheduler.workers[address]
        ws.metrics["bandwidth"] = {"workers": worker.fetches.bandwidths}  # its heartbeats would report them
        return name

    def _limit(self, worker: VirtualWorker, memory: MemorySpec) -> None:
        """Limit the memory of a worker that joins."""
        address, latency_s = worker.state.address, self.fabric.network.message_s(worker.name)

        def tell(metrics: Mapping[str, Any]) -> None:
            if address in self.scheduler.workers:
                self.scheduler.workers[address].metrics.update(metrics)

        def died() -> None:
            self.scheduler.log_event("worker-restart-memory", {"worker": address})  # as a nanny does
            self.leave(worker.name)
            self.time.after(RESTART_S, self._replace, worker, memory)

        worker.limit(memory, partial(self.time.after, latency_s, tell, background=True), died)

    def _replace(self, worker: VirtualWorker, memory: MemorySpec) -> None:
        """Let a worker join in place of one that has died, as a nanny does."""
        self.fabric.replace(worker.name)
        resources = {**worker.state.total_resources}
        resources.pop(RESOURCE, None)  # which its end adds again
        self._join(worker.state.nthreads, worker.speed, resources, memory)

    def leave(self, worker: int) -> None:
        """Let a worker die now, with all that it has; the scheduler learns of it one latency later."""
        self.workers[worker].die()
        address = self.workers[worker].state.address
        self.time.after(self.fabric.network.message_s(worker), self._left, address)

    def _left(self, address: str) -> None:
        if isinstance(self.stealing, FerroflowStealing):
            self.stealing.graphs.deaths.spare(address)
        self.scheduler.leave(address)

    def pause(self, worker: int) -> None:
        """Let a worker start no tasks from now on."""
        self.workers[worker].set_running(False)

    def resume(self, worker: int) -> None:
        """Let a paused worker go on."""
        self.workers[worker].set_running(True)

    # Clients

    def submit(
        self,
        graph: Mapping[Key, VirtualTask],
        client: str = "client",
        *,
        keep: Iterable[Key] | None = None,
        priority: float = 0,
        annotations: Mapping[str, Any] | None = None,
        actors: Iterable[Key] = (),
        order: Mapping[Key, int] | None = None,
        fifo_timeout_s: float = 60.0,
        is_sent: bool = False,
        knows_prefixes: bool = True,
        knows_costs: bool = False,
        learned_s: Mapping[str, float] | None = None,
    ) -> None:
        """Let a client's graph arrive at the scheduler now.

        Parameters
        ----------
        graph : mapping of key to VirtualTask
        client : str, optional
        keep : keys, optional
            What the client wants; if left out, the tasks on which no other one depends.
        priority : float, optional
            The client's `priority=`; higher ones first.
        annotations : mapping, optional
            For all tasks; those of a task take precedence.
        actors : keys, optional
        order : mapping of key to int, optional
            Order within the graph, as `dask.order` gives it; the order of `graph` if left out, Dask's
            static order if graphs are bundled.
        fifo_timeout_s : float, optional
            Graphs that arrive within this time of the last one that began a generation belong to the same
            generation, and share their priorities [s]. `Client.compute`, `Client.persist` and `Client.get`
            pass 60 s, `Client.submit` and `Client.map` 0.1 s.
        is_sent : bool, optional
            Whether the client has sent it already: then that takes no time.
        knows_prefixes : bool, optional
            Whether the scheduler knows the means of each prefix, as from earlier runs. If not, it knows what
            it has learned in this run. Then a sample may run first, and later messages of clients wait.
        knows_costs : bool, optional
            Whether bundles are cut by the duration of each task, not by the mean of its prefix.
        learned_s : mapping of str to float, optional
            Durations of prefixes by which bundles are cut, where they differ from the mean [s].
        """
        for key, task in graph.items():
            for needed in task.dependencies:
                if needed not in graph and needed not in self.scheduler.tasks and needed not in self._sent:
                    raise UsageError(f"{key!r} depends on {needed!r}, which no client has or submits")
        keys = list(sinks(graph) if keep is None else keep)
        options = {
            "client": client,
            "global_annotations": dict(annotations or {}),
            "user_priority": priority,
            "actors": list(actors),
            "fifo_timeout": fifo_timeout_s,
        }
        runtime, n = self.fabric.runtime, len(graph)
        self.record.n_arriving += 1
        if self.fabric.topology is not None:
            self._sent.update(graph)
        # A plan is not the event loop's work.
        if self._bundler is None or options["actors"]:
            place = order or {key: place for place, key in enumerate(graph)}
            create = partial(self._create, graph, keys, order=place, annotations=annotations_of(graph))
            arrives = partial(self.cpu.run, partial(create, specs=specs_of(graph), **options))
        else:
            graph_sent = sent_graph(graph, keys, order, knows_costs=knows_costs)
            known = averages_by_prefix(graph, learned_s) if knows_prefixes else {}
            carry_out = partial(self._carry_out, graph, keys, options)
            arrives = partial(self._bundler.arrives, graph_sent, known, carry_out)
        handled = partial(self.fabric.scheduler.run, n * runtime.graph_task_s, self._messages.handle, arrives)
        latency_s = self.fabric.network.client_s()
        sent = partial(self.time.after, latency_s, handled) if latency_s else handled
        sends_s = 0.0 if is_sent else runtime.submit_s + n * runtime.client_task_s
        self.fabric.client.run(sends_s, handled if is_sent else sent)

    def _create(self, graph: Mapping[Key, VirtualTask], keys: list[Key], **options: Any) -> None:
        """Create the tasks of a graph, or those that are left after a sample."""
        self.record.n_arriving -= 1
        states = self.scheduler.tasks
        self.record.wanted.update(key for key in keys if key not in states or states[key].state != "memory")
        self._create_part(graph, keys, **options)

    def _create_part(
        self,
        graph: Mapping[Key, VirtualTask],
        keys: list[Key],
        *,
        annotations: Mapping[str, Mapping[Key, Any]],
        **options: Any,
    ) -> None:
        self.tasks.update(graph)
        by_type = {name: by_key for name, by_key in annotations.items() if name != FAILURES}
        self.scheduler.submit(keys=keys, annotations=by_type, now=self.time.now, **options)

    def _carry_out(
        self, graph: Mapping[Key, VirtualTask], keys: list[Key], options: dict[str, Any], plan: Plan
    ) -> None:
        """Create the tasks of a plan; a sample is released once the rest of its graph exists."""
        new = {"specs": plan.tasks, "order": plan.order, "annotations": plan.annotations, **options}
        if plan.rest is not None:
            self._create_part(graph, [key for key in plan.tasks if key in plan.wanted], **new)
            return
        self._create(graph, keys, **new)
        if sampled := plan.graph.sampled.difference(keys):
            self._release([key for key in graph if key in sampled], options["client"])

    def release(self, keys: Iterable[Key], client: str = "client") -> None:
        """Let a client release its futures now."""
        self._messages.handle(self._release, list(keys), client)

    def _release(self, keys: list[Key], client: str) -> None:
        stimulus_id = f"client-releases-keys-{self.time.now}"
        self.scheduler.client_releases_keys(keys=keys, client=client, stimulus_id=stimulus_id)

    # Time

    def at(self, when: float, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have `action(*args, **kwargs)`, such as `cluster.leave(1)`, happen at a time [s]."""
        self.time.at(when, lambda: action(*args, **kwargs))

    def run(self, until: float = math.inf, max_events: int = 10_000_000) -> float:
        """Run until nothing is left to happen, or up to a time; return when the last task was completed [s].

        Parameters
        ----------
        until : float, optional
            Up to this time the scheduler's periodic looks go on even where nothing else happens [s].
        max_events : int, optional
            These looks are among them.

        Raises
        ------
        SimulationError
            The run did not come to an end within `max_events`.
        UsageError
            `until` is not a number.
        """
        if math.isnan(until):
            raise UsageError("until is nan; it must be a time [s]")
        patience_s = max(_PATIENCE_S, 2 * stealing_interval_s(self.stealing))
        self.time.run(until, patience_s, max_events)
        return self.record.makespan_s

    def check(self) -> None:
        """Check the end of a run.

        All that a client wants is in memory or has failed, no steal is under way, no resources are in
        use, no occupancy is left, our view is empty, and the states of scheduler and workers are valid
        and agree.

        Raises
        ------
        SimulationError
            Something of this does not hold; the message says what.
        """
        check_end(self.scheduler, self.workers, self.stealing)

    @property
    def n_steals(self) -> int:
        """Steals that were asked for, by whatever extension."""
        counts = self.stealing.metrics["request_count_total"] if self.stealing is not None else {}
        return int(sum(counts.values()))

    # What workers send

    def _arrived(self, address: str, message: dict[str, Any]) -> None:
        runtime = self.fabric.runtime
        service_s = runtime.of_message(message["op"])
        if message["op"] == "task-finished" and isinstance(self.stealing, FerroflowStealing):
            service_s += runtime.plugin_task_s
        self.fabric.scheduler.run(service_s, self.cpu.run, self._handle, address, message)

    def _handle(self, address: str, message: dict[str, Any]) -> None:
        if address not in self.scheduler.workers:
            return  # its stream is closed
        op = message.pop("op")
        self.record.messages[op] += 1
        self.scheduler.stream_handlers[op](worker=address, **message)
