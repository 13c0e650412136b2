"""Manifests of the second version, of every kind, are read unchanged; those of the first are named as such."""

import dataclasses
import json
import pathlib

import pytest

from calm_beam.manifest import (
    SCHEMAS,
    Manifest,
    ManifestError,
    SettingManifest,
    content_digest,
    parse_manifest,
    read_any_manifest,
)
from tests.calm_beam.manifest.builders import written_by

# The same runs as those of the first version, with new features.
_FIRST, _SECOND = written_by(1), written_by(2)


def _read(content: object, folder: pathlib.Path) -> Manifest | SettingManifest:
    path = folder / "manifest.json"
    path.write_text(json.dumps(content))
    return read_any_manifest(path)


@pytest.mark.parametrize("kind", _SECOND)
def test_what_was_written_is_read_and_would_be_written_again(kind: str, tmp_path: pathlib.Path) -> None:
    """Each has the right digest and kind, and no value is lost or added."""
    manifest = _read(_SECOND[kind], tmp_path)
    assert manifest.to_dict() == _SECOND[kind]
    assert manifest.digest == _SECOND[kind]["digest"]
    assert manifest.schema_version == 2
    assert (_SECOND[kind]["schema"], _SECOND[kind]["kind"]) == (SCHEMAS[2], manifest.KIND)


@pytest.mark.parametrize("kind", _SECOND)
def test_each_key_that_is_missing_is_seen(kind: str) -> None:
    """A manifest without any one of its keys is refused, by the key or by its digest."""
    for key in _SECOND[kind]:
        rest = {name: value for name, value in _SECOND[kind].items() if name != key}
        with pytest.raises(ManifestError):
            parse_manifest(json.dumps(rest))


@pytest.mark.parametrize("kind", _FIRST)
def test_a_run_says_the_same_in_both_versions(kind: str, tmp_path: pathlib.Path) -> None:
    """Except for the format and the entries' exit rules, the second version has the first one's content."""
    first, second = _read(_FIRST[kind], tmp_path), _read(_SECOND[kind], tmp_path)
    assert first.schema_version == 1
    if isinstance(second, Manifest):
        assert isinstance(first, Manifest)
        rules = [None if entry.threshold is None else first.decode_of(entry).rule() for entry in first.calibrations]
        assert [entry.rule for entry in second.calibrations] == rules
        entries = tuple(dataclasses.replace(entry, rule=None) for entry in second.calibrations)
        second = dataclasses.replace(second, calibrations=entries)
    assert dataclasses.replace(second, schema_version=1) == first


def test_a_rule_is_that_of_the_run() -> None:
    """An entry's rule that contradicts decode and variant, or that belongs to never exit, is refused."""
    manifest = next(each for each in map(Manifest.from_dict, _of_thresholds()) if each.calibrations[0].rule is not None)
    entry, *others = manifest.calibrations
    assert entry.rule is not None
    other = dataclasses.replace(entry, rule=dataclasses.replace(entry.rule, exit_interval=entry.rule.exit_interval + 1))
    with pytest.raises(ManifestError, match=r"calibrations\[0\]\.rule must be \{.*, as decode and variant say$"):
        dataclasses.replace(manifest, calibrations=(other, *others))
    with pytest.raises(ManifestError, match="rule must be left out when threshold is null"):
        dataclasses.replace(entry, threshold=None, threshold_by_position=None)


def test_a_form_has_what_is_its_own() -> None:
    """The first version has no rules, read or set, and no unknown version is written."""
    manifest = next(each for each in map(Manifest.from_dict, _of_thresholds()) if each.calibrations[0].rule is not None)
    said = r"calibrations\[0\]\.rule is not a key of calm-beam/manifest/v1"
    with pytest.raises(ManifestError, match=said):
        dataclasses.replace(manifest, schema_version=1)
    content = {key: value for key, value in manifest.to_dict().items() if key != "kind"} | {"schema": SCHEMAS[1]}
    with pytest.raises(ManifestError, match=said):
        parse_manifest(json.dumps({**content, "digest": content_digest(content)}))
    with pytest.raises(ManifestError, match="schema_version must be one of 1, 2, got 3"):
        dataclasses.replace(manifest, schema_version=3)


def _of_thresholds() -> list[object]:
    return [content for content in _SECOND.values() if content["kind"] == Manifest.KIND]
