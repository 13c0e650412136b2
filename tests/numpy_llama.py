"""Llama's family in plain numpy, written from the papers: every head by itself, and rotary positions as complex turns.

Of a mixture of experts, only the experts that a token uses are computed, one after the other.

Attention divides by the sum of its exponentials at the end, and subtracts nothing from the logits before: in bfloat16,
the exponentials are rounded.

The frequencies of scaled rotary positions are not repeated here; tests compare those with transformers.
"""

import cmath
import functools
import math
from collections.abc import Sequence

import numpy as np

from calm_beam.model.llama import RopeScaling
from tests.numpy_decoder import Begun, KeyValue, NumpyDecoder, softmax


class NumpyLlama(NumpyDecoder):
    """The model."""

    def begin(self, source: Sequence[int]) -> Begun:
        """Returns a prompt whose tokens but the last have run through all layers, one after the other."""
        depth = self.config.num_decoder_layers
        kept: list[list[KeyValue]] = [[] for _ in range(depth)]
        for token in source[:-1]:
            self._go_through(token, kept)
        return Begun(kept=kept, first_input=source[-1], keeps_first=True)

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns every layer's output, shape (layers, tokens, width), without early exits."""
        kept: list[list[KeyValue]] = [[] for _ in range(self.config.num_decoder_layers)]
        return np.stack([np.stack(self._go_through(token, kept)) for token in tokens], axis=1)

    def embed(self, token: int) -> np.ndarray:
        """Returns the embedding of a token."""
        embedding = self.arrays["token_embedder/embedding"][token] * self.config.embedding_factor
        if not self.config.scaled_embedding:
            return self.rounded(embedding)
        return self.rounded(embedding * self.rounded(np.sqrt(np.float64(self.config.emb_dim))))

    def normed(self, state: np.ndarray, name: str) -> np.ndarray:
        """Returns a decoder layer's output after the norm of a name, rounded as factors of products are.

        A divisor of the logits divides this output.
        """
        return self.rounded(self._factor(state, name) / self.config.logits_divisor)

    def shared_logits(self, normed: np.ndarray) -> np.ndarray:
        """Returns the logits, shape (..., vocabulary), of the output head for normed states."""
        kernel = (
            self.arrays["token_embedder/embedding"].T
            if self.config.tied_head
            else self.arrays["decoder/logits_dense/kernel"]
        )
        logits, cap = normed @ kernel, self.config.logits_cap
        return cap * np.tanh(logits / cap) if cap else logits

    def key_value(self, layer: int, state: np.ndarray, position: int) -> KeyValue:
        """Returns the key, rotated by its position, and the value that a layer computes from one state."""
        name = f"decoder/layers_{layer - 1}"
        normed = self._taken(state, f"{name}/pre_self_attention_layer_norm")
        key = self._projected(f"{name}/self_attention", "key", normed)
        value = self._projected(f"{name}/self_attention", "value", normed)
        return self.rounded(self._turned(key, position, layer)), self.rounded(value)

    def decoder_layer(self, layer: int, memory: Sequence[KeyValue], state: np.ndarray, context: None) -> np.ndarray:
        """Returns the layer's output, (width,), of a state at the last position of its memory."""
        config, name, position = self.config, f"decoder/layers_{layer - 1}", len(memory) - 1
        if layer - 1 in config.windowed_layers:
            memory = memory[-config.sliding_window :]
        # [positions, heads of keys, head_dim]
        keys, values = (np.stack(parts) for parts in zip(*memory, strict=True))
        normed = self._taken(state, f"{name}/pre_self_attention_layer_norm")
        queries = self._turned(self._projected(f"{name}/self_attention", "query", normed), position, layer)
        queries = self.rounded(queries * (config.query_factor or 1 / math.sqrt(config.head_dim)))
        mixed = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            logits = keys[:, shared] @ queries[head]
            if config.attention_cap:
                logits = config.attention_cap * np.tanh(logits / config.attention_cap)
            weights = np.exp(logits)
            mixed.append(self.rounded(weights) @ values[:, shared] / weights.sum())
        attended = self.rounded(np.concatenate(mixed)) @ self.arrays[f"{name}/self_attention/out/kernel"]
        state = self.rounded(state + self._given(attended, f"{name}/post_self_attention_layer_norm"))
        normed = self._taken(state, f"{name}/pre_mlp_layer_norm")
        made = sum(
            self._expert(f"{name}/mlp", normed, expert, weight)
            for expert, weight in self._routed(f"{name}/mlp", normed).items()
        )
        return self.rounded(state + self._given(np.asarray(made), f"{name}/post_mlp_layer_norm"))

    def _routed(self, name: str, normed: np.ndarray) -> dict[int, float]:
        """Returns the experts that a token uses, with their weights."""
        count, used = self.config.num_experts, self.config.experts_per_token
        if count == 1:
            return {0: 1.0}
        shares = softmax(normed @ self.arrays[f"{name}/router/kernel"])
        order = sorted(range(count), key=lambda expert: -shares[expert])
        # So far from a tie that float32 must choose as float64 does.
        assert self._is_rounded or used == count or shares[order[used - 1]] - shares[order[used]] > 1e-5
        total = sum(shares[order[:used]]) if self.config.normed_expert_weights else 1.0
        return {expert: float(shares[expert] / total) for expert in order[:used]}

    def _expert(self, name: str, normed: np.ndarray, expert: int, weight: float) -> np.ndarray:
        """Returns what an expert adds to the output of a feed-forward layer."""
        width = self.config.mlp_dim // self.config.num_experts
        own = slice(expert * width, (expert + 1) * width)
        gate, linear = (normed @ self.arrays[f"{name}/{kernel}/kernel"][:, own] for kernel in ("wi_0", "wi_1"))
        activated = np.maximum(gate, 0) if self.config.activation == "relu" else gate / (1 + np.exp(-gate))
        made: np.ndarray = self.rounded(activated * linear * weight) @ self.arrays[f"{name}/wo/kernel"][own]
        return made

    def _go_through(self, token: int, kept: list[list[KeyValue]]) -> list[np.ndarray]:
        """Returns the outputs of all layers for the next token, whose keys and values all layers keep."""
        state, states = self.embed(token), []
        for layer, memory in enumerate(kept, start=1):
            memory.append(self.key_value(layer, state, len(memory)))
            state = self.decoder_layer(layer, memory, state, None)
            states.append(state)
        return states

    def _projected(self, name: str, kind: str, normed: np.ndarray) -> np.ndarray:
        """Returns queries, keys or values, (heads, head_dim)."""
        made = normed @ self.arrays[f"{name}/{kind}/kernel"] + self.arrays.get(f"{name}/{kind}/bias", 0)
        scale = f"{name}/{kind}_norm"
        if f"{scale}/scale" not in self.arrays:
            return made.reshape(-1, self.config.head_dim)
        if self.config.whole_norms:
            return self._norm(made, scale).reshape(-1, self.config.head_dim)
        return self._norm(made.reshape(-1, self.config.head_dim), scale)

    def _turned(self, heads: np.ndarray, position: int, layer: int) -> np.ndarray:
        """Returns heads, (heads, head_dim), with each pair of values rotated as one complex number."""
        scaling, theta = self.config.rope_scaling, self.config.rope_theta
        if layer - 1 in self.config.unturned_layers:
            return heads
        if self.config.local_rope_theta and layer - 1 in self.config.windowed_layers:
            scaling, theta = RopeScaling(), self.config.local_rope_theta
        half = (self.config.turned_dim or self.config.head_dim) // 2
        turns = _turns(position, scaling, theta, half)
        turned = (heads[:, :half] + 1j * heads[:, half : 2 * half]) * turns
        return np.concatenate([turned.real, turned.imag, heads[:, 2 * half :]], axis=1)

    def _taken(self, state: np.ndarray, name: str) -> np.ndarray:
        """Returns the input of a sub-layer for a state: normed, unless the model has no such norm."""
        return self._factor(state, name) if f"{name}/scale" in self.arrays else state

    def _given(self, values: np.ndarray, name: str) -> np.ndarray:
        """Returns the part of a sub-layer's output that is added to a state."""
        normed = self._norm(values, name) if f"{name}/scale" in self.arrays else values
        return normed * self.config.residual_factor

    def _factor(self, state: np.ndarray, name: str) -> np.ndarray:
        return self.rounded(self._norm(state, name))

    def _norm(self, inputs: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(inputs**2, axis=-1, keepdims=True)
        scale = self.arrays[f"{name}/scale"] + self.config.unit_offset_norms
        return inputs / np.sqrt(mean_square + self.config.norm_epsilon) * scale


@functools.cache
def _turns(position: int, scaling: RopeScaling, theta: float, half: int) -> np.ndarray:
    """Returns the turn of each pair of a head's values at a position, complex, (half,)."""
    factors = scaling.pair_factors or (scaling.factor,) * half
    angles = [position / factor / theta ** (i / half) for i, factor in enumerate(factors)]
    return np.array([cmath.rect(scaling.attention_factor, angle) for angle in angles])
