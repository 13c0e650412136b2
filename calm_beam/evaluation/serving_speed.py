"""How a model serves where its time is measured: one prompt at a time, or so many together."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.engine_choice import Machine, chosen_engine
from calm_beam.decoding.result import BranchResult
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.outputs.prepared import PreparedSweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedDecoder:
    """A decoder of one rule and threshold, as it serves.

    Attributes:
      decoder: What decodes.
    """

    decoder: Decoder | EarlyExitDecoder

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterable[BranchResult]:
        """Yields the outputs of prompts, in any order."""
        if isinstance(self.decoder, EarlyExitDecoder):
            yield from (result for _, result in self.decoder.decode(prompts))
        else:
            yield from (result.branch(0) for _, result in self.decoder.decode(prompts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model serves: a single prompt by the decoder of single prompts, several by that of batches.

    Attributes:
      checkpoint: The model, with its weights.
      settings: Sizes of prompts and outputs, and the precision.
      batch: Prompts at a time.
      asked: What decoders are asked for, by their arguments `engine` and `exit_head`.
    """

    checkpoint: Checkpoint
    settings: DecodeSettings
    batch: int
    asked: dict[str, Any]

    @classmethod
    def of(cls, sweep: PreparedSweep, *, batch: int) -> Self:
        """Returns how the model of a sweep serves, by the engine of the sweep."""
        asked = {"engine": sweep.request.engine, "exit_head": sweep.request.exit_head}
        return cls(checkpoint=sweep.checkpoint, settings=sweep.settings, batch=batch, asked=asked)

    def decoder(self, rule: ExitRule, threshold: float | None) -> ServedDecoder:
        """Returns what serves by a rule at a threshold; None is the full model."""
        settings = self.settings
        branch = Branch.at(rule, threshold, max_decode_length=settings.max_decode_length)
        given: dict[str, Any] = {
            "max_input_length": settings.max_input_length,
            "precision": settings.precision,
            **self.asked,
        }
        if self.batch == 1:
            return ServedDecoder(decoder=EarlyExitDecoder(self.checkpoint, branch, **given))
        return ServedDecoder(decoder=Decoder(self.checkpoint, [branch], batch_size=self.batch, **given))

    def engine(self) -> EngineRecord:
        """Returns what serves."""
        given: dict[str, Any] = {
            "config": self.checkpoint.config,
            "rule": self.settings.rule,
            "precision": self.settings.precision,
            "machine": Machine.of(jax.local_devices()[0]),
        }
        return chosen_engine(**self.asked, **given, in_loop=self.batch == 1)

    @property
    def device(self) -> str:
        """JAX's name of the kind of device."""
        return str(jax.local_devices()[0].device_kind)

    @property
    def cores(self) -> int:
        """Cores that the process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def load(self) -> float:
        """Processes that run or wait to, by the mean of the last minute."""
        return os.getloadavg()[0]
