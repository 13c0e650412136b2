"""Beam pipelines on Dask, with every output and the right ones.

Beam's own DaskRunner loses what `finish_bundle` yields, mixes tagged outputs, runs the last of several sinks only, and
reports success. This subclass makes a task graph of its own: a partition of elements is a bundle, and the tasks of a
worker that dies are computed again elsewhere. Files are written whole and by name, so that nothing counts twice.

What it cannot do is refused before anything runs: state and timers, splittable DoFns and native reads, windows other
than the global one, bundle finalization. It keeps no metrics.
"""

import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import apache_beam as beam
import dask
import distributed
from apache_beam import coders, typehints
from apache_beam.internal import pickler
from apache_beam.io.iobase import Read
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor
from apache_beam.runners.common import DoFnRunner, DoFnSignature, Receiver
from apache_beam.runners.dask.dask_runner import DaskOptions, DaskRunner
from apache_beam.runners.runner import PipelineResult, PipelineState
from apache_beam.transforms.sideinputs import SideInputMap
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from calm_beam.launch.flags import UsageError

from .loopback import HOST

# Partitions for every thread of the cluster: with several, the slowest is not waited for so long.
_PARTITIONS_PER_THREAD = 4
_CONNECT_SECONDS = 10

# What a task holds: the elements of one partition of a PCollection.
Elements = list[WindowedValue]


class CorrectedDaskRunner(DaskRunner):
    """Runs bounded pipelines of Impulse, ParDo, GroupByKey, Flatten and Reshuffle, and what is made of them."""

    @staticmethod
    def is_fnapi_compatible() -> bool:
        """Returns True: Beam rebuilds pipelines of other runners from their portable form, where types are lost."""
        return True

    def run_pipeline(self, pipeline: beam.Pipeline, options: PipelineOptions) -> "_DaskResult":
        """Starts a pipeline on the cluster of `--dask_client_address`, or on processes of this machine.

        Raises:
          UsageError: If the pipeline has what this runner cannot do; nothing has run.
        """
        # Before a cluster is started, with a number that no task sees.
        pipeline.visit(_TaskGraph(1))
        given = options.view_as(DaskOptions).get_all_options(drop_default=True, current_only=True)
        partitions = DaskOptions._extract_bag_kwargs(given)
        if "partition_size" in partitions:
            raise UsageError("--dask_partition_size: partitions are made by number. Pass --dask_npartitions.")
        client, cluster = _connect(given, num_workers=options.view_as(DirectOptions).direct_num_workers)
        threads = sum(client.nthreads().values())
        graph = _TaskGraph(partitions.get("npartitions") or max(1, threads) * _PARTITIONS_PER_THREAD)
        pipeline.visit(graph)
        return _DaskResult(client, cluster, futures=client.compute(graph.sinks()))


def _connect(given: dict[str, Any], *, num_workers: int) -> tuple[distributed.Client, distributed.LocalCluster | None]:
    if "address" in given or "scheduler_file" in given:
        return _connected(given), None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    # Spawned, not forked: JAX does not survive a fork. One thread each, since decoding uses all cores by itself.
    cluster = distributed.LocalCluster(
        n_workers=num_workers or None,
        threads_per_worker=1,
        memory_limit=None,
        # For this machine alone, also where a configuration of Dask's says otherwise.
        host=HOST,
        dashboard_address=f"{HOST}:0",
        worker_dashboard_address=f"{HOST}:0",
    )
    return distributed.Client(cluster, **given), cluster


def _connected(given: dict[str, Any]) -> distributed.Client:
    """Returns a client of a cluster that runs already."""
    file = given.get("scheduler_file")
    if file is not None and not os.path.isfile(file):
        # Dask would wait for it, for ever.
        raise UsageError(f"--dask_scheduler_file={file}: no such file. The scheduler writes it when it starts.")
    try:
        return distributed.Client(**{"timeout": _CONNECT_SECONDS, **given})
    except (OSError, TypeError, ValueError) as error:
        where = f"--dask_scheduler_file={file}" if file is not None else f"--dask_client_address={given['address']}"
        raise UsageError(f"{where}: no Dask scheduler answers there ({error}).") from error


class _DaskResult(PipelineResult):
    """A run on Dask; whoever waits for it takes down what it started."""

    def __init__(
        self,
        client: distributed.Client,
        cluster: distributed.LocalCluster | None,
        *,
        futures: Sequence[distributed.Future],
    ) -> None:
        super().__init__(PipelineState.RUNNING)
        self._client = client
        self._cluster = cluster
        self._futures = futures

    def wait_until_finish(self, duration: int | None = None) -> str:
        self._state = PipelineState.FAILED
        try:
            # Raises what a task raised, as soon as one did.
            timeout = None if duration is None else duration / 1000
            for _ in distributed.as_completed(self._futures, with_results=True, timeout=timeout):
                pass
            self._state = PipelineState.DONE
        finally:
            self._close()
        return str(self._state)

    def cancel(self) -> str:
        self._close()
        self._state = PipelineState.CANCELLED
        return str(self._state)

    def metrics(self) -> NoReturn:
        raise NotImplementedError("the Dask runner keeps no metrics.")

    def _close(self) -> None:
        # Tasks that nobody wants any more are dropped by the scheduler.
        self._futures = []
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


class _TaskGraph(PipelineVisitor):
    """Makes tasks of a pipeline, in the order of its data."""

    def __init__(self, num_partitions: int) -> None:
        self._num_partitions = num_partitions
        # One task a partition; each gives `Elements`.
        self._partitions: dict[beam.PCollection, list[Any]] = {}
        self._consumed: set[beam.PCollection] = set()
        # Every ParDo with its tasks: also those whose outputs nobody reads have to run.
        self._runs: list[tuple[AppliedPTransform, list[Any]]] = []
        self._reshuffle: AppliedPTransform | None = None

    def sinks(self) -> list[Any]:
        """Returns tasks that end when everything has run, and give None."""
        return [
            dask.delayed(_none)(run)
            for node, runs in self._runs
            if not self._consumed & set(node.outputs.values())
            for run in runs
        ]

    def enter_composite_transform(self, transform_node: AppliedPTransform) -> None:
        if isinstance(transform_node.transform, Read):
            _refuse(
                transform_node, "native reads", instead="Read files in a DoFn of your own: beam.Create(files) | ParDo."
            )
        if self._reshuffle is None and isinstance(transform_node.transform, beam.Reshuffle):
            self._reshuffle = transform_node

    def leave_composite_transform(self, transform_node: AppliedPTransform) -> None:
        if transform_node is self._reshuffle and transform_node is not None:
            self._reshuffle = None
            (source,), (output,) = transform_node.inputs, transform_node.outputs.values()
            dealt = [
                dask.delayed(_deal, nout=self._num_partitions)(part, first, self._num_partitions)
                for first, part in enumerate(self._read(source))
            ]
            self._partitions[output] = [dask.delayed(_concatenate)(list(parts)) for parts in zip(*dealt, strict=True)]

    def visit_transform(self, transform_node: AppliedPTransform) -> None:
        # What a Reshuffle is made of is passed over: random keys are no use where there is no shuffle to balance.
        if self._reshuffle is not None:
            return
        for output in transform_node.outputs.values():
            if output.windowing.windowfn != GlobalWindows():
                _refuse(transform_node, "windows other than the global one")
        transform = transform_node.transform
        if isinstance(transform, beam.Impulse):
            self._set_output(transform_node, [dask.delayed(_impulse)()])
        elif isinstance(transform, beam.Flatten):
            self._set_output(transform_node, [part for source in transform_node.inputs for part in self._read(source)])
        elif isinstance(transform, beam.GroupByKey):
            self._group_by_key(transform_node)
        elif isinstance(transform, beam.ParDo):
            self._run_bundles(transform_node)
        else:
            _refuse(transform_node, type(transform).__name__)

    def _read(self, source: beam.PCollection) -> list[Any]:
        self._consumed.add(source)
        return self._partitions[source]

    def _set_output(self, node: AppliedPTransform, partitions: list[Any]) -> None:
        (output,) = node.outputs.values()
        self._partitions[output] = partitions

    def _group_by_key(self, node: AppliedPTransform) -> None:
        (source,) = node.inputs
        kind = typehints.typehints.coerce_to_kv_type(source.element_type)
        # Keys are equal if their codes are, as on any runner; the hash of a str differs between processes.
        coder = coders.registry.get_coder(kind).key_coder().as_deterministic_coder(node.full_label)
        count = self._num_partitions
        split = [dask.delayed(_split_by_key, nout=count)(part, coder, count) for part in self._read(source)]
        self._set_output(node, [dask.delayed(_group)(list(parts)) for parts in zip(*split, strict=True)])

    def _run_bundles(self, node: AppliedPTransform) -> None:
        transform = node.transform
        signature = DoFnSignature(transform.fn)
        if signature.is_stateful_dofn():
            _refuse(node, "state and timers")
        if signature.is_splittable_dofn():
            _refuse(node, "splittable DoFns and native reads")
        if signature.has_bundle_finalization():
            _refuse(node, "bundle finalization")
        main = node.main_inputs.values()
        (source,) = main
        views = [(type(view), view._view_options()) for view in node.side_inputs]
        step = pickler.dumps(
            (
                transform.fn,
                transform.args,
                transform.kwargs,
                views,
                transform.get_windowing(node.inputs),
                node.full_label,
            )
        )
        sides = [self._read(view.pvalue) for view in node.side_inputs]
        runs = [dask.delayed(_run_bundle)(step, part, sides) for part in self._read(source)]
        self._runs.append((node, runs))
        for tag, output in node.outputs.items():
            self._partitions[output] = [dask.delayed(_output)(run, tag) for run in runs]


def _refuse(node: AppliedPTransform, what: str, *, instead: str = "") -> NoReturn:
    hint = instead or "Take another runner for this pipeline."
    raise UsageError(f"--runner=DaskRunner cannot do {what} (in step {node.full_label}). {hint}")


def _impulse() -> Elements:
    return [GlobalWindows.windowed_value(b"")]


def _deal(elements: Elements, first: int, count: int) -> list[Elements]:
    """Deals elements out in turn, from the `first` of the new partitions on."""
    return [elements[(index - first) % count :: count] for index in range(count)]


def _concatenate(parts: Iterable[Elements]) -> Elements:
    return list(itertools.chain.from_iterable(parts))


def _split_by_key(elements: Elements, coder: coders.Coder, count: int) -> list[list[tuple[bytes, Any, Any]]]:
    """Returns (code of the key, key, value) for each partition of keys."""
    parts: list[list[tuple[bytes, Any, Any]]] = [[] for _ in range(count)]
    for element in elements:
        key, value = element.value
        code = coder.encode(key)
        index = int.from_bytes(hashlib.blake2b(code, digest_size=8).digest(), "big") % count
        parts[index].append((code, key, value))
    return parts


def _group(parts: Iterable[list[tuple[bytes, Any, Any]]]) -> Elements:
    groups: dict[bytes, tuple[Any, list[Any]]] = {}
    for code, key, value in itertools.chain.from_iterable(parts):
        groups.setdefault(code, (key, []))[1].append(value)
    return [GlobalWindows.windowed_value(group, GlobalWindow().max_timestamp()) for group in groups.values()]


class _Receiver(Receiver):
    """Keeps what a DoFn yields under one tag."""

    def __init__(self) -> None:
        self.elements: Elements = []

    def receive(self, windowed_value: WindowedValue) -> None:
        self.elements.append(windowed_value)


class _Receivers(dict[str | None, _Receiver]):
    """Receivers of every tag that occurs."""

    def __missing__(self, tag: str | None) -> _Receiver:
        self[tag] = _Receiver()
        return self[tag]


def _run_bundle(step: bytes, elements: Elements, sides: list[list[Elements]]) -> dict[str | None, Elements]:
    """Returns what a DoFn yields for one bundle, `finish_bundle` included, by tag."""
    fn, args, kwargs, views, windowing, label = pickler.loads(step)
    side_inputs = [
        SideInputMap(view, view_options, _concatenate(parts))
        for (view, view_options), parts in zip(views, sides, strict=True)
    ]
    receivers = _Receivers()
    runner = DoFnRunner(fn, args, kwargs, side_inputs, windowing, receivers, step_name=label)
    runner.setup()
    try:
        runner.start()
        for element in elements:
            runner.process(element)
        runner.finish()
    finally:
        runner.teardown()
    return {tag: receiver.elements for tag, receiver in receivers.items()}


def _output(run: dict[str | None, Elements], tag: str | None) -> Elements:
    return run.get(tag, [])


def _none(_: object) -> None:
    return None
