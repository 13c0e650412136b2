"""The sweep: the greedy output of every prompt at every threshold, and of the full model.

The seam is `SweepDecoder.decode`: prompts in; tokens, exit layers and confidences out.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds

from .plain import PlainSweep
from .result import SweepResult as SweepResult
from .shared import SharedSweep


class SweepDecoder:
    """Decodes prompts at all thresholds of a grid; prompts and lanes never influence each other.

    Thresholds share the work that they have in common, unless the rule runs every layer for every token anyway.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rule: ExitRule,
        *,
        thresholds: Sequence[float],
        max_decode_length: int,
        max_input_length: int = 512,
        batch_size: int = 8,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: Exit thresholds in [0, 1], any order; lane k of a result belongs to the k-th.
          max_decode_length: Most tokens to generate, eos included.
          max_input_length: Most tokens of a prompt.
          batch_size: Prompts decoded at the same time.

        Raises:
          ValueError: If the rule does not fit the model (no exit classifier, `min_exit_layer` too high), or a number
            is below 1.
        """
        if rule.confidence == "classifier" and not checkpoint.config.exit_classifier:
            raise ValueError("confidence 'classifier' needs decoder/meta_cls in the checkpoint, which has none.")
        sizes = {"max_decode_length": max_decode_length, "max_input_length": max_input_length, "batch_size": batch_size}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        rule.exit_layers(checkpoint.config.num_decoder_layers)
        # [steps, thresholds]; no confidence reaches the full model's, which is not a threshold of 1: some are 1.
        by_step = scheduled_thresholds(rule, tuple(thresholds), max_decode_length)
        lanes = np.concatenate([np.full((max_decode_length, 1), np.inf, np.float32), by_step], axis=1)
        sweep = PlainSweep if rule.needs_full_model() else SharedSweep
        self._sweep = sweep(checkpoint, rule, lanes, max_input_length=max_input_length, slots=batch_size)

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        yield from self._sweep.decode(prompts)
