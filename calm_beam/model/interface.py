"""The interface of a network for decoders, common to all architectures.

A prompt is prefilled once (`prefill`), which gives keys and values of the *source* at every decoder layer: T5's are
those of the encoder's output, a decoder-only model's those of the prompt itself. Generated tokens then run through the
decoder one by one; their keys and values are on the *path* of their branch. The architecture defines how a layer
attends to both. Decoder layers are counted from 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from calm_beam.precision import Precision

# Keys and values, each of shape (..., heads of keys, positions, head_dim), or of one position without that axis.
KeysValues = tuple[jax.Array, ...]

# An array on the host, or on the device.
Numbers = jax.Array | np.ndarray

_Each = TypeVar("_Each")


class Position(NamedTuple):
    """Positions of tokens.

    Attributes:
      steps: int32. How many tokens were generated before each; it determines rotary positions and ages.
      prompt_lengths: int32. Tokens of its prompt.
    """

    steps: Numbers
    prompt_lengths: Numbers


class Taught(NamedTuple):
    """A batch of prompts with given outputs, for training or evaluation; rows may be empty.

    Only the lengths determine which numbers are padding: in some architectures, every id is a token.

    Attributes:
      source_tokens: int32, shape (batch, source). From `Architecture.taught_source`, right-padded with 0.
      source_lengths: int32, shape (batch,). Tokens of each source; 0 for an empty row.
      targets: int32, shape (batch, target). The outputs, right-padded with 0.
      target_lengths: int32, shape (batch,). Tokens of each output; 0 for an empty row.
    """

    source_tokens: Numbers
    source_lengths: Numbers
    targets: Numbers
    target_lengths: Numbers

    @property
    def is_target(self) -> Any:
        """Mask of the targets that are tokens of an output: bool, shape (batch, target)."""
        return np.arange(self.targets.shape[1], dtype=np.int32)[None] < self.target_lengths[:, None]

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens, with end tokens and without padding; for arrays on the host."""
        return int(np.sum(self.target_lengths))


class Attended(Protocol):
    """Keys and values that some rows attend to, read in blocks of positions.

    Blocks in which no row attends to anything are skipped, which does not change a bit of the results.

    Attributes:
      positions: Number of positions, a multiple of the block size.
    """

    positions: int

    def logits(self, of_keys: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the logits of all positions, (..., positions), `MASKED` in the blocks that are skipped.

        Args:
          of_keys: Takes the keys of a block, and returns float32 logits, (..., positions of the block).
        """

    def total(self, values: jax.Array) -> jax.Array:
        """Returns the sums of values, (..., positions), over the positions, added up in the same order for all rows."""

    def mixed(self, of_values: Callable[..., jax.Array], *by_position: jax.Array) -> jax.Array:
        """Returns the sum over blocks of a function of each block.

        Args:
          of_values: Takes the values of a block, and its part of each of `by_position`; returns a float32 array.
          by_position: Arrays, (..., positions).
        """


class Sources(Protocol):
    """The sources of packed rows, which attend in groups: a few rows of one prompt each."""

    def place(self, rows: jax.Array) -> jax.Array:
        """Returns arrays of rows, (rows, n), arranged by group, (groups, ranks, n)."""

    def pick(self, placed: jax.Array) -> jax.Array:
        """Returns arrays arranged by group, (groups, ranks, n), by row again, (rows, n)."""

    def each(self, attend: Callable[..., Any], *placed: jax.Array) -> Any:
        """Returns the results of `attend` for all groups, called with a suitable number of groups at a time.

        Args:
          attend: Takes an `Attended` with keys and values of some groups, (some, heads of keys, positions of a block,
            head_dim); the mask of positions that have a token, bool, (some, positions); and the same groups of
            `placed`. Returns an array, or a tuple of arrays, whose first axis is that of the groups.
          placed: Arrays whose first axis is that of the groups.
        """


class PackedLayer(Protocol):
    """One decoder layer, applied to rows of any prompts with the parameters of this layer alone."""

    def apply(self, variables: Any, *args: Any, **arguments: Any) -> Any:
        """Calls a method, as Flax does."""

    def self_keys_values(self, states: jax.Array, *, position: Position, terms: Any) -> KeysValues:
        """Returns keys and values of (possibly propagated) states, (rows, width), each (heads, rows, head_dim).

        Args:
          states: shape (rows, width).
          position: Position of each row, (rows,).
          terms: See `in_rows`.
        """

    def in_rows(
        self, hidden: jax.Array, *, position: Position, terms: Any, path: Attended, sources: Sources
    ) -> jax.Array:
        """Returns the layer's output for packed rows, (rows, width).

        Args:
          hidden: shape (rows, width). Output of the layer below.
          position: Position of each row, (rows,). Its path has a node for each earlier step, and its own.
          terms: One of the network's `path_terms`.
          path: Keys and values of the rows' outputs, (rows, positions of a block, heads of keys, head_dim). Positions
            after a row's step are not part of its path.
          sources: Keys and values of the rows' prompts.
        """


class EarlyExitModel(Protocol):
    """A network whose decoder can predict after any layer. Call methods through `apply`, by name."""

    @property
    def config(self) -> Any:
        """Sizes of the model."""

    @property
    def precision(self) -> Precision:
        """Precision in which it computes; states, keys and values, and inputs of the head have its type."""

    def apply(self, variables: Any, *args: Any, **arguments: Any) -> Any:
        """Calls a method, as Flax does."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of token ids, shape of `tokens` + (width,)."""

    def prefill(
        self, source_tokens: jax.Array, lengths: jax.Array, prefix: Sequence[KeysValues] = ()
    ) -> tuple[list[KeysValues], jax.Array]:
        """Returns every decoder layer's keys and values of prompts, and the mask of their positions.

        Args:
          source_tokens: shape (batch, source). Right-padded with 0.
          lengths: int32, shape (batch,). Tokens of each prompt; 0 for padding rows.
          prefix: Every layer's keys and values of a common prefix of all rows, each (1, heads of keys, positions,
            head_dim), as `prefill` returned them; empty to compute them here. Only for an architecture that
            `shares_prefixes`.

        Returns:
          For each layer keys and values, each (batch, heads of keys, source, head_dim); and bool, (batch, source).
        """

    def decoder_position_biases(self, length: int) -> list[jax.Array]:
        """Returns the biases of the logits of generated keys, by steps of query and key, with future keys masked.

        Each has shape (heads or 1, length, length). There is one for every layer, or one for all: see `of_layer`.
        """

    def path_terms(self, length: int) -> list[Any]:
        """Returns what packed layers need besides parameters for paths of `length`, for every layer, or one for all."""

    def source_biases(self, source_mask: jax.Array, position: Position) -> list[jax.Array]:
        """Returns the biases of the logits of the source's keys, each (batch, 1, 1, source).

        There is one for every layer, or one for all.

        Args:
          source_mask: shape (batch, source). The mask that `prefill` returns.
          position: Position of each row's query, (batch,).
        """

    def self_keys_values(self, states: jax.Array, layer: int, *, position: Position) -> KeysValues:
        """Returns a decoder layer's keys and values for one position of every branch.

        Args:
          states: shape (batch, branches, width). The (possibly propagated) output of the layer below.
          layer: Number of the layer.
          position: Position of each row, (batch,).

        Returns:
          Keys and values, each of shape (batch, branches, heads of keys, head_dim).
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
        """Returns the output of a decoder layer for one position of every branch.

        Args:
          hidden: shape (batch, branches, width). Output of the layer below at this position.
          layer: Number of the layer.
          self_keys_values: Each of shape (batch, branches, heads of keys, steps, head_dim).
          self_bias: shape (batch or 1, 1, heads or 1, 1, steps).
          source_keys_values: Each of shape (batch, heads of keys, source, head_dim), shared by a prompt's branches.
          source_bias: shape (batch, 1, 1, source).
          position: Position of each row, (batch,).

        Returns:
          Shape (batch, branches, width).
        """

    def teacher_forced(self, taught: Taught, *, deterministic: bool = True) -> jax.Array:
        """Returns every layer's states that predict the tokens of given outputs (teacher forcing).

        The states equal those of step by step decoding without early exits. An output directly follows its prompt, and
        the prompt's own tokens are not predicted.

        Args:
          taught: Prompts and outputs.
          deterministic: Whether dropout is off; if not, it draws from the stream `dropout`.

        Returns:
          Shape (layers, batch, target, width), no final norm applied. States at padding are arbitrary.
        """

    def head(self, states: jax.Array, layer: int, *, deterministic: bool = True) -> jax.Array:
        """Returns the float32 logits of the head after a layer, (..., vocabulary), of its output, (..., width).

        All layers share norm and head, unless the config says that those below the last have their own. Pass states of
        different layers in one call only if they share both.

        Args:
          states: shape (..., width).
          layer: Number of the layer.
          deterministic: See `teacher_forced`.
        """

    def head_inputs(self, states: jax.Array, layer: int) -> jax.Array:
        """Returns the inputs of the head after a layer, shape of `states`."""

    def head_weights(self, layer: int) -> tuple[jax.Array, int]:
        """Returns the weights of the head after a layer, and the axis of the vocabulary in them."""

    def exit_score(self, states: jax.Array) -> jax.Array:
        """Returns the exit classifier's probability of "exit", shape (...), of raw layer outputs, (..., width)."""


def of_layer(values: Sequence[_Each], layer: int) -> _Each:
    """Returns the entry of a decoder layer, counted from 1, of a list that has one for each, or one for all."""
    return values[0] if len(values) == 1 else values[layer - 1]
