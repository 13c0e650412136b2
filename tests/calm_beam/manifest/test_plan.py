"""A manifest holds its plan, and the reader refuses a run that differs from it."""

import dataclasses
import json
import re
from typing import Any

import pytest

from calm_beam.manifest import (
    Manifest,
    ManifestError,
    Plan,
    content_digest,
    manifest_text,
    parse_manifest,
    served_in_words,
)
from tests.calm_beam.manifest.builders import (
    build_calibration,
    build_grouped_manifest,
    build_manifest,
    build_path_entry,
    build_plan_record,
    build_planned_manifest,
    build_signed_calibration,
)


def _refused(message: str) -> Any:
    """Expects a ManifestError with exactly this text."""
    return pytest.raises(ManifestError, match=f"^{re.escape(message)}$")


def test_a_planned_manifest_survives_writing_and_reading() -> None:
    """Plan, losses, negative risks and procedures read back unchanged."""
    manifest = build_planned_manifest()
    read = parse_manifest(manifest_text(manifest))
    assert read == manifest
    assert read.plan == build_plan_record()
    assert read.digest == manifest.digest
    assert [entry.loss for entry in read.calibrations] == ["dissimilarity", "signed"]


def test_early_manifests_are_read() -> None:
    """A manifest without plan, losses and clusters is read, and keeps its digest."""
    content = json.loads(manifest_text(build_manifest()))
    assert "plan" not in content
    assert "clusters" not in content["data"]
    assert "loss" not in content["calibrations"][0]
    read = parse_manifest(json.dumps(content))
    assert (read.plan, read.data.clusters, read.calibrations[0].loss) == (None, None, None)
    assert read.to_dict() == content


@pytest.mark.parametrize("path", [("plan",), ("data", "clusters"), ("calibrations", 0, "loss")])
def test_what_is_not_there_is_left_out(path: tuple[str | int, ...]) -> None:
    """An optional key must not be null, since two manifests would have the same meaning."""
    content: Any = build_manifest().to_dict()
    parent = content
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = None
    name = ".".join(map(str, path)).replace(".0.", "[0].")
    with _refused(f"{name} must not be null: where there is none, the key is left out"):
        Manifest.from_dict({**content, "digest": content_digest(content)})


def test_plan_has_a_digest_of_its_own() -> None:
    """The plan's digest is that of its canonical JSON, so that it can be compared with one noted beforehand."""
    plan = build_plan_record()
    assert plan.digest == content_digest({key: value for key, value in plan.to_dict().items() if key != "digest"})
    assert Plan.from_dict(plan.to_dict()) == plan
    assert build_plan_record(salt="calm-beam/1").digest != plan.digest
    content: Any = build_planned_manifest().to_dict()
    content["plan"]["salt"] = "pepper"
    with pytest.raises(ManifestError, match=rf'^plan.digest is "{plan.digest}", but that of the plan is "sha256:'):
        Manifest.from_dict({**content, "digest": content_digest(content)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.8, 0.9)}, "thresholds must be strictly descending, got [0.8, 0.9]"),
        ({"thresholds": (0.8, 1.5)}, "thresholds[1] must be a number in [0, 1], got 1.5"),
        ({"joint_epsilon": 0.09}, "joint_epsilon must be at least the sum of the tests' epsilons, 0.1, got 0.09"),
        ({"joint_epsilon": 1}, "joint_epsilon must be a number in (0, 1), got 1"),
        ({"cluster_key": ""}, 'cluster_key must be a non-empty string, got ""'),
        ({"salt": ""}, 'salt must be a non-empty string, got ""'),
        ({"on_error": "skip"}, 'on_error must be one of fail, worst_case, got "skip"'),
        ({"on_long": "skip"}, 'on_long must be one of truncate, error, got "skip"'),
    ],
)
def test_plans_check_themselves(changes: dict[str, Any], message: str) -> None:
    """An impossible plan is refused by its key."""
    with _refused(message):
        build_plan_record(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"plan": build_plan_record(model="sha256:00")},
            'plan.model must be model.fingerprint, which is "sha256:6d6f64656c", got "sha256:00"',
        ),
        (
            {"plan": build_plan_record(cluster_key="paragraph")},
            'data.clusters must be there exactly if plan.cluster_key is not null, got null and "paragraph"',
        ),
        (
            {"calibrations": (build_calibration(loss="dissimilarity"),)},
            "calibrations must be the 2 that were planned, got 1",
        ),
        (
            {"calibrations": (build_calibration(loss="dissimilarity", delta=0.2), build_signed_calibration())},
            "calibrations[0].delta must be 0.1, as was planned, got 0.2",
        ),
        (
            {"calibrations": (build_calibration(), build_signed_calibration())},
            'calibrations[0].loss must be "dissimilarity", as was planned, got null',
        ),
        (
            {"plan": build_plan_record(thresholds=(0.95, 0.9, 0.8, 0.7, 0.6))},
            "calibrations[0].path must test thresholds in the planned order, which begins [0.95, 0.9, 0.8], "
            "got [0.9, 0.8, 0.7]",
        ),
        (
            {"plan": build_plan_record(thresholds=(0.9, 0.8, 0.7, 0.5))},
            "calibrations[1].path must test thresholds in the planned order, which begins [0.9, 0.8, 0.7, 0.5], "
            "got [0.9, 0.8, 0.7, 0.6]",
        ),
    ],
)
def test_another_run_than_the_planned_one_is_refused(changes: dict[str, Any], message: str) -> None:
    """Another model, unit, entry, setting or grid than the plan's is refused, though each part is valid by itself."""
    with _refused(message):
        build_planned_manifest(**changes)


def test_other_procedures_have_rules_of_their_own() -> None:
    """Other procedures may reject after a failure, and reject less than fixed sequences, but none beyond epsilon."""
    path = build_signed_calibration().path
    with _refused("path[1].rejected is false, so the test stops there, but path[2] follows"):
        build_signed_calibration(procedure="fixed_sequence")
    with _refused("path[3].rejected must be false, got true: p_value is 1 and epsilon 0.05"):
        build_signed_calibration(path=(*path[:3], dataclasses.replace(path[3], rejected=True)))
    with _refused("threshold must be 0.7, as the last one rejected in path says, got 0.9"):
        build_signed_calibration(threshold=0.9)


def test_only_signed_losses_have_negative_risks() -> None:
    """A negative risk is refused for any other loss, and if the loss is not named."""
    negative = (build_path_entry(risk=-0.25),)
    kept = build_signed_calibration(path=negative, threshold=0.9, layers=5.5, risk=-0.25)
    assert kept.risk == -0.25
    for loss in ("dissimilarity", "relu", None):
        with _refused("risk must be a number in [0, 1], got -0.25"):
            build_calibration(path=negative, threshold=0.9, layers=5.5, risk=-0.25, loss=loss)
        with _refused("path[0].risk must be a number in [0, 1], got -0.25"):
            build_calibration(path=negative, threshold=0.9, layers=5.5, risk=0, loss=loss)


def test_clusters_are_what_is_counted() -> None:
    """With clusters every n is their number, which is at most that of examples."""
    data = dataclasses.replace(build_manifest().data, clusters=40)
    assert (data.units, build_manifest().data.units) == (40, 200)
    with _refused(
        "calibrations[0].path[0].n must be data.clusters, which is 40 (failed examples count, with loss 1), got 200"
    ):
        build_manifest(data=data)
    with _refused("clusters must be at most examples, which is 200, got 201"):
        dataclasses.replace(data, clusters=201)


def test_the_served_entry_is_taken_where_none_is_named() -> None:
    """The plan names the default entry; a name selects another, and without either nothing is selected."""
    manifest = build_planned_manifest(plan=build_plan_record(serve=1))
    read = parse_manifest(manifest_text(manifest))
    assert read.served == read.calibration() == read.calibrations[1]
    assert read.calibration(consistency="textual") == read.calibrations[0]
    assert served_in_words(read) == (
        "The plan named the entry that is served before any loss was seen: risk, rouge_l, delta 0.02, epsilon 0.05."
    )
    other = build_planned_manifest()
    assert (other.served, served_in_words(other)) == (None, "")
    with pytest.raises(ManifestError, match=r"there are 2 calibrations\. Say which consistency and loss and delta"):
        other.calibration()
    assert read.plan is not None
    assert other.plan is not None
    assert read.plan.digest != other.plan.digest


def test_groups_are_served_by_the_promise_that_is_served() -> None:
    """A named group gets its entry of the served promise, and a plan may name a group's entry."""
    grouped = build_grouped_manifest()
    assert grouped.plan is not None
    manifest = dataclasses.replace(grouped, plan=dataclasses.replace(grouped.plan, serve=0))
    assert [manifest.calibration(group=group).group for group in (None, "de", "fr")] == [None, "de", "fr"]
    of_group = dataclasses.replace(grouped, plan=dataclasses.replace(grouped.plan, serve=2))
    assert of_group.calibration().group == "en"
    with pytest.raises(ManifestError, match="there is no group"):
        manifest.calibration(group="it")


@pytest.mark.parametrize("serve", [2, -1, 0.5, True, "textual"])
def test_a_plan_that_serves_nothing_is_refused(serve: Any) -> None:
    """The served entry must be one of the tests."""
    with pytest.raises(ManifestError, match="serve"):
        build_plan_record(serve=serve)
