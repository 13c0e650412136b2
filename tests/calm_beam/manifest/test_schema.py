"""The schema file and the reader describe the same format."""

import copy
import dataclasses
import functools
import importlib.resources
import json
import operator
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from calm_beam import manifest as manifest_module
from calm_beam.exits.measures import is_own
from calm_beam.manifest import (
    SETTINGS,
    ChatRecord,
    EarlierPlan,
    EngineRecord,
    Manifest,
    ManifestError,
    SettingManifest,
    UnseenRecord,
    VocabularyRecord,
    content_digest,
    manifest_text,
)
from calm_beam.manifest.schema import SCHEMA_FILE, manifest_schema, schema_text
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.rules import TAILED, split_tail, tail_name
from tests.calm_beam.manifest.builders import (
    REMOVED,
    build_confirmed_manifest,
    build_grouped_manifest,
    build_joint_confirmed_manifest,
    build_manifest,
    build_path_confirmed_manifest,
    build_plan_record,
    build_planned_manifest,
    build_positions,
    build_sequential_manifest,
    build_variants_manifest,
    changed,
    written_by,
)

_SCHEMA = manifest_schema()
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)
_WITH_CHAT = VocabularyRecord(
    fingerprint="sha256:746f6b",
    extra_ids=0,
    chat=ChatRecord(template="{{ bos_token }}", tokens={"bos_token": "<s>"}, system="Be brief."),
)
_ENGINE = EngineRecord(name="native", instructions="avx2", head="uint8", prefill="native")
_UNSEEN = UnseenRecord(metric="token_f1", no_token=3, few_letters=0)
_EARLIER = EarlierPlan(plan="sha256:65", command="calibrate", asked="2026-01-31T11:00:00Z", answered=True)
_OWN_NAMES = ("a.b:c", "a:b", "_a1:_b", "a", "a:", ":b", "a:b:c", "1a:b", "a:b.c", "a :b", "")
_CALIBRATION = ("calibrations", 0)
_PATH_ENTRY = ("calibrations", 0, "path", 1)


def test_schema_is_made_of_the_records() -> None:
    """The schema's file is generated from the fields of records, and is a JSON Schema of the 2020-12 draft.

    `python -m tools.site.schema` writes the file.
    """
    text = importlib.resources.files("calm_beam.manifest").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    assert text == schema_text()
    _VALIDATOR.check_schema(_SCHEMA)


def test_schema_is_strict_and_described() -> None:
    """Every object allows its named keys only, requires all but a few, and every key has a description."""
    definitions = _SCHEMA["$defs"]
    assert list(definitions)[:2] == ["thresholds", "settings"]
    assert len(definitions) == 35
    for described in definitions.values():
        assert described["additionalProperties"] is False
        assert [key for key in described["properties"] if key in described["required"]] == described["required"]
        assert all(key["description"] for key in described["properties"].values())
    optional = {
        name: sorted(described["properties"].keys() - described["required"]) for name, described in definitions.items()
    }
    assert {name: keys for name, keys in optional.items() if keys} == {
        "thresholds": ["confirmation", "cost", "earlier_plans", "plan", "sequential", "speeds"],
        "settings": ["decoder", "earlier_plans", "sequential"],
        "vocabulary": ["chat", "stop_strings"],
        "chat": ["system"],
        "decode": ["confidence_source", "engine", "matmul_precision", "patience"],
        "engine": ["instructions", "prefill"],
        "data": ["choosing", "clusters", "failed_ids", "groups", "several_turns", "unseen"],
        "plan": [
            *("confirm_path", "confirm_share", "group_key", "joint_procedure", "near_ties", "pareto", "sequential"),
            "serve",
        ],
        "planned_test": ["group"],
        "sequential_plan": ["stop_at_layers", "stop_at_threshold", "stop_gain"],
        "variant": ["confidence", "exit_interval", "tau"],
        "confirmation": ["engine"],
        "calibration": [
            "confirmation",
            "confirming_epsilon",
            "example_risk",
            "group",
            "looks",
            "loss",
            "pays",
            "rule",
            "tested_epsilon",
            "threshold_by_position",
            "variant",
        ],
        "pareto_plan": ["choosing_share", "objective"],
        "cost": ["batch", "classifier_test", "cores", "device", "engine", "logits_test", "states_test"],
        "speed": ["standard_error"],
        "exit_rule": ["confidence_source", "patience"],
        "path_entry": ["near_ties", "variant"],
        "setting_data": ["id_sample"],
        "setting_plan": ["consistency", "direction", "joint_procedure", "sequential"],
        "setting_sequential_plan": ["costs", "stop_at_cost", "stop_at_setting", "stop_gain"],
        "setting_calibration": ["example_risk", "looks", "tested_epsilon"],
    }


@pytest.mark.parametrize(
    "manifest",
    [
        build_manifest(),
        build_manifest(vocabulary=None),
        build_manifest(vocabulary=_WITH_CHAT),
        build_planned_manifest(),
        build_planned_manifest(
            plan=build_plan_record(cluster_key="paragraph", joint_epsilon=0.1),
            data=dataclasses.replace(build_manifest().data, clusters=200),
        ),
        build_manifest(data=dataclasses.replace(build_manifest().data, failed=2, failed_ids=("a", "b"))),
        build_manifest(data=dataclasses.replace(build_manifest().data, unseen=(_UNSEEN,))),
        build_sequential_manifest(),
        build_grouped_manifest(),
        build_variants_manifest(),
        build_confirmed_manifest(),
        build_path_confirmed_manifest(),
        build_joint_confirmed_manifest(),
        build_manifest(decode=dataclasses.replace(build_manifest().decode, engine=_ENGINE)),
        build_planned_manifest(earlier_plans=(_EARLIER,), plan=build_plan_record(serve=1)),
    ],
)
def test_schema_takes_what_the_writer_writes(manifest: Manifest) -> None:
    """A written manifest is valid, with a vocabulary and without, with a plan and as early writers made it."""
    assert list(_VALIDATOR.iter_errors(json.loads(manifest_text(manifest)))) == []


def test_names_of_two_forms_are_those_that_the_reader_takes() -> None:
    """The schema's patterns match names of users' measures and of tails exactly where the reader accepts them."""
    definitions = _SCHEMA["$defs"]
    _, own = definitions["decode"]["properties"]["confidence"]["anyOf"]
    assert all(bool(re.search(own["pattern"], name)) == is_own(name) for name in _OWN_NAMES)
    _, *tails = definitions["planned_test"]["properties"]["loss"]["anyOf"]
    for name in _TAILS:
        assert any(re.search(tail["pattern"], name) for tail in tails) == _is_tail(name), name


_TAILS = [
    *(tail_name(loss, above) for loss in TAILED for above in (0, 0.3, 1 / 3, 1e-5, 1.5e-7, 5e-324, 0.9999999999999999)),
    *(
        "signed>0.3",
        "relu>-0.0",
        "relu>1.0",
        "relu>.3",
        "relu>0.3>0.4",
        "relu >0.3",
        "relu>nan",
        "relu>-0.1",
        "relu>",
        "rouge>0.3",
    ),
]


def _is_tail(name: str) -> bool:
    try:
        return split_tail(name)[1] is not None
    except ValueError:
        return False


def test_core_and_manifest_name_the_same_choices() -> None:
    """Every procedure of a calibration can be written, and conversely."""
    assert set(manifest_module.PROCEDURES) == set(PROCEDURES)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "calm-beam/manifest/v3"),
        (("kind",), REMOVED),
        (("kind",), "external"),
        (("comment",), "an unknown key"),
        (("software",), REMOVED),
        (("created",), "31 January 2026"),
        (("created",), "2026-01-31T12:00:00+01:00"),
        (("model", "uri"), ""),
        (("model", "layers"), 0),
        (("model", "layers"), True),
        (("model", "layers"), 2**31),
        (("model", "layers"), 6.5),
        (("model", "heads"), 8),
        (("vocabulary",), "t5"),
        (("vocabulary", "extra_ids"), -1),
        (("vocabulary", "fingerprint"), REMOVED),
        (("decode", "confidence"), "surprise"),
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
        (("data", "examples"), 10**400),
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
        ((*_CALIBRATION, "procedure"), "sequential"),
        ((*_CALIBRATION, "loss"), "squared"),
        ((*_CALIBRATION, "loss"), None),
        (("data", "clusters"), 0),
        (("data", "clusters"), None),
        (("plan",), None),
        (("plan",), {}),
        ((*_CALIBRATION, "threshold"), 1.5),
        ((*_CALIBRATION, "threshold_by_position"), None),
        ((*_CALIBRATION, "threshold_by_position"), []),
        ((*_CALIBRATION, "threshold_by_position"), 0.8),
        ((*_CALIBRATION, "threshold_by_position"), [*build_positions(0.8)[:-1], "0.8"]),
        ((*_CALIBRATION, "threshold_by_position"), [1.5, *build_positions(0.8)[1:]]),
        ((*_CALIBRATION, "layers"), 0.5),
        ((*_CALIBRATION, "risk"), -1.5),
        ((*_CALIBRATION, "path"), []),
        ((*_CALIBRATION, "alpha"), 0.1),
        ((*_PATH_ENTRY, "threshold"), None),
        ((*_PATH_ENTRY, "n"), 0),
        ((*_PATH_ENTRY, "n"), 2**63),
        ((*_PATH_ENTRY, "risk"), 1.5),
        ((*_PATH_ENTRY, "p_value"), True),
        ((*_PATH_ENTRY, "rejected"), 1),
        ((*_PATH_ENTRY, "layers"), REMOVED),
        (("guarantee",), ""),
        (("data", "unseen"), []),
        (("data", "unseen"), None),
        (("data", "unseen"), [{"metric": "rouge_l", "no_token": 1}]),
        (("data", "unseen"), [{"metric": "rouge_l", "no_token": -1, "few_letters": 1}]),
        (("data", "unseen"), [{"metric": "", "no_token": 1, "few_letters": 0}]),
        (("data", "failed_ids"), []),
        (("data", "failed_ids"), None),
        (("data", "failed_ids"), [7]),
        (("data", "failed_ids"), [f"row-{index:04}" for index in range(1001)]),
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
        ((*_CALIBRATION, "loss"), "dissimilarity"),
        ((*_CALIBRATION, "threshold_by_position"), list(build_positions(0.8))),
        (("data", "clusters"), 200),
        (("data", "failed_ids"), ["row-7"]),
        (("software",), {}),
    ],
)
def test_schema_and_reader_take_the_same_form(path: tuple[str | int, ...], value: object) -> None:
    """Schema and reader both take a manifest that uses the freedom left to it."""
    content = changed(path, value)
    assert _VALIDATOR.is_valid(content)
    assert Manifest.from_dict(content).to_dict() == content


_ENDS = ("stop_at_cost", "stop_at_layers", "stop_gain")
_DAMAGES: tuple[Any, ...] = (None, 0, 1, -1, 2, 0.5, 1.5, "", "x", [], {}, True, 2**31, ["a"], [1], ["a", "a"], *_ENDS)


def _places(content: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the places of values, in the first items of lists."""
    items = (
        content.items() if isinstance(content, dict) else enumerate(content[:2]) if isinstance(content, list) else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from _places(value, (*at, key))


_WRITTEN = written_by(2)


@pytest.mark.parametrize("kind", _WRITTEN)
def test_what_the_schema_refuses_the_reader_refuses(kind: str) -> None:
    """Of damaged and resealed manifests of every kind, the reader accepts none that the schema refuses."""
    content, rng = _WRITTEN[kind], random.Random(kind)
    record = SettingManifest if content["kind"] == SETTINGS else Manifest
    assert _VALIDATOR.is_valid(content)
    places, refused = list(_places(content)), 0
    for _ in range(40):
        damaged = copy.deepcopy(content)
        *above, key = rng.choice(places)
        place: Any = functools.reduce(operator.getitem, above, damaged)
        place[key] = rng.choice(_DAMAGES)
        if isinstance(place, dict) and rng.random() < 0.2:
            del place[key]
        if isinstance(damaged.get("plan"), dict):
            damaged["plan"]["digest"] = content_digest(damaged["plan"])
        damaged["digest"] = content_digest(damaged)
        if not _VALIDATOR.is_valid(damaged):
            refused += 1
            with pytest.raises(ManifestError):
                record.from_dict(damaged)
    assert refused > 10
