"""From prompts to generations: the sweep over one batch, as values that can be stored."""

from collections.abc import Sequence

from calm_beam.generations import Generation, Output
from calm_beam.vocabulary import EOS_ID, Vocabulary

from .prompts import PromptBatch
from .sweep import SweepDecoder, SweepResult


class DecodeError(RuntimeError):
    """An example that could not be decoded."""


def generate_batch(
    decoder: SweepDecoder,
    batch: PromptBatch,
    vocabulary: Vocabulary | None,
    *,
    on_error: str,
    duplicates: frozenset[str],
) -> list[Generation]:
    """Returns the generations of a batch of prompts, in its order.

    Args:
      decoder: Decodes at all thresholds.
      batch: The prompts.
      vocabulary: Turns output ids into text where the prompt was text.
      on_error: `fail` raises for an example that cannot be decoded, `worst_case` returns it with its failure, to be
        counted with loss 1 at every threshold. It is never dropped: that would bias the risk.
      duplicates: Ids of examples whose prompt counts before them.

    Raises:
      DecodeError: If logits are not finite and `on_error` is `fail`; names the example.
    """
    result = decoder.decode(batch.source_tokens)
    generations = []
    for row, prompt in enumerate(batch.prompts):
        failure = None
        if not result.finite[row]:
            failure = "the model gave logits that are not finite"
            if on_error == "fail":
                raise DecodeError(
                    f"example {prompt.example.id}: {failure}. Check the checkpoint; --on_error=worst_case counts such "
                    "examples with loss 1 at every threshold."
                )
        reads_text = prompt.example.input is not None
        generations.append(
            Generation(
                example=prompt.example,
                truncated=prompt.truncated,
                duplicate=prompt.example.id in duplicates,
                failure=failure,
                outputs=() if failure else _outputs(result, row, vocabulary if reads_text else None),
            )
        )
    return generations


def _outputs(result: SweepResult, row: int, vocabulary: Vocabulary | None) -> tuple[Output, ...]:
    outputs = []
    for lane, length in enumerate(result.lengths[row].tolist()):
        tokens = tuple(result.tokens[row, lane, :length].tolist())
        outputs.append(
            Output(
                text=vocabulary.decode(tokens) if vocabulary else _ids_as_text(tokens),
                tokens=tokens,
                exit_layers=tuple(result.exit_layers[row, lane, :length].tolist()),
                confidences=tuple(result.confidences[row, lane, :length].tolist()),
            )
        )
    return tuple(outputs)


def _ids_as_text(tokens: Sequence[int]) -> str:
    """Returns ids joined by spaces, for metrics; eos is no content and would only make outputs look alike."""
    return " ".join(str(token) for token in tokens if token != EOS_ID)
