"""Decoding with early exits in plain numpy: one prompt, one threshold, no KV cache, no sharing.

Written from the papers, to check the real decoders against. Deliberately naive: at every step every layer runs, and
each keeps one key and one value of every position. Outputs of a prompt share only what comes before their first step.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from calm_beam.checkpoints import Arrays
from calm_beam.exits.rule import ExitRule
from calm_beam.model import ModelConfig

KeyValue = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """One output.

    Attributes:
      tokens: Generated ids, eos included.
      exit_layers: Layers used for each, from 1.
      confidences: Confidence at each exit layer.
      min_margin: Least distance of a confidence to its threshold over all decisions.
      min_gap: Least distance of the two best logits at an exit layer.
    """

    tokens: list[int]
    exit_layers: list[int]
    confidences: list[float]
    min_margin: float
    min_gap: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A prompt before its first decoding step.

    Attributes:
      kept: By layer, key and value of every position before the first step.
      first_input: Token that the first step reads.
      context: Further inputs of the layers.
      keeps_first: Whether every layer keeps its own key and value of the first step, whatever its exit layer.
    """

    kept: list[list[KeyValue]]
    first_input: int
    context: Any = None
    keeps_first: bool = False


class NumpyDecoder(abc.ABC):
    """A model in float64 or, with bfloat16, with every factor of a product and every state rounded."""

    def __init__(self, config: ModelConfig, arrays: Arrays, dtype: str = "float32") -> None:
        """Takes sizes, weights, and the precision of the model that this one checks."""
        self.config: Any = config
        self._is_rounded = dtype == "bfloat16"
        wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        self.arrays = {name: array if _stays_wide(name) else self.rounded(array) for name, array in wide.items()}
        self._begun: dict[tuple[int, ...], Begun] = {}

    @abc.abstractmethod
    def begin(self, source: Sequence[int]) -> Begun:
        """Returns the state of a prompt before anything is decoded."""

    @abc.abstractmethod
    def embed(self, token: int) -> np.ndarray:
        """Returns the embedding of a token."""

    @abc.abstractmethod
    def key_value(self, layer: int, state: np.ndarray, position: int) -> KeyValue:
        """Returns the key and the value that a decoder layer computes from one state at a position."""

    @abc.abstractmethod
    def decoder_layer(self, layer: int, memory: Sequence[KeyValue], state: np.ndarray, context: Any) -> np.ndarray:
        """Returns the layer's output, (width,), of a state at the last position of its memory."""

    @abc.abstractmethod
    def normed(self, state: np.ndarray, name: str) -> np.ndarray:
        """Returns a decoder layer's output after the norm of a name, not rounded."""

    @abc.abstractmethod
    def shared_logits(self, normed: np.ndarray) -> np.ndarray:
        """Returns the logits, shape (..., vocabulary), of the output head for normed states."""

    def logits(self, state: np.ndarray, layer: int | None = None) -> np.ndarray:
        """Returns the logits, shape (..., vocabulary), of a decoder layer's output; None means the last layer."""
        place = None if layer == self.config.num_decoder_layers or layer is None else layer - 1
        has_norm = place is not None and self.config.exit_norms
        normed = self.normed(state, f"decoder/exit_norms_{place}" if has_norm else "decoder/decoder_norm")
        if place is None or not self.config.exit_heads:
            return self.shared_logits(normed)
        return self.rounded(normed) @ self.arrays[f"decoder/exit_heads_{place}/kernel"]

    def logits_of_layers(self, states: np.ndarray) -> np.ndarray:
        """Returns the logits, (layers, ..., vocabulary), of every layer's output, (layers, ..., width)."""
        return np.stack([self.logits(state, layer) for layer, state in enumerate(states, start=1)])

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Returns values rounded as the model that this one checks keeps them."""
        return values.astype(ml_dtypes.bfloat16).astype(np.float64) if self._is_rounded else values

    def exit_score(self, state: np.ndarray) -> np.ndarray:
        """Returns the exit classifier's probability, shape (...), of a decoder layer's output."""
        scores = state @ self.arrays["decoder/meta_cls/kernel"] + self.arrays["decoder/meta_cls/bias"]
        return softmax(scores)[..., 1] if self.config.exit_classifier == 2 else 1 / (1 + np.exp(-scores[..., 0]))

    def decode(
        self, source: Sequence[int], rule: ExitRule, threshold: float | None, *, max_decode_length: int
    ) -> Decoded:
        """Returns the greedy output at one threshold; None is the full model, which never exits."""
        depth = self.config.num_decoder_layers
        # Outputs at other thresholds begin alike.
        if tuple(source) not in self._begun:
            self._begun[tuple(source)] = self.begin(source)
        begun = self._begun[tuple(source)]
        # kept[k - 1]: layer k's key and value of every position so far.
        kept = [list(of_layer) for of_layer in begun.kept]
        tokens: list[int] = []
        exit_layers, confidences, min_margin, min_gap = [], [], math.inf, math.inf
        while len(tokens) < max_decode_length and not set(tokens[-1:]) & set(self.config.end_ids):
            limit = threshold_at(rule, threshold, step=len(tokens), max_decode_length=max_decode_length)
            # states[k]: output of layer k if nothing is skipped; states[0] is the embedding.
            states = [self.embed(tokens[-1] if tokens else begun.first_input)]
            own: list[KeyValue] = []
            for layer in range(1, depth + 1):
                own.append(self.key_value(layer, states[-1], len(kept[layer - 1])))
                states.append(self.decoder_layer(layer, [*kept[layer - 1], own[-1]], states[-1], begun.context))
            allowed = [layer for layer in range(1, depth + 1) if may_exit(rule, layer, depth)]
            for place, exit_layer in enumerate(allowed):
                confidence = self._confidence(rule, allowed[: place + 1], states)
                if exit_layer < depth and limit is not None:
                    is_certain = rule.confidence in ("oracle", "static", "patience") or (
                        rule.confidence,
                        exit_layer,
                    ) == ("state", 1)
                    min_margin = min(min_margin, math.inf if is_certain else abs(confidence - limit))
                    if confidence >= limit:
                        break
            keeps_all = rule.state_propagation == "full_cache" or (not tokens and begun.keeps_first)
            for layer in range(1, depth + 1):
                position = len(kept[layer - 1])
                if layer <= exit_layer or keeps_all:
                    new = own[layer - 1]
                elif rule.state_propagation == "projected":
                    new = own[exit_layer - 1]
                else:
                    passed_on = exit_layer if rule.state_propagation == "from_exit" else allowed[0]
                    new = self.key_value(layer, states[passed_on], position)
                kept[layer - 1].append(new)
            predicting = depth if rule.token_from == "last_layer" else exit_layer
            logits = self.logits(states[predicting], predicting)
            compared = (
                [logits]
                if rule.confidence not in ("oracle", "patience")
                else [self.logits(state, layer) for layer, state in enumerate(states[1:], start=1)]
            )
            for values in compared:
                runner_up, best = np.sort(values)[-2:]
                min_gap = min(min_gap, float(best - runner_up))
            tokens.append(int(np.argmax(logits)))
            exit_layers.append(exit_layer)
            confidences.append(float(confidence))
        return Decoded(
            tokens=tokens, exit_layers=exit_layers, confidences=confidences, min_margin=min_margin, min_gap=min_gap
        )

    def _confidence(self, rule: ExitRule, asked: Sequence[int], states: Sequence[np.ndarray]) -> float:
        """Returns the confidence at the last of the layers tested so far."""
        measure, layer = rule.confidence, asked[-1]
        output, below = states[layer], states[layer - 1]
        if measure == "patience":
            assert rule.patience is not None
            tokens = [int(np.argmax(self.logits(states[each], each))) for each in asked[-rule.patience :]]
            return float(np.float32(tokens.count(tokens[-1]) / rule.patience))
        if measure == "entropy":
            shares = softmax(self.logits(output, layer))
            return float(1 + (shares * np.log(shares)).sum() / math.log(len(shares)))
        if measure == "classifier":
            return float(self.exit_score(output))
        if measure == "state":
            if layer == 1:
                return 0.0
            return float(output @ below / math.sqrt((output @ output) * (below @ below)))
        if measure == "static":
            return float(np.float32(layer / (len(states) - 1)))
        if measure == "oracle":
            return float(np.argmax(self.logits(output, layer)) == np.argmax(self.logits(states[-1])))
        second, first = np.sort(softmax(self.logits(output, layer)))[-2:]
        # No default: a measure without a formula here is compared with nothing.
        return float({"softmax": first - second, "softmax_max": first}[measure])


def may_exit(rule: ExitRule, layer: int, depth: int) -> bool:
    """Returns whether a token may exit after a layer."""
    return layer == depth or (layer >= rule.min_exit_layer and (layer - rule.min_exit_layer) % rule.exit_interval == 0)


def threshold_at(rule: ExitRule, threshold: float | None, *, step: int, max_decode_length: int) -> float | None:
    """Returns the threshold at a step, counted from 0, rounded to float32."""
    if threshold is None:
        return None
    if rule.schedule != "constant":
        assert rule.tau is not None
        falling = 0.1 * math.exp(-rule.tau * step / max_decode_length)
        threshold = 0.9 * threshold + (falling if rule.schedule == "decay" else threshold * falling)
    return float(np.float32(min(max(threshold, 0.0), 1.0)))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis."""
    powers = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


def _stays_wide(name: str) -> bool:
    return name.endswith(("/scale", "/bias", "/rel_embedding")) or "meta_cls" in name
