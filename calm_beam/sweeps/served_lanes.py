"""The decoder that serves, asked as a sweep is: what it makes of prompts at every threshold that was chosen.

A sweep decodes all lanes of a prompt together. Here prompts are decoded at one threshold after the other, and by the
full model for itself, by the decoder of `Generator.generate_batch`, as if each threshold were served.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.batch_decoder import BatchDecoder
from calm_beam.decoding.near_ties import near_ties_of
from calm_beam.decoding.result import EarlyExitResult, KnownOutput, SweepResult
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.thresholds import thresholds_by_step
from calm_beam.decoding.work import Work
from calm_beam.manifest import EngineRecord


class ServedLanes:
    """Decodes prompts at some thresholds, one after the other; lane 0 is the full model, lane k the k-th threshold."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecodeSettings,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        exit_head: str = "exact",
        engine: str = "auto",
        model_parallelism: int = 1,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          settings: How it decodes, and at which thresholds.
          batch_size: As in `BatchDecoder`.
          token_budget: As there.
          exit_head: As there.
          engine: As there.
          model_parallelism: As there.

        Raises:
          ValueError: As `BatchDecoder`.
        """
        lanes = (None, *settings.thresholds)
        self._schedules = range(len(lanes))
        self._prompts = self._tokens = 0
        self._rule, self._num_layers = settings.rule, checkpoint.config.num_decoder_layers
        by_lane = [
            thresholds_by_step(settings.rule, lane, max_decode_length=settings.max_decode_length) for lane in lanes
        ]
        # [steps, lanes]
        self._thresholds = np.stack(by_lane, axis=1)
        self._decoder = BatchDecoder(
            checkpoint,
            settings.rule,
            thresholds=by_lane,
            max_input_length=settings.max_input_length,
            batch_size=batch_size,
            token_budget=token_budget,
            exit_head=exit_head,
            engine=engine,
            arithmetic=settings.arithmetic,
            model_parallelism=model_parallelism,
        )

    @property
    def work(self) -> Work:
        """What has been decoded so far, counted: a prompt once, however many thresholds it was decoded at."""
        return dataclasses.replace(self._decoder.work, prompts=self._prompts, tokens=self._tokens)

    @property
    def engine(self) -> EngineRecord:
        """What decodes."""
        return self._decoder.engine

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side, on all devices together."""
        return self._decoder.slots

    def decode(
        self, prompts: Sequence[Sequence[int]], known: Sequence[KnownOutput] | None = None
    ) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end at the last threshold.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.
          known: None: nothing is shared with what a sweep has decoded.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        assert known is None
        before: dict[int, list[EarlyExitResult]] = {index: [] for index in range(len(prompts))}
        *others, last = self._schedules
        for schedule in others:
            for index, result in self._decoder.decode(prompts, [schedule] * len(prompts)):
                before[index].append(result)
        for index, result in self._decoder.decode(prompts, [last] * len(prompts)):
            found = _stacked([*before.pop(index), result])
            near = near_ties_of(found, self._rule, thresholds=self._thresholds, num_layers=self._num_layers)
            found = dataclasses.replace(found, near_ties=near)
            self._prompts += 1
            self._tokens += int(found.lengths[0])
            yield index, found


def _stacked(lanes: Sequence[EarlyExitResult]) -> SweepResult:
    told = [lane.runner_ups for lane in lanes if lane.runner_ups is not None]
    return SweepResult(
        tokens=np.stack([lane.tokens for lane in lanes]),
        exit_layers=np.stack([lane.exit_layers for lane in lanes]),
        confidences=np.stack([lane.confidences for lane in lanes]),
        lengths=np.array([lane.length for lane in lanes], np.int32),
        is_finite=all(lane.is_finite for lane in lanes),
        runner_ups=np.stack(told) if told else None,
    )
