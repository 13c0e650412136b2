"""From prompts to generations: the sweep, as values that can be stored."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.generations import Generation, Output
from calm_beam.vocabulary import Vocabulary, output_text

from .prompts import Prompt
from .result import KnownOutput, SweepResult

if TYPE_CHECKING:
    from .sweep import SweepDecoder


class DecodeError(CalmBeamError, RuntimeError):
    """An example that could not be decoded, or a device that cannot go on."""


_NOT_FINITE = "the model gave logits that are not finite"
# Reasons are for readers; some errors repeat whole programs.
_LONGEST_REASON = 300


def generate(
    decoder: "SweepDecoder",
    prompts: Sequence[Prompt],
    *,
    vocabulary: Vocabulary | None,
    on_error: str,
    duplicates: frozenset[str],
    above: Sequence[Generation] | None = None,
    goes_on: bool = False,
) -> Iterator[Generation]:
    """Yields the generation of every prompt, in the order in which they end.

    A prompt that fails does not take those beside it along: they are decoded without it, and it is tried again alone
    before it counts as failed.

    Args:
      decoder: Decodes at all thresholds.
      prompts: The prompts.
      vocabulary: Turns output ids into text; None where prompts are token ids and there is none.
      on_error: `fail` raises for an example that cannot be decoded, `worst_case` returns it with its failure, to be
        counted with loss 1 at every threshold. It is never dropped: that would bias the risk.
      duplicates: Ids of examples whose prompt counts before them.
      above: The generation of each prompt at the thresholds above the decoder's, which is completed: outputs follow
        those that it has. None if the decoder's lanes are all there is.
      goes_on: Whether another sweep is to go on below the last threshold.

    Raises:
      DecodeError: If a prompt cannot be decoded, also alone, or its logits are not finite, and `on_error` is `fail`;
        names the example. Whatever `on_error` is, if the device has no memory left: that is no prompt's fault.
    """
    known = _known_outputs(above) if above is not None else None
    for index, result in _results(decoder, prompts, known, range(len(prompts)), is_retry=False):
        prompt = prompts[index]
        outputs: tuple[Output, ...] = ()
        failure = result if isinstance(result, str) else None
        if isinstance(result, SweepResult):
            try:
                outputs = _outputs(result, vocabulary)
            except Exception as error:
                failure = reason_of(error)
        if failure and on_error == "fail":
            raise DecodeError(
                f"{prompt.example.in_words()}: {failure}. Check the checkpoint; --on_error=worst_case counts such "
                "examples with loss 1 at every threshold."
            )
        yield Generation(
            example=prompt.example,
            truncated=prompt.truncated,
            duplicate=prompt.example.id in duplicates,
            failure=failure,
            outputs=(*above[index].outputs, *outputs) if above is not None and not failure else outputs,
            runner_ups=_runner_ups(result) if goes_on and isinstance(result, SweepResult) and not failure else None,
        )


def _known_outputs(above: Sequence[Generation]) -> list[KnownOutput] | None:
    """Returns the last output of every prompt; None if the sweep did not tell what it takes to go on from there."""
    known = []
    for generation in above:
        if generation.runner_ups is None:
            return None
        output = generation.outputs[-1]
        known.append(
            KnownOutput(
                tokens=np.array(output.tokens, np.int32),
                exit_layers=np.array(output.exit_layers, np.int32),
                confidences=np.array(output.confidences, np.float32),
                runner_ups=np.array(generation.runner_ups, np.float32),
            )
        )
    return known


def _runner_ups(result: SweepResult) -> tuple[float, ...] | None:
    return None if result.runner_ups is None else tuple(result.runner_ups[-1, : result.lengths[-1]].tolist())


def reason_of(error: Exception) -> str:
    """Returns the type and the beginning of an error's message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


def _results(
    decoder: "SweepDecoder",
    prompts: Sequence[Prompt],
    known: Sequence[KnownOutput] | None,
    members: Sequence[int],
    *,
    is_retry: bool,
) -> Iterator[tuple[int, SweepResult | str]]:
    """Yields index and result of every member, or in words why it has none.

    After a crash, those without a result are decoded again by halves, until the culprit stands alone.
    """
    waiting = dict.fromkeys(members)
    not_finite: list[int] = []
    crash: Exception | None = None
    try:
        known_here = [known[member] for member in members] if known is not None else None
        for place, result in decoder.decode([prompts[member].ids for member in members], known_here):
            member = members[place]
            del waiting[member]
            if result.is_finite:
                yield member, result
            else:
                not_finite.append(member)
    except Exception as error:
        _check_memory(error)
        crash = error
    if crash and not waiting:
        # No prompt is to blame, and nobody knows what else is wrong.
        raise crash
    if waiting and not crash:
        raise DecodeError(f"the decoder gave no result for {len(waiting)} of {len(members)} prompts.")
    if is_retry and len(members) == 1:
        yield from ((member, _NOT_FINITE) for member in not_finite)
        yield from ((member, reason_of(crash)) for member in waiting if crash)
        return
    left = list(waiting)
    middle = (len(left) + 1) // 2
    for again in (*([member] for member in not_finite), left[:middle], left[middle:]):
        if again:
            yield from _results(decoder, prompts, known, again, is_retry=True)


def _check_memory(error: Exception) -> None:
    """Raises where an error says that memory is short: the next prompts would fare no better."""
    import jax

    if isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        raise DecodeError(
            f"out of memory while decoding ({reason_of(error)}). Take a smaller --token_budget, a coarser grid or a "
            "larger machine; calibrate keeps the shards that were finished, and goes on from there with --resume."
        ) from error


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
