"""The JSON Schema of manifests, generated from the fields of records: their types and their docstrings."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from calm_beam.storage.records import DigestedRecord, OrNone, Record, definition_name, kinds_of

from ._entries import SETTINGS, THRESHOLDS
from ._manifest import SCHEMA, Manifest, SettingManifest, WrittenManifest

SCHEMA_FILE = "manifest.schema.json"
"""The package's file that describes manifests for other languages."""

_KINDS: tuple[type[WrittenManifest[Any]], ...] = (Manifest, SettingManifest)
_SCHEMA = {
    "description": "Name and version of this form. A reader refuses versions it does not know.",
    "const": SCHEMA,
}
_DIGEST = {
    "description": '"sha256:" and the hexadecimal SHA-256 of this object as JSON without the key `digest`: keys sorted '
    'at every level, separators "," and ":", UTF-8 unescaped.',
    "type": "string",
    "pattern": "^sha256:[0-9a-f]{64}$",
}


def manifest_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of manifests of the version that is written.

    It describes the allowed values. Rules that tie values to each other are checked by the records, and described as
    text.
    """
    kind = {"description": "The kind of manifest, which decides its keys.", "enum": [each.KIND for each in _KINDS]}
    of_settings = {"properties": {"kind": {"const": SETTINGS}}}
    parts = {definition_name(record): _described(record) for each in _KINDS for record in _parts(each)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{SCHEMA.replace('/', ':')}",
        "title": "calm-beam manifest",
        "description": "Proven exit thresholds of a model, or proven settings of a sweep made elsewhere.",
        "type": "object",
        "required": ["schema", "kind"],
        "properties": {"schema": _SCHEMA, "kind": kind},
        "if": of_settings,
        "then": {"$ref": f"#/$defs/{SETTINGS}"},
        "else": {"$ref": f"#/$defs/{THRESHOLDS}"},
        "$defs": {**{each.KIND: _whole(each) for each in _KINDS}, **parts},
    }


def _whole(manifest: type[WrittenManifest[Any]]) -> dict[str, Any]:
    """Returns the JSON Schema of a kind of manifest."""
    described = _described(manifest)
    heads = {"schema": _SCHEMA, "kind": {"description": "The kind of manifest.", "const": manifest.KIND}}
    return {
        **described,
        "required": [*heads, *described["required"], "digest"],
        "properties": {**heads, **described["properties"], "digest": _DIGEST},
    }


def schema_text() -> str:
    """Returns the content of `SCHEMA_FILE`."""
    return json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"


def _parts(record: type[Record]) -> Iterator[type[Record]]:
    """Yields a record and the records in its fields, each once, before its own parts."""
    seen: list[type[Record]] = []

    def visit(each: type[Record]) -> None:
        for key in each.file_keys():
            part = kinds_of(each)[key].record
            if part is not None and part not in seen:
                seen.append(part)
                visit(part)

    visit(record)
    yield from seen


def _described(record: type[Record]) -> dict[str, Any]:
    """Returns the JSON Schema of a record, which refers to other records among the definitions by name."""
    properties, said = {}, _attributes(record)
    for key in record.file_keys():
        kind, absent = kinds_of(record)[key], "null"
        if key in record.optional_keys():
            # Optional keys are left out of the file, not null.
            kind, absent = kind.kind if isinstance(kind, OrNone) else kind, "left out"
        properties[key] = {"description": _in_json(said[key], absent=absent), **kind.schema()}
    if issubclass(record, DigestedRecord):
        properties["digest"] = _DIGEST
    words, _, _ = inspect.cleandoc(record.__doc__ or "").partition("\n\nAttributes:")
    return {
        "description": _in_json(" ".join(words.split()), absent="null"),
        "type": "object",
        "additionalProperties": False,
        "required": [key for key in properties if key not in record.optional_keys()],
        "properties": properties,
        **record.SCHEMA_RULES,
    }


def _attributes(record: type[Record]) -> dict[str, str]:
    """Returns the descriptions of a record's fields, from its docstring and those of its bases."""
    said: dict[str, str] = {}
    for base in reversed(record.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\n\nAttributes:\n")
        for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", attributes, re.MULTILINE):
            said[name] = " ".join(text.split())
    return {field.name: said[field.name] for field in fields(record)}  # type: ignore[arg-type]


def _in_json(text: str, *, absent: str) -> str:
    """Returns a docstring's text with None as it appears in the file: `null`, or `left out`.

    >>> _in_json("The group; None for all. None: as above.", absent="null")
    'The group; null for all. Null: as above.'
    """
    started = re.sub(r"(^|[.:] )None\b", lambda found: found[1] + absent.capitalize(), text)
    return re.sub(r"\bNone\b", absent, started)
