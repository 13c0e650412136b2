"""Sentences of the page for every kind of result."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from calm_beam.manifest import Manifest, repeats_in_words
from calm_beam.report.promise import cautions, end_in_words, promise_in_words, together_in_words
from tests.calm_beam.manifest.builders import (
    SPEED,
    build_calibration,
    build_manifest,
    build_never_exit,
    build_path_entry,
    build_plan_record,
    build_planned_manifest,
    build_signed_calibration,
)


def _sentence(entry: Any, **changes: Any) -> str:
    return "".join(promise_in_words(entry, build_manifest(**changes)))


def _data(**changes: Any) -> Any:
    data = {"duplicates": 0, "failed": 0, "truncated": 0, **changes}
    return dataclasses.replace(build_manifest().data, **data)


def _texts(manifest: Manifest) -> list[str]:
    return [f"{caution.kind}: {caution.text}" for caution in cautions(manifest)]


def test_textual_consistency() -> None:
    """The sentence has probability, examples, threshold, tolerance, metric, kind of consistency and layers saved."""
    assert _sentence(build_calibration()) == (
        "With probability at least 95 % over the draw of the 200 calibration examples, exiting at threshold 0.8 costs "
        "in expectation at most 0.1 rouge_l against the full model’s own outputs (textual consistency), and saves 29 % "
        "of the decoder layers: tokens use 4.25 of 6 on average. The operations that this saves were not counted."
    )


def test_a_measured_speed_stands_for_operations_that_nobody_counted() -> None:
    """The sentence has the batch size; operations come first, if they were counted."""
    speed = dataclasses.replace(SPEED, factor=1.5, batch=64)
    entry = build_calibration()
    manifest = build_manifest(speeds=(speed,))
    measured = " On the machine that calibrated, it was 1.50 times as fast as the full model, in batches of 64."
    assert "".join(promise_in_words(entry, manifest)).endswith(f"tokens use 4.25 of 6 on average.{measured}")
    counted = "".join(promise_in_words(entry, manifest, factors=[1.4]))
    assert counted.endswith(f"fewer operations than the full model.{measured}")


def test_tails() -> None:
    """A tail is a share of outputs, for either kind of consistency, proved or not."""
    tail = build_calibration(loss="dissimilarity>0.3", p_value="exact_binomial")
    assert (
        "exiting at threshold 0.8 lets at most 10 % of outputs lose more than 0.3 rouge_l against the full model’s own "
        "outputs (textual consistency), and saves 29 % of the decoder layers"
    ) in _sentence(tail)
    assert "measured share 0." in end_in_words(tail)
    never = build_never_exit(consistency="risk", loss="relu>0.5", p_value="exact_binomial")
    assert (
        "no threshold could be proved with probability at least 95 % to let at most 1 % of outputs score more than 0.5 "
        "rouge_l worse than the full model’s against the references (risk consistency). All 6 layers run"
    ) in _sentence(never, calibrations=(never,))


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((0.79, 0.95), "5 % to 27 % more operations than"),
        ((1.25, 2.0), "20 % to 50 % fewer operations than"),
        ((0.8, 1.25), "20 % fewer to 25 % more operations than"),
        ((1.25, 1.25), "20 % fewer operations than"),
        ((1.001, 0.999), "as many operations as"),
        ((1.0, 0.8), "0 % to 25 % more operations than"),
    ],
)
def test_operations_stand_beside_the_layers(factors: tuple[float, ...], said: str) -> None:
    """If operations were counted, the sentence has their savings in percent next to the layers'."""
    sentence = "".join(promise_in_words(build_calibration(), build_manifest(), factors=factors))
    assert "saves 29 % of the decoder layers: tokens use 4.25 of 6 on average." in sentence
    assert sentence.endswith(f"Exit tests included, the decoder does {said} the full model.")


def test_a_single_layer() -> None:
    """A model of one layer has no layers in the plural."""
    manifest = build_manifest()
    decode = dataclasses.replace(manifest.decode, min_exit_layer=1)
    model = dataclasses.replace(manifest.model, layers=1)
    never = build_never_exit(layers=1, path=(build_path_entry(p_value=0.3, rejected=False, layers=1.0),))
    sentence = _sentence(never, decode=decode, model=model, calibrations=(never,))
    assert sentence.endswith("Its only layer runs for every token, and nothing is saved.")


def test_numbers_are_set_off() -> None:
    """Every second part of a sentence is a number, which the page sets in bold."""
    assert promise_in_words(build_calibration(), build_manifest())[1::2] == (
        "95 %",
        "200 calibration examples",
        "0.8",
        "0.1 rouge_l",
        "29 %",
        "4.25 of 6",
    )


def test_risk_consistency() -> None:
    """Scores are compared against references; the paper's loss says that better outputs count as no change."""
    signed = _sentence(build_signed_calibration(epsilon=0.025))
    assert "With probability at least 97.5 %" in signed
    assert (
        "exiting at threshold 0.7 lets outputs score worse in expectation by at most 0.02 rouge_l than the full "
        "model’s against the references (risk consistency), and saves 42 %" in signed
    )
    for loss in ("relu", None):
        entry = build_calibration(consistency="risk", loss=loss)
        assert "where prompts on which they score better count as no change (risk consistency)" in _sentence(entry)


@pytest.mark.parametrize("consistency", ["textual", "risk"])
def test_never_exit(consistency: str) -> None:
    """Without a safe threshold the sentence begins with that, and explains it."""
    sentence = _sentence(build_never_exit(consistency=consistency))
    assert sentence.startswith("Never exit: from 200 calibration examples, no threshold could be proved")
    assert "at most 0.01 rouge_l" in sentence
    assert (
        f"({'textual consistency' if consistency == 'textual' else 'risk consistency'}). All 6 layers run" in sentence
    )
    assert sentence.endswith("for every token, and nothing is saved.")


def test_clusters_are_the_units() -> None:
    """With clusters, the sentence counts these."""
    assert "the draw of the 40 calibration clusters (200 examples)" in _sentence(
        build_calibration(path=(build_path_entry(n=40, threshold=0.8, p_value=0.05, risk=0.03, layers=4.25),)),
        data=_data(clusters=40),
        calibrations=(build_never_exit(path=(build_path_entry(n=40, p_value=0.3, rejected=False),)),),
    )


def test_where_the_test_ended() -> None:
    """The end of the test is named: the first failure with its p-value, the end of the grid, or the whole grid."""
    assert end_in_words(build_calibration()) == (
        "Fixed sequence testing went from 0.9 down and stopped at 0.7, the first threshold that could not be proved "
        "safe: p = 0.4 exceeds ε = 0.05, measured loss 0.0800."
    )
    whole = build_calibration(path=build_calibration().path[:2])
    assert end_in_words(whole) == (
        "Fixed sequence testing went from 0.9 down to 0.8 and proved every threshold safe: the end of the grid."
    )
    assert end_in_words(build_signed_calibration()) == (
        "bonferroni looked at 4 thresholds, from 0.9 to 0.6, and proved 2 of them safe; the lowest of them is chosen."
    )
    none = build_never_exit(procedure="holm", path=tuple(_not_rejected(0.9, 0.8)))
    assert (
        end_in_words(none)
        == "holm looked at 2 thresholds, from 0.9 to 0.8, and proved none of them safe; nothing is chosen."
    )


def test_a_test_of_one_threshold() -> None:
    """A test that ended at its first threshold has no "from ... down to"."""
    assert end_in_words(build_never_exit()) == (
        "Fixed sequence testing stopped at its first threshold, 0.9, which could not be proved safe: p = 0.3 exceeds "
        "ε = 0.05, measured loss 0.0125."
    )
    (step, *_) = build_calibration().path
    first = build_calibration(path=(step,), threshold=step.threshold, risk=step.risk, layers=step.layers)
    assert end_in_words(first) == ("Fixed sequence testing proved the only threshold, 0.9, safe: the end of the grid.")
    whole = dataclasses.replace(first, procedure="holm")
    assert end_in_words(whole) == "holm looked at one threshold, 0.9, and proved it safe."
    none = build_never_exit(procedure="holm")
    assert end_in_words(none) == "holm looked at one threshold, 0.9, and could not prove it safe, so nothing is chosen."


def test_a_p_value_just_above_epsilon() -> None:
    """A p-value just above epsilon has enough digits to show that."""
    entry = build_never_exit(path=tuple(_not_rejected(0.9, p_value=0.0500001)))
    assert "p = 0.0500001 exceeds ε = 0.05" in end_in_words(entry)


def _not_rejected(*thresholds: float, p_value: float = 0.3) -> Iterator[Any]:
    for threshold in thresholds:
        yield build_path_entry(threshold=threshold, p_value=p_value, rejected=False)


def test_whether_promises_hold_together() -> None:
    """One promise needs no note; several are joint, or separate with a warning about choosing among them afterwards."""
    alone = build_manifest(calibrations=(build_calibration(),))
    assert together_in_words(alone) == ""
    assert "Each of the 2 promises holds alone." in together_in_words(build_manifest())
    assert "choosing the best of them here voids its guarantee" in together_in_words(build_manifest())
    joint = build_planned_manifest(plan=build_plan_record(joint_epsilon=0.1))
    assert together_in_words(joint) == "All 2 promises of this manifest hold together with probability at least 90 %."


def test_nothing_to_warn_of() -> None:
    """A planned calibration of clean data has no caution."""
    assert _texts(build_planned_manifest(data=_data())) == []


def test_what_may_void_the_guarantee() -> None:
    """Repeated prompts, failures and a missing plan are cautions, each with its number."""
    texts = _texts(build_manifest())
    assert [text.split(":")[0] for text in texts] == ["void", "void", "void", "note", "note"]
    assert texts[0] == f"void: {repeats_in_words(build_manifest())}"
    assert texts[0].startswith("void: 3 examples repeat an input. Leave in what repeats by itself")
    assert texts[1].startswith("void: 1 example of 200 failed and counts with loss 1")
    assert "does not say what was planned" in texts[2]
    assert texts[3] == "note: 7 prompts were cut to 512 tokens; serving must cut alike."
    assert texts[4].startswith("note: 1 of 2 promises cannot be proved by 200 examples")


@pytest.mark.parametrize("changes", [{"confidence": "oracle"}, {"state_propagation": "full_cache"}])
def test_what_cannot_be_served(changes: dict[str, Any]) -> None:
    """Oracle and full cache are the first of all cautions."""
    decode = dataclasses.replace(build_manifest().decode, **changes)
    assert _texts(build_manifest(decode=decode))[0].startswith("void: Cannot be served: confidence")
