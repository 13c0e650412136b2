"""Losses of many answers at once equal those of single ones."""

import dataclasses

import pytest

from calm_beam.manifest import ManifestError
from calm_beam.serving import Answer, Generator, LossMeter, MeasuredLoss
from calm_beam.serving.loss_meter import AnsweredRequest
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPTS = [[5, 9, 12, 1], [7, 3, 1], [20, 21, 22, 23, 24, 1], [63], [40, 2, 1]]


def _answered(generator: Generator) -> list[AnsweredRequest]:
    return [
        AnsweredRequest(id=f"request {number}", prompt=prompt, answer=generator.generate(prompt))
        for number, prompt in enumerate(_PROMPTS)
    ]


def test_many_are_measured_as_one_is() -> None:
    """Each request has the loss that it has alone, and some losses differ from 0."""
    generator = Generator.from_manifest(build_served_manifest(_CHECKPOINT, (build_entry(0.2),)), _CHECKPOINT)
    meter = LossMeter(generator, share=1.0, salt="a")
    answered = _answered(generator)
    found = dict(meter.measure_each(answered))
    assert [found[index] for index in range(len(answered))] == [
        meter.measure(one.id, one.prompt, answer=one.answer) for one in answered
    ]
    assert max(loss.value for loss in found.values()) > 0
    assert list(meter.measure_each([])) == []


def test_a_loss_that_cannot_be_measured_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that fails for one output, and an invalid prompt, give that request loss 1, and no other."""
    generator = Generator.from_manifest(build_served_manifest(_CHECKPOINT, (build_entry(0.2),)), _CHECKPOINT)
    meter = LossMeter(generator, share=1.0, salt="a")
    answered = _answered(generator)
    expected = dict(meter.measure_each(answered))
    score = meter._metric

    def fails_once(candidate: str, references: tuple[str, ...]) -> float:
        if candidate == answered[2].answer.text:
            raise RuntimeError("no score")
        return score(candidate, references)

    assert sum(one.answer.text == answered[2].answer.text for one in answered) == 1
    monkeypatch.setattr(meter, "_metric", fails_once)
    no_prompt = AnsweredRequest(id="none", prompt=[99], answer=answered[0].answer)
    found = dict(meter.measure_each([no_prompt, *answered]))
    failed = {0: found.pop(0), 3: found.pop(3)}
    assert [loss.value for loss in failed.values()] == [1, 1]
    assert ["PromptError: none" in str(failed[0].failure), "no score" in str(failed[3].failure)] == [True, True]
    expected.pop(2)
    assert found == {index + 1: loss for index, loss in expected.items()}


@pytest.mark.parametrize(("early", "loss"), [("\n" * 24, 1.0), ("A:", 0.0)])
def test_texts_that_the_metric_does_not_see_are_losses(
    early: str, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For texts that the metric does not see, an output other than the full model's has loss 1, an equal one 0."""
    generator = Generator.from_manifest(build_served_manifest(_CHECKPOINT, (build_entry(0.2),)), _CHECKPOINT)
    meter = LossMeter(generator, share=1.0, salt="a")
    answer = dataclasses.replace(generator.generate(_PROMPTS[0]), text=early)
    full = dataclasses.replace(answer, text="\n\nA:")
    monkeypatch.setattr(meter._full, "generate", lambda prompt: full)
    assert meter.measure("a", _PROMPTS[0], answer=answer) == MeasuredLoss(value=loss, failure=None)


def test_failures_name_their_reason() -> None:
    """A request without an output counts with loss 1."""
    assert MeasuredLoss.of_failure(ValueError("x")) == MeasuredLoss(value=1.0, failure="ValueError: x")


def test_refusals() -> None:
    """Losses without their references, another metric than the entry's, and a missing share are refused."""
    entry = build_entry(0.2, consistency="risk", loss="relu")
    generator = Generator.from_manifest(build_served_manifest(_CHECKPOINT, (entry,)), _CHECKPOINT)
    meter = LossMeter(generator, share=1.0, salt="a")
    answer = generator.generate(_PROMPTS[0])
    assert isinstance(answer, Answer)
    with pytest.raises(ValueError, match="request 7: risk consistency needs references"):
        list(meter.measure_each([AnsweredRequest(id="7", prompt=_PROMPTS[0], answer=answer)]))
    with pytest.raises(ManifestError, match='the entry is about metric "token_f1", not "edit_distance"'):
        LossMeter(generator, share=1.0, salt="a", metric="edit_distance")
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 2"):
        LossMeter(generator, share=2, salt="a")
