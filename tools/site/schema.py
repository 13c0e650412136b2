"""The reference of manifests, written by their JSON schemas."""

import html
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

_FOLDER = pathlib.Path(__file__).parents[2] / "calm_beam" / "manifest"


def tables(name: str) -> str:
    """Returns every key of a schema as Markdown: a table for each object, and for each definition.

    Args:
      name: File of the schema, such as `manifest.schema.json`.
    """
    schema = json.loads((_FOLDER / name).read_text(encoding="utf-8"))
    sections = [*_sections("The whole", schema)]
    for name, definition in schema["$defs"].items():
        if "properties" in definition:
            sections += _sections(f"`{name}`", definition, path=f"{name}.")
        else:
            sections.append(f"### `{name}`\n\n{_sentence(definition)} {_kind(definition)}".rstrip())
    return "\n\n".join(sections)


def _sections(title: str, schema: Mapping[str, Any], *, path: str = "") -> Iterator[str]:
    """Yields the table of an object, and those of the objects in it, whose names begin with its path."""
    keys = schema["properties"]
    required = set(schema.get("required", ()))
    rows = [
        f"| `{key}` | {_kind(value)}{'' if key in required else ', optional'} | {_sentence(value)} |"
        for key, value in keys.items()
    ]
    said = "" if title == "The whole" else f"{_sentence(schema)}\n\n"
    yield f"### {title}\n\n{said}" + "\n".join(["| key | is | meaning |", "|---|---|---|", *rows])
    for key, value in keys.items():
        inner = value.get("items", value)
        name = f"{path}{key}{'[]' if 'items' in value else ''}"
        if "properties" in inner:
            yield from _sections(f"`{name}`", inner, path=f"{name}.")


def _sentence(schema: Mapping[str, Any]) -> str:
    text = str(schema.get("description", "")) or str(schema.get("items", {}).get("description", ""))
    return html.escape(text, quote=False).replace("|", r"\|").replace("*", r"\*")


def _kind(schema: Mapping[str, Any]) -> str:
    """Returns in a few words what a value may be."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(each) for each in schema[several])
    types = schema.get("type", "any value")
    names = " or ".join(types) if isinstance(types, list) else types
    if names == "array" and schema.get("items"):
        return f"array of {_kind(schema['items'])}"
    return f"{names}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    """Returns the least and greatest number, where there are any that say something."""
    low = _bound(schema, "minimum", "≥", "exclusiveMinimum", ">")
    high = _bound(schema, "maximum", "≤", "exclusiveMaximum", "<")
    # The greatest of a 32-bit integer stands for none.
    bounds = [bound for bound in (low, high) if bound and not bound.endswith("2147483647")]
    return f" {', '.join(bounds)}" if bounds else ""


def _bound(schema: Mapping[str, Any], key: str, sign: str, open_key: str, open_sign: str) -> str:
    if key in schema:
        return f"{sign} {schema[key]}"
    return f"{html.escape(open_sign)} {schema[open_key]}" if open_key in schema else ""
