"""A manifest is written atomically, with exactly the given content."""

import json
import os
import pathlib
import stat
from typing import Any

import pytest

from calm_beam.manifest import content_digest, manifest_text, read_manifest, write_manifest
from tests.calm_beam.manifest.builders import build_manifest, build_planned_manifest, build_positions

_OLD = build_manifest(created="2025-01-01T00:00:00Z")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that already holds an older manifest."""
    path = tmp_path / "manifest.json"
    write_manifest(_OLD, path)
    return path


def test_text_is_indented_unescaped_and_ends_in_a_newline() -> None:
    """The text is readable: indented, in the order of the schema, with unescaped accents."""
    text = manifest_text(build_manifest())
    assert text.startswith(
        '{\n  "schema": "calm-beam/manifest/v2",\n  "kind": "thresholds",\n  "created": "2026-01-31T12:00:00Z",\n'
    )
    assert text.endswith('"\n}\n')
    assert '"task_prefix": "résume: "' in text


def test_numbers_stay_as_given() -> None:
    """An integer stays one, and a float keeps its shortest exact form."""
    text = manifest_text(build_manifest())
    assert '"layers": 6,\n      "risk": 0,' in text
    assert '"p_value": 0.0007,' in text


def test_lists_of_numbers_stand_in_one_line() -> None:
    """Long lists of numbers are one line, and strings that look alike are unchanged."""
    manifest = build_planned_manifest(software={"a": "[\n  1,\n  2\n]"})
    text = manifest_text(manifest)
    assert '\n    "thresholds": [0.9, 0.8, 0.7, 0.6],\n' in text
    assert f'"threshold_by_position": {list(build_positions(0.8))},\n' in text
    assert json.loads(text) == manifest.to_dict()


def test_software_is_sorted() -> None:
    """The order in which versions were gathered does not show in the text."""
    assert manifest_text(build_manifest(software={"b": "1", "a": "2"})) == manifest_text(
        build_manifest(software={"a": "2", "b": "1"})
    )


def test_digest_is_the_documented_one() -> None:
    """The digest hashes the documented canonical text, here written out by hand."""
    assert content_digest({"b": [1.5, None], "digest": "x", "a": {"d": True, "c": "é"}}) == (
        # printf '{"a":{"c":"é","d":true},"b":[1.5,null]}' | sha256sum
        "sha256:9bba7c4a97edc625570e37e103c0a62a77883c70fbec8aac2965c89d1c60b852"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_digest_refuses_what_json_has_no_number_for(value: float) -> None:
    """NaN and infinities have no digest."""
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        content_digest({"a": [value]})


def test_writing_replaces_the_old_file(path: pathlib.Path) -> None:
    """A second write leaves the new manifest and nothing else in the folder."""
    write_manifest(build_manifest(), path, overwrite=True)
    assert read_manifest(path) == build_manifest()
    assert path.read_text(encoding="utf-8") == manifest_text(build_manifest())
    assert os.listdir(path.parent) == ["manifest.json"]


def test_writing_takes_a_bare_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a folder is written to the current one."""
    monkeypatch.chdir(tmp_path)
    write_manifest(_OLD, "m.json")
    assert os.listdir(tmp_path) == ["m.json"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_others_may_read_the_file(path: pathlib.Path) -> None:
    """The file gets the mode of any new file, so that serving can read another user's file."""
    plain = path.parent / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_failing_to_write_leaves_the_old_file(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """A failed write leaves the old manifest and no temporary file."""

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="disk full"):
        write_manifest(build_manifest(), path, overwrite=True)
    assert read_manifest(path) == _OLD
    assert os.listdir(path.parent) == ["manifest.json"]


def test_an_unserialisable_manifest_leaves_the_old_file(path: pathlib.Path) -> None:
    """A value without a form in JSON fails before anything is written."""
    broken = build_manifest()
    broken.software["jax"] = object()  # type: ignore[index]
    with pytest.raises(TypeError, match="object is not JSON serializable"):
        write_manifest(broken, path)
    assert read_manifest(path) == _OLD
    assert os.listdir(path.parent) == ["manifest.json"]


def test_a_missing_folder_is_an_error(tmp_path: pathlib.Path) -> None:
    """A missing folder is not made, and the error names the path."""
    with pytest.raises(FileNotFoundError, match="absent"):
        write_manifest(_OLD, tmp_path / "absent" / "manifest.json")


def test_text_parses_to_the_plain_form() -> None:
    """Text and plain form have the same content."""
    assert json.loads(manifest_text(_OLD)) == _OLD.to_dict()
