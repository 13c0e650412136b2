"""Pipelines that answer prompts of the demo model and watch a promise, on any runner, and store what they give.

A module of its own, which workers import: what is defined in the program itself would be pickled with every step.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelMetadata, PredictionResult, RunInference
from apache_beam.transforms import window
from apache_beam.transforms.periodicsequence import PeriodicImpulse, RebaseMode
from apache_beam.utils.timestamp import Timestamp

from calm_beam.risk.monitor import WatchedRisk
from calm_beam.serving import ProbedAnswer
from calm_beam.transforms import EarlyExitModelHandler, MonitorRisk, SampledLosses

WINDOW_SECONDS = 10
ANSWERS, STATES, ALARMS = "answers", "states", "alarms"
_PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Elements, each with a time of its own, which is the same in every run.

    Attributes:
      elements: In the order of their times.
      seconds_apart: Between the times of two elements; the first is at 0.
    """

    elements: tuple[Any, ...]
    seconds_apart: float

    def at_once(self) -> beam.PTransform:
        """Returns a source of all elements."""
        # Beam takes the times for a part of the elements' type.
        return beam.Create([window.TimestampedValue(element, at) for at, element in self._timed()]).with_output_types(
            Any
        )

    def one_by_one(self, *, wait_seconds: float) -> beam.PTransform:
        """Returns a stream that ends: from its start on, an element every `wait_seconds`."""
        timed = [(Timestamp.of(at), element) for at, element in self._timed()]
        return PeriodicImpulse(
            start_timestamp=Timestamp.now(), fire_interval=wait_seconds, data=timed, rebase=RebaseMode.REBASE_ALL
        )

    def _timed(self) -> Iterator[tuple[float, Any]]:
        return ((number * self.seconds_apart, element) for number, element in enumerate(self.elements))


def in_windows() -> beam.PTransform:
    """Returns a transform that puts elements into windows of `WINDOW_SECONDS`."""
    return beam.WindowInto(window.FixedWindows(WINDOW_SECONDS))


def answered(
    prompts: beam.PCollection, handler: EarlyExitModelHandler, *, folder: pathlib.Path, **settings: Any
) -> Any:
    """Answers prompts under a manifest, stores the answers below a folder, and returns the results.

    Args:
      prompts: Each a `NamedPrompt` with an id.
      handler: Of the manifest; measures every answer.
      folder: A folder that all workers see.
      settings: Of `RunInference`.
    """
    results = prompts | "Answer" >> RunInference(handler, **settings)
    _ = results | "NameAnswers" >> beam.Map(_answer_row) | "StoreAnswers" >> store_rows(folder / ANSWERS)
    return results


def watched(results: beam.PCollection, *, folder: pathlib.Path) -> None:
    """Watches the promise of results, and stores its states and alarms below a folder."""
    risks = results | SampledLosses() | MonitorRisk(alpha=0.05)
    _ = risks.states | "NameStates" >> beam.Map(_state_row) | "StoreStates" >> store_rows(folder / STATES)
    _ = risks.alarms | "NameAlarms" >> beam.Map(_state_row) | "StoreAlarms" >> store_rows(folder / ALARMS)


def metadata_of(path: str) -> ModelMetadata:
    """Returns what tells `RunInference` of a manifest."""
    return ModelMetadata(model_id=path, model_name=pathlib.Path(path).stem)


def newest_manifest(folder: str) -> ModelMetadata:
    """Returns what tells `RunInference` of the last manifest of a folder, by name."""
    return metadata_of(str(max(pathlib.Path(folder).glob("*.json"))))


def store_rows(folder: pathlib.Path) -> beam.PTransform:
    """Returns a transform that stores rows in a folder, each different one as a file.

    A row that comes again after a failure adds none.
    """
    return beam.Map(_store, folder=str(folder))


def stored(folder: pathlib.Path) -> tuple[dict[str, Any], ...]:
    """Returns all rows of a folder, in an order of their content; none if there is no folder yet."""
    return tuple(json.loads(content) for content in sorted(path.read_bytes() for path in folder.glob("*.json")))


def _store(row: dict[str, Any], *, folder: str) -> None:
    content = json.dumps(row, sort_keys=True).encode()
    os.makedirs(folder, exist_ok=True)
    partial = pathlib.Path(folder, f"{uuid.uuid4().hex}{_PARTIAL}")
    partial.write_bytes(content)
    partial.rename(partial.with_name(f"{hashlib.sha256(content).hexdigest()}.json"))


def _answer_row(result: PredictionResult) -> dict[str, Any]:
    """Returns an answer to the last bit, the manifest that it was answered under, and what it loses."""
    answer = result.inference
    assert isinstance(answer, ProbedAnswer), "the handler measures every answer, and the demo's prompts have one"
    return {
        "id": result.example.id,
        "by": result.model_id,
        "text": answer.text,
        "tokens": answer.tokens,
        "exit_layers": answer.exit_layers,
        "confidences": answer.confidences,
        "loss": answer.loss.value,
    }


def _state_row(state: WatchedRisk) -> dict[str, Any]:
    """Returns the state of a promise after a window, to the last bit."""
    return dataclasses.asdict(state)
