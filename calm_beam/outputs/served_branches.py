"""The decoder that serves, asked as a sweep is: what it makes of prompts by every branch, each by itself.

A sweep decodes all branches of a prompt together. Here prompts are decoded by one branch after the other, as
`Generator.generate_batch` decodes them: as if each threshold were served, and the full model, too.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.request import Request
from calm_beam.decoding.result import PromptResult
from calm_beam.decoding.work import Work
from calm_beam.manifest import EngineRecord


class ServedBranches:
    """Decodes prompts by some branches, one after the other."""

    def __init__(self, decoder: Decoder, branches: Sequence[Branch]) -> None:
        """Keeps what decodes.

        Args:
          decoder: Of one branch, whose rule is that of all.
          branches: At least one.
        """
        self._decoder, self._branches = decoder, branches
        self._prompts = self._tokens = 0

    @property
    def work(self) -> Work:
        """What has been decoded so far, counted: a prompt once, however many branches it was decoded by."""
        return dataclasses.replace(self._decoder.work, prompts=self._prompts, tokens=self._tokens)

    @property
    def engine(self) -> EngineRecord:
        """What decodes."""
        return self._decoder.engine

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side, on all devices together."""
        return self._decoder.slots

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end by the last branch.

        Args:
          prompts: Of which nothing is known: nothing is shared with what a sweep has decoded.

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
