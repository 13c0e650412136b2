"""The reference of manifests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.snippets import ROOT
from tools.site.schema import tables


def _keys(schema: dict[str, Any]) -> Iterator[str]:
    yield from schema.get("properties", {})
    for value in [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]:
        yield from _keys(value.get("items", value))


@pytest.mark.parametrize("name", ["manifest.schema.json", "external.schema.json"])
def test_every_key_has_a_row(name: str) -> None:
    """No key of a schema is left out, however deep it is."""
    schema = json.loads((ROOT / "calm_beam" / "manifest" / name).read_text(encoding="utf-8"))
    rows = [line.split("`")[1] for line in tables(name).splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert sorted(rows) == sorted(_keys(schema))


def test_what_a_key_may_be() -> None:
    """Types, ranges, choices and definitions are told, and what may be left out."""
    text = tables("manifest.schema.json")
    assert '| `schema` | `"calm-beam/manifest/v1"` |' in text
    assert "| `plan` | object, optional |" in text
    assert "array of [`calibration`](#calibration)" in text
    assert "| `layers` | integer ≥ 1 |" in text
