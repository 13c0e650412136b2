"""Checks that `RunInference` and `MonitorRisk` give on a Flink cluster what they give in one process.

    python -m tools.flink.serving --checks=answers,swap,watch,kill

On the demo model, under a manifest calibrated here, on a cluster of two TaskManagers:

* answers: a batch of prompts is answered to the bit as in one process, and the two workers load one model.
* swap: in a stream, a side input names another manifest; each window is answered under its own.
* watch: in a stream, each window looks for the newest manifest of a folder; one that is written there soon answers.
* kill: in a stream with checkpoints, a TaskManager is killed with SIGKILL once the monitor has a state, and started
  again; answers, states and alarms are those of one process, so that no loss counts twice or is left out.

Prints a line for each check; the exit status is 1 if one finds a difference. Needs the files that `make flink` fetches.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult

from calm_beam.inputs.demo import embedded
from calm_beam.manifest import read_manifest
from calm_beam.transforms import EarlyExitModelHandler, NamedPrompt

from . import served
from .checks import Checks
from .cluster import Cluster, running_cluster
from .files import EngineError, Engines

# Flags that pipelines of a user need beyond the cluster's own flags.
_KEPT_WORKERS = "--environment_cache_millis=10000"
_STREAM = ("--streaming", _KEPT_WORKERS)
_CHECKPOINTS = (
    "--checkpointing_interval=3000",
    # Without it, Flink's runner may keep what a bundle gave until another bundle begins, which may never be.
    "--finish_bundle_before_checkpointing",
)
# The runner cannot store a stream that waits for a side input: a stream with one has no checkpoints. Its sources would
# then end at once, and the stream with them.
_NO_CHECKPOINTS = ("--shutdown_sources_after_idle_ms=600000",)
# Flink's attempts, more than a kill takes.
_TRIES = 10
# Far more than a stream takes: one that hangs is reported as such.
_LONGEST = 420.0
_SECONDS_APART, _WAIT_SECONDS = 2.0, 1.5
_WINDOW_WAIT_SECONDS = _WAIT_SECONDS * served.WINDOW_SECONDS / _SECONDS_APART
_TASK_MANAGER = "task-manager-1"
_DOWN_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check.

    Attributes:
      seconds: How long the cluster took.
      wrong: What is not as it should be; nothing if all is well.
      seen: What was counted.
    """

    seconds: float
    wrong: tuple[str, ...]
    seen: str

    @property
    def in_words(self) -> str:
        """The line of a check."""
        return f"{'; '.join(self.wrong) or 'equal'}, {self.seconds:.0f} s; {self.seen}"


class Serving:
    """Prompts of the demo, and two manifests of its model that let tokens exit at different confidences."""

    checks = ("answers", "swap", "watch", "kill")

    def __init__(self, folder: pathlib.Path, *, examples: int = 40) -> None:
        """Calibrates twice in one process, unless the folder has the manifests already.

        Raises:
          EngineError: If that fails.
        """
        checks = Checks(folder, examples=examples)
        self._folder = folder
        self._manifests = []
        for name, flags in (("first", ()), ("second", ("--thresholds=0.97,0.8,0.7",))):
            output = folder / name
            if not (output / "manifest.json").exists() and checks.start("calibrate", output, flags).wait():
                raise EngineError(f"calibrate failed; see {output}.log")
            self._manifests.append(str(output / "manifest.json"))
        with open(folder / "rows.jsonl", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        self._prompts = tuple(NamedPrompt(id=row["id"], prompt=row["input"]) for row in rows)
        self._windows = math.ceil(len(self._prompts) * _SECONDS_APART / served.WINDOW_SECONDS)

    def run(self, check: str, cluster: Cluster) -> Finding:
        """Runs a check on a cluster."""
        checks: Mapping[str, Callable[[Cluster], Finding]] = {
            "answers": self._answers,
            "swap": self._swap,
            "watch": self._watch,
            "kill": self._kill,
        }
        return checks[check](cluster)

    def _answers(self, cluster: Cluster) -> Finding:
        wrong: list[str] = []
        loads, seconds = {}, 0.0
        for is_shared in (True, False):
            here, there = self._folders(f"answers-{'shared' if is_shared else 'own'}")
            self._answer_batch(self._handler_here(), folder=here).run().wait_until_finish()
            # Prompts by twos, so that there is something for each of two workers.
            handler = self._handler(share_model_across_processes=is_shared, min_batch_size=2, max_batch_size=2)
            began = time.monotonic()
            result = self._answer_batch(handler, folder=there, flags=(*cluster.flags, _KEPT_WORKERS)).run()
            result.wait_until_finish()
            seconds = seconds or time.monotonic() - began
            wrong += differences(here, there)
            loads[is_shared] = (_values(result, "model-load-msec"), _values(result, "load_model_latency_milli_secs"))
        (shared, workers), (own, _) = loads[True], loads[False]
        if shared != 1:
            wrong.append(f"{shared} models were loaded where processes share one")
        seen = f"{len(self._prompts)} prompts; {shared} model for {workers} workers, {own} where they do not share it"
        return Finding(seconds=seconds, wrong=tuple(wrong), seen=seen)

    def _swap(self, cluster: Cluster) -> Finding:
        here, there = self._folders("swap")
        prompts = self._timed(self._prompts)
        first, second = self._manifests
        paths = (first,) * (self._windows // 2) + (second,) * (self._windows - self._windows // 2)
        manifests = served.Timed(elements=paths, seconds_apart=served.WINDOW_SECONDS)

        def build(
            handler: EarlyExitModelHandler,
            prompts: beam.PTransform,
            manifests: beam.PTransform,
            folder: pathlib.Path,
            **run: Any,
        ) -> beam.Pipeline:
            pipeline = _pipeline(**run)
            named = (
                pipeline
                | "Manifests" >> manifests
                | "ManifestWindows" >> served.in_windows()
                | beam.Map(served.metadata_of)
            )
            asked = pipeline | "Prompts" >> prompts | "PromptWindows" >> served.in_windows()
            served.answered(asked, handler, folder=folder, model_metadata_pcoll=named)
            return pipeline

        build(self._handler_here(), prompts.at_once(), manifests.at_once(), here).run().wait_until_finish()
        streams = (
            prompts.one_by_one(wait_seconds=_WAIT_SECONDS),
            manifests.one_by_one(wait_seconds=_WINDOW_WAIT_SECONDS),
        )
        pipeline = build(self._handler(), *streams, there, flags=(*cluster.flags, *_STREAM, *_NO_CHECKPOINTS))
        with _streaming(pipeline, cluster) as (_, began):
            _until(lambda: _has_all(here, there))
            seconds = time.monotonic() - began
        return Finding(seconds=seconds, wrong=differences(here, there), seen=self._by_manifest(there))

    def _watch(self, cluster: Cluster) -> Finding:
        here, there = self._folders("watch")
        first, second = self._manifests
        for manifest in self._manifests:
            self._answer_batch(self._handler_here(manifest), folder=here).run().wait_until_finish()
        names = there / "manifests"
        _write(first, names / "1.json")
        pipeline = _pipeline(flags=(*cluster.flags, *_STREAM, *_NO_CHECKPOINTS))
        looks = served.Timed(elements=(str(names),) * self._windows, seconds_apart=served.WINDOW_SECONDS)
        manifests = (
            pipeline
            | "Looks" >> looks.one_by_one(wait_seconds=_WINDOW_WAIT_SECONDS)
            | "LookWindows" >> served.in_windows()
            | beam.Map(served.newest_manifest)
        )
        prompts = pipeline | "Prompts" >> self._timed(self._prompts).one_by_one(wait_seconds=_WAIT_SECONDS)
        served.answered(prompts | served.in_windows(), self._handler(), folder=there, model_metadata_pcoll=manifests)
        with _streaming(pipeline, cluster) as (_, began):
            _until(lambda: len(served.stored(there / served.ANSWERS)) >= len(self._prompts) / 4)
            before = {row["id"]: row["by"] for row in served.stored(there / served.ANSWERS)}
            _write(second, names / "2.json")
            _until(lambda: len(served.stored(there / served.ANSWERS)) >= len(self._prompts))
            seconds = time.monotonic() - began
        rows = {row["id"]: row for row in served.stored(there / served.ANSWERS)}
        expected = [_text(row) for row in served.stored(here / served.ANSWERS)]
        digests = [f"{read_manifest(path).digest}#" for path in self._manifests]
        last = rows.get(str(self._prompts[-1].id), {"by": "nothing"})["by"]
        wrong = {
            f"{len(rows)} of {len(self._prompts)} prompts are answered": len(rows) != len(self._prompts),
            "answers differ": any(_text(row) not in expected for row in rows.values()),
            "the second manifest answers before it was written": not all(
                by.startswith(digests[0]) for by in before.values()
            ),
            f"the last answer is by {last}": not last.startswith(digests[1]),
        }
        found = tuple(words for words, is_wrong in wrong.items() if is_wrong)
        return Finding(seconds=seconds, wrong=found, seen=f"{self._by_manifest(there)}; written after {len(before)}")

    def _kill(self, cluster: Cluster) -> Finding:
        here, there = self._folders("kill")
        prompts = self._timed(self._drifting())

        def build(
            handler: EarlyExitModelHandler, source: beam.PTransform, folder: pathlib.Path, **run: Any
        ) -> beam.Pipeline:
            pipeline = _pipeline(**run)
            asked = pipeline | "Prompts" >> source | served.in_windows()
            served.watched(served.answered(asked, handler, folder=folder), folder=folder)
            return pipeline

        build(self._handler_here(), prompts.at_once(), here).run().wait_until_finish()
        source = prompts.one_by_one(wait_seconds=_WAIT_SECONDS)
        with _streaming(
            build(self._handler(), source, there, flags=(*cluster.flags, *_STREAM, *_CHECKPOINTS)), cluster
        ) as (
            job,
            began,
        ):
            _until(lambda: len(served.stored(there / served.STATES)) >= 2)
            before = {name: len(served.stored(there / name)) for name in _OUTPUTS}
            cluster.kill(_TASK_MANAGER)
            time.sleep(_DOWN_SECONDS)
            cluster.start(_TASK_MANAGER)
            _until(lambda: _has_all(here, there))
            seconds = time.monotonic() - began
            checkpoints = cluster.answer(f"jobs/{job}/checkpoints")["counts"]
        wrong = list(differences(here, there))
        if not checkpoints["restored"]:
            wrong.append("no checkpoint was restored")
        if not served.stored(here / served.ALARMS):
            wrong.append("there is no alarm to compare")
        counted = max((row["monitor"]["n"] for row in served.stored(there / served.STATES)), default=0)
        seen = ", ".join(f"{len(served.stored(there / name))} {name} ({before[name]} at the kill)" for name in _OUTPUTS)
        seen += f", {counted} losses; {checkpoints['completed']} checkpoints, restored {checkpoints['restored']} times"
        return Finding(seconds=seconds, wrong=tuple(wrong), seen=seen)

    def _drifting(self) -> tuple[NamedPrompt, ...]:
        """Returns the prompts; in place of the second half, the one that loses most, each time with another id."""
        folder, _ = self._folders("losses")
        self._answer_batch(self._handler_here(), folder=folder).run().wait_until_finish()
        losses = {row["id"]: row["loss"] for row in served.stored(folder / served.ANSWERS)}
        worst = max(self._prompts, key=lambda prompt: losses[prompt.id])
        half = len(self._prompts) // 2
        again = [dataclasses.replace(worst, id=f"again {number}") for number in range(half, len(self._prompts))]
        return (*self._prompts[:half], *again)

    def _answer_batch(
        self, handler: EarlyExitModelHandler, *, folder: pathlib.Path, flags: Sequence[str] | None = None
    ) -> beam.Pipeline:
        pipeline = _pipeline(flags=flags)
        served.answered(pipeline | beam.Create(self._prompts) | beam.Reshuffle(), handler, folder=folder)
        return pipeline

    def _handler(self, **settings: Any) -> EarlyExitModelHandler:
        return EarlyExitModelHandler(self._manifests[0], embedded.MODEL, **_SERVED, **settings)

    def _handler_here(self, manifest: str | None = None) -> EarlyExitModelHandler:
        """Returns a handler for one process, which holds a model of its own: workers would find and share it."""
        return EarlyExitModelHandler(
            manifest or self._manifests[0], embedded.MODEL, **_SERVED, share_model_across_processes=False
        )

    def _timed(self, prompts: Iterable[NamedPrompt]) -> served.Timed:
        return served.Timed(elements=tuple(prompts), seconds_apart=_SECONDS_APART)

    def _folders(self, name: str) -> tuple[pathlib.Path, pathlib.Path]:
        """Returns where one process and where the cluster stores what a check gives; both are empty."""
        folders = self._folder / "one-process" / name, self._folder / "flink" / name
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folders

    def _by_manifest(self, folder: pathlib.Path) -> str:
        counts = collections.Counter(row["by"].split("#")[0] for row in served.stored(folder / served.ANSWERS))
        first, second = (counts[read_manifest(path).digest] for path in self._manifests)
        return f"{first} answers under the first manifest, {second} under the second"


_OUTPUTS = (served.ANSWERS, served.STATES, served.ALARMS)
_SERVED: dict[str, Any] = {
    "consistency": "textual",
    "delta": 0.3,
    "probe_share": 1,
    "probe_salt": "of a check",
}


def _pipeline(*, flags: Sequence[str] | None = None) -> beam.Pipeline:
    """Returns an empty pipeline with flags as a user passes them; without, for one process."""
    if flags is None:
        return beam.Pipeline(runner=FnApiRunner())
    return beam.Pipeline(options=PipelineOptions(list(flags)))


@contextlib.contextmanager
def _streaming(pipeline: beam.Pipeline, cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Runs a stream, and cancels it when the block ends; gives Flink's id of the job, and when it was begun."""
    began = time.monotonic()
    pipeline.run()
    try:
        yield _running_job(cluster), began
    finally:
        # Beam's own `cancel` leaves the job to run on Flink.
        cluster.cancel_jobs()


def _running_job(cluster: Cluster) -> str:
    """Returns Flink's id of the one job, once it has begun.

    Raises:
      EngineError: If none begins.
    """
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        # A JobManager that is given a job answers late.
        with contextlib.suppress(OSError):
            if jobs := cluster.running_jobs():
                return jobs[0]
        time.sleep(0.2)
    raise EngineError(f"no job has begun; logs are in {cluster.folder}")


def _until(is_reached: Callable[[], bool]) -> None:
    """Waits until a condition holds, minutes at most: what is missing then is found by comparison."""
    end = time.monotonic() + _LONGEST
    while not is_reached() and time.monotonic() < end:
        time.sleep(0.2)


def _has_all(here: pathlib.Path, there: pathlib.Path) -> bool:
    return all(len(served.stored(there / name)) >= len(served.stored(here / name)) for name in _OUTPUTS)


def differences(here: pathlib.Path, there: pathlib.Path) -> tuple[str, ...]:
    """Returns what a run on the cluster has stored otherwise than one process."""
    wrong = []
    for name in _OUTPUTS:
        one, other = ({_text(row) for row in served.stored(folder / name)} for folder in (here, there))
        if one != other:
            wrong.append(f"{name}: {len(one - other)} missing, {len(other - one)} that one process does not have")
    return tuple(wrong)


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def _values(result: PipelineResult, name: str) -> int:
    """Returns how many values a distribution of a run has."""
    found = result.metrics().query(beam.metrics.MetricsFilter().with_name(name))["distributions"]
    return sum(each.committed.count for each in found)


def _write(manifest: str, path: pathlib.Path) -> None:
    """Copies a manifest atomically."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    shutil.copyfile(manifest, partial)
    partial.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks that flags select; returns 1 if one finds a difference, or an engine is not available."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.serving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink-serving", help="folder of what pipelines store")
    parser.add_argument("--checks", default=",".join(Serving.checks), help="comma-separated")
    flags = parser.parse_args(argv)
    is_good = True
    try:
        serving = Serving(pathlib.Path(flags.output).absolute())
        with running_cluster(Engines.here(), tries=_TRIES) as cluster:
            for check in flags.checks.split(","):
                finding = serving.run(check, cluster)
                print(f"{check}: {finding.in_words}", flush=True)
                is_good &= not finding.wrong
    except EngineError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
