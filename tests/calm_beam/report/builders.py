"""Complete calibrations with known content, stored as `calibrate` stores them, made without a model."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.publish import EarlierResult, RunProvenance, publish
from calm_beam.calibration.result import choose_thresholds, risk_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID
from calm_beam.manifest import ModelRecord, Plan, PlannedTest, VocabularyRecord
from calm_beam.metrics.registry import get_metric
from calm_beam.outputs import DecodeJob, FinishedSweep, Generation, Output, StoredShard, write_generations
from calm_beam.outputs.scoring import score_generation
from calm_beam.outputs.totals import CalibrationTotals, objectives_of
from tests.calm_beam.calibration.builders import build_example, build_generation
from tests.plans import all_specs, build_plan

NUM_LAYERS = 4
GRID = (0.9, 0.6, 0.3, 0.0)
SPECS = all_specs(
    consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.05, 0.2, 0.6), epsilons=(0.1,), p_value=None
)


def build_output(tokens: Sequence[int], layers: Sequence[int], confidences: Sequence[float] | None = None) -> Output:
    """Returns an output whose text is its ids, without eos."""
    return Output(
        text=" ".join(str(token) for token in tokens if token != EOS_ID),
        tokens=tuple(tokens),
        exit_layers=tuple(layers),
        confidences=tuple(confidences or [0.5] * len(tokens)),
    )


def random_generations(
    count: int, *, seed: int = 0, thresholds: int = len(GRID), length: int = 9, num_layers: int = NUM_LAYERS
) -> list[Generation]:
    """Returns examples whose outputs diverge from the full model's as thresholds fall; every tenth was cut."""
    generator = np.random.default_rng(seed)
    generations = []
    for index in range(count):
        size = int(generator.integers(2, length))
        tokens = generator.integers(3, 40, size=size)
        layers = np.full(size, num_layers)
        outputs = []
        for lane in range(thresholds + 1):
            if lane:
                layers = np.maximum(1, layers - generator.integers(0, 2, size=size))
                changed = generator.random(size) < 0.1
                tokens = np.where(changed, generator.integers(3, 40, size=size), tokens)
            eos = () if index % 10 == 9 else (EOS_ID,)
            missing = (7,) * (length - size) if index % 10 == 9 else ()
            ids = (*map(int, tokens), *missing, *eos)
            exits = (*map(int, layers), *(num_layers for _ in (*missing, *eos)))
            outputs.append(build_output(ids, exits, [float(c) for c in generator.random(len(ids))]))
        example = build_example(
            id=f"row-{index}", input=f"the prompt number {index}", references=(outputs[0].text,), line=index + 1
        )
        generations.append(build_generation(example=example, outputs=tuple(outputs)))
    return generations


def write_calibration(
    folder: pathlib.Path,
    generations: Sequence[Generation],
    *,
    specs: Sequence[PlannedTest] = SPECS,
    thresholds: Sequence[float] = GRID,
    calibrated: Sequence[float] | None = None,
    rule: ExitRule | None = None,
    vocabulary: VocabularyRecord | None = None,
    num_layers: int = NUM_LAYERS,
    max_decode_length: int = 9,
    num_shards: int = 3,
    joint_epsilon: float | None = None,
    model: str = "/models/tiny",
    fingerprint: str = "sha256:6d",
    patterns: Sequence[str] = ("data/*.jsonl",),
) -> pathlib.Path:
    """Calibrates generations and stores everything as the command does, and returns the output directory.

    Args:
      folder: Folder to write to; made if needed.
      generations: Generations at all thresholds of the grid.
      specs: Requested guarantees.
      thresholds: The grid that was decoded.
      calibrated: The part of it that is calibrated; all of it if omitted.
      rule: Exit rule to record.
      vocabulary: Vocabulary to record.
      num_layers: Decoder depth.
      max_decode_length: Longest output of the settings.
      num_shards: Number of files.
      joint_epsilon: Joint epsilon of the plan.
      model: Path of the model to record.
      fingerprint: The model's.
      patterns: Patterns of data files to record.
    """
    decoded = DecodeSettings(
        rule=rule or ExitRule(),
        thresholds=tuple(thresholds),
        max_input_length=32,
        max_decode_length=max_decode_length,
    )
    settings = dataclasses.replace(decoded, thresholds=tuple(calibrated or thresholds))
    record = ModelRecord(uri=model, fingerprint=fingerprint, layers=num_layers)
    job = DecodeJob(
        model=record,
        vocabulary=vocabulary,
        settings=decoded,
        on_long="truncate",
        cluster_key=None,
        patterns=tuple(patterns),
        files=("/data/a.jsonl",),
        num_shards=num_shards,
        software={"calm-beam": "0"},
    )
    stored = folder / "generations" / job.outputs()
    stored.mkdir(parents=True)
    job.write(str(stored))
    shards = []
    for shard in range(num_shards):
        part = generations[shard::num_shards]
        if not part:
            continue
        digest = job.shard_digest(shard, examples=[item.example for item in part])
        write_generations(job.shard_path(str(stored), shard), part, shard=shard, digest=digest)
        failed = sum(item.failure is not None for item in part)
        shards.append(StoredShard(shard=shard, examples=len(part), failed=failed, digest=digest))
    FinishedSweep.of(shards, job=job.digest(), examples=len(generations)).write(str(stored))

    plan = build_plan(
        specs,
        settings,
        model=fingerprint,
        vocabulary=job.vocabulary_identity(),
        joint_epsilon=joint_epsilon,
        on_error="worst_case",
    )
    lanes = [0, *(1 + decoded.thresholds.index(threshold) for threshold in settings.thresholds)]
    kept = [
        dataclasses.replace(item, outputs=tuple(item.outputs[lane] for lane in lanes if item.outputs))
        for item in generations
    ]
    rows = risk_rows(_totals(kept, plan), plan, num_layers=num_layers)
    failures = [(item.example.id, item.failure) for item in generations if item.failure is not None]
    manifest = RunProvenance(
        created="2026-01-31T12:00:00Z",
        model=record,
        vocabulary=vocabulary,
        settings=settings,
        patterns=job.patterns,
        software={"calm-beam": "0"},
    ).manifest(
        _totals(kept, plan),
        choose_thresholds(rows, plan, num_layers=num_layers),
        plan=plan,
        digest=plan.digest,
    )
    publish(str(folder), manifest, rows=rows, failures=failures, earlier=EarlierResult())
    return folder


def _totals(generations: Sequence[Generation], plan: Plan) -> CalibrationTotals:
    layout = layout_of(plan)
    objectives = objectives_of(plan.tests)
    metrics: dict[str, Any] = {objective.metric: get_metric(objective.metric) for objective in objectives}
    losses = [
        score_generation(item, objectives, metrics=metrics, num_thresholds=len(plan.thresholds)) for item in generations
    ]
    ids = [item.example.id for item in generations]
    return CalibrationTotals.of_examples(generations, layout).merge(
        CalibrationTotals.of_losses(ids, np.stack(losses), layout=layout, salt=plan.salt)
    )
