"""What decoders ask of a network, whatever its architecture.

A prompt is gone through once (`prefill`), which leaves keys and values of the *source* at every decoder layer: T5's are
those of the encoder's output, a decoder-only model's those of the prompt itself. What is generated then goes through
the decoder token by token, and leaves keys and values of its own, on the *path* of its lane. An architecture says how
a layer attends to both. Decoder layers are counted from 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from calm_beam.precision import Precision

# Keys and values, each of shape (..., heads of keys, positions, head_dim), or of one position without that axis.
KeysValues = tuple[jax.Array, ...]

# Made on the host, or on the device.
Numbers = jax.Array | np.ndarray

_Each = TypeVar("_Each")


class Position(NamedTuple):
    """Where tokens stand.

    Attributes:
      steps: int32. How many tokens were generated before each: rotary positions and ages are made of it.
      prompt_lengths: int32. Tokens of its prompt.
    """

    steps: Numbers
    prompt_lengths: Numbers


class Taught(NamedTuple):
    """A batch of prompts with outputs that are given, to learn from or to be judged by; rows may be empty.

    Which numbers are padding only the lengths say: to some architectures, every id is a token.

    Attributes:
      source_tokens: int32, shape (batch, source). By `Architecture.taught_source`, padded behind with 0.
      source_lengths: int32, shape (batch,). Tokens of each source; 0 of an empty row.
      targets: int32, shape (batch, target). The outputs, padded behind with 0.
      target_lengths: int32, shape (batch,). Tokens of each output; 0 of an empty row.
    """

    source_tokens: Numbers
    source_lengths: Numbers
    targets: Numbers
    target_lengths: Numbers

    @property
    def is_target(self) -> Any:
        """Which targets are tokens of an output: bool, shape (batch, target)."""
        return np.arange(self.targets.shape[1], dtype=np.int32)[None] < self.target_lengths[:, None]

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens, ends included, padding not; of arrays on the host."""
        return int(np.sum(self.target_lengths))


class Attended(Protocol):
    """What some rows attend to, looked at block by block of its positions.

    Blocks in which no row sees anything are left out, which changes no bit of what is made of the others.

    Attributes:
      positions: How many there are, a multiple of a block's.
    """

    positions: int

    def logits(self, of_keys: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the logits of all positions, (..., positions), `MASKED` in the blocks that are left out.

        Args:
          of_keys: Takes the keys of a block, and returns float32 logits, (..., positions of the block).
        """

    def total(self, values: jax.Array) -> jax.Array:
        """Returns the sums of values, (..., positions), over the positions, added up in the same order for all rows."""

    def mixed(self, of_values: Callable[..., jax.Array], *by_position: jax.Array) -> jax.Array:
        """Returns the sum over blocks of what is made of each.

        Args:
          of_values: Takes the values of a block, and its part of each of `by_position`; returns a float32 array.
          by_position: Arrays, (..., positions).
        """


class Sources(Protocol):
    """The sources of packed rows, which attend in groups: a few rows of one prompt each."""

    def place(self, rows: jax.Array) -> jax.Array:
        """Brings arrays of rows, (rows, n), to their groups, (groups, ranks, n)."""

    def pick(self, placed: jax.Array) -> jax.Array:
        """Brings them back."""

    def each(self, attend: Callable[..., Any], *placed: jax.Array) -> Any:
        """Returns what `attend` makes of all groups, as many at a time as is well.

        Args:
          attend: Takes an `Attended` with keys and values of some groups, (some, heads of keys, positions of a block,
            head_dim); which positions have a token of theirs, bool, (some, positions); and the same groups of `placed`.
            Returns an array, or a tuple of arrays, whose first axis is that of the groups.
          placed: Arrays whose first axis is that of the groups.
        """


class PackedLayer(Protocol):
    """One decoder layer, applied to rows of whatever prompts with the parameters of this layer alone."""

    def apply(self, variables: Any, *args: Any, **arguments: Any) -> Any:
        """Calls a method, as Flax does."""

    def self_keys_values(self, states: jax.Array, *, position: Position, terms: Any) -> KeysValues:
        """Returns keys and values of (possibly propagated) states, (rows, width), each (heads, rows, head_dim).

        Args:
          states: shape (rows, width).
          position: Of each row, (rows,).
          terms: As of `in_rows`.
        """

    def in_rows(
        self, hidden: jax.Array, *, position: Position, terms: Any, path: Attended, sources: Sources
    ) -> jax.Array:
        """Returns the layer's output for packed rows, (rows, width).

        Args:
          hidden: shape (rows, width). Output of the layer below.
          position: Of each row, (rows,). Its path has as many earlier nodes as its step says, and its own.
          terms: One of the network's `path_terms`.
          path: What rows attend to of their outputs: keys and values are (rows, positions of a block, heads of keys,
            head_dim). Positions after a row's step are not of its path.
          sources: What they attend to of their prompts.
        """


class EarlyExitModel(Protocol):
    """A network whose decoder can predict after any layer. Methods are called through `apply`, by their names."""

    @property
    def config(self) -> Any:
        """Sizes of the model."""

    @property
    def precision(self) -> Precision:
        """In which numbers it computes: of its type are states, keys and values, and what the head multiplies."""

    def apply(self, variables: Any, *args: Any, **arguments: Any) -> Any:
        """Calls a method, as Flax does."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of token ids, shape of `tokens` + (width,)."""

    def prefill(
        self, source_tokens: jax.Array, lengths: jax.Array, prefix: Sequence[KeysValues] = ()
    ) -> tuple[list[KeysValues], jax.Array]:
        """Returns what every decoder layer attends to of prompts, and which of it is no padding.

        Args:
          source_tokens: shape (batch, source). Padded behind with 0.
          lengths: int32, shape (batch,). Tokens of each prompt; a row of none is no prompt.
          prefix: Every layer's keys and values of the first tokens, which all rows share, each (1, heads of keys,
            positions, head_dim), as `prefill` has returned them; none if nothing is known of them. Only for an
            architecture that `shares_prefixes`.

        Returns:
          For each layer keys and values, each (batch, heads of keys, source, head_dim); and bool, (batch, source).
        """

    def decoder_position_biases(self, length: int) -> list[jax.Array]:
        """Returns what is added to the logits of generated keys, by steps of query and key, future ones masked.

        Each has shape (heads or 1, length, length). There is one for every layer, or one for all: see `of_layer`.
        """

    def path_terms(self, length: int) -> list[Any]:
        """Returns what packed layers need beside their parameters for paths of `length`; as many as of the biases."""

    def source_biases(self, source_mask: jax.Array, position: Position) -> list[jax.Array]:
        """Returns what is added to the logits of the source's keys, each (batch, 1, 1, source).

        There is one for every layer, or one for all.

        Args:
          source_mask: shape (batch, source). Of `prefill`.
          position: Of the query of each row, (batch,).
        """

    def self_keys_values(self, states: jax.Array, layer: int, *, position: Position) -> KeysValues:
        """Returns the keys and values that a decoder layer makes of one position of every lane.

        Args:
          states: shape (batch, lanes, width). The (possibly propagated) output of the layer below.
          layer: Which layer.
          position: Of each row, (batch,).

        Returns:
          Keys and values, each of shape (batch, lanes, heads of keys, head_dim).
        """

    def decoder_layer(
        self,
        hidden: jax.Array,
        layer: int,
        *,
        self_keys_values: KeysValues,
        self_bias: jax.Array,
        source_keys_values: KeysValues,
        source_bias: jax.Array,
        position: Position,
    ) -> jax.Array:
        """Returns the output of a decoder layer for one position of every lane.

        Args:
          hidden: shape (batch, lanes, width). Output of the layer below at this position.
          layer: Which layer.
          self_keys_values: Each of shape (batch, lanes, heads of keys, steps, head_dim).
          self_bias: shape (batch or 1, 1, heads or 1, 1, steps).
          source_keys_values: Each of shape (batch, heads of keys, source, head_dim), shared by the lanes of a prompt.
          source_bias: shape (batch, 1, 1, source).
          position: Of each row, (batch,).

        Returns:
          Shape (batch, lanes, width).
        """

    def teacher_forced(self, taught: Taught, *, deterministic: bool = True) -> jax.Array:
        """Returns the states that every layer predicts given outputs from, each token after those before it.

        They are those of step by step decoding without early exits. Nothing stands between a prompt and its output,
        and the prompt's own tokens are not predicted.

        Args:
          taught: Prompts and outputs.
          deterministic: Whether dropout is off; if not, and there is any, it draws from the stream `dropout`.

        Returns:
          Shape (layers, batch, target, width), no final norm applied. At padding it is whatever comes out.
        """

    def head(self, states: jax.Array, layer: int, *, deterministic: bool = True) -> jax.Array:
        """Returns the float32 logits of the head after a layer, (..., vocabulary), of its output, (..., width).

        Norm and head are shared by all layers, unless the config says that those below the last have their own. So
        states of different layers are never given to one call, unless it says that they share both.

        Args:
          states: shape (..., width).
          layer: Which layer's.
          deterministic: As in `teacher_forced`.
        """

    def head_inputs(self, states: jax.Array, layer: int) -> jax.Array:
        """Returns what the weights of the head after a layer multiply, shape of `states`."""

    def head_weights(self, layer: int) -> tuple[jax.Array, int]:
        """Returns the weights of the head after a layer, and the axis of the vocabulary in them."""

    def exit_score(self, states: jax.Array) -> jax.Array:
        """Returns the exit classifier's probability of "exit", shape (...), of raw layer outputs, (..., width)."""


def of_layer(values: Sequence[_Each], layer: int) -> _Each:
    """Returns what belongs to a decoder layer, counted from 1, of a list that has one for each, or one for all."""
    return values[0] if len(values) == 1 else values[layer - 1]
