"""A manifest records how a sequential calibration ended, and the reader refuses an inconsistent one."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from calm_beam.manifest import EarlierEnd, Manifest, ManifestError, guarantee_in_words, manifest_text, parse_manifest
from tests.calm_beam.manifest.builders import (
    build_looks,
    build_manifest,
    build_path_entry,
    build_planned_manifest,
    build_sequential_manifest,
    build_signed_calibration,
)


def test_it_survives_writing_and_reading() -> None:
    """Rounds, rule, looks and the continued run read back unchanged."""
    manifest = build_sequential_manifest()
    assert manifest.sequential is not None
    continued = dataclasses.replace(
        manifest,
        sequential=dataclasses.replace(
            manifest.sequential, continues=(EarlierEnd(plan="sha256:70", rounds=2, ended_by="stop_gain"),)
        ),
    )
    for each in (manifest, continued):
        assert parse_manifest(manifest_text(each)) == each
    assert manifest.digest != continued.digest


def test_others_do_not_mention_it() -> None:
    """Manifests without rounds have no rounds or looks, so their digests are unchanged."""
    content: Any = build_planned_manifest().to_dict()
    assert "sequential" not in content
    assert "sequential" not in content["plan"]
    assert "looks" not in content["calibrations"][0]


def test_the_guarantee_says_so() -> None:
    """The guarantee says that tests were looked at repeatedly, and hold all the same."""
    assert "looked at after every round" in guarantee_in_words(is_sequential=True)
    assert "round" not in guarantee_in_words()


def _with_sequential(**changes: Any) -> Callable[[], Manifest]:
    def build() -> Manifest:
        manifest = build_sequential_manifest()
        assert manifest.sequential is not None
        return dataclasses.replace(manifest, sequential=dataclasses.replace(manifest.sequential, **changes))

    return build


def _with_look(index: int, **changes: Any) -> Callable[[], Manifest]:
    def build() -> Manifest:
        looks = list(build_looks())
        looks[index] = dataclasses.replace(looks[index], **changes)
        (entry,) = build_sequential_manifest().calibrations
        return build_sequential_manifest(calibrations=(dataclasses.replace(entry, looks=tuple(looks)),))

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: build_manifest(sequential=build_sequential_manifest().sequential),
            "sequential must be there exactly if plan.sequential is, got one and none",
        ),
        (
            lambda: dataclasses.replace(build_sequential_manifest(), sequential=None),
            "sequential must be there exactly if plan.sequential is, got none and one",
        ),
        (
            _with_sequential(rounds=2),
            "calibrations[0].looks must have one entry for each of sequential.rounds, which is 2, got 3",
        ),
        (_with_sequential(of_rounds=2), "of_rounds must be an integer of at least 3, got 2"),
        (
            _with_sequential(ended_by="end_of_data"),
            "ended_by must say what stopped it, since rounds is 3 of 5, got end_of_data",
        ),
        (
            _with_sequential(ended_by="stop_gain"),
            "sequential.ended_by is stop_gain, but plan.sequential has no such rule",
        ),
        (
            _with_sequential(of_examples=199),
            "sequential.of_examples must be at least data.examples, which is 200, got 199",
        ),
        (_with_sequential(of_examples=200), "data.examples is 200 of 200, but sequential.rounds 3 of 5"),
        (
            _with_sequential(continues=(EarlierEnd(plan="a", rounds=4, ended_by="stop_gain"),)),
            "continues must be of no more rounds than what followed, got [4, 3]",
        ),
        (_with_look(1, n=60), "looks[1].n must be above that of the round before, 60, got 60"),
        (
            _with_look(0, threshold=0.7, layers=3.0),
            "looks[1].threshold must not come before 0.7, which was accepted before, got 0.9",
        ),
        (_with_look(2, n=201), "looks[2].n must be 200, as at the end, got 201"),
        (_with_look(2, threshold=0.6), "looks[2].threshold must be one that path rejects, or null, got 0.6"),
        (_with_look(2, layers=3.0), "looks[2].layers must be 3.5, as at the end, got 3.0"),
        (_with_look(2, risk=0.5), "looks[2].risk must be 0.0025, as at the end, got 0.5"),
        (
            _with_look(1, log_capital=3.0),
            "looks must come to a capital of 1 / 0.01, which the p-value at 0.7 is made of, got e^3",
        ),
    ],
)
def test_what_is_at_odds_is_refused(build: Callable[[], Manifest], message: str) -> None:
    """Each message names the key, the value and what contradicts it."""
    with pytest.raises(ManifestError, match=f"{re.escape(message)}$"):
        build()


def test_capital_that_never_grew_is_a_p_value_of_one() -> None:
    """If the bettor has lost, the p-value is 1 and nothing is chosen; looks are then at the first threshold."""
    path = (build_path_entry(p_value=1, rejected=False),)
    looks = tuple(
        dataclasses.replace(look, threshold=None, layers=6, risk=risk, log_capital=-1.0)
        for look, risk in zip(build_looks(), (0.2, 0.1, 0.0125), strict=True)
    )
    fields: dict[str, Any] = {"procedure": "fixed_sequence", "threshold": None, "layers": 6, "risk": 0, "path": path}
    entry = build_signed_calibration(**fields, looks=looks)
    assert entry.looks == looks
