"""The Dask runner gives what the in-process runner gives, or says that it cannot."""

import glob
import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam import coders
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import FixedWindows, GlobalWindow, TimestampedValue
from apache_beam.utils.shared import Shared
from apache_beam.utils.windowed_value import WindowedValue

pytest.importorskip("distributed")

import distributed

from calm_beam.inputs.examples import DataError
from calm_beam.launch.flags import UsageError
from calm_beam.launch.runners import PipelineError, run_pipeline
from calm_beam.launch.runners import dask as dask_runner
from calm_beam.launch.runners.dask import CorrectedDaskRunner
from tests.sockets import family, listening, open_to_others

pytestmark = pytest.mark.timeout(300)

Outputs = dict[str, beam.PCollection]


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    """Two worker processes."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit=None, dashboard_address=None
    ) as cluster:
        yield cluster


class _CountAtTheEnd(beam.DoFn):
    """Yields elements, those over 5 under a tag of their own, and at the end of a bundle how many there were."""

    def start_bundle(self) -> None:
        self._count = 0

    def process(self, element: int) -> Iterator[Any]:
        self._count += 1
        yield beam.pvalue.TaggedOutput("large", element) if element > 5 else element

    def finish_bundle(self) -> Iterator[Any]:
        timestamp, windows = GlobalWindow().max_timestamp(), [GlobalWindow()]
        yield beam.pvalue.TaggedOutput("counts", WindowedValue(self._count, timestamp, windows))


def _sorted_values(element: tuple[Any, Iterable[Any]]) -> tuple[Any, list[Any]]:
    key, values = element
    return key, sorted(values)


def _grouped(pipeline: beam.Pipeline) -> Outputs:
    pairs = pipeline | beam.Create([(f"key {index % 7}", index) for index in range(40)]) | beam.Reshuffle()
    return {"groups": pairs | beam.GroupByKey() | beam.Map(_sorted_values)}


def _combined(pipeline: beam.Pipeline) -> Outputs:
    pairs = pipeline | beam.Create([(index % 3, index) for index in range(40)])
    numbers = pairs | beam.Values()
    return {
        "per key": pairs | beam.CombinePerKey(sum),
        "global": numbers | beam.CombineGlobally(sum),
        "mean": numbers | beam.combiners.Mean.Globally(),
    }


def _empty(pipeline: beam.Pipeline) -> Outputs:
    nothing = pipeline | beam.Create([])
    return {
        "sum": nothing | beam.CombineGlobally(sum),
        "groups": nothing | beam.Map(lambda element: (element, 1)) | beam.GroupByKey(),
        "dealt": nothing | beam.Reshuffle(),
        "flat": (nothing, nothing) | beam.Flatten(),
    }


def _several_outputs(pipeline: beam.Pipeline) -> Outputs:
    numbers = pipeline | beam.Create(range(10))
    parted = numbers | beam.ParDo(_CountAtTheEnd()).with_outputs("large", "counts", main="small")
    # How many bundles there are is the runner's affair; what they count together is not.
    total = parted.counts | beam.CombineGlobally(sum)
    return {"small": parted.small, "large": parted.large, "total": total}


def _flattened(pipeline: beam.Pipeline) -> Outputs:
    ones = pipeline | "Ones" >> beam.Create([1, 2])
    tens = pipeline | "Tens" >> beam.Create([10, 20, 20])
    return {"all": (ones, tens, ones) | beam.Flatten(), "one": (tens,) | "Alone" >> beam.Flatten()}


def _with_side_inputs(pipeline: beam.Pipeline) -> Outputs:
    numbers = pipeline | beam.Create([1, 2, 3])
    total = numbers | beam.CombineGlobally(sum)
    names = pipeline | "Names" >> beam.Create([(1, "one"), (2, "two")])

    def describe(number: int, total: int, names: dict[int, str], empty: Iterable[int], factor: int) -> Any:
        return number * factor, total, names.get(number), list(empty)

    return {
        "described": numbers
        | beam.Map(
            describe,
            beam.pvalue.AsSingleton(total),
            names=beam.pvalue.AsDict(names),
            empty=beam.pvalue.AsIter(numbers | beam.Filter(lambda number: number > 9)),
            factor=10,
        )
    }


def _of_equal_keys(pipeline: beam.Pipeline) -> Outputs:
    """Keys whose hash differs from process to process, and None."""
    keys: list[Any] = [("a", 1), "a", None, b"a", ("a", 1), "a", None, 1]
    pairs = pipeline | beam.Create(keys) | beam.Reshuffle() | beam.Map(lambda key: (key, 1))
    return {"counts": pairs | beam.CombinePerKey(sum)}


_PIPELINES = {
    "grouped": _grouped,
    "combined": _combined,
    "empty": _empty,
    "several outputs": _several_outputs,
    "flattened": _flattened,
    "side inputs": _with_side_inputs,
    "equal keys": _of_equal_keys,
}


def _results(
    build: Callable[[beam.Pipeline], Outputs], folder: pathlib.Path, runner: Any, *flags: str
) -> dict[str, list[str]]:
    """Returns the elements of every output, each written by a sink of its own."""
    folder.mkdir()
    pipeline = beam.Pipeline(runner=runner, options=PipelineOptions(list(flags)))
    outputs = build(pipeline)
    for name, output in outputs.items():
        _ = output | f"Print {name}" >> beam.Map(repr) | f"Write {name}" >> beam.io.WriteToText(f"{folder}/{name}")
    run_pipeline(pipeline)
    found = {}
    for name in outputs:
        parts = glob.glob(f"{folder}/{name}-*")
        assert parts
        found[name] = sorted(line for part in parts for line in pathlib.Path(part).read_text().splitlines())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", _PIPELINES)
def test_results_are_those_of_one_process(name: str, tmp_path: pathlib.Path, cluster: Any) -> None:
    """Everything that a pipeline is made of gives the in-process runner's elements, in every sink."""
    address = f"--dask_client_address={cluster.scheduler_address}"
    here = _results(_PIPELINES[name], tmp_path / "here", FnApiRunner())
    there = _results(_PIPELINES[name], tmp_path / "there", CorrectedDaskRunner(), address)
    assert there == here
    one_partition = _results(_PIPELINES[name], tmp_path / "one", CorrectedDaskRunner(), address, "--dask_npartitions=1")
    assert one_partition == here


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path: pathlib.Path, cluster: Any) -> None:
    """A worker that is killed in the middle leaves its work to others, and nothing is lost or counted twice."""
    was_killed = tmp_path / "killed"

    def weigh(element: int) -> tuple[int, int]:
        if element == 7 and not was_killed.exists():
            was_killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return element % 4, element

    def build(pipeline: beam.Pipeline) -> Outputs:
        weighed = pipeline | beam.Create(range(40)) | beam.Reshuffle() | beam.Map(weigh)
        return {"sums": weighed | beam.CombinePerKey(sum), "all": weighed}

    address = f"--dask_client_address={cluster.scheduler_address}"
    there = _results(build, tmp_path / "there", CorrectedDaskRunner(), address)
    assert was_killed.exists()
    assert there == _results(build, tmp_path / "here", FnApiRunner())


class _Model(list[int]):
    """What a DoFn shares; `Shared` keeps a weak reference to it."""


class _UseShared(beam.DoFn):
    def __init__(self, log: str) -> None:
        self._log = log
        self._shared = Shared()

    def setup(self) -> None:
        def load() -> _Model:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            return _Model([10])

        self._model = self._shared.acquire(load)

    def process(self, element: int) -> Iterator[int]:
        yield element * self._model[0]


@pytest.mark.slow
def test_a_model_is_loaded_once_per_process(tmp_path: pathlib.Path, cluster: Any) -> None:
    """What a DoFn shares is loaded once by each worker that has bundles of it, however many they are."""
    log = tmp_path / "loads"

    def build(pipeline: beam.Pipeline) -> Outputs:
        numbers = pipeline | beam.Create(range(40)) | beam.Reshuffle()
        return {"tens": numbers | beam.ParDo(_UseShared(str(log)))}

    address = f"--dask_client_address={cluster.scheduler_address}"
    results = _results(build, tmp_path / "there", CorrectedDaskRunner(), address, "--dask_npartitions=20")
    assert results["tens"] == sorted(str(10 * number) for number in range(40))
    processes = log.read_text().split()
    assert 1 <= len(processes) == len(set(processes)) <= 2


@pytest.mark.slow
def test_failures_are_told(cluster: Any) -> None:
    """What a worker raises on purpose ends the run in its words."""

    def fail(element: int) -> None:
        raise DataError(f"a.jsonl, line {element}: bad")

    options = PipelineOptions([f"--dask_client_address={cluster.scheduler_address}"])
    pipeline = beam.Pipeline(runner=CorrectedDaskRunner(), options=options)
    _ = pipeline | beam.Create([3]) | beam.Map(fail)
    with pytest.raises(PipelineError, match=r"^a\.jsonl, line 3: bad$"):
        run_pipeline(pipeline)


@pytest.mark.slow
def test_no_metrics(cluster: Any) -> None:
    """Metrics are refused in words, and a run has None of them."""
    options = PipelineOptions([f"--dask_client_address={cluster.scheduler_address}"])
    pipeline = beam.Pipeline(runner=CorrectedDaskRunner(), options=options)
    _ = pipeline | beam.Create([3])
    assert run_pipeline(pipeline) is None
    result = pipeline.run()
    with pytest.raises(NotImplementedError, match="the Dask runner keeps no metrics"):
        result.metrics()
    assert result.cancel() == "CANCELLED"


class _Stateful(beam.DoFn):
    _SEEN = BagStateSpec("seen", coders.VarIntCoder())

    def process(self, element: tuple[str, int], seen: Any = beam.DoFn.StateParam(_SEEN)) -> None:  # noqa: B008
        seen.add(element[1])


class _Restrictions(beam.RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 1)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return 1


class _Splittable(beam.DoFn):
    def process(self, element: Any, tracker: Any = beam.DoFn.RestrictionParam(_Restrictions())) -> None:  # noqa: B008
        tracker.try_claim(0)


class _Finalizing(beam.DoFn):
    def process(self, element: Any, finalizer: Any = beam.DoFn.BundleFinalizerParam) -> None:
        finalizer.register(print)


_REFUSED: dict[str, tuple[Callable[[beam.Pipeline], Any], str]] = {
    "state": (
        lambda pipeline: pipeline | beam.Create([("a", 1)]) | "Step" >> beam.ParDo(_Stateful()),
        "cannot do state and timers (in step Step). Take another runner for this pipeline.",
    ),
    "splittable": (
        lambda pipeline: pipeline | beam.Create([1]) | "Step" >> beam.ParDo(_Splittable()),
        "cannot do splittable DoFns and native reads (in step Step). Take another runner for this pipeline.",
    ),
    "finalization": (
        lambda pipeline: pipeline | beam.Create([1]) | "Step" >> beam.ParDo(_Finalizing()),
        "cannot do bundle finalization (in step Step). Take another runner for this pipeline.",
    ),
    "reads": (
        lambda pipeline: pipeline | "Step" >> beam.io.ReadFromText(__file__),
        "cannot do native reads (in step Step/Read). Read files in a DoFn of your own: beam.Create(files) | ParDo.",
    ),
    "windows": (
        lambda pipeline: (
            pipeline
            | beam.Create([1])
            | beam.Map(lambda element: TimestampedValue(element, element))
            | "Step" >> beam.WindowInto(FixedWindows(10))
        ),
        "cannot do windows other than the global one (in step Step). Take another runner for this pipeline.",
    ),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_it_cannot_do_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a cluster is started or sought, the step is named that cannot run."""
    monkeypatch.setattr(dask_runner, "_connect", None)
    build, message = _REFUSED[kind]
    pipeline = beam.Pipeline(runner=CorrectedDaskRunner(), options=PipelineOptions([]))
    _ = build(pipeline)
    with pytest.raises(UsageError) as caught:
        pipeline.run()
    assert str(caught.value) == f"--runner=DaskRunner {message}"


def test_a_cluster_of_our_own_is_open_to_this_machine_alone() -> None:
    """Scheduler, workers and the pages about them listen at loopback addresses."""
    client, own = dask_runner._connect({}, num_workers=1)
    assert own is not None
    with own, client:
        addresses = listening(family(os.getpid()))
        assert addresses
        assert open_to_others(addresses) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheduler_file": "/no/such.json"}, "--dask_scheduler_file=/no/such.json: no such file."),
        (
            {"address": "tcp://127.0.0.1:1", "timeout": 0.2},
            "--dask_client_address=tcp://127.0.0.1:1: no Dask scheduler",
        ),
        ({"address": "nonsense://x"}, "--dask_client_address=nonsense://x: no Dask scheduler answers there"),
    ],
)
def test_clusters_that_are_not_there(given: dict[str, Any], message: str) -> None:
    """Where no scheduler is, the flag is named, and nobody waits for one to appear."""
    with pytest.raises(UsageError, match=re.escape(message)):
        dask_runner._connect(given, num_workers=1)
