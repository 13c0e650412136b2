"""Decoders of single prompts: native code, or XLA's loop on the device.

Native code takes all steps of an output in one call where it can, and else is a batch of one. Outputs are those of a
batch, to the bit.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.propagations import PassedOn
from calm_beam.manifest import EngineRecord
from calm_beam.model import architecture_of, network_of
from calm_beam.precision import FLOAT32, Precision

from .branches import Branch, Branches, BranchResult, EndsOutput
from .compilation import members_by_width
from .cpu import NativeEngine
from .decoder import BranchDecoder, Decoder
from .device_groups import device_groups, placed
from .early_exit import EarlyExitDecoder
from .engine import Slots
from .engine_choice import Machine, single_prompt_engine, takes_one_call
from .kv_cache import SingleBranches
from .settings import check_decodable
from .weights import Weights


class NativeLoop:
    """Decodes single prompts by native code, where it `takes_one_call` for an output.

    Decoders of the same rule share the packed weights at any thresholds, and threads may share a decoder.

    Attributes:
      engine: The engine that computes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        branch: Branch,
        *,
        engine: EngineRecord,
        max_input_length: int = 512,
        ends_output: EndsOutput | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          branch: How exits are decided, and at which threshold of every step.
          engine: What `single_prompt_engine` returns for the model and the rule.
          max_input_length: Most tokens of a prompt.
          ends_output: What ends an output besides end tokens; None for nothing. Native code does not know it: it
            decodes to the end, and the rest is cut.

        Raises:
          ValueError: If the rule does not fit the model, or a number is below 1.
        """
        assert engine.name == "native"
        config, rule, steps = checkpoint.config, branch.rule, len(branch.thresholds)
        rule.check_served()
        check_decodable(config, [rule], max_decode_length=steps, max_input_length=max_input_length)
        self._branch, self._max_input_length, self._ends_output = branch, max_input_length, ends_output
        self._branch_rules = Branches.of([rule], layers=config.num_decoder_layers)
        self._group, *_ = device_groups(config)
        self.engine = engine
        self._model = network_of(config, precision=FLOAT32)
        with self._group.running():
            self._weights = Weights(
                placed(checkpoint, self._group),
                self._model,
                self._group,
                steps=steps,
                measures=self._branch_rules.measures,
                engine=self.engine,
            )
        # Engines that no thread uses at the moment; each has the KV cache of one prompt.
        self._idle: list[tuple[NativeEngine, Slots]] = []
        self._lock = threading.Lock()

    def at(self, branch: Branch) -> Self:
        """Returns a decoder with the same weights for another branch of the same rule and length."""
        assert (branch.rule, len(branch.thresholds)) == (self._branch.rule, len(self._branch.thresholds))
        other = copy.copy(self)
        other._branch = branch
        return other

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, BranchResult]]:
        """Yields the output of every prompt with its index, narrower widths first, else in the order given.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        for members in members_by_width(prompts, self._max_input_length).values():
            for index in members:
                with self._group.running():
                    result = self._decode(prompts[index])
                yield index, result if self._ends_output is None else result.ended_by(self._ends_output)

    def _decode(self, ids: Sequence[int]) -> BranchResult:
        with self._lock:
            engine, slots = self._idle.pop() if self._idle else self._new_engine()
        slots.lengths[0] = len(ids)
        source_tokens = np.array([ids], np.int32)
        engine.prefill(self._max_input_length, source_tokens, lengths=slots.lengths, places=slots.places)
        architecture = architecture_of(self._model.config)
        fills_from_first = self._branch_rules.passed_on is PassedOn.FIRST_STATE
        new, length = engine.decode_alone(
            architecture.first_input(self._model.config, ids),
            self._branch.thresholds,
            first_kept_step=architecture.first_kept_step,
            passed_on=self._branch_rules.first_exit if fills_from_first else 0,
        )
        # An engine whose prompt failed is dropped: another prompt gets a new one.
        with self._lock:
            self._idle.append((engine, slots))
        rejected = new.max_rejected_confidence[:, 0]
        rejected[length:] = 0
        return BranchResult(
            tokens=new.tokens[:, 0],
            exit_layers=new.exit_layers[:, 0],
            confidences=new.confidences[:, 0],
            length=length,
            is_finite=bool(new.is_finite.all()),
            max_rejected_confidence=rejected,
        )

    def _new_engine(self) -> tuple[NativeEngine, Slots]:
        """Returns an engine with room for one prompt, whose output takes nodes in order."""
        steps = len(self._branch.thresholds)
        tree = SingleBranches(slots=1, steps=steps, capacity=steps)
        tree.all_paths(1)[0] = np.arange(steps)
        slots = Slots(
            tree,
            num_branches=1,
            steps=steps,
            sources={self._max_input_length: 1},
            prefixes={},
            widths=np.full(1, self._max_input_length, np.int32),
            places=np.zeros(1, np.int32),
            lengths=np.ones(1, np.int32),
        )
        return NativeEngine(self._model, self._branch_rules, weights=self._weights, slots=slots), slots


SinglePromptDecoder = NativeLoop | BranchDecoder | EarlyExitDecoder
"""A decoder of single prompts."""


def single_prompt_decoder(
    checkpoint: Checkpoint,
    branch: Branch,
    *,
    exit_head: str = "exact",
    engine: str = "auto",
    precision: Precision = FLOAT32,
    model_parallelism: int = 1,
    **options: Any,
) -> SinglePromptDecoder:
    """Returns the decoder of single prompts; arguments and errors are those of `EarlyExitDecoder`."""
    group, *_ = device_groups(checkpoint.config, model_parallelism=model_parallelism)
    chosen = single_prompt_engine(
        engine,
        exit_head,
        config=checkpoint.config,
        rule=branch.rule,
        precision=precision,
        machine=Machine.of(group.devices[0]),
        model_parallelism=model_parallelism,
    )
    if takes_one_call(chosen, branch.rule, checkpoint.config):
        return NativeLoop(checkpoint, branch, engine=chosen, **options)
    options |= {
        "exit_head": exit_head,
        "engine": engine,
        "precision": precision,
        "model_parallelism": model_parallelism,
    }
    if chosen.name == "native":
        # The other two check this themselves; a decoder of batches also sweeps.
        branch.rule.check_served()
        return BranchDecoder(Decoder(checkpoint, [branch], batch_size=1, **options), branch, turn=threading.Lock())
    return EarlyExitDecoder(checkpoint, branch, **options)
