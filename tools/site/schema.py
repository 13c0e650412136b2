"""The reference of manifests, generated from their JSON schema.

`python -m tools.site.schema` writes the schema's file, which is part of the package and the documentation, from the
records.
"""

import html
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from calm_beam.manifest.schema import SCHEMA_FILE, manifest_schema, schema_text

_FOLDER = pathlib.Path(__file__).parents[2] / "calm_beam" / "manifest"


def tables() -> str:
    """Returns every key of a manifest as Markdown: a table for each object, each kind of manifest first."""
    schema = manifest_schema()
    definitions = schema["$defs"].items()
    return "\n\n".join([_table("The whole", schema), *(_table(f"`{name}`", each) for name, each in definitions)])


def _table(title: str, schema: Mapping[str, Any]) -> str:
    """Returns the section about an object."""
    required = set(schema["required"])
    rows = [
        f"| `{key}` | {_kind(value)}{'' if key in required else ', optional'} | {_sentence(value)} |"
        for key, value in schema["properties"].items()
    ]
    said = "" if title == "The whole" else f"{_sentence(schema)}\n\n"
    return f"### {title}\n\n{said}" + "\n".join(["| key | is | meaning |", "|---|---|---|", *rows])


def _sentence(schema: Mapping[str, Any]) -> str:
    return html.escape(str(schema["description"]), quote=False).replace("|", r"\|").replace("*", r"\*")


def _kind(schema: Mapping[str, Any]) -> str:
    """Returns a short description of a value's type."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema["type"] == "array":
        return f"array of {_kind(schema['items'])}"
    return f"{schema['type']}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    """Returns the bounds of a number, without those that say nothing."""
    low = _bound(schema, "minimum", "≥", "exclusiveMinimum", ">")
    high = _bound(schema, "maximum", "≤", "exclusiveMaximum", "<")
    # The maximum of a 32-bit integer means that there is no bound.
    bounds = [bound for bound in (low, high) if bound and not bound.endswith("2147483647")]
    return f" {', '.join(bounds)}" if bounds else ""


def _bound(schema: Mapping[str, Any], key: str, sign: str, open_key: str, open_sign: str) -> str:
    if key in schema:
        return f"{sign} {schema[key]}"
    return f"{html.escape(open_sign)} {schema[open_key]}" if open_key in schema else ""


if __name__ == "__main__":
    (_FOLDER / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
