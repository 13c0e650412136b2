"""From prompts to generations: the sweep, as values that can be stored."""

from collections.abc import Iterator, Sequence

from calm_beam.generations import Generation, Output
from calm_beam.vocabulary import EOS_ID, Vocabulary

from .prompts import Prompt
from .sweep import SweepDecoder, SweepResult


class DecodeError(RuntimeError):
    """An example that could not be decoded."""


def generate(
    decoder: SweepDecoder,
    prompts: Sequence[Prompt],
    vocabulary: Vocabulary | None,
    *,
    on_error: str,
    duplicates: frozenset[str],
) -> Iterator[Generation]:
    """Yields the generation of every prompt, in the order in which they end.

    Args:
      decoder: Decodes at all thresholds.
      prompts: The prompts.
      vocabulary: Turns output ids into text where the prompt was text.
      on_error: `fail` raises for an example that cannot be decoded, `worst_case` returns it with its failure, to be
        counted with loss 1 at every threshold. It is never dropped: that would bias the risk.
      duplicates: Ids of examples whose prompt counts before them.

    Raises:
      DecodeError: If logits are not finite and `on_error` is `fail`; names the example.
    """
    for index, result in decoder.decode([prompt.ids for prompt in prompts]):
        prompt = prompts[index]
        failure = None if result.is_finite else "the model gave logits that are not finite"
        if failure and on_error == "fail":
            raise DecodeError(
                f"example {prompt.example.id}: {failure}. Check the checkpoint; --on_error=worst_case counts such "
                "examples with loss 1 at every threshold."
            )
        yield Generation(
            example=prompt.example,
            truncated=prompt.truncated,
            duplicate=prompt.example.id in duplicates,
            failure=failure,
            outputs=() if failure else _outputs(result, vocabulary if prompt.example.input is not None else None),
        )


def _outputs(result: SweepResult, vocabulary: Vocabulary | None) -> tuple[Output, ...]:
    outputs = []
    for lane, length in enumerate(result.lengths.tolist()):
        tokens = tuple(result.tokens[lane, :length].tolist())
        outputs.append(
            Output(
                text=output_text(tokens, vocabulary),
                tokens=tokens,
                exit_layers=tuple(result.exit_layers[lane, :length].tolist()),
                confidences=tuple(result.confidences[lane, :length].tolist()),
            )
        )
    return tuple(outputs)


def output_text(tokens: Sequence[int], vocabulary: Vocabulary | None) -> str:
    """Returns the text of an output that metrics see, without eos: it is no content, and makes outputs look alike.

    Args:
      tokens: Generated ids.
      vocabulary: None if the prompt was token ids; then the text is the ids joined by spaces.
    """
    return vocabulary.decode(tokens) if vocabulary else " ".join(str(token) for token in tokens if token != EOS_ID)
