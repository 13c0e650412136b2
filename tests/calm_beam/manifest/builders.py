"""Small valid manifests for tests, sealed, with single values changed."""

import copy
import dataclasses
import gzip
import json
import math
import pathlib
from typing import Any

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.manifest import (
    EACH_VARIANT,
    PARETO,
    Calibration,
    ConfirmationRecord,
    CostRecord,
    DataRecord,
    DecodeRecord,
    EngineRecord,
    GroupRecord,
    Look,
    Manifest,
    ModelRecord,
    ParetoPlan,
    PathEntry,
    Plan,
    PlannedTest,
    SequentialPlan,
    SequentialRecord,
    SpeedRecord,
    Variant,
    VocabularyRecord,
    content_digest,
)

_WRITTEN = {1: "before.jsonl.gz", 2: "second.jsonl.gz"}
REMOVED = object()
"""Stands for "take this key away" in `changed` and `unsealed`."""


def build_path_entry(**changes: Any) -> PathEntry:
    """Returns a test that accepts threshold 0.9, with the given fields changed."""
    values: dict[str, Any] = {
        "threshold": 0.9,
        "n": 200,
        "risk": 0.0125,
        "p_value": 0.0007,
        "rejected": True,
        "layers": 5.5,
    }
    return PathEntry(**{**values, **changes})


def build_calibration(**changes: Any) -> Calibration:
    """Returns a calibration that accepts 0.9 and 0.8 and stops at 0.7, with the given fields changed."""
    values: dict[str, Any] = {
        "consistency": "textual",
        "metric": "rouge_l",
        "delta": 0.1,
        "epsilon": 0.05,
        "p_value": "hoeffding_bentkus",
        "procedure": "fixed_sequence",
        "threshold": 0.8,
        "layers": 4.25,
        "risk": 0.03,
        "path": (
            build_path_entry(),
            build_path_entry(threshold=0.8, risk=0.03, p_value=0.05, layers=4.25),
            build_path_entry(threshold=0.7, risk=0.08, p_value=0.4, rejected=False, layers=3.125),
        ),
    }
    return Calibration(**{**values, **changes})


def build_never_exit(**changes: Any) -> Calibration:
    """Returns a calibration that found no safe threshold, with the given fields changed."""
    values: dict[str, Any] = {
        "delta": 0.01,
        "threshold": None,
        "layers": 6,
        "risk": 0,
        "path": (build_path_entry(p_value=0.3, rejected=False),),
    }
    return build_calibration(**{**values, **changes})


def build_manifest(**changes: Any) -> Manifest:
    """Returns an early writer's manifest with two calibrations, with the given fields changed."""
    values: dict[str, Any] = {
        "created": "2026-01-31T12:00:00Z",
        "model": ModelRecord(uri="gs://models/t5-small", fingerprint="sha256:6d6f64656c", layers=6),
        "vocabulary": VocabularyRecord(fingerprint="sha256:766f636162", extra_ids=100),
        "decode": DecodeRecord(
            confidence="softmax",
            schedule="decay",
            tau=4.0,
            state_propagation="from_exit",
            min_exit_layer=1,
            exit_interval=1,
            max_input_length=512,
            max_decode_length=64,
            task_prefix="résume: ",
            dtype="bfloat16",
        ),
        "data": DataRecord(
            patterns=("gs://data/calibration-*.jsonl.gz",),
            examples=200,
            duplicates=3,
            failed=1,
            truncated=7,
            fingerprint="sha256:64617461",
        ),
        "calibrations": (build_calibration(), build_never_exit()),
        "software": {"jax": "0.8.1", "calm-beam": "0.1.0"},
    }
    return Manifest(**{**values, **changes})


def build_plan_record(**changes: Any) -> Plan:
    """Returns the plan behind `build_planned_manifest`, with the given fields changed."""
    tests = (
        PlannedTest(
            consistency="textual",
            metric="rouge_l",
            loss="dissimilarity",
            delta=0.1,
            epsilon=0.05,
            p_value="hoeffding_bentkus",
            procedure="fixed_sequence",
        ),
        PlannedTest(
            consistency="risk",
            metric="rouge_l",
            loss="signed",
            delta=0.02,
            epsilon=0.05,
            p_value="signed_mixture",
            procedure="bonferroni",
        ),
    )
    values: dict[str, Any] = {
        "thresholds": (0.9, 0.8, 0.7, 0.6),
        "tests": tests,
        "joint_epsilon": None,
        "cluster_key": None,
        "salt": "calm-beam/0",
        "on_error": "fail",
        "on_long": "truncate",
        "model": "sha256:6d6f64656c",
        "outputs": "0123456789abcdef01234567",
    }
    return Plan(**{**values, **changes})


def build_signed_calibration(**changes: Any) -> Calibration:
    """Returns a calibration of the signed loss by Bonferroni, 0.9 and 0.7 rejected, with the given fields changed."""
    values: dict[str, Any] = {
        "consistency": "risk",
        "loss": "signed",
        "delta": 0.02,
        "p_value": "signed_mixture",
        "procedure": "bonferroni",
        "threshold": 0.7,
        "layers": 3.5,
        "risk": 0.0025,
        "path": (
            build_path_entry(risk=-0.01, p_value=0.001),
            build_path_entry(threshold=0.8, risk=0.005, p_value=0.03, layers=4.25, rejected=False),
            build_path_entry(threshold=0.7, risk=0.0025, p_value=0.01, layers=3.5),
            build_path_entry(threshold=0.6, risk=0.03, p_value=1, layers=3.125, rejected=False),
        ),
    }
    return build_calibration(**{**values, **changes})


def build_positions(threshold: float, **changes: Any) -> tuple[float, ...]:
    """Returns the threshold of every position in `build_manifest`'s schedule, with fields of the rule changed."""
    decode = build_manifest().decode
    rule = ExitRule(**{"schedule": decode.schedule, "tau": decode.tau, **changes})
    return tuple(scheduled_thresholds(rule, (threshold,), max_decode_length=decode.max_decode_length)[:, 0].tolist())


def build_planned_manifest(**changes: Any) -> Manifest:
    """Returns a manifest with a plan, and two calibrations in the present format, with the given fields changed."""
    values: dict[str, Any] = {
        "plan": build_plan_record(),
        "calibrations": (
            build_calibration(loss="dissimilarity", threshold_by_position=build_positions(0.8)),
            build_signed_calibration(threshold_by_position=build_positions(0.7)),
        ),
    }
    return build_manifest(**{**values, **changes})


def build_looks() -> tuple[Look, ...]:
    """Returns looks of three rounds that lead to `build_signed_calibration`."""
    return (
        Look(n=60, threshold=None, layers=6, risk=0.01, log_capital=-0.5),
        Look(n=130, threshold=0.9, layers=5.25, risk=0.003, log_capital=-math.log(0.01)),
        Look(n=200, threshold=0.7, layers=3.5, risk=0.0025, log_capital=2.0),
    )


def build_sequential_manifest(**changes: Any) -> Manifest:
    """Returns the manifest of a calibration that stopped after three of five rounds, with the given fields changed."""
    plan = build_plan_record()
    values: dict[str, Any] = {
        "plan": dataclasses.replace(
            plan, tests=plan.tests[1:], sequential=SequentialPlan(round_examples=60, stop_at_layers=3.5)
        ),
        "sequential": SequentialRecord(rounds=3, of_rounds=5, of_examples=300, ended_by="stop_at_layers"),
        "calibrations": (build_signed_calibration(threshold_by_position=build_positions(0.7), looks=build_looks()),),
    }
    return build_manifest(**{**values, **changes})


def build_grouped_manifest(**changes: Any) -> Manifest:
    """Returns a manifest of the groups de, en and fr: en has the threshold of all prompts, de a lower one, fr none."""
    groups = (("de", 50), ("en", 120), ("fr", 30))
    whole = build_calibration(loss="dissimilarity", threshold_by_position=build_positions(0.8))
    sizes = dict(groups)

    def of_group(entry: Calibration, group: str) -> Calibration:
        path = tuple(dataclasses.replace(step, n=sizes[group]) for step in entry.path)
        return dataclasses.replace(entry, group=group, path=path)

    bold = build_calibration(
        loss="dissimilarity",
        threshold=0.7,
        layers=2.5,
        risk=0.02,
        threshold_by_position=build_positions(0.7),
        path=(
            build_path_entry(),
            build_path_entry(threshold=0.8, layers=3.0),
            build_path_entry(threshold=0.7, risk=0.02, layers=2.5),
        ),
    )
    never = build_never_exit(loss="dissimilarity", delta=whole.delta)
    entries = (whole, of_group(bold, "de"), of_group(whole, "en"), of_group(never, "fr"))
    planned = build_plan_record().tests[0]
    tests = tuple(dataclasses.replace(planned, group=entry.group) for entry in entries)
    values: dict[str, Any] = {
        "plan": build_plan_record(tests=tests, group_key="language"),
        "data": dataclasses.replace(
            build_manifest().data, groups=tuple(GroupRecord(name=name, examples=size) for name, size in groups)
        ),
        "calibrations": entries,
    }
    return build_manifest(**{**values, **changes})


VARIANTS = (
    Variant(tau=1.0, min_exit_layer=1),
    Variant(tau=1.0, min_exit_layer=2),
    Variant(tau=4.0, min_exit_layer=1),
    Variant(tau=4.0, min_exit_layer=2),
)
"""Those of `build_variants_manifest`."""


def build_variants_manifest(**changes: Any) -> Manifest:
    """Returns a manifest of four variants, with the given fields changed.

    60 of 200 examples selected the path; the first entry exits by tau 4 from layer 2, the second never.
    """
    first, second, _, last = VARIANTS
    n = 140
    entry = build_calibration(
        loss="dissimilarity",
        procedure=PARETO,
        threshold=0.9,
        variant=last,
        threshold_by_position=build_positions(0.9, tau=4.0),
        layers=3.5,
        risk=0.03,
        path=(
            build_path_entry(n=n, variant=first),
            build_path_entry(n=n, variant=second, threshold=0.6, risk=0.02, layers=5.0),
            build_path_entry(n=n, variant=last, risk=0.03, layers=3.5),
            build_path_entry(n=n, variant=first, threshold=0.6, risk=0.09, p_value=0.3, rejected=False, layers=3.0),
        ),
    )
    never = build_never_exit(
        loss="dissimilarity",
        procedure=PARETO,
        path=(build_path_entry(n=n, variant=second, p_value=0.3, rejected=False),),
    )
    plan = build_plan_record()
    tests = tuple(dataclasses.replace(plan.tests[0], procedure=PARETO, delta=each.delta) for each in (entry, never))
    base = build_manifest()
    values: dict[str, Any] = {
        "decode": dataclasses.replace(base.decode, tau=1.0),
        "plan": dataclasses.replace(plan, tests=tests, pareto=ParetoPlan(variants=VARIANTS, choosing_share=0.3)),
        "data": dataclasses.replace(base.data, choosing=60),
        "calibrations": (entry, never),
    }
    return build_manifest(**{**values, **changes})


def build_each_variant_manifest(**changes: Any) -> Manifest:
    """Returns a manifest of two variants, each of which was tested by itself, with the given fields changed.

    The entry exits by tau 4 from layer 2, which is the cheaper of two that were proved.
    """
    first, last = VARIANTS[0], VARIANTS[-1]
    entry = build_calibration(
        loss="dissimilarity",
        procedure=EACH_VARIANT,
        threshold=0.9,
        variant=last,
        threshold_by_position=build_positions(0.9, tau=4.0),
        layers=3.5,
        risk=0.03,
        path=(
            build_path_entry(variant=first, p_value=0.01),
            build_path_entry(variant=first, threshold=0.8, p_value=0.03, rejected=False),
            build_path_entry(variant=last, risk=0.03, p_value=0.02, layers=3.5),
            build_path_entry(variant=last, threshold=0.8, risk=0.09, p_value=0.3, rejected=False, layers=3.0),
        ),
    )
    plan = build_plan_record()
    tests = (dataclasses.replace(plan.tests[0], procedure=EACH_VARIANT, delta=entry.delta),)
    base = build_manifest()
    values: dict[str, Any] = {
        "decode": dataclasses.replace(base.decode, tau=1.0),
        "plan": dataclasses.replace(plan, tests=tests, pareto=ParetoPlan(variants=(first, last))),
        "calibrations": (entry,),
    }
    return build_manifest(**{**values, **changes})


def build_confirmed_manifest(**changes: Any) -> Manifest:
    """Returns a manifest whose first threshold 80 examples confirmed, and its second not, with fields changed."""
    chosen = build_calibration(loss="dissimilarity", threshold_by_position=build_positions(0.8))
    confirmed = dataclasses.replace(
        chosen,
        confirmation=(build_path_entry(threshold=0.8, n=80, risk=0.04, p_value=0.02, layers=4.5),),
        layers=4.5,
        risk=0.04,
    )
    refused = build_signed_calibration(
        threshold=None,
        layers=6,
        risk=0,
        confirmation=(build_path_entry(threshold=0.7, n=80, risk=0.015, p_value=0.3125, rejected=False, layers=3.75),),
    )
    data = build_manifest().data
    values: dict[str, Any] = {
        "plan": build_plan_record(confirm_share=0.3),
        "confirmation": ConfirmationRecord(
            decoder="batch",
            exit_head="auto",
            dtype="bfloat16",
            data=dataclasses.replace(data, examples=80, duplicates=1, failed=2, failed_ids=("a", "b"), truncated=0),
        ),
        "calibrations": (confirmed, refused),
    }
    return build_manifest(**{**values, **changes})


def build_path_confirmed_manifest(**changes: Any) -> Manifest:
    """Returns `build_confirmed_manifest` with another first entry: 0.9 was confirmed, and 0.8 was not."""
    early = build_confirmed_manifest()
    safer = build_path_entry(n=80, risk=0.03, p_value=0.01, layers=5.25)
    failed = build_path_entry(threshold=0.8, n=80, risk=0.05, p_value=0.07, rejected=False, layers=4.5)
    entry = dataclasses.replace(
        early.calibrations[0],
        confirmation=(safer, failed),
        threshold=safer.threshold,
        threshold_by_position=build_positions(safer.threshold),
        layers=safer.layers,
        risk=safer.risk,
    )
    values: dict[str, Any] = {
        "plan": build_plan_record(confirm_share=0.3, confirm_path=3),
        "calibrations": (entry, early.calibrations[1]),
    }
    return build_confirmed_manifest(**{**values, **changes})


def build_joint_confirmed_manifest(**changes: Any) -> Manifest:
    """Returns a manifest with joint promises, the first of which was confirmed at both their epsilons."""
    confirmed, refused = build_path_confirmed_manifest().calibrations
    failed = tuple(dataclasses.replace(step, rejected=False, p_value=0.5) for step in refused.path)
    nothing = dataclasses.replace(refused, confirmation=None, path=failed)
    steps = confirmed.confirmation or ()
    entry = dataclasses.replace(
        confirmed,
        confirmation=(steps[0], dataclasses.replace(steps[1], p_value=0.12)),
        confirming_epsilon=0.1,
    )
    values: dict[str, Any] = {
        "plan": build_plan_record(confirm_share=0.3, confirm_path=3, joint_epsilon=0.1),
        "calibrations": (entry, nothing),
    }
    return build_path_confirmed_manifest(**{**values, **changes})


def unsealed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Returns the plain form of `build_manifest()` with one value changed and the digest left as it was."""
    content: Any = copy.deepcopy(build_manifest().to_dict())
    parent = content
    for step in path[:-1]:
        parent = parent[step]
    if value is REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return content


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Returns the plain form of `build_manifest()` with one value changed and a new digest."""
    content = unsealed(path, value)
    return {**content, "digest": content_digest(content)}


def written_by(version: int) -> dict[str, Any]:
    """Returns a manifest of each kind that a version of the format was written for, by the kind of run."""
    file = pathlib.Path(__file__).parent / _WRITTEN[version]
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    return {line["kind"]: line["manifest"] for line in map(json.loads, lines)}


_ENGINE = EngineRecord(name="xla_loop", instructions="cpu avx2", head="exact")
_COST = CostRecord(
    unit="seconds",
    batch=1,
    device="cpu",
    cores=2,
    engine=_ENGINE,
    layer=1e-4,
    skipped=0.0,
    output=2e-4,
    logits_test=3e-5,
)
SPEED = SpeedRecord(
    calibrations=(0,),
    factor=1.25,
    standard_error=0.02,
    prompts=200,
    batch=1,
    seconds=0.008,
    full_seconds=0.01,
    device="cpu",
    cores=2,
    engine=_ENGINE,
)
"""The speed of the first entry of `build_timed_manifest`, one prompt at a time."""


def build_timed_manifest(**changes: Any) -> Manifest:
    """Returns a manifest of variants chosen by seconds, whose first entry was timed, with the given fields changed."""
    base = build_variants_manifest()
    assert base.plan is not None
    assert base.plan.pareto is not None
    pareto = dataclasses.replace(base.plan.pareto, objective="latency")
    plan = dataclasses.replace(base.plan, pareto=pareto)
    return dataclasses.replace(base, **{"plan": plan, "cost": _COST, "speeds": (SPEED,), **changes})
