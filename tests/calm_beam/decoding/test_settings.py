"""Settings: refused values, and the fingerprint."""

import dataclasses
from typing import Any

import pytest

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.precision import Precision
from tests.builders import build_rule

_SETTINGS = DecodeSettings(
    rule=ExitRule(schedule="decay", tau=4.0), thresholds=(0.9, 0.5), max_input_length=32, max_decode_length=8
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.5, 0.9)}, r"thresholds must be strictly descending, got \(0\.5, 0\.9\)"),
        ({"thresholds": (0.5, 0.5)}, "thresholds must be distinct"),
        ({"thresholds": ()}, "thresholds must not be empty"),
        ({"max_input_length": 0}, "max_input_length must be at least 1, got 0"),
        ({"max_decode_length": -3}, "max_decode_length must be at least 1, got -3"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every wrong field is named, with its value."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_SETTINGS, **changes)


def test_equal_settings_have_equal_fingerprints() -> None:
    """The fingerprint depends on nothing but the values, and is 24 hexadecimal digits."""
    one = _SETTINGS.fingerprint(model="m", vocabulary=None)
    same = dataclasses.replace(_SETTINGS, rule=ExitRule(tau=4.0, schedule="decay"))
    assert same.fingerprint(model="m", vocabulary=None) == one
    assert len(one) == 24
    assert set(one) <= set("0123456789abcdef")


_CHANGES: dict[str, Any] = {
    "thresholds": (0.9, 0.4),
    "max_input_length": 33,
    "max_decode_length": 9,
    "task_prefix": "translate: ",
    "precision": Precision(dtype="bfloat16"),
    "engine": EngineRecord(name="xla", head="exact"),
}
_RULE_CHANGES: dict[str, Any] = {
    "confidence": "softmax_max",
    "schedule": "decay_t5x",
    "tau": 4.5,
    "state_propagation": "from_first_exit",
    "token_from": "last_layer",
    "min_exit_layer": 2,
    "exit_interval": 2,
}


def test_every_field_is_in_the_fingerprint() -> None:
    """Changing any setting, any part of the rule, the model or the vocabulary gives another fingerprint."""
    assert _CHANGES.keys() == {field.name for field in dataclasses.fields(DecodeSettings)} - {"rule"}
    of_some = {"patience", "confidence_source"}
    assert _RULE_CHANGES.keys() | of_some == {field.name for field in dataclasses.fields(ExitRule)}
    variants = [dataclasses.replace(_SETTINGS, **{name: value}) for name, value in _CHANGES.items()]
    for name, value in _RULE_CHANGES.items():
        variants.append(dataclasses.replace(_SETTINGS, rule=dataclasses.replace(_SETTINGS.rule, **{name: value})))
    rules = [build_rule("patience", patience=patience) for patience in (2, 3)]
    rules += [ExitRule(confidence="module:f", confidence_source=source) for source in (None, "sha256:1", "sha256:2")]
    variants.extend(dataclasses.replace(_SETTINGS, rule=rule) for rule in rules)
    variants.extend(
        dataclasses.replace(_SETTINGS, precision=Precision(matmul_precision=name)) for name in ("high", "default")
    )
    fingerprints = {variant.fingerprint(model="m", vocabulary="v") for variant in (_SETTINGS, *variants)}
    fingerprints.add(_SETTINGS.fingerprint(model="n", vocabulary="v"))
    fingerprints.add(_SETTINGS.fingerprint(model="m", vocabulary="w"))
    fingerprints.add(_SETTINGS.fingerprint(model="m", vocabulary=None))
    assert len(fingerprints) == 1 + len(variants) + 3
