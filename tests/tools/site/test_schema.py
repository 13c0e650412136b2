"""The reference of manifests."""

from typing import Any

from calm_beam.manifest.schema import manifest_schema
from tools.site.schema import tables


def test_every_key_has_a_row() -> None:
    """Every key of the schema, at any depth, has a row."""
    schema: Any = manifest_schema()
    keys = [key for each in (schema, *schema["$defs"].values()) for key in each["properties"]]
    rows = [line.split("`")[1] for line in tables().splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert sorted(rows) == sorted(keys)


def test_what_a_key_may_be() -> None:
    """Rows show types, ranges, choices, definitions, and whether a key may be left out."""
    text = tables()
    assert '| `schema` | `"calm-beam/manifest/v2"` |' in text
    assert '| `kind` | `"thresholds"`, `"settings"` |' in text
    assert "| `plan` | [`plan`](#plan), optional |" in text
    assert "| `threshold` | number ≥ 0, ≤ 1 or null |" in text
    assert "array of [`calibration`](#calibration)" in text
    assert "| `layers` | integer ≥ 1 |" in text
