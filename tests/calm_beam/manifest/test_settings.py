"""Manifests of kind settings: format, checks, and commands that refuse them."""

import copy
import dataclasses
import json
import pathlib
from typing import Any

import jsonschema
import pytest

from calm_beam.inputs.losses import DIRECTIONS
from calm_beam.manifest import (
    SETTINGS,
    THRESHOLDS,
    ManifestError,
    SettingCalibration,
    SettingDataRecord,
    SettingGroup,
    SettingManifest,
    SettingPlan,
    SettingRecord,
    SettingStep,
    SettingTest,
    content_digest,
    guarantee_in_words,
    manifest_text,
    parse_manifest,
    read_any_manifest,
    read_manifest,
    read_setting_manifest,
    without_keys,
    write_manifest,
)
from calm_beam.manifest.schema import manifest_schema
from tests.calm_beam.manifest.builders import build_manifest

_SCHEMA = manifest_schema()


def build_setting_manifest(**changes: Any) -> SettingManifest:
    """Returns a manifest that accepts 8 bits and 6 bits and stops at 4, and one of a group, with fields changed."""
    costs = {"8bit": 8.0, "6bit": 6, "4bit": None}
    asked: dict[str, Any] = {
        "loss": "given",
        "delta": 0.1,
        "epsilon": 0.05,
        "p_value": "hoeffding_bentkus",
        "procedure": "fixed_sequence",
    }
    tests = (SettingTest(group=None, tail=None, **asked), SettingTest(group="math", tail=0.5, **asked))

    def step(setting: str, n: int, p_value: float) -> SettingStep:
        return SettingStep(
            setting=setting, n=n, risk=0.03125, p_value=p_value, rejected=p_value <= 0.05, cost=costs[setting]
        )

    values: dict[str, Any] = {
        "created": "2026-01-31T12:00:00Z",
        "settings": tuple(
            SettingRecord(name=name, cost=cost, fingerprint="sha256-sum:00") for name, cost in costs.items()
        ),
        "data": SettingDataRecord(
            patterns=("a.csv",),
            examples=300,
            clusters=None,
            groups=(
                SettingGroup(name="chat", examples=200, clusters=None),
                SettingGroup(name="math", examples=100, clusters=None),
            ),
            fingerprint="sha256-sum:01",
        ),
        "plan": SettingPlan(
            order=tuple(costs),
            tests=tests,
            joint_epsilon=0.1,
            group_key="topic",
            cluster_key=None,
            salt="calm-beam/0",
            baseline=None,
            task=None,
            metric=None,
        ),
        "calibrations": (
            SettingCalibration(
                **{**tests[0].to_dict(), "setting": "6bit", "cost": 6, "risk": 0.03125},  # type: ignore[arg-type]
                path=(step("8bit", 300, 0.001), step("6bit", 300, 0.05), step("4bit", 300, 0.06)),
            ),
            SettingCalibration(
                **{**tests[1].to_dict(), "setting": None, "cost": None, "risk": None},  # type: ignore[arg-type]
                path=(step("8bit", 100, 0.5),),
            ),
        ),
        "guarantee": guarantee_in_words(kind=SETTINGS, joint_epsilon=0.1),
        "software": {"calm-beam": "0.1.0"},
    }
    return SettingManifest(**{**values, **changes})


def _changed(path: tuple[str | int, ...], value: object, *, seals_plan: bool = True) -> dict[str, Any]:
    """Returns the manifest as JSON with one value changed and sealed again."""
    content: dict[str, Any] = copy.deepcopy(json.loads(manifest_text(build_setting_manifest())))
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if seals_plan and isinstance(content["plan"], dict):
        content["plan"]["digest"] = content_digest(content["plan"])
    return {**content, "digest": content_digest(content)}


def test_round_trip(tmp_path: pathlib.Path) -> None:
    """A written manifest reads back unchanged, and matches the schema."""
    manifest = build_setting_manifest()
    path = tmp_path / "manifest.json"
    write_manifest(manifest, path)
    assert read_setting_manifest(path) == read_any_manifest(path) == manifest
    content = json.loads(path.read_text())
    assert list(content)[:2] == ["schema", "kind"]
    assert content["digest"] == manifest.digest
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    jsonschema.validate(content, _SCHEMA)


def test_others_refuse_it(tmp_path: pathlib.Path) -> None:
    """The reader of served manifests refuses it with a clear message, and this reader refuses those."""
    path = tmp_path / "manifest.json"
    write_manifest(build_setting_manifest(), path)
    said = "is of kind settings: it proves a setting of a sweep that was made elsewhere, and names no model"
    with pytest.raises(ManifestError, match=rf"manifest .*manifest\.json: {said}"):
        read_manifest(path)
    with pytest.raises(ManifestError, match=f"manifest: {said}"):
        parse_manifest(path.read_bytes())
    other = tmp_path / "other.json"
    write_manifest(build_manifest(), other)
    assert read_any_manifest(other) == build_manifest()
    with pytest.raises(ManifestError, match="is one of calibrate, and not of kind settings"):
        read_setting_manifest(other)
    with pytest.raises(ManifestError, match="another one was published there first"):
        write_manifest(build_manifest(), path)


def test_an_unknown_kind_is_refused() -> None:
    """An unknown kind is refused."""
    content = {**build_manifest().to_dict(), "kind": "other"}
    with pytest.raises(ManifestError, match='kind must be "thresholds", got "other"'):
        parse_manifest(json.dumps({**content, "digest": content_digest(content)}))


def test_changes_by_hand(tmp_path: pathlib.Path) -> None:
    """A changed number breaks the digest, and a changed plan its own digest."""
    path = tmp_path / "manifest.json"
    path.write_text(manifest_text(build_setting_manifest()).replace('"risk": 0.03125', '"risk": 0.02', 1))
    with pytest.raises(ManifestError, match=r"manifest\.json: digest is .*, but that of the content is"):
        read_any_manifest(path)
    with pytest.raises(ManifestError, match=r"plan\.digest is .*, but that of the plan is"):
        SettingManifest.from_dict(_changed(("plan", "salt"), "calm-beam/1", seals_plan=False))


_FIRST = ("calibrations", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), "internal", 'kind must be "settings", got "internal"'),
        (("created",), "yesterday", "created must be a UTC time"),
        (("settings", 0, "name"), "2bit", "settings must be those of plan.order"),
        (("settings", 0, "cost"), -1, r"settings\[0\]\.cost must be a finite number of at least 0"),
        (("data", "examples"), 0, "data.examples must be an integer of at least 1"),
        (("data", "clusters"), 400, "data.clusters must be at most examples, which is 300"),
        (("data", "clusters"), 30, "data.groups.*clusters must be null exactly if clusters is"),
        (("data", "groups", 0, "name"), "z", "data.groups must have one or more names, ascending, each once"),
        (("data", "groups", 0, "examples"), 100, "data.groups must have all examples, of which there are 300, got 200"),
        (("data", "id_sample"), ["a" * 16, "b" * 16], "data.id_sample must have 256 digests, ascending"),
        (("data", "groups"), [], r"calibrations\[1\].group must be one of data.groups, got \"math\""),
        (("plan", "order"), ["8bit", "8bit"], "plan.order must name one or more settings, each once"),
        (("plan", "tests", 0, "tail"), 1, r"plan\.tests\[0\]\.tail must be a number in \[0, 1\), got 1"),
        (("plan", "tests", 0, "loss"), "hinge", "loss must be one of given, signed, relu"),
        (("plan", "joint_epsilon"), 0.06, "plan.joint_epsilon must be at least the sum of the tests' epsilons"),
        (("plan", "cluster_key"), "doc", "data.clusters must be there exactly if plan.cluster_key is not null"),
        (("plan", "tests", 0, "delta"), 0.2, r"calibrations\[0\]\.delta must be 0.2, as was planned, got 0.1"),
        (("calibrations",), [], "calibrations must have at least one entry"),
        ((*_FIRST, "setting"), "4bit", r"calibrations\[0\]\.setting must be \"6bit\", as the last one rejected"),
        ((*_FIRST, "cost"), 8, r"calibrations\[0\]\.cost must be 6, as the last one rejected"),
        ((*_FIRST, "risk"), 0.5, r"calibrations\[0\]\.risk must be 0.03125"),
        ((*_FIRST, "path"), [], r"calibrations\[0\]\.path must have an entry"),
        ((*_FIRST, "path", 0, "n"), 299, r"calibrations\[0\]\.path\[0\]\.n must be 300, as data says, got 299"),
        ((*_FIRST, "path", 0, "cost"), 9, r"calibrations\[0\]\.path\[0\]\.cost must be 8.0, as settings says"),
        ((*_FIRST, "path", 0, "risk"), -0.5, r"path\[0\]\.risk must be a number in \[0, 1\]"),
        ((*_FIRST, "path", 0, "p_value"), 0.06, r"path\[0\]\.rejected must be false, got true: p_value is 0.06"),
        ((*_FIRST, "path", 0, "rejected"), False, r"path\[0\]\.rejected is false, so the test stops there"),
        ((*_FIRST, "path", 2, "setting"), "6bit", "path must test every setting once"),
        ((*_FIRST, "path", 0, "extra"), 1, r"path\[0\]\.extra is not a key"),
        (("calibrations", 1, "group"), "code", r"calibrations\[1\]\.group must be one of data.groups, got \"code\""),
        (("guarantee",), "", "guarantee must be a non-empty string"),
        (("software",), [], "software must be a JSON object"),
    ],
)
def test_what_contradicts_itself(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Invalid and contradictory values are refused with their place."""
    with pytest.raises(ManifestError, match=message):
        SettingManifest.from_dict(_changed(path, value))


def test_tests_follow_the_planned_order() -> None:
    """A path that leaves the planned order is refused, though its decisions follow from its p-values."""
    entry = build_setting_manifest().calibrations[0]
    swapped = dataclasses.replace(entry, path=(entry.path[1], entry.path[0], entry.path[2]), setting="8bit", cost=8.0)
    with pytest.raises(ManifestError, match=r"path must test settings in the planned order, which begins \[\"8bit\""):
        build_setting_manifest(calibrations=(swapped, build_setting_manifest().calibrations[1]))


def test_entries_by_their_values() -> None:
    """An entry is found by group, tail, delta and epsilon; values that match none or several are refused."""
    manifest = build_setting_manifest()
    assert manifest.calibration() == manifest.calibrations[0]
    assert manifest.calibration(group="math", tail=0.5) == manifest.calibrations[1]
    with pytest.raises(
        ManifestError, match=r'no calibration has group=math, tail=null\. .* has: group="math", tail=0\.5'
    ):
        manifest.calibration(group="math")


def test_the_guarantee_says_whom_an_entry_is_about() -> None:
    """With groups the guarantee says that the promise for all examples may be broken for some; else it does not."""
    words = guarantee_in_words(kind=SETTINGS, group_key="topic")
    assert "An entry of a group, which topic names, is about examples drawn from that group alone" in words
    assert "is about all examples together, and may be broken for some of the groups." in words
    assert "group" not in guarantee_in_words(kind=SETTINGS, joint_epsilon=0.1, cluster_key="passage")


def test_which_scores_are_better() -> None:
    """The direction belongs to a metric, has two values, and changes the plan's digest; early manifests have none."""
    plan = build_setting_manifest().plan
    assert "direction" not in plan.to_dict()
    plans = [dataclasses.replace(plan, metric="acc", direction=direction) for direction in (None, *DIRECTIONS)]
    assert len({each.digest for each in plans}) == 3
    for each in plans:
        assert SettingPlan.from_dict(each.to_dict()) == each
    with pytest.raises(ManifestError, match="direction must be one of higher, lower"):
        dataclasses.replace(plan, metric="acc", direction="up")
    with pytest.raises(ManifestError, match="direction must be null without metric"):
        dataclasses.replace(plan, direction="lower")


@pytest.mark.parametrize("kind", [SETTINGS, THRESHOLDS])
@pytest.mark.parametrize("hands_on", [True, False])
@pytest.mark.parametrize("most_confirmed", [0, 1, 3])
def test_a_promise_without_keys(kind: str, hands_on: bool, most_confirmed: int) -> None:
    """Terminals print a joint promise without keys of the manifest; a promise of entries alone is printed as stored."""
    stored = guarantee_in_words(kind=kind, joint_epsilon=0.1, hands_on=hands_on, most_confirmed=most_confirmed)
    shown = without_keys(stored)
    assert "_epsilon" not in shown
    assert shown.split(" together: ")[1].split(" is at most ")[0] in stored
    alone = guarantee_in_words(kind=kind, most_confirmed=most_confirmed)
    assert without_keys(alone) == alone
