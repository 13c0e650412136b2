"""Wall-clock speed of a model that serves on this machine: one prompt at a time, or several together.

The wall-clock speedup of early exits is measured where they are served, encoder included. Source: CALM, "FLOPs and
speedup computations" (batch size one, first execution ignored, times averaged).

The cost of a token in seconds on the serving engine is measured in a short run of known exits. A few prompts are
decoded by the full model, and by each measure at a few thresholds, which share compiled programs. The time of each run
and its numbers of tokens, layers used and exit tests are then known; the
seconds of each part are those that explain all runs best. A skipped layer costs its keys and values. Since that is paid
for every layer that is not used, only the difference to a used layer can be estimated; it is
stored in `layer`, and all the rest in `output`.
"""

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import numpy as np
from scipy.optimize import nnls

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, EndsOutput
from calm_beam.decoding.compilation import bucket_width
from calm_beam.decoding.decoder import BranchDecoder, Decoder
from calm_beam.decoding.engine_choice import Machine, chosen_engine, single_prompt_engine
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import SinglePromptDecoder, single_prompt_decoder
from calm_beam.evaluation.performance import Estimate, estimated_ratio
from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost, tests_at
from calm_beam.inputs.vocabularies.vocabulary import ends_output
from calm_beam.manifest import EngineRecord
from calm_beam.outputs.prepared import PreparedSweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """A model's serving setup: single prompts use the decoder of single prompts, several the batch decoder.

    Attributes:
      checkpoint: The model, with its weights.
      settings: Sizes of prompts and outputs, and the precision.
      batch: Number of prompts decoded together.
      asked: The arguments `engine` and `exit_head` of decoders.
      ends_output: What ends an output besides end tokens; None for nothing.
    """

    checkpoint: Checkpoint
    settings: DecodeSettings
    batch: int
    asked: dict[str, Any]
    ends_output: EndsOutput | None = None

    @classmethod
    def of(cls, sweep: PreparedSweep, *, batch: int) -> Self:
        """Returns the serving setup of a sweep's model, with the engine of the sweep."""
        asked = {"engine": sweep.request.engine, "exit_head": sweep.request.exit_head}
        ends = ends_output(sweep.vocabulary)
        return cls(checkpoint=sweep.checkpoint, settings=sweep.settings, batch=batch, asked=asked, ends_output=ends)

    def decoder(self, rule: ExitRule, threshold: float | None) -> SinglePromptDecoder:
        """Returns the decoder for a rule and a threshold; None is the full model."""
        settings = self.settings
        branch = Branch.at(rule, threshold, max_decode_length=settings.max_decode_length)
        given: dict[str, Any] = {
            "max_input_length": settings.max_input_length,
            "precision": settings.precision,
            "ends_output": self.ends_output,
            **self.asked,
        }
        if self.batch == 1:
            return single_prompt_decoder(self.checkpoint, branch, **given)
        decoder = Decoder(self.checkpoint, [branch], batch_size=self.batch, **given)
        return BranchDecoder(decoder, branch, turn=threading.Lock())

    def engine(self) -> EngineRecord:
        """Returns the record of the engine that serves."""
        given: dict[str, Any] = {
            "config": self.checkpoint.config,
            "rule": self.settings.rule,
            "precision": self.settings.precision,
            "machine": Machine.of(jax.local_devices()[0]),
        }
        return (single_prompt_engine if self.batch == 1 else chosen_engine)(**self.asked, **given)

    @property
    def device(self) -> str:
        """JAX's name of the kind of device."""
        return str(jax.local_devices()[0].device_kind)

    @property
    def cores(self) -> int:
        """Number of cores that the process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def load(self) -> float:
        """Load average of the last minute: processes that run or wait to run."""
        return os.getloadavg()[0]


MEASURED = (Need.LOGITS, Need.STATES, Need.CLASSIFIER)
"""Needs of the exit tests whose time is measured; static layers test nothing."""
# No token exits at the first threshold, some at the second, and all at the last, at the lowest exit layer.
_THRESHOLDS = {Need.LOGITS: (1.0, 0.9, 0.0), Need.STATES: (1.0, 0.95, 0.0), Need.CLASSIFIER: (1.0, 0.9, 0.0)}
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 5, 1.0


OnDecoded = Callable[[int, int], None]
"""Told how far a measurement is: the number of prompts newly decoded, and of those decoded in all, as far as known."""


class _Run(NamedTuple):
    """One rule and decoder, with its total counts."""

    rule: ExitRule
    decoder: SinglePromptDecoder
    tokens: int
    layers: int
    tests: int


def measured_cost(
    serving: Serving,
    prompts: Sequence[Sequence[int]],
    *,
    needs: Collection[Need],
    exits: ExitRule,
    clock: Callable[[], float] = time.perf_counter,
    on_decoded: OnDecoded | None = None,
) -> TokenCost:
    """Returns the cost of a token in seconds, for a number of prompts decoded together.

    Args:
      serving: How the model serves.
      prompts: Token ids of each, at least one; more prompts reduce the effect of other work on the machine.
      needs: Tests to measure, one or more of `MEASURED`.
      exits: The exit layers: lowest layer and interval.
      clock: Returns seconds.
      on_decoded: Told how far it is, if it is not None.

    Raises:
      ValueError: If there are no prompts, or no tests.

    Source: least squares of relative errors; seconds are not negative.
    """
    if not prompts:
        raise ValueError("measuring needs at least one prompt, got none.")
    if not needs:
        raise ValueError("measuring needs at least one kind of exit test, got none.")
    depth = serving.checkpoint.config.num_decoder_layers
    ways: list[tuple[ExitRule, float | None]] = [(ExitRule(confidence="static"), None)]
    for need in needs:
        measure = next(each.name for each in MEASURES.values() if each.needs is need)
        rule = ExitRule(confidence=measure, min_exit_layer=exits.min_exit_layer, exit_interval=exits.exit_interval)
        ways += [(rule, threshold) for threshold in _THRESHOLDS[need]]
    # Once to count, and so many rounds at least; a fast machine makes more.
    told = _teller(on_decoded, in_all=(1 + _LEAST_ROUNDS) * len(ways) * len(prompts))
    # Compiles each program, and counts its work.
    runs = []
    for rule, threshold in ways:
        runs.append(_counted(rule, serving.decoder(rule, threshold), prompts, depth=depth))
        told(len(prompts))
    # The fastest round of each part counts: other work on the machine only adds to it.
    parts = [prompts[start : start + serving.batch] for start in range(0, len(prompts), serving.batch)]
    seconds = np.full((len(runs), len(parts)), np.inf)
    began = clock()
    for turn in range(_MOST_ROUNDS):
        for at, part in enumerate(parts):
            for index, run in enumerate(runs):
                start = clock()
                for _ in run.decoder.decode(part):
                    pass
                seconds[index, at] = min(seconds[index, at], clock() - start)
                told(len(part))
        if turn + 1 >= _LEAST_ROUNDS and clock() - began > _ENOUGH_SECONDS:
            break
    rows = [
        [
            len(prompts),
            run.tokens,
            run.layers,
            *(run.tests if run.rule.measure().needs is need else 0 for need in needs),
        ]
        for run in runs
    ]
    known = np.array(rows, float) / seconds.sum(axis=1)[:, None]
    (prompt, token, layer, *tests), _ = nnls(known, np.ones(len(runs)))
    return TokenCost(
        layers=depth,
        layer=float(layer),
        # Amortised over outputs as long as the full model's.
        output=float(token + prompt * len(prompts) / max(1, runs[0].tokens)),
        tests={need: float(test) for need, test in zip(needs, tests, strict=True)},
    )


def _teller(on_decoded: OnDecoded | None, *, in_all: int) -> Callable[[int], None]:
    """Returns what takes the number of prompts newly decoded; it does nothing without `on_decoded`."""
    return lambda newly: None if on_decoded is None else on_decoded(newly, in_all)


def _counted(rule: ExitRule, decoder: SinglePromptDecoder, prompts: Sequence[Sequence[int]], *, depth: int) -> _Run:
    tests = [tests_at(layer, rule, layers=depth) for layer in range(1, depth + 1)]
    layers = np.concatenate([result.exit_layers[: result.length] for _, result in decoder.decode(prompts)]).astype(int)
    return _Run(
        rule=rule,
        decoder=decoder,
        tokens=len(layers),
        layers=int(layers.sum()),
        tests=int(np.array(tests)[layers - 1].sum()),
    )


_Key = TypeVar("_Key", bound=Hashable)


# This many turns, if they do not take so many times as long as they may.
_ENOUGH_TURNS, _LONGER = 4, 3


class TimedDecoder(Protocol):
    """A decoder to time, such as `EarlyExitDecoder` with a batch size of 1."""

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterable[object]:
        """Returns the outputs of the prompts, one by one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedup:
    """The speedup of a decoder over the full model.

    Attributes:
      factor: Time of the full model divided by that of the decoder, both summed over the prompts.
      seconds: Mean time of the decoder for one prompt.
      full_seconds: Mean time of the full model for one prompt, measured in turns with the decoder.
      prompts: Number of prompts that both have decoded.
    """

    factor: Estimate
    seconds: float
    full_seconds: float
    prompts: int


def measure_speedups(
    full: TimedDecoder,
    early: Mapping[_Key, TimedDecoder],
    *,
    prompts: Sequence[Sequence[int]],
    max_input_length: int,
    together: int = 1,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    on_decoded: OnDecoded | None = None,
) -> dict[_Key, Speedup]:
    """Returns the speedup of every decoder.

    All decoders take turns, prompt by prompt or batch by batch, and each turn starts with another decoder, so that
    other work on the machine affects all alike. Decoders compile at the first prompt of each width, or at the first
    batch; such runs are not timed.

    Args:
      full: Decoder of the full model.
      early: Decoders to compare it with.
      prompts: Token ids of each prompt, at least one.
      max_input_length: Largest prompt length of the decoders; it decides the widths.
      together: Number of prompts decoded together.
      most_seconds: No turn starts later than this, but fewer than four turns may take three times as long, since a
        standard error of few means little; there is at least one turn.
      clock: Returns seconds.
      on_decoded: Told how far it is, if it is not None. Where time ends it, all are told to be decoded.

    Raises:
      ValueError: If there are no prompts.
    """
    if not prompts:
        raise ValueError("a speedup needs at least one prompt, got none.")
    decoders = [full, *early.values()]
    parts = [prompts[start : start + together] for start in range(0, len(prompts), together)]
    firsts = [[each] for each in _first_of_each_width(prompts, max_input_length)] if together == 1 else parts[:1]
    told = _teller(on_decoded, in_all=len(decoders) * sum(map(len, [*firsts, *parts])))
    for part in firsts:
        for decoder in decoders:
            _run(decoder, part)
            told(len(part))
    seconds: list[list[float]] = [[] for _ in decoders]
    began, count = clock(), 0
    for turn, part in enumerate(parts):
        allowed = most_seconds if turn >= _ENOUGH_TURNS else _LONGER * most_seconds
        if turn and clock() - began > allowed:
            told(len(decoders) * (len(prompts) - count))
            break
        count += len(part)
        for place in range(len(decoders)):
            index = (turn + place) % len(decoders)
            start = clock()
            _run(decoders[index], part)
            seconds[index].append(clock() - start)
            told(len(part))
    return {
        key: Speedup(
            factor=estimated_ratio(seconds[0], times),
            seconds=sum(times) / count,
            full_seconds=sum(seconds[0]) / count,
            prompts=count,
        )
        for key, times in zip(early, seconds[1:], strict=True)
    }


def _first_of_each_width(prompts: Sequence[Sequence[int]], max_input_length: int) -> list[Sequence[int]]:
    first: dict[int, Sequence[int]] = {}
    for prompt in prompts:
        first.setdefault(bucket_width(len(prompt), max_input_length), prompt)
    return list(first.values())


def _run(decoder: TimedDecoder, prompts: Sequence[Sequence[int]]) -> None:
    # The decoder is lazy; its outputs are on the host when it yields them.
    for _ in decoder.decode(prompts):
        pass
