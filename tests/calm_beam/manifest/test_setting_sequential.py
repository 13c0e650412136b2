"""A settings manifest records how a sequential certification ended; an inconsistent one is refused."""

import dataclasses
import json
import math
import re
from typing import Any

import jsonschema
import pytest

from calm_beam.manifest import (
    EarlierEnd,
    ManifestError,
    SequentialRecord,
    SettingLook,
    SettingManifest,
    SettingSequentialPlan,
    content_digest,
    manifest_text,
    rounds_in_words,
)
from calm_beam.manifest.schema import manifest_schema
from tests.calm_beam.manifest.test_settings import build_setting_manifest

_SCHEMA = manifest_schema()


def build_sequential_setting_manifest() -> SettingManifest:
    """Returns a manifest that has stopped after three of five rounds, once 6 bits were proved for all and for maths."""
    base = build_setting_manifest()
    plan = dataclasses.replace(
        base.plan,
        sequential=SettingSequentialPlan(
            ids="sha256-sum:02", examples=500, round_examples=100, costs=(8.0, 6.0, 4.0), stop_at_setting="6bit"
        ),
    )
    settings = tuple(
        dataclasses.replace(each, cost=cost) for each, cost in zip(base.settings, (8.0, 6.0, 4.0), strict=True)
    )
    capital = -math.log(0.05)
    first = dataclasses.replace(
        base.calibrations[0],
        path=tuple(
            dataclasses.replace(step, cost=cost)
            for step, cost in zip(base.calibrations[0].path, (8.0, 6.0, 4.0), strict=True)
        ),
        looks=(
            SettingLook(n=100, setting=None, cost=None, risk=0.0, log_capital=-0.5),
            SettingLook(n=200, setting="8bit", cost=8.0, risk=0.02, log_capital=capital),
            SettingLook(n=300, setting="6bit", cost=6.0, risk=0.03125, log_capital=2.0),
        ),
    )
    steps = tuple(dataclasses.replace(step, n=100) for step in first.path)
    second = dataclasses.replace(
        first,
        group="math",
        tail=0.5,
        path=steps,
        looks=(
            SettingLook(n=0, setting=None, cost=None, risk=0.0, log_capital=0.0),
            SettingLook(n=0, setting=None, cost=None, risk=0.0, log_capital=0.0),
            SettingLook(n=100, setting="6bit", cost=6.0, risk=0.03125, log_capital=capital),
        ),
    )
    return dataclasses.replace(
        base,
        plan=plan,
        settings=settings,
        calibrations=(first, second),
        sequential=SequentialRecord(rounds=3, of_rounds=5, of_examples=500, ended_by="stop_at_setting"),
    )


def test_it_survives_writing_and_reading() -> None:
    """Rounds, rule, looks and the continued run read back unchanged, as the schema describes them."""
    manifest = build_sequential_setting_manifest()
    assert manifest.sequential is not None
    continued = dataclasses.replace(
        manifest,
        sequential=dataclasses.replace(
            manifest.sequential, continues=(EarlierEnd(plan="sha256:70", rounds=3, ended_by="stop_at_cost"),)
        ),
    )
    for each in (manifest, continued):
        content = json.loads(manifest_text(each))
        assert SettingManifest.from_dict(content) == each
        jsonschema.validate(content, _SCHEMA)
    assert rounds_in_words(manifest) == (
        "The tests were looked at after every round of examples, and ended after round 3 of 5, with 300 of 500 "
        "examples: every promise had come to setting 6bit, or to a later one."
    )
    assert rounds_in_words(continued).endswith(
        "It had stopped after round 3 before, and was continued by another rule."
    )


def test_others_do_not_mention_it() -> None:
    """Manifests without rounds have no rounds or looks, so their digests are unchanged."""
    content: Any = build_setting_manifest().to_dict()
    assert "sequential" not in content
    assert "sequential" not in content["plan"]
    assert "looks" not in content["calibrations"][0]
    assert rounds_in_words(build_setting_manifest()) == ""


_LOOKS = ("calibrations", 0, "looks")
_RULE = ("plan", "sequential")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("sequential",), ..., "sequential must be there exactly if plan.sequential is, got none and one"),
        (_RULE, ..., "sequential must be there exactly if plan.sequential is, got one and none"),
        ((*_RULE, "stop_at_setting"), "2bit", 'plan.sequential.stop_at_setting must be one of order, got "2bit"'),
        ((*_RULE, "costs"), [1], "plan.sequential.costs must be those of 3 settings, as order has, got 1"),
        ((*_RULE, "costs"), [8.0, 6.0, 5.0], "settings must cost what plan.sequential.costs says"),
        ((*_RULE, "stop_gain"), 0, "plan.sequential.stop_gain must be a number in (0, 1), got 0"),
        ((*_RULE, "stop_at_layers"), 4, "plan.sequential.stop_at_layers is not a key"),
        ((*_RULE, "examples"), 400, "sequential.of_examples must be plan.sequential.examples, which is 400, got 500"),
        ((*_RULE, "round_examples"), 120, "calibrations[0].looks[0].n must be 120, as plan.sequential says, got 100"),
        ((*_RULE, "round_examples"), 200, "sequential.of_rounds must be 3, of 200 of 500 examples each, got 5"),
        (
            (*_RULE, "stop_at_setting"),
            ...,
            "sequential.ended_by is stop_at_setting, but plan.sequential has no such rule",
        ),
        (
            ("sequential", "ended_by"),
            "stop_at_layers",
            "sequential.ended_by must be one of stop_at_setting, stop_at_cost",
        ),
        (("sequential", "ended_by"), "all_proved", 'is "all_proved" after round 3, but after round 3 plan.sequential'),
        (("sequential", "rounds"), 2, "calibrations[0].looks must have one entry for each of sequential.rounds"),
        ((*_LOOKS, 1, "n"), 150, "calibrations[0].looks[1].n must be 200, as plan.sequential says, got 150"),
        ((*_LOOKS, 1, "setting"), "4bit", "looks[1].setting must be one that path rejects, or null"),
        ((*_LOOKS, 0, "setting"), "6bit", 'looks[1].setting must not come before "6bit", which was accepted before'),
        ((*_LOOKS, 0, "cost"), 8.0, "looks[0].cost must be null without a setting, got 8.0"),
        ((*_LOOKS, 2, "cost"), 8.0, "looks[2].cost must be 6.0, as at the end, got 8.0"),
        ((*_LOOKS, 2, "risk"), 0.5, "looks[2].risk must be 0.03125, as at the end, got 0.5"),
        ((*_LOOKS, 1, "log_capital"), 2.0, "looks must come to a capital of 1 / 0.05"),
        ((*_LOOKS, 0, "n"), 0, "calibrations[0].looks[0].n must be an integer of at least 1, got 0"),
        (("calibrations", 1, "path", 0, "n"), 0, "path[0] must have p_value 1 and risk 0 where n is 0"),
    ],
)
def test_what_is_at_odds_is_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    """Each message names the key, the value and what contradicts it."""
    content: Any = json.loads(manifest_text(build_sequential_setting_manifest()))
    place = content
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    content["plan"]["digest"] = content_digest(content["plan"])
    content["digest"] = content_digest(content)
    with pytest.raises(ManifestError, match=re.escape(message)):
        SettingManifest.from_dict(content)


def test_it_ends_as_soon_as_its_rule_says() -> None:
    """A look after the rule's stop is refused, unless another rule continued."""
    manifest = build_sequential_setting_manifest()
    early = tuple(
        dataclasses.replace(
            entry,
            looks=tuple(
                dataclasses.replace(look, n=max(look.n, 50), setting="6bit", cost=6.0) if place == 1 else look
                for place, look in enumerate(entry.looks or ())
            ),
        )
        for entry in manifest.calibrations
    )
    with pytest.raises(ManifestError, match=r'but after round 2 plan\.sequential says "stop_at_setting"'):
        dataclasses.replace(manifest, calibrations=early)
    assert manifest.sequential is not None
    end = EarlierEnd(plan="sha256:70", rounds=3, ended_by="stop_at_cost")
    ended = dataclasses.replace(manifest.sequential, continues=(end,))
    assert dataclasses.replace(manifest, calibrations=early, sequential=ended).calibrations == early


def test_a_rule_about_costs_needs_them() -> None:
    """Looks without a cost cannot have stopped by one."""
    manifest = build_sequential_setting_manifest()
    assert manifest.plan.sequential is not None
    rule = dataclasses.replace(manifest.plan.sequential, costs=None, stop_at_cost=1.0)
    bare = tuple(
        dataclasses.replace(
            entry,
            cost=None,
            path=tuple(dataclasses.replace(step, cost=None) for step in entry.path),
            looks=tuple(dataclasses.replace(look, cost=None) for look in entry.looks or ()),
        )
        for entry in manifest.calibrations
    )
    with pytest.raises(ManifestError, match=r"looks must say costs, since plan\.sequential stops by them"):
        dataclasses.replace(
            manifest,
            plan=dataclasses.replace(manifest.plan, sequential=rule),
            settings=tuple(dataclasses.replace(setting, cost=None) for setting in manifest.settings),
            calibrations=bare,
        )
