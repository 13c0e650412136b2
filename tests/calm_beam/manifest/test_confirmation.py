"""Manifests with confirmed thresholds: consistency checks, and texts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from calm_beam.manifest import (
    Calibration,
    GroupRecord,
    Manifest,
    ManifestError,
    PathEntry,
    confirmation_in_words,
    confirming_in_words,
    manifest_text,
    p_value_beside,
    parse_manifest,
)
from tests.calm_beam.manifest.builders import (
    VARIANTS,
    build_calibration,
    build_confirmed_manifest,
    build_joint_confirmed_manifest,
    build_path_confirmed_manifest,
    build_path_entry,
    build_plan_record,
    build_planned_manifest,
    build_sequential_manifest,
)

_MANIFEST = build_confirmed_manifest()
_CONFIRMED, _REFUSED = _MANIFEST.calibrations
_JOINT = build_joint_confirmed_manifest()
_PATH = build_path_confirmed_manifest()
_SAFER, _FAILED = _PATH.calibrations[0].confirmation or ()
_STEP = build_path_entry(threshold=0.8, n=80, risk=0.04, p_value=0.02, layers=4.5)


def test_it_is_read_again() -> None:
    """A written manifest reads back unchanged, with one test of an entry and with several."""
    assert parse_manifest(manifest_text(_MANIFEST)) == _MANIFEST
    for manifest in (_PATH, _JOINT):
        assert parse_manifest(manifest_text(manifest)) == manifest


def test_one_test_stands_by_itself() -> None:
    """A single test is no list, so that early manifests keep their digests; several are a list."""
    early: Any = _MANIFEST.to_dict()
    assert early["calibrations"][0]["confirmation"] == _STEP.to_dict()
    assert "confirm_path" not in early["plan"]
    content: Any = _PATH.calibrations[0].to_dict()
    assert content["confirmation"] == [_SAFER.to_dict(), _FAILED.to_dict()]
    content["confirmation"] = content["confirmation"][:1]
    with pytest.raises(ManifestError, match="confirmation must be the test itself where there is one, got a list"):
        Calibration.from_dict(content)


def test_the_last_that_held_is_promised() -> None:
    """If a safer threshold was confirmed before the chosen one failed, the safer one is served."""
    entry, refused = _PATH.calibrations
    assert (entry.threshold, entry.risk, entry.layers) == (0.9, 0.03, 5.25)
    assert entry.chosen is not None
    assert entry.chosen.threshold == 0.8
    assert entry.deciding == _SAFER
    assert refused.confirmation is not None
    assert refused.deciding == refused.confirmation[0]
    assert _CONFIRMED.deciding == _STEP
    unasked = build_planned_manifest().calibrations[0]
    assert unasked.deciding == unasked.chosen


def test_without_the_flag_nothing_is_said() -> None:
    """Without a holdout, manifests have the bytes and digests of earlier versions."""
    for manifest in (build_planned_manifest(), build_sequential_manifest()):
        assert "confirm" not in manifest_text(manifest)


def test_what_was_chosen_is_told_from_what_is_promised() -> None:
    """An unconfirmed threshold is chosen but never served; risk and layers are those of the holdout."""
    assert (_CONFIRMED.threshold, _CONFIRMED.risk, _CONFIRMED.layers) == (0.8, 0.04, 4.5)
    assert _CONFIRMED.chosen is not None
    assert (_CONFIRMED.chosen.threshold, _CONFIRMED.chosen.risk) == (0.8, 0.03)
    assert (_REFUSED.threshold, _REFUSED.layers) == (None, 6)
    assert _REFUSED.chosen is not None
    assert _REFUSED.chosen.threshold == 0.7


def test_promises_that_hold_together_divide_what_others_leave() -> None:
    """An entry confirmed at a larger share of the joint epsilon has that level; others have none."""
    confirmed, nothing = _JOINT.calibrations
    assert (confirmed.epsilon, confirmed.promised_epsilon) == (0.05, 0.1)
    assert nothing.promised_epsilon == 0.05
    assert "confirming_epsilon" not in manifest_text(_PATH)


def test_words() -> None:
    """The text has the choice, whether it was confirmed, and by which examples."""
    assert confirmation_in_words(_CONFIRMED) == "chosen 0.8, confirmed: p = 0.02"
    assert confirmation_in_words(_REFUSED) == "chosen 0.7, not confirmed: p = 0.31"
    assert confirmation_in_words(_PATH.calibrations[0]) == "chosen 0.8, confirmed 0.9: p = 0.01, not 0.8: p = 0.07"
    held = dataclasses.replace(_PATH.calibrations[0])
    object.__setattr__(held, "confirmation", (_SAFER, _STEP))
    assert confirmation_in_words(held) == "chosen 0.8, confirmed: p = 0.02"
    object.__setattr__(held, "confirmation", (dataclasses.replace(_SAFER, p_value=0.2, rejected=False),))
    assert confirmation_in_words(held) == "chosen 0.8, not confirmed: p = 0.2 at 0.9"
    assert confirmation_in_words(build_planned_manifest().calibrations[0]) == ""
    assert confirming_in_words(_MANIFEST) == (
        "80 other examples, which chose nothing, tested what was chosen, decoded by the batch decoder that serves "
        "(exit head auto, bfloat16); 1 repeated input, 0 prompts cut, 2 failed."
    )
    assert confirming_in_words(build_planned_manifest()) == ""
    varied = dataclasses.replace(_STEP, variant=VARIANTS[3])
    entry = dataclasses.replace(_CONFIRMED)
    object.__setattr__(entry, "confirmation", (varied,))
    object.__setattr__(entry, "path", (dataclasses.replace(entry.path[0], threshold=0.8, variant=VARIANTS[3]),))
    assert confirmation_in_words(entry) == "chosen 0.8 (tau 4, from layer 2), confirmed: p = 0.02"


def test_a_p_value_shows_on_which_side_it_is() -> None:
    """A p-value is printed with as many digits as show its side of the level."""
    assert p_value_beside(0.050000001, 0.05) == "0.050000001"
    assert p_value_beside(0.05, 0.05) == "0.05"


def _with_entry(**changes: Any) -> Callable[[], Manifest]:
    return lambda: build_confirmed_manifest(calibrations=(dataclasses.replace(_CONFIRMED, **changes), _REFUSED))


def _with_step(**changes: Any) -> Callable[[], Manifest]:
    return _with_entry(confirmation=(dataclasses.replace(_STEP, **changes),))


def _with_steps(*steps: PathEntry, **changes: Any) -> Callable[[], Manifest]:
    entry, refused = _PATH.calibrations
    return lambda: dataclasses.replace(
        _PATH, calibrations=(dataclasses.replace(entry, confirmation=steps, **changes), refused)
    )


def _with_confirmation(**changes: Any) -> Callable[[], Manifest]:
    assert _MANIFEST.confirmation is not None
    changed = dataclasses.replace(_MANIFEST.confirmation, **changes)
    return lambda: build_confirmed_manifest(confirmation=changed)


def _with_data(**changes: Any) -> Callable[[], Manifest]:
    assert _MANIFEST.confirmation is not None
    data = dataclasses.replace(_MANIFEST.confirmation.data, **changes)
    return lambda: _with_confirmation(data=data)()


def _without(entry: Calibration) -> Calibration:
    """Returns an entry as it was before it was confirmed."""
    assert entry.chosen is not None
    return dataclasses.replace(
        entry, confirmation=None, threshold=entry.chosen.threshold, layers=entry.chosen.layers, risk=entry.chosen.risk
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _with_step(threshold=0.9),
            "confirmation must end at 0.8, which path has chosen, or at a test that failed, got 0.9",
        ),
        (_with_step(threshold=0.6), "confirmation must be of a threshold that path has accepted, got 0.6"),
        (_with_entry(confirmation=()), r"confirmation must have a test, or be left out, got \[\]"),
        (_with_steps(_SAFER, _SAFER), "confirmation must test thresholds in the order of path, each once"),
        (_with_steps(_STEP, _SAFER), "confirmation must test thresholds in the order of path, each once"),
        (
            _with_steps(dataclasses.replace(_SAFER, p_value=0.06, rejected=False), _STEP),
            "confirmation must end at the first test that failed",
        ),
        (
            _with_steps(_SAFER, dataclasses.replace(_FAILED, p_value=0.04)),
            r"confirmation\[1\].rejected must be true, got false: p_value is 0.04",
        ),
        (_with_steps(_SAFER, dataclasses.replace(_FAILED, n=81)), r"confirmation\[1\].n must be confirmation.data"),
        (
            lambda: dataclasses.replace(_PATH, plan=build_plan_record(confirm_share=0.3)),
            "confirmation must have at most as many tests as plan.confirm_path says, which is 1, got 2",
        ),
        (
            lambda: dataclasses.replace(_PATH.calibrations[0], confirming_epsilon=0.05),
            "confirming_epsilon must be above epsilon, and left out where there is no confirmation, got 0.05",
        ),
        (
            lambda: build_calibration(confirming_epsilon=0.1),
            "confirming_epsilon must be above epsilon, and left out where there is no confirmation, got 0.1",
        ),
        (
            lambda: dataclasses.replace(_JOINT, calibrations=(_PATH.calibrations[0], _JOINT.calibrations[1])),
            r"calibrations\[0\].confirming_epsilon must be its share of plan.joint_epsilon, which is 0.1, got 0.05",
        ),
        (
            lambda: dataclasses.replace(_PATH, calibrations=(_JOINT.calibrations[0], _PATH.calibrations[1])),
            r"calibrations\[0\].confirming_epsilon must be its share of plan.joint_epsilon, which is 0.05, got 0.1",
        ),
        (
            lambda: build_plan_record(confirm_path=3),
            "confirm_path must be left out without confirm_share, got 3",
        ),
        (_with_step(rejected=False), "confirmation.rejected must be true, got false: p_value is 0.02 and epsilon 0.05"),
        (_with_step(p_value=0.06), "confirmation.rejected must be false, got true: p_value is 0.06"),
        (_with_step(risk=-0.1), r"confirmation.risk must be a number in \[0, 1\]"),
        (_with_step(n=200), r"confirmation.n must be confirmation.data.examples, which is 80"),
        (
            _with_entry(confirmation=(dataclasses.replace(_STEP, layers=7),), layers=7),
            "confirmation.layers must be at most model.layers, which is 6, got 7",
        ),
        (
            _with_entry(confirmation=(dataclasses.replace(_STEP, risk=0.02),), risk=0.02),
            "confirmation.risk must be at least 0.025, since 2 of 80 examples failed",
        ),
        (_with_entry(threshold=0.9), "threshold must be 0.8, as the last one rejected in confirmation says"),
        (_with_entry(risk=0.03), "risk must be 0.04, as the last one rejected in confirmation says, got 0.03"),
        (_with_entry(layers=4.25), "layers must be 4.5, as the last one rejected in confirmation says, got 4.25"),
        (
            lambda: dataclasses.replace(_REFUSED, threshold=0.7, layers=3.5, risk=0.0025),
            r"threshold must be null, since none in confirmation was rejected, got 0.7",
        ),
        (
            _with_entry(
                path=(dataclasses.replace(_CONFIRMED.path[0], rejected=False, p_value=0.5),),
            ),
            "confirmation must be left out where path has chosen no threshold",
        ),
        (
            lambda: build_confirmed_manifest(calibrations=(_without(_CONFIRMED), _REFUSED)),
            r"calibrations\[0\].confirmation must be there exactly if there is plan.confirm_share and path has chosen",
        ),
        (
            lambda: build_confirmed_manifest(plan=build_plan_record()),
            r"calibrations\[0\].confirmation must be there exactly if there is plan.confirm_share",
        ),
        (
            lambda: build_confirmed_manifest(confirmation=None),
            "confirmation must be there exactly if a calibration has",
        ),
        (
            lambda: build_planned_manifest(confirmation=_MANIFEST.confirmation),
            "confirmation must be there exactly if a calibration has one, got one",
        ),
        (
            _with_confirmation(dtype="float32"),
            "confirmation.dtype must be decode.dtype, which is bfloat16, got float32",
        ),
        (_with_data(clusters=80), r"n must be confirmation.data.clusters|must have clusters exactly if data has"),
        (
            _with_data(groups=(GroupRecord(name="de", examples=80),)),
            "confirmation.data must have clusters exactly if data has, and the groups of data",
        ),
        (_with_data(patterns=("other",)), "confirmation.data.patterns must be data.patterns"),
        (lambda: build_plan_record(confirm_share=1), r"confirm_share must be a number in \(0, 1\), got 1"),
    ],
)
def test_what_does_not_agree_is_refused(make: Callable[[], object], message: str) -> None:
    """Every part is compared with those that it has to fit."""
    with pytest.raises(ManifestError, match=message):
        make()


def test_other_decoders_are_refused() -> None:
    """Only the decoder that serves confirms, on examples that selected nothing."""
    assert _MANIFEST.confirmation is not None
    with pytest.raises(ManifestError, match='decoder must be one of batch, got "sweep"'):
        dataclasses.replace(_MANIFEST.confirmation, decoder="sweep")
    choosing = dataclasses.replace(_MANIFEST.confirmation.data, choosing=20)
    with pytest.raises(ManifestError, match=r"data\.choosing must be left out, since these chose nothing, got 20"):
        dataclasses.replace(_MANIFEST.confirmation, data=choosing)


def test_looks_end_at_what_was_chosen() -> None:
    """The looks of a sequential calibration end at its choice, whether or not that was confirmed."""
    manifest = build_sequential_manifest()
    assert manifest.plan is not None
    (entry,) = manifest.calibrations
    refused = dataclasses.replace(
        entry,
        confirmation=(build_path_entry(threshold=0.7, n=80, risk=0.015, p_value=0.3125, rejected=False, layers=3.75),),
        threshold=None,
        threshold_by_position=None,
        layers=6,
        risk=0,
    )
    plan = dataclasses.replace(manifest.plan, confirm_share=0.3)
    found = dataclasses.replace(manifest, plan=plan, calibrations=(refused,), confirmation=_MANIFEST.confirmation)
    assert parse_manifest(manifest_text(found)) == found
