"""Manifests of tiny models, for serving."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import (
    Calibration,
    DataRecord,
    DecodeRecord,
    GroupRecord,
    Manifest,
    ModelRecord,
    PathEntry,
)
from tests.calm_beam.manifest.builders import build_plan_record

STEPS = 6


def build_entry(threshold: float | None, *, rule: ExitRule | None = None, **changes: Any) -> Calibration:
    """Returns an entry that accepts one threshold, or rejects 0.9, with the given fields changed."""
    step = PathEntry(
        threshold=0.9 if threshold is None else threshold,
        n=200,
        risk=0.3 if threshold is None else 0.03,
        p_value=0.9 if threshold is None else 0.001,
        rejected=threshold is not None,
        layers=3,
    )
    values: dict[str, Any] = {
        "consistency": "textual",
        "metric": "token_f1",
        "loss": "dissimilarity",
        "delta": 0.1,
        "epsilon": 0.05,
        "p_value": "hoeffding_bentkus",
        "procedure": "fixed_sequence",
        "threshold": threshold,
        "layers": 4 if threshold is None else 3,
        "risk": 0 if threshold is None else step.risk,
        "path": (step,),
    }
    if threshold is not None:
        positions = scheduled_thresholds(rule or ExitRule(), (threshold,), max_decode_length=STEPS)[:, 0]
        values["threshold_by_position"] = tuple(positions.tolist())
    return Calibration(**{**values, **changes})


def build_served_manifest(
    checkpoint: Checkpoint,
    entries: Sequence[Calibration] = (),
    *,
    rule: ExitRule | None = None,
    vocabulary: Vocabulary | None = None,
    decode: dict[str, Any] | None = None,
    **changes: Any,
) -> Manifest:
    """Returns a manifest of a model, by default with one entry at threshold 0.5, with the given fields changed."""
    rule = rule or ExitRule()
    values: dict[str, Any] = {
        "created": "2026-01-31T12:00:00Z",
        "model": ModelRecord(
            uri="/models/tiny", fingerprint=checkpoint.fingerprint(), layers=checkpoint.config.num_decoder_layers
        ),
        "vocabulary": None if vocabulary is None else vocabulary.record(),
        "decode": DecodeRecord(
            **{
                "confidence": rule.confidence,
                "schedule": rule.schedule,
                "tau": rule.tau,
                "state_propagation": rule.state_propagation,
                "min_exit_layer": rule.min_exit_layer,
                "exit_interval": rule.exit_interval,
                "max_input_length": 32,
                "max_decode_length": STEPS,
                "task_prefix": "",
                "dtype": "float32",
                **(decode or {}),
            }
        ),
        "data": DataRecord(
            patterns=("data/*.jsonl",), examples=200, duplicates=0, failed=0, truncated=0, fingerprint="sha256:64"
        ),
        "calibrations": tuple(entries) or (build_entry(0.5, rule=rule),),
        "software": {},
    }
    return Manifest(**{**values, **changes})


def with_groups(manifest: Manifest) -> Manifest:
    """Returns a manifest with entries for all prompts at 0.3, for group en at 0.9, and for fr, which never exits."""
    safe, bold, never = (build_entry(threshold).path[0] for threshold in (0.9, 0.3, None))
    paths: dict[str | None, tuple[float | None, tuple[PathEntry, ...]]] = {
        None: (0.3, (safe, bold)),
        "en": (0.9, (safe, dataclasses.replace(never, threshold=0.3))),
        "fr": (None, (never,)),
    }
    size = manifest.data.examples // 2
    entries = tuple(
        build_entry(
            threshold,
            group=group,
            path=path if group is None else tuple(dataclasses.replace(step, n=size) for step in path),
        )
        for group, (threshold, path) in paths.items()
    )
    about: dict[str, Any] = {
        "consistency": "textual",
        "metric": "token_f1",
        "loss": "dissimilarity",
        "delta": 0.1,
        "epsilon": 0.05,
    }
    planned = build_plan_record().tests[0]
    return dataclasses.replace(
        manifest,
        calibrations=entries,
        plan=build_plan_record(
            model=manifest.model.fingerprint,
            thresholds=(0.9, 0.3),
            tests=tuple(dataclasses.replace(planned, group=entry.group, **about) for entry in entries),
            group_key="language",
        ),
        data=dataclasses.replace(
            manifest.data, groups=tuple(GroupRecord(name=name, examples=size) for name in ("en", "fr"))
        ),
    )
