"""Requests to a decoder, which are prompts, and its results, which are their outputs by branch.

A branch has an exit rule and a threshold for every step. A layer's output for a token depends on the tokens so far
and on the layer where each of them exited, not on why it exited there. So branches with any rules share their work, as
long as skipped layers store the same keys and values for a token that exits at a given layer.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from calm_beam.exits.measures import Measure, Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds

from .settings import check_sizes

if TYPE_CHECKING:
    import jax

_Tokens = TypeVar("_Tokens", np.ndarray, "jax.Array")


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """One way in which a prompt is decoded.

    Attributes:
      rule: How exits are decided.
      thresholds: float32, shape (max_decode_length,). One for every step; no token exits at +inf, so that a branch of
        +inf alone is the full model.
    """

    rule: ExitRule
    thresholds: np.ndarray

    @classmethod
    def at(
        cls,
        rule: ExitRule,
        threshold: float | None,
        threshold_by_position: Sequence[float] | None = None,
        *,
        max_decode_length: int,
    ) -> Self:
        """Returns the branch of a threshold.

        Args:
          rule: How exits are decided; it names the schedule.
          threshold: Exit threshold in [0, 1]; None never exits.
          threshold_by_position: The thresholds by position that the rule's schedule gave at calibration; computed here
            if None.
          max_decode_length: Most tokens to generate, eos included.

        Raises:
          ValueError: If the threshold is outside [0, 1], the thresholds by position are not `max_decode_length` numbers
            in [0, 1], or come without a threshold, or `max_decode_length` is below 1.
        """
        check_sizes(max_decode_length=max_decode_length)
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], or None to never exit; got {threshold}.")
        if threshold_by_position is None:
            if threshold is None:
                return cls(rule, np.full(max_decode_length, np.inf, np.float32))
            return cls(rule, scheduled_thresholds(rule, (threshold,), max_decode_length=max_decode_length)[:, 0])
        if threshold is None or len(threshold_by_position) != max_decode_length:
            raise ValueError(
                f"threshold_by_position must be {max_decode_length} numbers next to a threshold, got "
                f"{len(threshold_by_position)} numbers next to {threshold}."
            )
        if not all(0 <= value <= 1 for value in threshold_by_position):
            raise ValueError(f"threshold_by_position must be numbers in [0, 1], got {list(threshold_by_position)}.")
        return cls(rule, np.array(threshold_by_position, np.float32))


def sweep_branches(
    rules: ExitRule | Sequence[ExitRule],
    thresholds: Sequence[float],
    *,
    max_decode_length: int,
    with_full_model: bool = True,
) -> tuple[Branch, ...]:
    """Returns the branches of a sweep: for each rule the full model, and then every threshold.

    Args:
      rules: One or more.
      thresholds: In [0, 1], any order.
      max_decode_length: Most tokens of an output, eos included.
      with_full_model: Whether there is a branch of the full model.

    Raises:
      ValueError: If a threshold is outside [0, 1], or `max_decode_length` is below 1.
    """
    full_model = (None,) if with_full_model else ()
    return tuple(
        Branch.at(rule, threshold, max_decode_length=max_decode_length)
        for rule in ([rules] if isinstance(rules, ExitRule) else rules)
        for threshold in (*full_model, *thresholds)
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Branches:
    """The exit rules of a prompt's branches.

    Attributes:
      layers: Decoder depth L.
      rules: For each distinct pair of measure and patience, one of the rules that have it.
      measures: The measures of `rules`, in this order.
      measure_of: int, shape (branches,). Index of each branch's measure.
      may_exit: bool, shape (layers + 1, branches). Whether each branch may exit at a layer, counted from 1.
      passed_on: From which states or keys and values skipped layers fill their cache.
      first_exit: First exit layer of the first branch; where it matters, all branches have the same.
      decides_after_last_layer: Whether every layer runs for every token, and exits are decided afterwards.
      takes_last_token: Whether the token is the last layer's prediction at any exit layer.
    """

    layers: int
    rules: tuple[ExitRule, ...]
    measures: tuple[Measure, ...]
    measure_of: np.ndarray
    may_exit: np.ndarray
    passed_on: PassedOn
    first_exit: int
    decides_after_last_layer: bool
    takes_last_token: bool

    @classmethod
    def of(cls, rules: Sequence[ExitRule], *, layers: int) -> Self:
        """Returns the exit rules of branches.

        Args:
          rules: One for every branch. Schedules do not matter: thresholds are given by step.
          layers: Decoder depth L.

        Raises:
          ValueError: If the rules cannot share their work: they propagate states differently, they propagate the states
            of different first layers, or one of several rules needs the full model for every token or all logits of a
            row.
        """
        distinct = tuple(dict.fromkeys(rules))
        _check_shared(distinct, layers)
        by_measure = {(rule.confidence, rule.patience): rule for rule in distinct}
        index = {key: place for place, key in enumerate(by_measure)}
        exit_layers = {rule: list(rule.exit_layers(layers)) for rule in distinct}
        may_exit = np.zeros((layers + 1, len(rules)), bool)
        for branch, rule in enumerate(rules):
            may_exit[exit_layers[rule], branch] = True
        return cls(
            layers=layers,
            rules=tuple(by_measure.values()),
            measures=tuple(rule.measure() for rule in by_measure.values()),
            measure_of=np.array([index[rule.confidence, rule.patience] for rule in rules]),
            may_exit=may_exit,
            passed_on=rules[0].propagation().passed_on,
            first_exit=exit_layers[rules[0]][0],
            decides_after_last_layer=rules[0].needs_full_model(),
            takes_last_token=rules[0].token_from == "last_layer",
        )

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The layers at which any branch may exit, ascending."""
        return tuple(np.flatnonzero(self.may_exit.any(axis=1)).tolist())

    @property
    def asks_head(self) -> np.ndarray:
        """Whether each branch's measure asks the head, bool of shape (branches,)."""
        return self._by_branch([measure.needs.asks_head for measure in self.measures])

    @functools.cached_property
    def sees_near_ties(self) -> np.ndarray:
        """Whether near ties of each branch's measure are detected, bool of shape (branches,)."""
        return self._by_branch([measure.sees_near_ties for measure in self.measures])

    @functools.cached_property
    def is_gap(self) -> np.ndarray:
        """Whether each branch's measure is the gap of the two most likely tokens, bool of shape (branches,)."""
        return self._by_branch([measure.is_gap for measure in self.measures])

    @property
    def most_compared(self) -> int:
        """The most predictions of lower layers that a token is compared with."""
        return max((rule.patience or 1) - 1 for rule in self.rules)

    def indices(self, *needs: Need) -> list[int]:
        """Returns the indices of the measures whose need is one of these."""
        return [index for index, measure in enumerate(self.measures) if measure.needs in needs]

    def _by_branch(self, of_measures: Sequence[bool]) -> np.ndarray:
        """Returns a property of each branch's measure, bool of shape (branches,), given those of all measures."""
        by_branch: np.ndarray = np.array(of_measures)[self.measure_of]
        return by_branch


def _check_shared(rules: Sequence[ExitRule], layers: int) -> None:
    first = rules[0]
    distinct = {dataclasses.replace(rule, schedule="constant", tau=None) for rule in rules}
    if len({rule.shares_sweep_by() for rule in distinct}) == 1:
        return
    propagations = {rule.state_propagation for rule in distinct}
    if len(propagations) > 1:
        raise ValueError(
            f"rules of one sweep must have one state_propagation, got {', '.join(sorted(propagations))}. Sweep them "
            "one after the other."
        )
    firsts = {rule.exit_layers(layers)[0] for rule in distinct}
    if first.propagation().passed_on is PassedOn.FIRST_STATE and len(firsts) > 1:
        raise ValueError(
            f"rules of one sweep with state_propagation {first.state_propagation!r} must have one first exit layer, "
            f"got {sorted(firsts)}: its states are what skipped layers are given. Sweep them one after the other."
        )
    if len(distinct) > 1 and (reason := next(filter(None, (rule.reason_for_full_model() for rule in rules)), None)):
        raise ValueError(f"a rule with {reason} needs every layer for every token, and must be swept by itself.")
    for rule in distinct:
        measure = rule.measure()
        if len(distinct) > 1 and measure.needs is Need.LOGITS and measure.of_summary is None:
            # Other code would then project for the other rules too, and round differently than in their own sweeps.
            raise ValueError(
                f"confidence {rule.confidence!r} takes all logits of a row, and must be swept by itself. A "
                "calm_beam.exits.measures.Measure with of_summary need not."
            )


NearTies = tuple[bool | None, ...]
"""For each branch of a prompt, whether its output depended on a near tie (`near_ties`); None where not detected."""


EndsOutput = Callable[[Sequence[int]], bool]
"""Returns whether the last of an output's tokens ends it, if none before has; end tokens end it in any case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchResult:
    """The output of one prompt by one branch.

    Attributes:
      tokens: int32, shape (max_decode_length,). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer, or the middle of an interval that contains
        it (`exit_head`); 0 after the end. The full model tests the last layer alone: `patience` gives 1 / k there.
      length: Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite; if not, the tokens are meaningless.
      max_rejected_confidence: float32, shape of `tokens`, as in `PromptResult`; None if the decoder does not report it.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    length: int
    is_finite: bool
    max_rejected_confidence: np.ndarray | None = None

    def ended_by(self, ends_output: EndsOutput) -> Self:
        """Returns the output up to the first token that ends it."""
        tokens = self.tokens[: self.length].tolist()
        length = next((count for count in range(1, self.length) if ends_output(tokens[:count])), self.length)
        if length == self.length:
            return self
        is_kept = np.arange(len(self.tokens)) < length
        rejected = self.max_rejected_confidence
        return dataclasses.replace(
            self,
            tokens=np.where(is_kept, self.tokens, 0),
            exit_layers=np.where(is_kept, self.exit_layers, 0),
            confidences=np.where(is_kept, self.confidences, np.float32(0)),
            length=length,
            max_rejected_confidence=None if rejected is None else np.where(is_kept, rejected, np.float32(0)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The outputs of one prompt by all of its branches.

    Attributes:
      tokens: int32, shape (branches, max_decode_length). 0 after the output's end; eos is part of the output.
      exit_layers: int32, shape of `tokens`. Layers used, counted from 1; 0 after the end.
      confidences: float32, shape of `tokens`. Confidence at the exit layer; 0 after the end. For the full model, and
        for any token that ran all layers, that is the last layer. Where a certified head decided, it is the middle of
        an interval that contains the confidence.
      lengths: int32, shape (branches,). Number of tokens, eos included.
      is_finite: Whether all logits and confidences that were used are finite.
      max_rejected_confidence: float32, shape of `tokens`. Largest confidence, or upper end of an interval that contains
        it, at the exit layers below the one taken: every threshold above it gives the same step. -inf where there is
        no such layer, or where the full model tested none. None if the decoder does not report it.
      find_near_ties: Returns `near_ties` of a result; None if the decoder does not report them.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    lengths: np.ndarray
    is_finite: bool
    max_rejected_confidence: np.ndarray | None = None
    find_near_ties: "Callable[[PromptResult], NearTies | None] | None" = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def joined(cls, results: "Sequence[PromptResult]") -> Self:
        """Returns one prompt's outputs by all branches, given results for disjoint sets of branches of one decoder."""
        told = [result.max_rejected_confidence for result in results if result.max_rejected_confidence is not None]
        near_ties = [result.near_ties for result in results]
        return cls(
            tokens=np.concatenate([result.tokens for result in results]),
            exit_layers=np.concatenate([result.exit_layers for result in results]),
            confidences=np.concatenate([result.confidences for result in results]),
            lengths=np.concatenate([result.lengths for result in results]),
            is_finite=all(result.is_finite for result in results),
            max_rejected_confidence=np.concatenate(told) if told else None,
            find_near_ties=lambda _: None if None in near_ties else tuple(itertools.chain(*filter(None, near_ties))),
        )

    @functools.cached_property
    def near_ties(self) -> NearTies | None:
        """Whether each output depended on a near tie, or None where not detected; None alone if for no branch."""
        return None if self.find_near_ties is None else self.find_near_ties(self)

    def branch(self, index: int) -> BranchResult:
        """Returns the output by one branch."""
        rejected = self.max_rejected_confidence
        return BranchResult(
            tokens=self.tokens[index],
            exit_layers=self.exit_layers[index],
            confidences=self.confidences[index],
            length=int(self.lengths[index]),
            is_finite=self.is_finite,
            max_rejected_confidence=None if rejected is None else rejected[index],
        )

    def by_rule(self, count: int) -> list[Self]:
        """Returns the outputs by rule, for `count` rules with equally many branches each, one rule after the other."""
        each, rest = divmod(len(self.lengths), count)
        assert not rest, "every rule has as many branches"
        return [self._some(slice(first, first + each)) for first in range(0, len(self.lengths), each)]

    def _some(self, chosen: slice) -> Self:
        rejected = self.max_rejected_confidence
        return dataclasses.replace(
            self,
            tokens=self.tokens[chosen],
            exit_layers=self.exit_layers[chosen],
            confidences=self.confidences[chosen],
            lengths=self.lengths[chosen],
            max_rejected_confidence=None if rejected is None else rejected[chosen],
            find_near_ties=lambda _: None if self.near_ties is None else self.near_ties[chosen],
        )


def is_end(tokens: _Tokens, end_ids: Sequence[int]) -> Any:
    """Returns which tokens end an output, bool, shape of `tokens`.

    Args:
      tokens: Ids, any shape.
      end_ids: Ids that end an output; at least one.
    """
    return functools.reduce(operator.or_, (tokens == end for end in end_ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownOutput:
    """The output of a prompt at a threshold above all thresholds that are still to be decoded.

    Attributes:
      tokens: int32, shape (length,).
      exit_layers: int32, shape (length,).
      confidences: float32, shape (length,).
      max_rejected_confidence: float32, shape (length,).
      goes_on: Whether an output that shares all of these tokens has more, which are to be decoded.
    """

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    max_rejected_confidence: np.ndarray
    goes_on: bool = False

    @classmethod
    def beginning(cls, tokens: Sequence[int], *, layers: int) -> Self:
        """Returns the first tokens of an output by the full model, of depth `layers`; the output goes on after them."""
        count = len(tokens)
        return cls(
            tokens=np.array(tokens, np.int32),
            exit_layers=np.full(count, layers, np.int32),
            confidences=np.zeros(count, np.float32),
            max_rejected_confidence=np.full(count, -np.inf, np.float32),
            goes_on=True,
        )

    def steps_shared(self, thresholds: np.ndarray) -> np.ndarray:
        """Returns how many first steps each branch has in common with this output.

        At a lower threshold, the token still exits at this exit layer or below. It does not exit below as long as the
        confidences of the layers there stay under the threshold.

        Args:
          thresholds: float32, shape (steps, branches). Below the thresholds of the known output.

        Returns:
          int, shape (branches,), up to the output's length.
        """
        parts = self.max_rejected_confidence[:, None] >= thresholds[: len(self.tokens)]
        return np.where(parts.any(axis=0), parts.argmax(axis=0), len(self.tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt to decode. Two requests are never equal, even of the same prompt.

    Attributes:
      ids: Its tokens, 1 to `max_input_length` of them.
      branches: Branches that replace the decoder's own: as many, with the same rules, at other thresholds.
      known: The prompt's output at a threshold above all of these, or the beginning of every output: the steps that
        branches share with it are not decided again. Rules that need the full model ignore it.
    """

    ids: Sequence[int]
    _: dataclasses.KW_ONLY
    branches: Sequence[Branch] | None = None
    known: KnownOutput | None = None

    def thresholds(self, usual: np.ndarray) -> np.ndarray:
        """Returns the thresholds of the request's branches, (steps, branches), given the decoder's."""
        if self.branches is None:
            return usual
        return np.stack([branch.thresholds for branch in self.branches], axis=1)
