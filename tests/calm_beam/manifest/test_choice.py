"""The choice of a manifest's entry, as one value."""

import argparse
import dataclasses
import pickle
from typing import get_type_hints

import pytest

from calm_beam.manifest import ANY_ENTRY, EntryChoice, EntryWords, ManifestError
from tests.calm_beam.manifest.builders import build_grouped_manifest, build_manifest
from tests.calm_beam.manifest.test_settings import build_setting_manifest


def test_words_are_the_fields() -> None:
    """Callers' keyword arguments are the fields of a choice, with the same types."""
    assert get_type_hints(EntryWords) == get_type_hints(EntryChoice)


def test_a_choice_finds_what_its_words_find() -> None:
    """A whole choice selects the entry that its keywords select, and keywords override it."""
    manifest = build_grouped_manifest()
    choice = EntryChoice(group="fr", delta=0.1)
    assert manifest.calibration(choice) == manifest.calibration(group="fr", delta=0.1)
    assert manifest.calibration(choice, group="en").group == "en"
    assert manifest.calibration(ANY_ENTRY) == manifest.calibration()
    settings = build_setting_manifest()
    assert settings.calibration(EntryChoice(group="math", tail=0.5)) == settings.calibrations[1]


def test_flags_make_a_choice() -> None:
    """Attributes with its names are taken, and missing ones are left open."""
    flags = argparse.Namespace(delta=0.1, group="en", batch_size=4)
    assert EntryChoice.named_by(flags) == EntryChoice(delta=0.1, group="en")


def test_a_choice_travels() -> None:
    """A choice can be pickled and hashed."""
    choice = EntryChoice(consistency="textual", metric="rouge_l", loss="dissimilarity>0.3", delta=0.1, confidence="a:b")
    assert {pickle.loads(pickle.dumps(choice)): 1}[choice] == 1
    assert dataclasses.replace(choice, confidence=None) != choice


def test_what_the_other_kind_has_is_refused() -> None:
    """A tail is refused for thresholds, a metric for settings, and a misspelt keyword for both."""
    with pytest.raises(
        ManifestError,
        match=r"^tail is for manifests of kind settings, and this one is of kind thresholds\. Name its loss\.$",
    ):
        build_manifest().calibration(tail=0.3)
    with pytest.raises(
        ManifestError,
        match=r"^metric is for manifests of kind thresholds, and this one is of kind settings\. Leave it out\.$",
    ):
        build_setting_manifest().calibration(metric="rouge_l")
    with pytest.raises(TypeError, match=r"^calibration\(\) has no argument 'deltas'\. Did you mean delta\?$"):
        build_manifest().calibration(deltas=0.1)  # type: ignore[call-arg]
