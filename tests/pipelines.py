"""Tiny models, data sets and runs for tests of the pipeline and of the command line."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.checkpoints import Declared, write_native
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import DataFiles, Reading
from calm_beam.manifest import Manifest, ModelRecord, PlannedTest, VocabularyRecord, read_manifest
from calm_beam.model import T5Config
from calm_beam.outputs import DecodeJob, Generation
from calm_beam.outputs.request import SweepAssignment
from calm_beam.transforms import Calibrate, ReadExamples, Sweep, WriteManifest
from calm_beam.transforms.metrics import ProgressLog
from tests.builders import build_arrays, build_config, train_vocabulary
from tests.plans import all_specs

CONFIG = build_config(num_encoder_layers=1)

BROKEN_ID = 63
"""The id whose states are not finite in a model written with `is_broken`; such a model never generates it."""

# One shape for all runs: XLA compiles once.
SETTINGS = DecodeSettings(
    rule=ExitRule(), thresholds=(0.9, 0.5, 0.2, 0.05, 0.0), max_input_length=32, max_decode_length=6
)
BATCH_SIZE = 4
SPECS = all_specs(
    consistencies=("textual", "risk"), metrics=("token_f1", "edit_distance"), deltas=(0.3, 0.6), epsilons=(0.1,)
)

TEXTUAL = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.3,), epsilons=(0.1,))

SHORT_FLAGS = (
    "--thresholds=0.05,0.9,0.5,0.2,0",
    "--max_input_length=32",
    "--max_decode_length=6",
    "--batch_size=4",
    "--num_shards=3",
)
"""Flags that give `SETTINGS` on the command line; the grid in an order of its own."""


def write_model(
    directory: pathlib.Path,
    *,
    config: T5Config = CONFIG,
    vocabulary: pathlib.Path | None = None,
    seed: int = 0,
    is_broken: bool = False,
) -> pathlib.Path:
    """Writes a random model in the native layout, without a vocabulary unless one is given, and returns its folder."""
    directory.mkdir(parents=True, exist_ok=True)
    source = vocabulary or directory / "none"
    if vocabulary is None:
        source.write_bytes(b"")
    arrays = build_arrays(config, seed)
    if is_broken:
        # A score of 0 is never the highest of 64.
        arrays["decoder/logits_dense/kernel"][:, BROKEN_ID] = 0
        # Weights must be finite for a reader to accept them: one column, 0 in all other embeddings, grows beyond
        # float32.
        arrays["token_embedder/embedding"][:, 0] = 0
        arrays["token_embedder/embedding"][BROKEN_ID, 0] = 100
        arrays["encoder/layers_0/pre_attention_layer_norm/scale"][0] = 3e38
    write_native(directory, config, arrays=arrays, vocabulary_path=source)
    if vocabulary is None:
        source.unlink()
        (directory / "sentencepiece.model").unlink()
    return directory


def write_vocabulary(path: pathlib.Path, *, size: int = 40) -> pathlib.Path:
    """Trains a small SentencePiece model on the prompts of `text_rows`, and returns its path."""
    return train_vocabulary(path, [row["input"] for row in text_rows(60)], size)


def id_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows of random token ids with ids; every seventh repeats the prompt before it. References are ids too."""
    generator = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        ids = generator.integers(2, BROKEN_ID, size=generator.integers(1, 9)).tolist()
        reference = generator.integers(2, BROKEN_ID, size=12).tolist()
        repeats = index % 7 == 6
        rows.append(
            {
                "id": f"row-{index}",
                "input_ids": rows[-1]["input_ids"] if repeats else [*ids, 1],
                "reference_ids": [reference, [7, 8, 9]],
            }
        )
    return rows


def text_rows(count: int) -> list[dict[str, Any]]:
    """Returns rows of short texts without ids, each fifth equal to the first."""
    nouns, verbs = ("cat", "dog", "owl", "fox", "hen"), ("sees", "hears", "likes", "finds")
    rows = []
    for index in range(count):
        place = 0 if index % 5 == 4 else index
        noun, verb = nouns[place % 5], verbs[place // 5 % 4]
        rows.append({"input": f"the {noun} {verb} {place}", "references": [f"the {noun}", verb]})
    return rows


def write_rows(path: pathlib.Path, rows: Iterable[object]) -> pathlib.Path:
    """Writes rows as JSONL and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def split_rows(folder: pathlib.Path, rows: Sequence[object], *, files: int) -> tuple[str, ...]:
    """Writes rows to several files, dealt out in turn, and returns their paths."""
    folder.mkdir()
    return tuple(str(write_rows(folder / f"part-{part}.jsonl", rows[part::files])) for part in range(files))


def build_assignment(
    folder: str, *, model: str, num_shards: int = 1, model_fingerprint: str = "sha256:0", vocabulary: str | None = None
) -> SweepAssignment:
    """Returns an assignment to decode into a folder; it expects another vocabulary, if any, than the one there."""
    job = DecodeJob(
        model=ModelRecord(uri=model, fingerprint=model_fingerprint, layers=CONFIG.num_decoder_layers),
        vocabulary=VocabularyRecord(fingerprint="sha256:1", extra_ids=0) if vocabulary else None,
        settings=SETTINGS,
        on_long="error",
        cluster_key=None,
        patterns=("data",),
        files=("data",),
        num_shards=num_shards,
        software={},
    )
    return SweepAssignment(
        directory=folder,
        job=job,
        vocabulary_path=vocabulary,
        declared=Declared(),
        batch_size=BATCH_SIZE,
        max_cache_tokens=None,
        exit_head="exact",
        on_error="fail",
        max_failures=None,
    )


def run_calibration(
    output: pathlib.Path,
    *,
    model: pathlib.Path,
    paths: Sequence[str],
    num_shards: int = 3,
    specs: Sequence[PlannedTest] = SPECS,
    settings: DecodeSettings = SETTINGS,
    on_error: str = "fail",
    on_long: str = "truncate",
    max_failures: int | None = None,
    created: str = "2026-01-31T12:00:00Z",
    progress: str | None = None,
    options: Sequence[str] = (),
    cluster_key: str | None = None,
    seed: int = 0,
) -> Manifest:
    """Runs the whole pipeline on the in-process runner, and returns the manifest it wrote into `output`."""
    guarantees = [
        Guarantee(
            spec.objective.consistency,
            spec.objective.metric,
            loss=spec.objective.loss,
            delta=spec.delta,
            epsilon=spec.epsilon,
            p_value=spec.p_value,
            procedure=spec.procedure,
        )
        for spec in specs
    ]
    log = ProgressLog(progress)
    reading = Reading(
        needs_references=any(guarantee.consistency == "risk" for guarantee in guarantees), cluster_key=cluster_key
    )
    # One name however they are divided, as a pattern would find them.
    data = DataFiles(patterns=("data/*.jsonl",), files=tuple(paths), reading=reading)
    with beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(list(options))) as pipeline:
        _ = (
            pipeline
            | ReadExamples(data, num_shards=num_shards, progress=log)
            | Sweep(
                model=str(model),
                output=str(output),
                exits=settings.rule,
                thresholds=settings.thresholds,
                task_prefix=settings.task_prefix,
                max_input_length=settings.max_input_length,
                max_decode_length=settings.max_decode_length,
                on_long=on_long,
                on_error=on_error,
                max_failures=max_failures,
                batch_size=BATCH_SIZE,
                progress=log,
            )
            | Calibrate(guarantees, seed=seed, max_failures=max_failures, created=created)
            | WriteManifest(str(output))
        )
    return read_manifest(output / "manifest.json")


def assert_same_generations(found: Iterable[Generation], expected: Iterable[Generation]) -> None:
    """Asserts that generations are equal in order, but for the last bits of confidences.

    Those depend on the batch, on some processors more than on others.
    """
    ours, theirs = list(found), list(expected)
    assert [_without_confidences(one) for one in ours] == [_without_confidences(one) for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for output, wanted in zip(one.outputs, other.outputs, strict=True):
            np.testing.assert_allclose(output.confidences, wanted.confidences, rtol=0, atol=1e-5)
        if one.max_rejected_confidence is not None and other.max_rejected_confidence is not None:
            np.testing.assert_allclose(one.max_rejected_confidence, other.max_rejected_confidence, rtol=0, atol=1e-5)


def _without_confidences(generation: Generation) -> Generation:
    """Returns a generation of the same shape with every confidence 0."""
    outputs = tuple(
        dataclasses.replace(output, confidences=(0.0,) * len(output.confidences)) for output in generation.outputs
    )
    rejected = generation.max_rejected_confidence
    zeros = None if rejected is None else (0.0,) * len(rejected)
    return dataclasses.replace(generation, outputs=outputs, max_rejected_confidence=zeros)


def without_time(manifest: Manifest) -> dict[str, object]:
    """Returns the manifest as plain values, without the fields that differ between two runs of the same calibration."""
    content = dataclasses.replace(manifest, created="2000-01-01T00:00:00Z").to_dict()
    return {key: value for key, value in content.items() if key != "digest"}


def without_engine(content: Any) -> Any:
    """Returns plain values without any engine, and without the digests that depend on it.

    Workers on other machines use XLA unless told otherwise, since their processors are unknown here.
    """
    if isinstance(content, dict):
        named = ("engine", "digest", "outputs", "job")
        return {key: without_engine(value) for key, value in content.items() if key not in named}
    return [without_engine(value) for value in content] if isinstance(content, list | tuple) else content
