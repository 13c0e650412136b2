"""The sweep: the greedy output of every prompt at every threshold, and of the full model.

The seam is `SweepDecoder.decode`: prompts in; tokens, exit layers and confidences out.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds

from .memory import choose_budget
from .plain import PlainSweep
from .result import SweepResult as SweepResult
from .shared import SharedSweep

# Every lane of these runs through every layer: more of them fit no cache.
_PLAIN_SLOTS = 8


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
        batch_size: int | None = None,
        token_budget: int | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: Exit thresholds in [0, 1], any order; lane k of a result belongs to the k-th.
          max_decode_length: Most tokens to generate, eos included.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None for as many as memory and speed recommend. It moves
            no output.
          token_budget: Most positions whose keys and values are held at a time, those of the sources included; None
            for a share of the device's memory.

        Raises:
          ValueError: If the rule does not fit the model (no exit classifier, `min_exit_layer` too high), a number is
            below 1, or the budget has no room for one prompt.
        """
        if rule.confidence == "classifier" and not checkpoint.config.exit_classifier:
            raise ValueError("confidence 'classifier' needs decoder/meta_cls in the checkpoint, which has none.")
        sizes = {
            "max_decode_length": max_decode_length,
            "max_input_length": max_input_length,
            "batch_size": batch_size,
            "token_budget": token_budget,
        }
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        rule.exit_layers(checkpoint.config.num_decoder_layers)
        # [steps, thresholds]; no confidence reaches the full model's, which is not a threshold of 1: some are 1.
        by_step = scheduled_thresholds(rule, tuple(thresholds), max_decode_length)
        lanes = np.concatenate([np.full((max_decode_length, 1), np.inf, np.float32), by_step], axis=1)
        if rule.needs_full_model():
            slots = batch_size or _PLAIN_SLOTS
            self._sweep: PlainSweep | SharedSweep = PlainSweep(
                checkpoint, rule, lanes, max_input_length=max_input_length, slots=slots
            )
            return
        budget = choose_budget(
            checkpoint.config,
            lanes=lanes.shape[1],
            steps=max_decode_length,
            source=max_input_length,
            batch_size=batch_size,
            token_budget=token_budget,
        )
        self._sweep = SharedSweep(checkpoint, rule, lanes, max_input_length=max_input_length, budget=budget)

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, SweepResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        yield from self._sweep.decode(prompts)
