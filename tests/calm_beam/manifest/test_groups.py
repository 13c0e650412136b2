"""Manifests with groups: consistency checks, and each group's entry."""

import dataclasses
from typing import Any

import pytest

from calm_beam.manifest import (
    GroupRecord,
    Manifest,
    ManifestError,
    guarantee_in_words,
    manifest_text,
    parse_manifest,
)
from tests.calm_beam.manifest.builders import build_grouped_manifest, build_manifest, build_planned_manifest

_GROUPED = build_grouped_manifest()


def test_a_manifest_with_groups_is_read_again() -> None:
    """A written manifest with groups reads back unchanged."""
    assert parse_manifest(manifest_text(_GROUPED)) == _GROUPED


def test_without_groups_nothing_is_said_of_them() -> None:
    """Manifests without groups have the bytes and digests of earlier versions."""
    assert "group" not in manifest_text(build_planned_manifest())


def test_an_entry_is_asked_for_by_its_group() -> None:
    """Without a name, the entry about all prompts is selected; an unknown name is refused with the known ones."""
    assert _GROUPED.calibration() == _GROUPED.calibrations[0]
    assert _GROUPED.calibration(group="fr", delta=0.1) == _GROUPED.calibrations[3]
    with pytest.raises(ManifestError, match=r'there is no group "it"\. The manifest has: de, en, fr\.'):
        _GROUPED.calibration(group="it")
    with pytest.raises(
        ManifestError, match=r'there is no group "it": the manifest was calibrated without --group_key\.'
    ):
        build_manifest().calibration(group="it")


def test_the_safest_entry_is_that_of_no_exit_or_the_highest_threshold() -> None:
    """A prompt of no known group is served by the safest entry: never exit, or else the highest threshold."""
    whole, de, en, fr = _GROUPED.calibrations
    assert _GROUPED.of_same_promise(de) == (whole, de, en, fr)
    assert {_GROUPED.safest(entry) for entry in _GROUPED.calibrations} == {fr}
    without = dataclasses.replace(
        _GROUPED,
        plan=None,
        data=dataclasses.replace(
            _GROUPED.data, groups=(GroupRecord(name="de", examples=50), GroupRecord(name="en", examples=150))
        ),
        calibrations=(
            whole,
            de,
            dataclasses.replace(en, path=tuple(dataclasses.replace(step, n=150) for step in en.path)),
        ),
    )
    assert without.safest(de).threshold == 0.8


def _changed(**changes: Any) -> Manifest:
    return dataclasses.replace(_GROUPED, **changes)


def _data(*groups: tuple[str, int], **changes: Any) -> dict[str, Any]:
    records = tuple(GroupRecord(name=name, examples=size) for name, size in groups)
    return {"data": dataclasses.replace(_GROUPED.data, groups=records or None, **changes)}


_WHOLE, _DE, _EN, _FR = _GROUPED.calibrations


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: _data(("en", 120), ("de", 50), ("fr", 30)),
            "groups must have one or more names, ascending, each once",
        ),
        (lambda: _data(("de", 50), ("en", 120), ("fr", 31)), "groups must have all examples, of which there are 200"),
        (lambda: _data(("de", 50), ("en", 121), ("fr", 29)), 'n must be data.groups\' examples of "en", which is 121'),
        (lambda: _data(("de", 50), ("en", 120), ("fr", 30), clusters=9), "groups must be left out where there are clu"),
        (lambda: _data(("de", 50), ("en", 120), ("it", 30)), 'group must be one of data.groups, got "fr"'),
        (lambda: _data(), 'group must be one of data.groups, got "de"'),
        (
            lambda: {"calibrations": (_WHOLE, _DE, _EN), "plan": None},
            'calibrations must have an entry for all prompts and one for each of data.groups; .* none for "fr"',
        ),
        (lambda: {"calibrations": (_DE, _EN, _FR), "plan": None}, "there is none for all prompts"),
        (
            lambda: {"plan": dataclasses.replace(_GROUPED.plan, group_key=None)},  # type: ignore[type-var]
            r"data.groups must be there exactly if plan.group_key is not null, got \[\"de\", \"en\", \"fr\"\] and null",
        ),
        (lambda: {"calibrations": (_WHOLE, _EN, _DE, _FR)}, r'calibrations\[1\].group must be "de", as was planned'),
        (
            lambda: {"calibrations": (dataclasses.replace(_WHOLE, group=""), _DE, _EN, _FR)},
            "group must be a non-empty string",
        ),
    ],
)
def test_what_does_not_agree_is_refused(change: Any, message: str) -> None:
    """Groups, their sizes, the plan and the entries must be consistent."""
    with pytest.raises(ManifestError, match=message):
        _changed(**change())


def test_only_a_group_may_have_no_examples() -> None:
    """A group without examples proves nothing; an entry about all prompts must have examples."""
    nothing = tuple(dataclasses.replace(step, n=0, p_value=1.0, risk=0.0) for step in _FR.path)
    assert dataclasses.replace(_FR, path=nothing).threshold is None
    with pytest.raises(ManifestError, match=r"path\[0\].n must be an integer of at least 1, got 0"):
        dataclasses.replace(_FR, path=nothing, group=None)
    risky = tuple(dataclasses.replace(step, risk=0.5) for step in nothing)
    with pytest.raises(ManifestError, match=r"path\[0\] must have p_value 1 and risk 0 where n is 0, got 1.0 and 0.5"):
        dataclasses.replace(_FR, path=risky)


def test_the_guarantee_says_whom_an_entry_is_about() -> None:
    """The guarantee says that the whole's promise may be broken for a group."""
    words = guarantee_in_words(group_key="language")
    assert "An entry of a group, which language names, is about prompts drawn from that group alone" in words
    assert "may be broken for some of the groups" in words
