"""T5 in plain numpy, written from the paper and the published description of T5 1.1."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from tests.numpy_decoder import Begun, KeyValue, NumpyDecoder, softmax


class NumpyT5(NumpyDecoder):
    """The model, in float64, or rounded to bfloat16."""

    def begin(self, source: Sequence[int]) -> Begun:
        """Returns the state of a prompt after the encoder."""
        kept: list[list[KeyValue]] = [[] for _ in range(self.config.num_decoder_layers)]
        return Begun(kept=kept, first_input=self.config.start_id, context=self.encode(source))

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
            hidden = self.rounded(hidden + np.stack(attended))
            output = self._feed_forward(f"{layer}/mlp", self._norm(hidden, f"{layer}/pre_mlp_layer_norm"))
            hidden = self.rounded(hidden + output)
        return self._norm(hidden, "encoder/encoder_norm")

    def teacher_forced(self, source: Sequence[int], decoder_inputs: Sequence[int]) -> np.ndarray:
        """Returns every layer's output, shape (layers, target, width), without early exits."""
        encoded = self.encode(source)
        below = self.arrays["token_embedder/embedding"][list(decoder_inputs)]
        states = []
        for layer in range(1, self.config.num_decoder_layers + 1):
            memory = [self.key_value(layer, state, place) for place, state in enumerate(below)]
            below = np.stack([self.decoder_layer(layer, memory[: q + 1], below[q], encoded) for q in range(len(below))])
            states.append(below)
        return np.stack(states)

    def embed(self, token: int) -> np.ndarray:
        """Returns the embedding of a token."""
        embedding: np.ndarray = self.arrays["token_embedder/embedding"][token]
        return embedding

    def normed(self, state: np.ndarray, name: str) -> np.ndarray:
        """Returns a decoder layer's output after the norm of a name."""
        return self._scaled(state, name)

    def shared_logits(self, normed: np.ndarray) -> np.ndarray:
        """Returns the logits, shape (..., vocabulary), of the output head for normed states."""
        if self.config.tied_head:
            inputs = self.rounded(normed / math.sqrt(self.config.emb_dim))
            return inputs @ self.arrays["token_embedder/embedding"].T
        return self.rounded(normed) @ self.arrays["decoder/logits_dense/kernel"]

    def key_value(self, layer: int, state: np.ndarray, position: int) -> KeyValue:
        """Returns the key and the value that a decoder layer computes from one state, at any position."""
        name = f"decoder/layers_{layer - 1}"
        normed = self._norm(state, f"{name}/pre_self_attention_layer_norm")
        key, value = (normed @ self.arrays[f"{name}/self_attention/{kind}/kernel"] for kind in ("key", "value"))
        return self.rounded(key), self.rounded(value)

    def decoder_layer(
        self, layer: int, memory: Sequence[KeyValue], state: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Returns the layer's output, (width,), of a state at the last position of its memory."""
        name = f"decoder/layers_{layer - 1}"
        keys, values = (np.stack(parts) for parts in zip(*memory, strict=True))
        normed = self._norm(state, f"{name}/pre_self_attention_layer_norm")
        bias = self._bias("decoder", layer, len(memory) - 1, len(memory))
        hidden = self.rounded(state + self._gather(f"{name}/self_attention", normed, keys, values, bias))
        normed = self._norm(hidden, f"{name}/pre_cross_attention_layer_norm")
        hidden = self.rounded(hidden + self._attend(f"{name}/encoder_decoder_attention", normed, context, None))
        output = self._feed_forward(f"{name}/mlp", self._norm(hidden, f"{name}/pre_mlp_layer_norm"))
        return self.rounded(hidden + output)

    def _attend(self, name: str, query: np.ndarray, memory: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """Returns one query's attention output, (width,), over a memory, (positions, width), with an optional bias.

        The bias has shape (heads, positions).
        """
        keys, values = (self.rounded(memory @ self.arrays[f"{name}/{kind}/kernel"]) for kind in ("key", "value"))
        return self._gather(name, query, keys, values, bias)

    def _gather(
        self, name: str, query: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray | None
    ) -> np.ndarray:
        """Returns one query's attention output, (width,), over keys and values, each (positions, heads * head_dim)."""
        width = self.config.head_dim
        queries = self.rounded(query @ self.arrays[f"{name}/query/kernel"])
        heads = []
        for head in range(self.config.num_heads):
            part = slice(head * width, (head + 1) * width)
            logits = keys[:, part] @ queries[part]
            if bias is not None:
                logits = logits + bias[head]
            heads.append(self.rounded(softmax(logits)) @ values[:, part])
        return self.rounded(np.concatenate(heads)) @ self.arrays[f"{name}/out/kernel"]

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
        return self.rounded(hidden) @ self.arrays[f"{name}/wo/kernel"]

    def _norm(self, inputs: np.ndarray, name: str) -> np.ndarray:
        return self.rounded(self._scaled(inputs, name))

    def _scaled(self, inputs: np.ndarray, name: str) -> np.ndarray:
        return inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True) + 1e-6) * self.arrays[f"{name}/scale"]


def _gelu(values: np.ndarray) -> np.ndarray:
    return 0.5 * values * (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))


_ACTIVATIONS = {
    "gelu": _gelu,
    "silu": lambda values: values / (1 + np.exp(-values)),
    "relu": lambda values: np.maximum(values, 0),
}


@functools.cache
def bucket_of(distance: int, buckets: int, farthest: int, *, both_ways: bool) -> int:
    """Returns the bucket of a key-minus-query distance: the index of its interval between powers of a ratio.

    In integers: bucket e + k starts at the least n with (n / e) ** w >= (farthest / e) ** k, where e buckets are exact
    and w are wide.
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
