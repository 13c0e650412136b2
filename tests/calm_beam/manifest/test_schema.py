"""The schema file and the reader describe the same form."""

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from calm_beam import manifest as manifest_module
from calm_beam.exits.measures import MEASURES, is_own
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.manifest import (
    ChatRecord,
    EarlierPlan,
    EngineRecord,
    Manifest,
    ManifestError,
    UnseenRecord,
    Variant,
    VocabularyRecord,
    manifest_text,
)
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.tails import TAILED, split_tail, tail_name
from tests.calm_beam.manifest.builders import (
    REMOVED,
    build_confirmed_manifest,
    build_grouped_manifest,
    build_joint_confirmed_manifest,
    build_manifest,
    build_path_confirmed_manifest,
    build_path_entry,
    build_plan_record,
    build_planned_manifest,
    build_positions,
    build_sequential_manifest,
    build_variants_manifest,
    changed,
)

_SCHEMA = json.loads(
    importlib.resources.files("calm_beam.manifest").joinpath("manifest.schema.json").read_text(encoding="utf-8")
)
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)
_WITH_CHAT = VocabularyRecord(
    fingerprint="sha256:746f6b",
    extra_ids=0,
    chat=ChatRecord(template="{{ bos_token }}", tokens={"bos_token": "<s>"}, system="Be brief."),
)
_ENGINE = EngineRecord(name="native", instructions="avx2", head="uint8")
_UNSEEN = UnseenRecord(metric="token_f1", no_token=3, few_letters=0)
_EARLIER = EarlierPlan(plan="sha256:65", command="calibrate", asked="2026-01-31T11:00:00Z", answered=True)
_OWN_NAMES = ("a.b:c", "a:b", "_a1:_b", "a", "a:", ":b", "a:b:c", "1a:b", "a:b.c", "a :b", "")
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
    """Every object allows its named keys only, requires all but a few, and every key is described."""
    objects = list(_objects(_SCHEMA))
    assert len(objects) == 21
    optional = []
    for described in objects:
        assert described["additionalProperties"] is False
        assert [key for key in described["properties"] if key in described["required"]] == described["required"]
        optional += [key for key in described["properties"] if key not in described["required"]]
        assert all(key["description"] for key in described["properties"].values())
    assert sorted(optional) == [
        "chat",
        "choosing",
        "choosing_share",
        "clusters",
        "confidence",
        "confidence_source",
        "confirm_path",
        "confirm_share",
        "confirmation",
        "confirmation",
        "confirming_epsilon",
        "earlier_plans",
        "engine",
        "engine",
        "example_risk",
        "exit_interval",
        "failed_ids",
        "group",
        "group",
        "group_key",
        "groups",
        "instructions",
        "looks",
        "loss",
        "matmul_precision",
        "near_ties",
        "near_ties",
        "pareto",
        "patience",
        "plan",
        "sequential",
        "sequential",
        "serve",
        "stop_at_layers",
        "stop_at_threshold",
        "stop_gain",
        "system",
        "tau",
        "threshold_by_position",
        "unseen",
        "variant",
        "variant",
    ]


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


def test_schema_and_reader_name_the_same_choices() -> None:
    """The enums of the schema are the constants of the records, in the same order."""
    decode, definitions = _SCHEMA["properties"]["decode"]["properties"], _SCHEMA["$defs"]
    assert _SCHEMA["properties"]["schema"]["const"] == manifest_module.SCHEMA
    ours, own = decode["confidence"]["anyOf"]
    assert ours["enum"] == list(MEASURES)
    assert all(bool(re.search(own["pattern"], name)) == is_own(name) for name in _OWN_NAMES)
    assert tuple(decode["schedule"]["enum"]) == tuple(SCHEDULES)
    assert decode["state_propagation"]["enum"] == list(PROPAGATIONS)
    for described in (definitions["calibration"], definitions["planned_test"]):
        assert tuple(described["properties"]["consistency"]["enum"]) == manifest_module.CONSISTENCIES
    plain, *tails = definitions["loss"]["anyOf"]
    assert tuple(plain["enum"]) == manifest_module.LOSSES
    for name in _TAILS:
        assert any(re.search(tail["pattern"], name) for tail in tails) == _is_tail(name), name
    assert tuple(definitions["procedure"]["enum"]) == (*manifest_module.PROCEDURES, *manifest_module.OF_VARIANTS)
    assert tuple(definitions["end"]["enum"]) == manifest_module.SequentialPlan.ends()
    assert tuple(definitions["variant"]["properties"]["confidence"]["enum"]) == manifest_module.VARIANT_MEASURES
    decoders = _SCHEMA["properties"]["confirmation"]["properties"]["decoder"]["enum"]
    assert tuple(decoders) == manifest_module.SERVED_DECODERS


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


def _all_of(*contents: dict[str, Any], like: dict[str, Any]) -> bool:
    """Returns whether each has its keys in the order of a schema, and together they have all."""
    properties = list(like["properties"])
    in_order = all(list(content) == [key for key in properties if key in content] for content in contents)
    return in_order and set().union(*contents) == set(properties)


def test_schema_and_reader_name_the_same_keys() -> None:
    """A written manifest has the keys of the schema, in the same order at every level."""
    early: Any = build_manifest().to_dict()
    assert list(early) == _SCHEMA["required"]
    assert list(early["data"]) == _SCHEMA["$defs"]["data"]["required"]
    assert list(early["calibrations"][0]) == _SCHEMA["$defs"]["calibration"]["required"]
    clustered = build_planned_manifest(
        plan=build_plan_record(cluster_key="paragraph"),
        data=dataclasses.replace(build_manifest().data, clusters=200, failed_ids=("row-7",), unseen=(_UNSEEN,)),
        vocabulary=_WITH_CHAT,
        decode=dataclasses.replace(
            build_manifest().decode,
            confidence="module:measure",
            patience=2,
            confidence_source="sha256:6d",
            matmul_precision="high",
            engine=_ENGINE,
        ),
    )
    entry = dataclasses.replace(clustered.calibrations[0], example_risk=0.72)
    clustered = dataclasses.replace(clustered, calibrations=(entry, *clustered.calibrations[1:]))
    content: Any = clustered.to_dict()
    watched: Any = build_sequential_manifest().to_dict()
    grouped: Any = build_grouped_manifest().to_dict()
    varied: Any = build_variants_manifest().to_dict()
    worst = dataclasses.replace(build_plan_record(), near_ties="worst_case").to_dict()
    without = build_joint_confirmed_manifest()
    assert without.confirmation is not None
    by_engine = dataclasses.replace(without.confirmation, engine=_ENGINE)
    confirmed: Any = dataclasses.replace(without, confirmation=by_engine).to_dict()
    asked_before: Any = build_planned_manifest(earlier_plans=(_EARLIER,), plan=build_plan_record(serve=1)).to_dict()
    assert list(asked_before["earlier_plans"][0]) == _SCHEMA["properties"]["earlier_plans"]["items"]["required"]
    assert _all_of(watched, confirmed, asked_before, like=_SCHEMA)
    plans = (watched["plan"], grouped["plan"], varied["plan"], confirmed["plan"], worst, asked_before["plan"])
    assert _all_of(*plans, like=_SCHEMA["properties"]["plan"])
    assert list(confirmed["confirmation"]) == list(_SCHEMA["properties"]["confirmation"]["properties"])
    assert list(watched["sequential"]) == list(_SCHEMA["properties"]["sequential"]["properties"])
    assert list(varied["plan"]["pareto"]) == list(_SCHEMA["properties"]["plan"]["properties"]["pareto"]["properties"])
    # Clusters, groups and parts are not told apart at once.
    assert _all_of(content["data"], grouped["data"], varied["data"], like=_SCHEMA["$defs"]["data"])
    unseen = _SCHEMA["$defs"]["data"]["properties"]["unseen"]["items"]
    assert list(content["data"]["unseen"][0]) == list(unseen["properties"])
    for key in ("model", "vocabulary", "decode"):
        assert list(content[key]) == list(_SCHEMA["properties"][key]["properties"])
    assert list(content["decode"]["engine"]) == list(_SCHEMA["$defs"]["engine"]["properties"])
    described_chat = _SCHEMA["properties"]["vocabulary"]["properties"]["chat"]
    assert list(content["vocabulary"]["chat"]) == list(described_chat["properties"])
    definitions = _SCHEMA["$defs"]
    assert list(grouped["plan"]["tests"][1]) == list(definitions["planned_test"]["properties"])
    entries = [each["calibrations"][0] for each in (watched, varied, confirmed, content)] + [grouped["calibrations"][1]]
    assert _all_of(*entries, like=definitions["calibration"])
    by_rules = Variant(tau=1.0, min_exit_layer=2, confidence="softmax", exit_interval=2)
    assert list(by_rules.to_dict()) == list(definitions["variant"]["properties"])
    assert Variant.from_dict(by_rules.to_dict(), at="variant") == by_rules
    assert list(watched["calibrations"][0]["looks"][0]) == list(definitions["look"]["properties"])
    counted = build_path_entry(variant=Variant(min_exit_layer=1), near_ties=3).to_dict()
    assert list(counted) == list(definitions["path_entry"]["properties"])


def test_core_and_manifest_name_the_same_choices() -> None:
    """Every procedure of a calibration can be written, and the other way round."""
    assert set(manifest_module.PROCEDURES) == set(PROCEDURES)


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
