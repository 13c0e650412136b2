"""Many prompts at one threshold each: continuous batching by depth, as it is served to many.

What is run is the sweep's engine with one lane a prompt. A layer takes the rows that still need it, each leaves at its
own, and a prompt that has ended gives its place to the next, so that neither short nor long outputs leave rows empty.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.model import architecture_of

from .batch import Batch
from .devices import PackedDecoders
from .result import EarlyExitResult, KnownOutput, SweepResult
from .settings import check_sizes
from .work import Work


class BatchDecoder:
    """Decodes prompts together, each at thresholds of its own; outputs are those of one prompt at a time.

    What is packed together moves confidences by about 1e-6, and so no output but at a near tie. Of the threads that
    share a decoder, one may decode at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rule: ExitRule,
        *,
        thresholds: Sequence[np.ndarray],
        max_input_length: int = 512,
        batch_size: int | None = None,
        token_budget: int | None = None,
        exit_head: str = "exact",
        engine: str = "auto",
        arithmetic: Arithmetic = FLOAT32,
        devices: Sequence[jax.Device] | None = None,
        model_parallelism: int = 1,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: By step, each float32 of shape (max_decode_length,), as `thresholds_by_step` returns them; a
            prompt names one of them by its index.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None for as many as memory and speed recommend.
          token_budget: Most positions whose keys and values are held at a time, those of the sources included; None for
            a share of the device's memory.
          exit_head: Form of the head that decides, one of `EXIT_HEADS`. Tokens and exit layers do not depend on it but
            at near ties.
          engine: One of `engine_choice.ENGINE_CHOICES`: what computes rows. Engines round otherwise.
          arithmetic: In which numbers the model computes. In bfloat16, what is decoded beside a prompt moves more than
            its near ties: see docs/precision.md.
          devices: Where to decode, with a model on each; None for all of this process.
          model_parallelism: Devices that share one model.

        Raises:
          ValueError: If the rule needs the full model at every token or does not fit the model (no exit classifier,
            `min_exit_layer` too high), a number is below 1, the model has too few positions, the budget has no room for
            one prompt, or the devices cannot share the model so.
        """
        max_decode_length = len(thresholds[0])
        check_sizes(
            max_decode_length=max_decode_length,
            max_input_length=max_input_length,
            batch_size=batch_size,
            token_budget=token_budget,
        )
        architecture_of(checkpoint.config).check_positions(
            checkpoint.config, source=max_input_length, steps=max_decode_length
        )
        rule.check_served()
        rule.check_model(checkpoint.config.num_decoder_layers, has_classifier=bool(checkpoint.config.exit_classifier))
        self._decoders = PackedDecoders(
            checkpoint,
            (rule,),
            thresholds=np.stack(thresholds)[:, :, None],
            max_input_length=max_input_length,
            batch_size=batch_size,
            token_budget=token_budget,
            exit_head=exit_head,
            engine=engine,
            arithmetic=arithmetic,
            devices=devices,
            model_parallelism=model_parallelism,
        )

    @property
    def work(self) -> Work:
        """What has been decoded so far, counted."""
        return self._decoders.work

    @property
    def engine(self) -> EngineRecord:
        """What decodes."""
        return self._decoders.engine

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side, on all devices together."""
        return self._decoders.slots

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        schedules: Sequence[int] | None = None,
        *,
        known: Sequence[KnownOutput] | None = None,
    ) -> Iterator[tuple[int, EarlyExitResult]]:
        """Yields the output of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.
          schedules: Index of the thresholds of each; None for the first.
          known: What each output has in common with one that is known, or begins with; None where nothing is known.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        for index, result in self._decoders.decode(prompts, known, schedules=schedules):
            yield index, result_of_lane(result)

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that come while others are decoded, on the first group of devices."""
        return self._decoders.open_batch()


def result_of_lane(result: SweepResult) -> EarlyExitResult:
    """Returns the first lane of a result."""
    return EarlyExitResult(
        tokens=result.tokens[0],
        exit_layers=result.exit_layers[0],
        confidences=result.confidences[0],
        length=int(result.lengths[0]),
        is_finite=result.is_finite,
        runner_ups=None if result.runner_ups is None else result.runner_ups[0],
    )
