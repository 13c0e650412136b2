"""Manifests of the first version, of every kind, are read unchanged."""

import gzip
import json
import pathlib
from typing import Any

import pytest

from calm_beam.manifest import ManifestError, parse_manifest
from calm_beam.manifest.files import read_any_manifest

# One line for each kind of run, of a small model with random weights and of made-up losses.
_LINES = gzip.decompress((pathlib.Path(__file__).parent / "before.jsonl.gz").read_bytes()).decode().splitlines()
_WRITTEN: dict[str, Any] = {line["kind"]: line["manifest"] for line in map(json.loads, _LINES)}


@pytest.mark.parametrize("kind", _WRITTEN)
def test_what_was_written_is_read_and_would_be_written_again(kind: str, tmp_path: pathlib.Path) -> None:
    """Each has the right digest, and no value is lost or added."""
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(_WRITTEN[kind]))
    manifest = read_any_manifest(path)
    assert manifest.to_dict() == _WRITTEN[kind]
    assert manifest.digest == _WRITTEN[kind]["digest"]
    assert len(manifest.calibrations) == len(_WRITTEN[kind]["calibrations"])


@pytest.mark.parametrize("kind", _WRITTEN)
def test_each_key_that_is_missing_is_seen(kind: str) -> None:
    """A manifest without any one of its keys is refused, by the key or by its digest."""
    for key in _WRITTEN[kind]:
        rest = {name: value for name, value in _WRITTEN[kind].items() if name != key}
        with pytest.raises(ManifestError):
            parse_manifest(json.dumps(rest))
