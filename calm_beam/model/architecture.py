"""The interface of an architecture apart from its network, and the common parts of the configs of all architectures.

Decoder layers below the last may have their own parameters to predict with: a norm, and the kernel of a head. Layers
without them share the final norm and the output head. In the names of these parameters, layers are counted from 0.
Source: EE-LLM (Chen et al., 2024), which calls them exit norms and untied exit output weights. This module also checks
token ids in a config. It needs no JAX.
"""

import abc
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from calm_beam.precision import Precision

if TYPE_CHECKING:
    from .interface import EarlyExitModel, PackedLayer
    from .native_decoder import NativeDecoder


class ArrayType(NamedTuple):
    """Shape and type of an array.

    Attributes:
      shape: Shape.
      dtype: Name of the type of the numbers.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


class ModelConfig(Protocol):
    """The fields that the config of every architecture has; see each for the others."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, and width of the output head."""

    @property
    def emb_dim(self) -> int:
        """Model width d."""

    @property
    def num_heads(self) -> int:
        """Attention heads of queries, per layer."""

    @property
    def num_kv_heads(self) -> int:
        """Attention heads of keys and values, per layer."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def mlp_dim(self) -> int:
        """Width of the feed-forward layer."""

    @property
    def num_decoder_layers(self) -> int:
        """Decoder depth L."""

    @property
    def tied_head(self) -> bool:
        """Whether the output head is the transposed embedding."""

    @property
    def exit_classifier(self) -> int:
        """Logits of the exit classifier; 0 if there is none."""

    @property
    def exit_norms(self) -> bool:
        """Whether every decoder layer below the last has its own norm before the head."""

    @property
    def exit_heads(self) -> bool:
        """Whether every decoder layer below the last has its own head kernel."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end an output."""


class Architecture(abc.ABC):
    """One family of models. Arguments called `config` are configs of this family.

    Attributes:
      shares_prefixes: Whether a prompt's keys and values at a position depend only on the tokens up to there.
      first_kept_step: First step whose keys and values later ones attend to: 1 where the source holds those of step 0.
      pad_id: Id that only pads, and is not a token; None if every id is a token.
      usual_dropout: Default share of activations that training drops; 0 if there is no dropout.
      scales_tied_head: Whether a tied head takes states divided by the square root of their width.
    """

    shares_prefixes: bool
    first_kept_step: int
    pad_id: int | None
    usual_dropout: float
    scales_tied_head: bool

    @abc.abstractmethod
    def parameter_shapes(self, config: Any) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every parameter."""

    @abc.abstractmethod
    def network(
        self, config: Any, *, precision: Precision, dropout_rate: float = 0.0, layer_dropout: float = 0.0
    ) -> "EarlyExitModel":
        """Returns the network; loads JAX.

        Raises:
          UsageError: If the architecture has no dropout and some is requested.
        """

    @abc.abstractmethod
    def packed_layer(self, config: Any, *, precision: Precision) -> "PackedLayer":
        """Returns a decoder layer for packed rows; loads JAX."""

    @abc.abstractmethod
    def native_decoder(self, config: Any, parameters: Mapping[str, Any], *, terms: Sequence[Any]) -> "NativeDecoder":
        """Returns a model's decoder for native code; loads JAX.

        Args:
          config: The model's config.
          parameters: All arrays of the model, as a tree.
          terms: The network's `path_terms`.
        """

    def why_not_native(self, config: Any) -> str | None:
        """Returns the reason why native code cannot compute a model; None if it can."""
        return None

    def logits_cap(self, config: Any) -> float | None:
        """Returns the cap on a head's logits, for `numerics.capped`; None if there is none."""
        return None

    @abc.abstractmethod
    def encoder_width(self, config: Any) -> int:
        """Returns the width of the encoder's output, the input of cross-attention keys and values; 0 if none."""

    @abc.abstractmethod
    def first_input(self, config: Any, prompt: Sequence[int]) -> int:
        """Returns the token that the decoder reads in the first step."""

    @abc.abstractmethod
    def room_for_prompts(self, config: Any, *, steps: int) -> int | None:
        """Returns the most tokens of a prompt with an output of `steps`, at least 1; None if there is no limit."""

    @abc.abstractmethod
    def check_positions(self, config: Any, *, source: int, steps: int) -> None:
        """Checks that a model has positions for prompts and outputs, given the most tokens of each.

        Raises:
          ValueError: If it has too few; the message says what to lower.
        """

    @abc.abstractmethod
    def taught_source(self, prompt: Sequence[int], target: Sequence[int]) -> Sequence[int]:
        """Returns the ids of the source when an output is given: at least those of the prompt."""

    @abc.abstractmethod
    def initial_distribution(self, config: Any, name: str, *, shape: Sequence[int]) -> tuple[float, float]:
        """Returns mean and standard deviation of a parameter of a new model, given its name and shape."""

    @abc.abstractmethod
    def layers_in_words(self, config: Any) -> str:
        """Returns text that says how many layers a model has."""

    @abc.abstractmethod
    def position_numbers(self, config: Any, *, steps: int) -> int:
        """Returns how many numbers of 4 bytes tables by position take for outputs of `steps` tokens."""

    @abc.abstractmethod
    def prefill_numbers(self, config: Any, *, rows: int, source: int) -> int:
        """Returns how many numbers a prefill of prompts of `source` tokens holds at a time, apart from its results."""


Shapes = Mapping[str, tuple[int, ...]]

# By field of the config, the array that each layer has.
_ARRAYS = {"exit_norms": "scale", "exit_heads": "kernel"}
_OWN = re.compile(r"decoder/(exit_norms|exit_heads)_\d+/.*")


def exit_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of the layers' own exit parameters, such as `decoder/exit_norms_0/scale`.

    Args:
      config: A config, whose `exit_norms` and `exit_heads` say whether there are any. Kernels are [width, vocabulary].
    """
    shapes = {"exit_norms": (config.emb_dim,), "exit_heads": (config.emb_dim, config.vocab_size)}
    return {
        name: shape
        for field, shape in shapes.items()
        if getattr(config, field)
        for name in _names(field, config.num_decoder_layers)
    }


def exit_fields(shapes: Shapes, num_layers: int) -> dict[str, bool]:
    """Returns the config fields `exit_norms` and `exit_heads` of a parameter tree.

    Args:
      shapes: Name and shape of every array.
      num_layers: Decoder depth L.

    Raises:
      ValueError: If only some of the layers below the last have such a parameter, or the last has it.
    """
    found: dict[str, set[str]] = {field: set() for field in _ARRAYS}
    for name in shapes:
        if match := _OWN.fullmatch(name):
            found[match.group(1)].add(name)
    for field, names in found.items():
        expected = set(_names(field, num_layers))
        missing, unknown = sorted(expected - names), sorted(names - expected)
        if names and (missing or unknown):
            wrong = f"{missing[0]} is missing" if missing else f"{unknown[0][:100]} is unknown"
            raise ValueError(
                f"{wrong}: of {num_layers} decoder layers, each below the last has {_singular(field)} of its own "
                f"({field}_0 and on), or none has."
            )
    return {field: bool(names) for field, names in found.items()}


def check_exit_fields(config: Any) -> None:
    """Checks that a config with exit norms or heads has at least two layers.

    Raises:
      ValueError: If it has one layer.
    """
    for field in _ARRAYS:
        if getattr(config, field) and config.num_decoder_layers < 2:
            raise ValueError(f"{field} is true, but needs at least 2 decoder layers: it is about those below the last.")


def _names(field: str, num_layers: int) -> list[str]:
    return [f"decoder/{field}_{index}/{_ARRAYS[field]}" for index in range(num_layers - 1)]


def _singular(field: str) -> str:
    return "a norm" if field == "exit_norms" else "a head"


_LONGEST_SHOWN = 100


def check_ids(name: str, ids: object, *, below: int) -> None:
    """Checks that ids are a tuple of distinct, ascending whole numbers.

    Args:
      name: Their name, for the message.
      ids: The numbers.
      below: Upper bound: each must be at least 0 and less than this.

    Raises:
      ValueError: If they are not.
    """
    is_of_numbers = isinstance(ids, tuple) and all(type(index) is int and 0 <= index < below for index in ids)
    if not is_of_numbers or list(ids) != sorted(set(ids)):  # type: ignore[call-overload]
        raise ValueError(
            f"{name} must be different whole numbers from 0 to {below - 1}, ascending; got {cut(repr(ids))}."
        )


def cut(text: str) -> str:
    """Returns text from a file for a message: at most 100 characters, with dots if it is longer."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def few(names: list[str]) -> str:
    """Returns names from a file for a message: four, and the number of others; `none` if there are none."""
    shown = ", ".join(cut(name) for name in names[:4]) or "none"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
