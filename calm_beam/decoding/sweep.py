"""The sweep: the greedy output of every prompt at every threshold, and of the full model.

The seam is `SweepDecoder.decode`: prompts in; tokens, exit layers and confidences out.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedule import scheduled_thresholds
from calm_beam.manifest import EngineRecord
from calm_beam.model import architecture_of

from .devices import PackedDecoders
from .near_ties import near_ties_of
from .result import KnownOutput
from .result import SweepResult as SweepResult
from .settings import check_sizes
from .work import Work


class SweepDecoder:
    """Decodes prompts at all thresholds of a grid; prompts and lanes never influence each other.

    Thresholds share the work that they have in common.
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
        with_full_model: bool = True,
        exit_head: str = "exact",
        engine: str = "auto",
        arithmetic: Arithmetic = FLOAT32,
        devices: Sequence[jax.Device] | None = None,
        model_parallelism: int = 1,
        other_rules: Sequence[ExitRule] = (),
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          rule: How exits are decided.
          thresholds: Exit thresholds in [0, 1], any order; lane k of a result belongs to the k-th.
          max_decode_length: Most tokens to generate, eos included.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None for as many as memory and speed recommend.
            What is packed together moves confidences by about 1e-6, and so no output but at a near tie.
          token_budget: Most positions whose keys and values are held at a time, those of the sources included; None
            for a share of the device's memory.
          with_full_model: Whether lane 0 is the full model; else lane k is the threshold k + 1.
          exit_head: Form of the head that decides, one of `EXIT_HEADS`. Tokens and exit layers do not depend on it but
            at near ties. Where several measures are made of logits, the exact one decides.
          engine: One of `engine_choice.ENGINE_CHOICES`: what computes rows. Engines round otherwise.
          arithmetic: In which numbers the model computes. In bfloat16, what is decoded beside a prompt moves more than
            its near ties: see docs/precision.md.
          devices: Where to decode, with a model on each; None for all of this process. Of JAX's default platform.
          model_parallelism: Devices that share one model, each with a part of its heads, feed-forward layers and
            vocabulary; the number of devices must be a multiple of it.
          other_rules: More rules, each in as many lanes of its own, which follow those of `rule` in this order
            (`SweepResult.by_rule` parts them). Whatever rules have in common is computed once.

        Raises:
          ValueError: If a rule does not fit the model (no exit classifier, `min_exit_layer` too high), rules cannot
            share a sweep (`Branches.of` says which can), a number is below 1, the model has too few positions, the
            budget has no room for one prompt, a device is of another platform, or the devices cannot share the model
            so.
        """
        check_sizes(
            max_decode_length=max_decode_length,
            max_input_length=max_input_length,
            batch_size=batch_size,
            token_budget=token_budget,
        )
        architecture_of(checkpoint.config).check_positions(
            checkpoint.config, source=max_input_length, steps=max_decode_length
        )
        rules, config = (rule, *other_rules), checkpoint.config
        # No confidence reaches the full model's, which is not a threshold of 1: some are 1.
        full_model = np.full((max_decode_length, int(with_full_model)), np.inf, np.float32)
        by_lane = []
        for each in rules:
            each.check_model(config.num_decoder_layers, has_classifier=bool(config.exit_classifier))
            by_lane += [full_model, scheduled_thresholds(each, tuple(thresholds), max_decode_length=max_decode_length)]
        # [steps, lanes]
        lanes = np.concatenate(by_lane, axis=1)
        self._rules, self._lanes, self._num_layers = rules, lanes, config.num_decoder_layers
        self._decoder = PackedDecoders(
            checkpoint,
            rules,
            thresholds=lanes[None],
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
        return self._decoder.work

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
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.
          known: Output of each prompt at a threshold above all of these, with which lower ones share their beginning.
            Of no use to rules that need the full model.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        by_rule = list(zip(self._rules, np.split(self._lanes, len(self._rules), axis=1), strict=True))
        for index, result in self._decoder.decode(prompts, None if self._rules[0].needs_full_model() else known):
            near = [
                near_ties_of(each, rule, thresholds=thresholds, num_layers=self._num_layers)
                for each, (rule, thresholds) in zip(result.by_rule(len(by_rule)), by_rule, strict=True)
            ]
            yield index, dataclasses.replace(result, near_ties=_joined(near, lanes=by_rule[0][1].shape[1]))


def _joined(near: Sequence[np.ndarray | None], *, lanes: int) -> np.ndarray | None:
    """Returns which outputs of all rules are known to have hung on a near tie, given those of each rule."""
    if all(each is None for each in near):
        return None
    return np.concatenate([np.zeros(lanes, bool) if each is None else each for each in near])
