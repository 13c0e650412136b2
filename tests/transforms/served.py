"""A tiny model and its manifests on disk, for prompts that are answered in pipelines."""

import dataclasses
import pathlib
import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler, PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult

from calm_beam.checkpoints import load_checkpoint
from calm_beam.manifest import Calibration, DataRecord, GroupRecord, write_manifest
from calm_beam.serving import Generator
from calm_beam.transforms import NamedPrompt
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import id_rows, write_model

PROMPTS = [tuple(row["input_ids"]) for row in id_rows(40)]
NAMED = [NamedPrompt(prompt=prompt, id=f"request {number}") for number, prompt in enumerate(PROMPTS)]
_PARTIAL = ".partial"


class Served:
    """A model with a manifest, in a folder."""

    def __init__(self, folder: pathlib.Path, *entries: Calibration, is_broken: bool = False) -> None:
        """Writes model and manifest; by default the manifest has one entry, at threshold 0.2."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.model = str(write_model(folder / "model", is_broken=is_broken))
        self.manifest = self.add_manifest("manifest.json", *(entries or (build_entry(0.2),)))

    def add_manifest(self, name: str, *entries: Calibration, model: str | None = None, **changes: Any) -> str:
        """Writes a manifest, by default of the model, and returns its path."""
        manifest = build_served_manifest(load_checkpoint(model or self.model), entries, **changes)
        path = self.folder / name
        write_manifest(manifest, path)
        return str(path)

    def add_grouped_manifest(self, name: str, thresholds: Mapping[str | None, float | None]) -> str:
        """Writes a manifest with an entry for each group, of 100 examples, and returns its path."""
        entries = []
        for group, threshold in thresholds.items():
            entry = build_entry(threshold, group=group)
            count = 100 * (len(thresholds) - 1) if group is None else 100
            entries.append(dataclasses.replace(entry, path=(dataclasses.replace(entry.path[0], n=count),)))
        groups = tuple(GroupRecord(name=group, examples=100) for group in thresholds if group is not None)
        data = DataRecord(
            patterns=("data/*.jsonl",),
            examples=100 * len(groups),
            duplicates=0,
            failed=0,
            truncated=0,
            fingerprint="sha256:64",
            groups=groups,
        )
        return self.add_manifest(name, *entries, data=data)

    def generator(self, manifest: str | None = None, **choice: Any) -> Generator:
        """Returns a generator that answers one prompt at a time."""
        return Generator.from_manifest(manifest or self.manifest, self.model, **choice)


def run(
    elements: Iterable[Any],
    handler: ModelHandler[Any, Any, Any],
    folder: pathlib.Path,
    *,
    options: Sequence[str] = (),
) -> tuple[list[Any], dict[str, int]]:
    """Returns the results of a pipeline, and its counters."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(list(options)))
    folder.mkdir()
    _ = (
        pipeline
        | beam.Create(list(elements))
        | beam.Reshuffle()
        | RunInference(handler)
        | beam.ParDo(Collect(str(folder)))
    )
    result = pipeline.run()
    result.wait_until_finish()
    return collected(folder), counts(result)


def counts(result: PipelineResult) -> dict[str, int]:
    """Returns a run's counters, and of each distribution how many values it has."""
    metrics = result.metrics().query()
    counters = {counter.key.metric.name: counter.committed for counter in metrics["counters"]}
    return counters | {each.key.metric.name: each.committed.count for each in metrics["distributions"]}


class Collect(beam.DoFn):
    """Stores elements in files of a folder, from any process."""

    def __init__(self, folder: str) -> None:
        """Takes the folder to store them in."""
        self._folder = folder

    def process(self, element: Any) -> None:
        """Writes a file of one element at once, since a test may look while a pipeline runs."""
        path = pathlib.Path(self._folder, uuid.uuid4().hex)
        partial = path.with_suffix(_PARTIAL)
        partial.write_bytes(pickle.dumps(element))
        partial.rename(path)


def collected(folder: pathlib.Path) -> list[Any]:
    """Returns the elements that `Collect` has stored, in no order."""
    return [pickle.loads(path.read_bytes()) for path in folder.iterdir() if path.suffix != _PARTIAL]


def by_example(results: Iterable[PredictionResult]) -> dict[Any, list[PredictionResult]]:
    """Returns results by their example."""
    found: dict[Any, list[PredictionResult]] = {}
    for result in results:
        found.setdefault(result.example, []).append(result)
    return found
