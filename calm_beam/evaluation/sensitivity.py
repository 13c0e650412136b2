"""How much one wrong token costs, by its position (CALM, "Sensitivity to local errors", Figure 2a)."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from calm_beam.decoding.isolation import DecodeError
from calm_beam.inputs.vocabularies.vocabulary import output_text

from .performance import Task
from .sample import Estimate, estimated_mean

if TYPE_CHECKING:
    from .perturbation import PerturbationDecoder, Perturbed

KINDS = ("sampling", "layer")
"""By what a token is replaced: the last layer's choice of a given rank, or the first layer's prediction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What replacing the token at one position does to the whole output.

    Attributes:
      kind: One of `KINDS`.
      position: Of the token, from 0.
      similarity: Score of the perturbed output against the unperturbed one, over the prompts whose output is that long.
      replaced: Share of those prompts whose token was replaced by another; the first layer may predict the same one.
    """

    kind: str
    position: int
    similarity: Estimate
    replaced: float


def measure_sensitivity(
    task: Task, decoder: "PerturbationDecoder", *, decoded: Callable[[], None]
) -> list[Sensitivity]:
    """Returns the sensitivity of every kind and position that some output has, kind by kind, positions ascending.

    Args:
      task: Prompts and metric.
      decoder: Replaces the tokens.
      decoded: Called after every prompt.

    Raises:
      DecodeError: If logits are not finite; names the example.
      MetricError: If the metric fails or leaves [0, 1]; names the example.
    """
    similarities: dict[tuple[str, int], list[float]] = {}
    replacements: dict[tuple[str, int], int] = {}
    for index, perturbed in decoder.decode([prompt.ids for prompt in task.prompts]):
        for lane, similarity in _similarities(task, index, perturbed=perturbed).items():
            similarities.setdefault(lane, []).append(similarity)
            is_other = perturbed.outputs[lane][lane[1]] != perturbed.unperturbed[lane[1]]
            replacements[lane] = replacements.get(lane, 0) + is_other
        decoded()
    return [
        Sensitivity(
            kind=kind,
            position=position,
            similarity=estimated_mean(similarities[kind, position]),
            replaced=replacements[kind, position] / len(similarities[kind, position]),
        )
        for kind, position in sorted(similarities, key=lambda lane: (KINDS.index(lane[0]), lane[1]))
    ]


def _similarities(task: Task, index: int, *, perturbed: "Perturbed") -> dict[tuple[str, int], float]:
    """Returns the score of every perturbed output of a prompt against the unperturbed one."""
    example = task.prompts[index].example
    if not perturbed.is_finite:
        raise DecodeError(f"{example.in_words()}: the model gave logits that are not finite. Check the checkpoint.")
    texts = {lane: output_text(tokens, task.vocabulary) for lane, tokens in perturbed.outputs.items()}
    scores = task.scores(example.id, texts.values(), references=(output_text(perturbed.unperturbed, task.vocabulary),))
    return {lane: scores[text] for lane, text in texts.items()}
