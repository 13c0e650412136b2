"""Generations from prompts, as storable values: by the sweep, or by the serving decoder behind the same interface.

A sweep decodes all branches of a prompt together. `ServedBranches` decodes prompts by one branch after the other, as
`Generator.generate_batch` does: each threshold as if it were served, and the full model too.

Importing this loads JAX.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from calm_beam.decoding.branches import Branch, KnownOutput, PromptResult, Request
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.isolation import DecodeError, reason_of, results_or_reasons
from calm_beam.inputs.prompts import Prompt
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary, output_text
from calm_beam.manifest import EngineRecord
from calm_beam.outputs import Generation, Output


class DecodesRequests(Protocol):
    """A decoder of prompts by several branches."""

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the outputs of every prompt, as `Decoder.decode` does."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptPart:
    """The part of a sweep that a decoder computes.

    Attributes:
      above: The generation of each prompt at the thresholds above the decoder's; the new outputs are appended to it.
        None if the decoder's branches are all there is.
      goes_on: Whether another sweep continues below the last threshold.
      rules: Number of the decoder's exit rules, each with as many branches. A prompt that fails by one fails by all.
    """

    above: Sequence[Generation] | None = None
    goes_on: bool = False
    rules: int = 1


WHOLE = SweptPart()
"""A whole sweep by one exit rule."""


def generate(
    decoder: DecodesRequests,
    prompts: Sequence[Prompt],
    *,
    vocabulary: Vocabulary | None,
    on_error: str,
    duplicates: frozenset[str],
    part: SweptPart = WHOLE,
    end_ids: Sequence[int] = (EOS_ID,),
) -> Iterator[tuple[Generation, ...]]:
    """Yields the generations of every prompt, one for each exit rule, in the order in which prompts end.

    A failing prompt does not fail its batch: the others are decoded without it, and it is retried alone before it
    counts as failed.

    Args:
      decoder: Decodes by the full model and at all thresholds, or at those that follow `part.above`.
      prompts: The prompts.
      vocabulary: Turns output ids into text; None if prompts are token ids and there is no vocabulary.
      on_error: `fail` raises for an example that cannot be decoded. `worst_case` returns it with its failure, and it
        counts with loss 1 at every threshold. It is never dropped: that would bias the risk.
      duplicates: Ids of examples whose prompt an earlier example has.
      part: Which part of a sweep the decoder computes.
      end_ids: End-of-sequence ids. Without a vocabulary, they are left out of the text.

    Raises:
      DecodeError: If a prompt cannot be decoded even alone, or its logits are not finite, and `on_error` is `fail`;
        names the example. Also, whatever `on_error` is, if the device runs out of memory: that is no prompt's fault.
    """
    above, rules = part.above, part.rules
    known = _known_outputs(above) if above is not None else None

    def decode(members: Sequence[int]) -> Iterator[tuple[int, PromptResult]]:
        return decoder.decode(
            [Request(prompts[member].ids, known=known[member] if known is not None else None) for member in members]
        )

    for index, result in results_or_reasons(decode, range(len(prompts))):
        prompt = prompts[index]
        by_rule: list[PromptResult] | None = None
        outputs: list[tuple[Output, ...]] = [()] * rules
        failure = result if isinstance(result, str) else None
        if isinstance(result, PromptResult):
            by_rule = result.by_rule(rules)
            try:
                # Most branches give one of few outputs: each is made into text once.
                text_of = functools.cache(functools.partial(output_text, vocabulary=vocabulary, end_ids=end_ids))
                outputs = [_outputs(each, text_of) for each in by_rule]
            except Exception as error:
                failure = reason_of(error)
        if failure and on_error == "fail":
            raise DecodeError(
                f"{prompt.example.in_words()}: {failure.removesuffix('.')}. Check the checkpoint; "
                "--on_error=worst_case counts such examples with loss 1 at every threshold."
            )
        yield tuple(
            Generation(
                example=prompt.example,
                truncated=prompt.truncated,
                duplicate=prompt.example.id in duplicates,
                failure=failure,
                outputs=(*above[index].outputs, *made) if above is not None and not failure else made,
                max_rejected_confidence=(
                    _rejected_by_last(by_rule[place]) if part.goes_on and by_rule and not failure else None
                ),
            )
            for place, made in enumerate(outputs)
        )


def _known_outputs(above: Sequence[Generation]) -> list[KnownOutput] | None:
    """Returns the last output of every prompt; None if the sweep did not record what resuming from it needs."""
    known = []
    for generation in above:
        if generation.max_rejected_confidence is None:
            return None
        output = generation.outputs[-1]
        known.append(
            KnownOutput(
                tokens=np.array(output.tokens, np.int32),
                exit_layers=np.array(output.exit_layers, np.int32),
                confidences=np.array(output.confidences, np.float32),
                max_rejected_confidence=np.array(generation.max_rejected_confidence, np.float32),
            )
        )
    return known


def _rejected_by_last(result: PromptResult) -> tuple[float, ...] | None:
    rejected = result.max_rejected_confidence
    return None if rejected is None else tuple(rejected[-1, : result.lengths[-1]].tolist())


def _outputs(result: PromptResult, text_of: Callable[[tuple[int, ...]], str]) -> tuple[Output, ...]:
    outputs = []
    for lane, length in enumerate(result.lengths.tolist()):
        tokens = tuple(result.tokens[lane, :length].tolist())
        outputs.append(
            Output(
                text=text_of(tokens),
                tokens=tokens,
                exit_layers=tuple(result.exit_layers[lane, :length].tolist()),
                confidences=tuple(result.confidences[lane, :length].tolist()),
                near_tie=None if result.near_ties is None else result.near_ties[lane],
            )
        )
    return tuple(outputs)


class ServedBranches:
    """Decodes prompts by several branches, one branch after the other."""

    def __init__(self, decoder: Decoder, branches: Sequence[Branch]) -> None:
        """Stores the decoder and its branches.

        Args:
          decoder: The decoder of one branch; all branches share its exit rule.
          branches: At least one.
        """
        self._decoder, self._branches = decoder, branches
        self._prompts = self._tokens = 0

    @property
    def work(self) -> Work:
        """Counts of the work so far; a prompt counts once, however many branches decoded it."""
        return dataclasses.replace(self._decoder.work, prompts=self._prompts, tokens=self._tokens)

    @property
    def engine(self) -> EngineRecord:
        """The engine that decodes."""
        return self._decoder.engine

    @property
    def slots(self) -> int:
        """Most prompts that are decoded at the same time, on all devices together."""
        return self._decoder.slots

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end by the last branch.

        Args:
          prompts: The prompts, without known outputs: nothing is shared with what a sweep has decoded.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        assert all(request.known is None for request in prompts)
        before: dict[int, list[PromptResult]] = {index: [] for index in range(len(prompts))}
        *others, last = self._branches
        for branch in others:
            for index, result in self._decode(prompts, branch):
                before[index].append(result)
        for index, result in self._decode(prompts, last):
            found = PromptResult.joined([*before.pop(index), result])
            self._prompts += 1
            self._tokens += int(found.lengths[0])
            yield index, found

    def _decode(self, prompts: Sequence[Request], branch: Branch) -> Iterator[tuple[int, PromptResult]]:
        return self._decoder.decode([dataclasses.replace(prompt, branches=[branch]) for prompt in prompts])
