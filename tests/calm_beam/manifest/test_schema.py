"""The schema file and the reader describe the same form."""

import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from calm_beam import manifest as manifest_module
from calm_beam.manifest import Manifest, ManifestError, manifest_text
from tests.calm_beam.manifest.builders import REMOVED, build_manifest, changed

_SCHEMA = json.loads(
    importlib.resources.files("calm_beam.manifest").joinpath("manifest.schema.json").read_text(encoding="utf-8")
)
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)
_CALIBRATION = ("calibrations", 0)
_PATH_ENTRY = ("calibrations", 0, "path", 1)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every part of the schema that describes an object with named keys."""
    if isinstance(schema, dict):
        if "object" in schema.get("type", ()) and "properties" in schema:
            yield schema
        for part in schema.values():
            yield from _objects(part)


def test_schema_is_valid() -> None:
    """The schema file is a JSON Schema of the 2020-12 draft."""
    _VALIDATOR.check_schema(_SCHEMA)


def test_schema_is_strict_and_described() -> None:
    """Every object allows its named keys only, requires each, and every key is described."""
    objects = list(_objects(_SCHEMA))
    assert len(objects) == 7
    for described in objects:
        assert described["additionalProperties"] is False
        assert list(described["properties"]) == described["required"]
        assert all(key["description"] for key in described["properties"].values())


@pytest.mark.parametrize("changes", [{}, {"vocabulary": None}])
def test_schema_takes_what_the_writer_writes(changes: dict[str, Any]) -> None:
    """A written manifest is valid, with a vocabulary and without."""
    assert list(_VALIDATOR.iter_errors(json.loads(manifest_text(build_manifest(**changes))))) == []


def test_schema_and_reader_name_the_same_choices() -> None:
    """The enums of the schema are the constants of the records, in the same order."""
    decode, calibration = _SCHEMA["properties"]["decode"]["properties"], _SCHEMA["$defs"]["calibration"]["properties"]
    assert _SCHEMA["properties"]["schema"]["const"] == manifest_module.SCHEMA
    assert tuple(decode["confidence"]["enum"]) == manifest_module.CONFIDENCES
    assert tuple(decode["schedule"]["enum"]) == manifest_module.SCHEDULES
    assert tuple(decode["state_propagation"]["enum"]) == manifest_module.STATE_PROPAGATIONS
    assert tuple(calibration["consistency"]["enum"]) == manifest_module.CONSISTENCIES
    assert tuple(calibration["procedure"]["enum"]) == manifest_module.PROCEDURES


def test_schema_and_reader_name_the_same_keys() -> None:
    """A written manifest has the keys of the schema, in the same order at every level."""
    content: Any = build_manifest().to_dict()
    assert list(content) == _SCHEMA["required"]
    for key in ("model", "vocabulary", "decode", "data"):
        assert list(content[key]) == _SCHEMA["properties"][key]["required"]
    assert list(content["calibrations"][0]) == _SCHEMA["$defs"]["calibration"]["required"]
    assert list(content["calibrations"][0]["path"][0]) == _SCHEMA["$defs"]["path_entry"]["required"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "calm-beam/manifest/v2"),
        (("comment",), "an unknown key"),
        (("software",), REMOVED),
        (("created",), "31 January 2026"),
        (("created",), "2026-01-31T12:00:00+01:00"),
        (("model", "uri"), ""),
        (("model", "layers"), 0),
        (("model", "layers"), True),
        (("model", "layers"), 6.5),
        (("model", "heads"), 8),
        (("vocabulary",), "t5"),
        (("vocabulary", "extra_ids"), -1),
        (("vocabulary", "fingerprint"), REMOVED),
        (("decode", "confidence"), "entropy"),
        (("decode", "schedule"), "linear"),
        (("decode", "tau"), "4"),
        (("decode", "tau"), -1.0),
        (("decode", "tau"), None),
        (("decode", "state_propagation"), ["from_exit"]),
        (("decode", "min_exit_layer"), 0),
        (("decode", "exit_interval"), 0),
        (("decode", "max_input_length"), 0),
        (("decode", "max_decode_length"), None),
        (("decode", "task_prefix"), None),
        (("decode", "dtype"), ""),
        (("data", "patterns"), "gs://data/*"),
        (("data", "patterns"), [""]),
        (("data", "examples"), 0),
        (("data", "duplicates"), -1),
        (("data", "failed"), "none"),
        (("data", "truncated"), False),
        (("data", "fingerprint"), 1),
        (("calibrations",), []),
        (("calibrations",), {}),
        (("calibrations", 0), None),
        ((*_CALIBRATION, "consistency"), "semantic"),
        ((*_CALIBRATION, "metric"), ""),
        ((*_CALIBRATION, "delta"), 0),
        ((*_CALIBRATION, "delta"), "x"),
        ((*_CALIBRATION, "epsilon"), 1),
        ((*_CALIBRATION, "p_value"), ""),
        ((*_CALIBRATION, "procedure"), "bonferroni"),
        ((*_CALIBRATION, "threshold"), 1.5),
        ((*_CALIBRATION, "layers"), 0.5),
        ((*_CALIBRATION, "risk"), -0.1),
        ((*_CALIBRATION, "path"), []),
        ((*_CALIBRATION, "alpha"), 0.1),
        ((*_PATH_ENTRY, "threshold"), None),
        ((*_PATH_ENTRY, "n"), 0),
        ((*_PATH_ENTRY, "risk"), 1.5),
        ((*_PATH_ENTRY, "p_value"), True),
        ((*_PATH_ENTRY, "rejected"), 1),
        ((*_PATH_ENTRY, "layers"), REMOVED),
        (("guarantee",), ""),
        (("software",), []),
        (("software", "jax"), 8),
        (("software", ""), "1.0"),
    ],
)
def test_schema_and_reader_refuse_the_same_form(path: tuple[str | int, ...], value: object) -> None:
    """Schema and reader both refuse a manifest whose form is wrong in one place."""
    content = changed(path, value)
    assert not _VALIDATOR.is_valid(content)
    with pytest.raises(ManifestError):
        Manifest.from_dict(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("created",), "2026-01-31T12:00:00.123456Z"),
        (("decode", "tau"), 4),
        (("decode", "task_prefix"), ""),
        (("data", "patterns"), []),
        ((*_CALIBRATION, "p_value"), "a_method_of_tomorrow"),
        (("software",), {}),
    ],
)
def test_schema_and_reader_take_the_same_form(path: tuple[str | int, ...], value: object) -> None:
    """Schema and reader both take a manifest that uses the freedom left to it."""
    content = changed(path, value)
    assert _VALIDATOR.is_valid(content)
    assert Manifest.from_dict(content).to_dict() == content
