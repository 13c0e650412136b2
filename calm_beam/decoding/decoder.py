"""The decoder: prompts in; tokens, exit layers and confidences out, by every branch of each prompt.

A sweep is a decoder with a branch for every threshold. What serves is one with a single branch, whose requests may name
other thresholds: prompts that stand in one batch then exit at their own.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from calm_beam.arithmetic import FLOAT32, Precision
from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.measures import Need
from calm_beam.model import architecture_of, network_of

from .batch import Batch
from .branches import Branch, Branches
from .device_groups import device_groups, placed
from .devices import decode_on_devices
from .engine_choice import Machine, chosen_engine
from .group_decoder import GroupDecoder
from .memory import check_devices, choose_budget
from .near_ties import near_ties_of
from .request import Request
from .result import NearTies, PromptResult
from .settings import check_sizes
from .weights import Weights
from .work import Work


class Decoder:
    """Decodes prompts, each by some branches; neither prompts nor branches ever influence each other.

    Branches of a prompt share the work that they have in common, and so do prompts: a layer is run for all that need
    it. A prompt's numbers are the same to the bit whatever is run beside it; docs/guarantee.md has the exceptions. Of
    the threads that share a decoder, one may decode at a time.

    Attributes:
      engine: What computes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        branches: Sequence[Branch],
        *,
        max_input_length: int = 512,
        batch_size: int | None = None,
        max_cache_tokens: int | None = None,
        exit_head: str = "exact",
        engine: str = "auto",
        precision: Precision = FLOAT32,
        devices: Sequence[jax.Device] | None = None,
        model_parallelism: int = 1,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          branches: At least one: by which every prompt is decoded. Requests may name other thresholds.
          max_input_length: Most tokens of a prompt.
          batch_size: Most prompts decoded at the same time; None for as many as memory and speed recommend.
          max_cache_tokens: Most positions whose keys and values are held at a time, those of the sources included; None
            for a share of the device's memory.
          exit_head: Form of the head that decides, one of `EXIT_HEADS`. Tokens and exit layers do not depend on it but
            at near ties. Where several measures are made of logits, the exact one decides.
          engine: One of `engine_choice.ENGINE_CHOICES`: what computes rows. Engines round otherwise.
          precision: In which numbers the model computes.
          devices: Where to decode, with a model on each; None for all of this process. Of JAX's default platform.
          model_parallelism: Devices that share one model, each with a part of its heads, feed-forward layers and
            vocabulary; the number of devices must be a multiple of it.

        Raises:
          ValueError: If a rule does not fit the model (no exit classifier, `min_exit_layer` too high), branches cannot
            share their work (`Branches.of` says which can), a number is below 1, the model has too few positions, the
            budget has no room for one prompt, a device is of another platform, or the devices cannot share the model
            so.
          UsageError: If `engine` is `native` and native code cannot do it.
        """
        config, steps = checkpoint.config, len(branches[0].thresholds)
        check_sizes(
            max_decode_length=steps,
            max_input_length=max_input_length,
            batch_size=batch_size,
            max_cache_tokens=max_cache_tokens,
        )
        architecture_of(config).check_positions(config, source=max_input_length, steps=steps)
        for rule in dict.fromkeys(branch.rule for branch in branches):
            rule.check_model(config.num_decoder_layers, has_classifier=bool(config.exit_classifier))
        self._rules = [branch.rule for branch in branches]
        self._branches = Branches.of(self._rules, layers=config.num_decoder_layers)
        # [steps, lanes]
        self._thresholds = np.stack([branch.thresholds for branch in branches], axis=1)
        groups = device_groups(config, model_parallelism=model_parallelism, devices=devices)
        by_logits = self._branches.indices(Need.LOGITS)
        self.engine = chosen_engine(
            engine,
            # A certified head proves intervals of one measure.
            exit_head if len(by_logits) < 2 else "exact",
            config=config,
            rule=self._branches.rules[by_logits[0] if by_logits else 0],
            precision=precision,
            machine=Machine.of(groups[0].devices[0]),
            model_parallelism=model_parallelism,
        )
        model = network_of(config, precision=precision)
        self._decoders: list[GroupDecoder] = []
        for group in groups:
            check_devices(config, group, precision)
            # Before the budget: what is free is what the weights leave.
            on_group = placed(checkpoint, group, precision)
            budget = choose_budget(
                config,
                group,
                lanes=len(branches),
                steps=steps,
                source=max_input_length,
                batch_size=batch_size,
                max_cache_tokens=max_cache_tokens,
                precision=precision,
            )
            with group.running():
                weights = Weights(
                    on_group, model, group, steps=steps, measures=self._branches.measures, engine=self.engine
                )
            self._decoders.append(
                GroupDecoder(
                    model,
                    self._branches,
                    weights=weights,
                    thresholds=self._thresholds,
                    max_input_length=max_input_length,
                    budget=budget,
                )
            )

    @property
    def work(self) -> Work:
        """What has been decoded so far, counted."""
        return sum((decoder.work for decoder in self._decoders), Work())

    @property
    def slots(self) -> int:
        """Most prompts that are decoded side by side, on all devices together."""
        return sum(decoder.slots for decoder in self._decoders)

    def decode(self, prompts: Sequence[Request | Sequence[int]]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the outputs of every prompt, with its index, in the order in which they end.

        Args:
          prompts: Requests, or token ids alone, which are decoded by the decoder's own branches.

        Raises:
          ValueError: If a prompt is empty or too long, or the branches of a request have other rules or steps than the
            decoder's.
        """
        # One that is given twice is decoded twice.
        index_of = {self._request(prompt): index for index, prompt in enumerate(prompts)}
        for request, result in decode_on_devices(self._decoders, list(index_of)):
            find = functools.partial(self._near_ties, request)
            yield index_of[request], dataclasses.replace(result, find_near_ties=find)

    def open_batch(self) -> Batch:
        """Returns a batch for prompts that come while others are decoded, on the first group of devices."""
        return self._decoders[0].open_batch()

    def _near_ties(self, request: Request, result: PromptResult) -> NearTies | None:
        return near_ties_of(result, self._branches, thresholds=request.thresholds(self._thresholds))

    def _request(self, prompt: Request | Sequence[int]) -> Request:
        """Returns a request of its own for a prompt."""
        if not isinstance(prompt, Request):
            return Request(prompt)
        if prompt.branches is not None:
            shapes = [(branch.rule, len(branch.thresholds)) for branch in prompt.branches]
            if shapes != [(rule, len(self._thresholds)) for rule in self._rules]:
                raise ValueError(
                    "the branches of a request must have the exit rules of the decoder's, in their order, and as many "
                    f"steps ({len(self._thresholds)})."
                )
        return dataclasses.replace(prompt, known=None if self._branches.decides_after_last_layer else prompt.known)
