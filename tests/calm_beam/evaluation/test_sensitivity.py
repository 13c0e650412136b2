"""From perturbed outputs to curves, with a decoder of known answers."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import pytest

from calm_beam.decoding.isolation import DecodeError
from calm_beam.evaluation.sensitivity import PerturbationDecoder, Perturbed, Sensitivity, measure_sensitivity
from tests.calm_beam.evaluation.builders import build_prompt, build_task


@dataclasses.dataclass(frozen=True)
class _Known:
    """A decoder with answers by prompt; the last prompt's come first."""

    answers: Mapping[tuple[int, ...], Perturbed]

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Perturbed]]:
        """Yields the answers."""
        for index, prompt in reversed(list(enumerate(prompts))):
            yield index, self.answers[tuple(prompt)]


def _measure(answers: Mapping[tuple[int, ...], Perturbed]) -> tuple[list[Sensitivity], int]:
    """Returns the curves and the number of reports about prompts."""
    task = build_task([build_prompt(f"prompt-{ids[0]}", ids) for ids in answers])
    calls: list[None] = []
    decoder = cast(PerturbationDecoder, _Known(answers))
    return measure_sensitivity(task, decoder, decoded=lambda: calls.append(None)), len(calls)


_LONG = Perturbed(
    unperturbed=(10, 11, 12, 1),
    outputs={
        ("sampling", 0): (20, 21, 12, 1),
        ("layer", 0): (10, 11, 12, 1),
        ("sampling", 3): (10, 11, 12, 13, 1),
        ("layer", 3): (10, 11, 12, 13, 13, 1),
    },
    is_finite=True,
)
_SHORT = Perturbed(unperturbed=(30, 1), outputs={("layer", 0): (31, 1), ("sampling", 0): (30, 30, 1)}, is_finite=True)


def test_known_outputs() -> None:
    """Each point is the mean score against the unperturbed text over the prompts that have the position."""
    found, reported = _measure({(5, 1): _LONG, (6, 1): _SHORT})
    assert [(point.kind, point.position, point.similarity.prompts) for point in found] == [
        ("sampling", 0, 2), ("sampling", 3, 1), ("layer", 0, 2), ("layer", 3, 1),
    ]  # fmt: skip
    # Token-F1 of "20 21 12" against "10 11 12", and of "30 30" against "30".
    expected = [(1 / 3 + 2 / 3) / 2, 6 / 7, (1 + 0) / 2, 6 / 8]
    assert [point.similarity.mean for point in found] == pytest.approx(expected)
    assert [point.replaced for point in found] == [0.5, 1, 0.5, 1]
    assert reported == 2


def test_a_broken_example_is_named() -> None:
    """Logits that are not finite end the measurement."""
    with pytest.raises(DecodeError, match="example prompt-6: the model gave logits that are not finite"):
        _measure({(5, 1): _LONG, (6, 1): dataclasses.replace(_SHORT, is_finite=False)})
