"""A T5 with early exits in plain numpy: one prompt, one threshold, nothing cached, nothing shared.

Written from the paper and the published description of T5 1.1, to check the real one against. Deliberately naive: at
every step every layer runs, and each keeps one key and one value of every position.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from calm_beam.checkpoints import Arrays
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config

KeyValue = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """One output.

    Attributes:
      tokens: Generated ids, eos included.
      exit_layers: Layers used for each, from 1.
      confidences: Confidence at each exit layer.
      min_margin: Least distance of a confidence to its threshold wherever there was a decision to take.
      min_gap: Least distance of the two best logits at an exit layer.
    """

    tokens: list[int]
    exit_layers: list[int]
    confidences: list[float]
    min_margin: float
    min_gap: float


class NumpyT5:
    """The model, in float64; where it is to compute in bfloat16, with every factor of a product and state rounded."""

    def __init__(self, config: T5Config, arrays: Arrays, dtype: str = "float32") -> None:
        """Takes sizes, weights, and what the model that this one checks computes in."""
        self.config = config
        self._is_rounded = dtype == "bfloat16"
        self.arrays = {
            name: np.asarray(array, np.float64) if _stays_wide(name) else self._rounded(np.asarray(array, np.float64))
            for name, array in arrays.items()
        }

    def encode(self, source: Sequence[int]) -> np.ndarray:
        """Returns the encoder's output, shape (source, width), of ids without padding."""
        hidden = self.arrays["token_embedder/embedding"][list(source)]
        for number in range(1, self.config.num_encoder_layers + 1):
            layer = f"encoder/layers_{number - 1}"
            normed = self._norm(hidden, f"{layer}/pre_attention_layer_norm")
            positions = range(len(source))
            attended = [
                self._attend(f"{layer}/attention", normed[q], normed, self._bias("encoder", number, q, len(source)))
                for q in positions
            ]
            hidden = self._rounded(hidden + np.stack(attended))
            output = self._feed_forward(f"{layer}/mlp", self._norm(hidden, f"{layer}/pre_mlp_layer_norm"))
            hidden = self._rounded(hidden + output)
        return self._norm(hidden, "encoder/encoder_norm")

    def teacher_forced(self, source: Sequence[int], decoder_inputs: Sequence[int]) -> np.ndarray:
        """Returns every layer's output, shape (layers, target, width), without early exits."""
        encoded = self.encode(source)
        below = self.arrays["token_embedder/embedding"][list(decoder_inputs)]
        states = []
        for layer in range(1, self.config.num_decoder_layers + 1):
            memory = [self._key_value(layer, state) for state in below]
            below = np.stack(
                [self._decoder_layer(layer, memory[: q + 1], below[q], encoded) for q in range(len(below))]
            )
            states.append(below)
        return np.stack(states)

    def logits(self, state: np.ndarray) -> np.ndarray:
        """Returns the logits, shape (..., vocabulary), of a decoder layer's output."""
        normed = self._scaled(state, "decoder/decoder_norm")
        if self.config.tied_head:
            inputs = self._rounded(normed / math.sqrt(self.config.emb_dim))
            return inputs @ self.arrays["token_embedder/embedding"].T
        return self._rounded(normed) @ self.arrays["decoder/logits_dense/kernel"]

    def exit_score(self, state: np.ndarray) -> np.ndarray:
        """Returns the exit classifier's probability, shape (...), of a decoder layer's output."""
        scores = state @ self.arrays["decoder/meta_cls/kernel"] + self.arrays["decoder/meta_cls/bias"]
        return _softmax(scores)[..., 1] if self.config.exit_classifier == 2 else 1 / (1 + np.exp(-scores[..., 0]))

    def decode(
        self, source: Sequence[int], rule: ExitRule, threshold: float | None, *, max_decode_length: int
    ) -> Decoded:
        """Returns the greedy output at one threshold; None is the full model, which never exits."""
        depth = self.config.num_decoder_layers
        encoded = self.encode(source)
        # kept[k - 1]: layer k's key and value of every position so far.
        kept: list[list[KeyValue]] = [[] for _ in range(depth)]
        tokens: list[int] = []
        exit_layers, confidences, min_margin, min_gap = [], [], math.inf, math.inf
        while len(tokens) < max_decode_length and tokens[-1:] != [1]:
            limit = threshold_at(rule, threshold, step=len(tokens), max_decode_length=max_decode_length)
            # states[k]: output of layer k if nothing is skipped; states[0] is the embedding.
            states = [self.arrays["token_embedder/embedding"][tokens[-1] if tokens else 0]]
            for layer in range(1, depth + 1):
                memory = [*kept[layer - 1], self._key_value(layer, states[-1])]
                states.append(self._decoder_layer(layer, memory, states[-1], encoded))
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
            for layer in range(1, depth + 1):
                if layer <= exit_layer or rule.state_propagation == "full_cache":
                    kept[layer - 1].append(self._key_value(layer, states[layer - 1]))
                elif rule.state_propagation == "projected":
                    kept[layer - 1].append(self._key_value(exit_layer, states[exit_layer - 1]))
                else:
                    passed_on = exit_layer if rule.state_propagation == "from_exit" else allowed[0]
                    kept[layer - 1].append(self._key_value(layer, states[passed_on]))
            logits = self.logits(states[depth if rule.token_from == "last_layer" else exit_layer])
            compared = (
                [logits]
                if rule.confidence not in ("oracle", "patience")
                else [self.logits(state) for state in states[1:]]
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
        """Returns the confidence at the last of the layers that were asked so far."""
        measure, layer = rule.confidence, asked[-1]
        output, below = states[layer], states[layer - 1]
        if measure == "patience":
            assert rule.patience is not None
            tokens = [int(np.argmax(self.logits(states[each]))) for each in asked[-rule.patience :]]
            return float(np.float32(tokens.count(tokens[-1]) / rule.patience))
        if measure == "entropy":
            shares = _softmax(self.logits(output))
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
            return float(np.argmax(self.logits(output)) == np.argmax(self.logits(states[-1])))
        second, first = np.sort(_softmax(self.logits(output)))[-2:]
        return float(first - second if measure == "softmax" else first)

    def _key_value(self, layer: int, state: np.ndarray) -> KeyValue:
        """Returns the key and the value that a decoder layer makes of one state."""
        name = f"decoder/layers_{layer - 1}"
        normed = self._norm(state, f"{name}/pre_self_attention_layer_norm")
        key, value = (normed @ self.arrays[f"{name}/self_attention/{kind}/kernel"] for kind in ("key", "value"))
        return self._rounded(key), self._rounded(value)

    def _decoder_layer(
        self, layer: int, memory: Sequence[KeyValue], state: np.ndarray, encoded: np.ndarray
    ) -> np.ndarray:
        """Returns the layer's output, (width,), of a state at the last position of its memory."""
        name = f"decoder/layers_{layer - 1}"
        keys, values = (np.stack(parts) for parts in zip(*memory, strict=True))
        normed = self._norm(state, f"{name}/pre_self_attention_layer_norm")
        bias = self._bias("decoder", layer, len(memory) - 1, len(memory))
        hidden = self._rounded(state + self._gather(f"{name}/self_attention", normed, keys, values, bias))
        normed = self._norm(hidden, f"{name}/pre_cross_attention_layer_norm")
        hidden = self._rounded(hidden + self._attend(f"{name}/encoder_decoder_attention", normed, encoded, None))
        output = self._feed_forward(f"{name}/mlp", self._norm(hidden, f"{name}/pre_mlp_layer_norm"))
        return self._rounded(hidden + output)

    def _attend(self, name: str, query: np.ndarray, memory: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """Returns what one query, (width,), gathers from a memory, (positions, width); `bias` is (heads, positions)."""
        keys, values = (self._rounded(memory @ self.arrays[f"{name}/{kind}/kernel"]) for kind in ("key", "value"))
        return self._gather(name, query, keys, values, bias)

    def _gather(
        self, name: str, query: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray | None
    ) -> np.ndarray:
        """Returns what one query, (width,), gathers of values by keys, each (positions, heads * head_dim)."""
        width = self.config.head_dim
        queries = self._rounded(query @ self.arrays[f"{name}/query/kernel"])
        heads = []
        for head in range(self.config.num_heads):
            part = slice(head * width, (head + 1) * width)
            logits = keys[:, part] @ queries[part]
            if bias is not None:
                logits = logits + bias[head]
            heads.append(self._rounded(_softmax(logits)) @ values[:, part])
        return self._rounded(np.concatenate(heads)) @ self.arrays[f"{name}/out/kernel"]

    def _bias(self, stack: str, layer: int, query: int, length: int) -> np.ndarray:
        """Returns the bias, (heads, length), of a layer's query position to the first key positions."""
        home = f"{stack}/layers_{layer - 1}" if self.config.relative_bias_per_layer else stack
        table = self.arrays[f"{home}/relpos_bias/rel_embedding"]
        buckets, farthest = self.config.relative_buckets, self.config.relative_max_distance
        is_encoder = stack == "encoder"
        return table[:, [bucket_of(key - query, buckets, farthest, both_ways=is_encoder) for key in range(length)]]

    def _feed_forward(self, name: str, inputs: np.ndarray) -> np.ndarray:
        activation = _ACTIVATIONS[self.config.activation]
        if not self.config.gated_mlp:
            hidden = activation(inputs @ self.arrays[f"{name}/wi/kernel"])
        else:
            gate = activation(inputs @ self.arrays[f"{name}/wi_0/kernel"])
            hidden = gate * (inputs @ self.arrays[f"{name}/wi_1/kernel"])
        return self._rounded(hidden) @ self.arrays[f"{name}/wo/kernel"]

    def _norm(self, inputs: np.ndarray, name: str) -> np.ndarray:
        return self._rounded(self._scaled(inputs, name))

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return values.astype(ml_dtypes.bfloat16).astype(np.float64) if self._is_rounded else values

    def _scaled(self, inputs: np.ndarray, name: str) -> np.ndarray:
        return inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True) + 1e-6) * self.arrays[f"{name}/scale"]


def _stays_wide(name: str) -> bool:
    return name.endswith(("/scale", "/rel_embedding")) or "meta_cls" in name


def _gelu(values: np.ndarray) -> np.ndarray:
    return 0.5 * values * (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))


_ACTIVATIONS = {
    "gelu": _gelu,
    "silu": lambda values: values / (1 + np.exp(-values)),
    "relu": lambda values: np.maximum(values, 0),
}


def may_exit(rule: ExitRule, layer: int, depth: int) -> bool:
    """Returns whether a token may leave after a layer."""
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


@functools.cache
def bucket_of(distance: int, buckets: int, farthest: int, *, both_ways: bool) -> int:
    """Returns the bucket of a key-minus-query distance, counting in which power-of-a-ratio interval it lies.

    In whole numbers: bucket e + k starts at the least n with (n / e) ** w >= (farthest / e) ** k, where e buckets are
    exact and w are wide.
    """
    offset = 0
    if both_ways:
        buckets //= 2
        offset = buckets if distance > 0 else 0
    elif distance > 0:
        return 0
    distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    wide = buckets - exact
    reached = max(k for k in range(wide) if distance**wide * exact**k >= farthest**k * exact**wide)
    return offset + exact + reached


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)
