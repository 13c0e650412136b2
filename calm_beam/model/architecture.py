"""What an architecture provides apart from its network, and what the configs of all architectures have in common.

Decoder layers below the last may have parameters of their own to predict with: a norm, and the kernel of a head.
Where they have none, the final norm and the output head are those of every layer. For these, layers are counted from
0, as in names of parameters. Source: EE-LLM (Chen et al., 2024), which calls them exit norms and untied exit output
weights. Token ids in a config are checked here, too. Nothing here needs JAX.
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
      shape: Its shape.
      dtype: Name of the type of its numbers.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


class ModelConfig(Protocol):
    """What the sizes of every model have; see the config of each architecture."""

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
        """Whether every decoder layer below the last has a norm of its own before the head."""

    @property
    def exit_heads(self) -> bool:
        """Whether each of these has the kernel of a head of its own."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids of which each ends an output."""


class Architecture(abc.ABC):
    """One family of models. Arguments called `config` are of its own kind of config.

    Attributes:
      shares_prefixes: Whether what a prompt leaves at a position depends on the tokens up to there alone.
      first_kept_step: First step whose keys and values later ones attend to: 1 where the source holds those of step 0.
      pad_id: Id that only pads, and is no token; None if every id is a token.
      usual_dropout: Share of activations that training drops if nobody says how many; 0 if there is no dropout.
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
          UsageError: If it has no dropout and some is asked for.
        """

    @abc.abstractmethod
    def packed_layer(self, config: Any, *, precision: Precision) -> "PackedLayer":
        """Returns a decoder layer of it, for packed rows; loads JAX."""

    @abc.abstractmethod
    def native_decoder(self, config: Any, parameters: Mapping[str, Any], *, terms: Sequence[Any]) -> "NativeDecoder":
        """Returns a model's decoder for native code; loads JAX.

        Args:
          config: Of the model.
          parameters: All of its arrays, as a tree.
          terms: The network's `path_terms`.
        """

    def why_not_native(self, config: Any) -> str | None:
        """Returns what a model has that native code does not compute; None if there is nothing."""
        return None

    def logits_cap(self, config: Any) -> float | None:
        """Returns what a head's logits are kept within by `numerics.capped`; None if they are as they come."""
        return None

    @abc.abstractmethod
    def encoder_width(self, config: Any) -> int:
        """Returns the width of what decoder layers make the source's keys and values of; 0 if there is no encoder."""

    @abc.abstractmethod
    def first_input(self, config: Any, prompt: Sequence[int]) -> int:
        """Returns the token that the decoder reads in the first step."""

    @abc.abstractmethod
    def room_for_prompts(self, config: Any, *, steps: int) -> int | None:
        """Returns the most tokens of a prompt beside an output of so many, at least 1; None if there is no limit."""

    @abc.abstractmethod
    def check_positions(self, config: Any, *, source: int, steps: int) -> None:
        """Refuses prompts and outputs, given the most tokens of each, for which a model has no positions.

        Raises:
          ValueError: If it has too few; says what to lower.
        """

    @abc.abstractmethod
    def taught_source(self, prompt: Sequence[int], target: Sequence[int]) -> Sequence[int]:
        """Returns the ids that stand in the source when an output is given: at least those of the prompt."""

    @abc.abstractmethod
    def initial_distribution(self, config: Any, name: str, *, shape: Sequence[int]) -> tuple[float, float]:
        """Returns mean and standard deviation of a parameter of a new model, given its name and shape."""

    @abc.abstractmethod
    def layers_in_words(self, config: Any) -> str:
        """Returns how many layers a model has."""

    @abc.abstractmethod
    def position_numbers(self, config: Any, *, steps: int) -> int:
        """Returns how many numbers of 4 bytes tables by position take for outputs of so many steps."""

    @abc.abstractmethod
    def prefill_numbers(self, config: Any, *, rows: int, source: int) -> int:
        """Returns how many numbers going through prompts of so many tokens takes at a time, its results apart."""


Shapes = Mapping[str, tuple[int, ...]]

# By field of the config, the array that each layer has.
_ARRAYS = {"exit_norms": "scale", "exit_heads": "kernel"}
_OWN = re.compile(r"decoder/(exit_norms|exit_heads)_\d+/.*")


def exit_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every parameter that layers have of their own, such as `decoder/exit_norms_0/scale`.

    Args:
      config: Has `exit_norms` and `exit_heads`, which say whether there are any. Kernels are [width, vocabulary].
    """
    shapes = {"exit_norms": (config.emb_dim,), "exit_heads": (config.emb_dim, config.vocab_size)}
    return {
        name: shape
        for field, shape in shapes.items()
        if getattr(config, field)
        for name in _names(field, config.num_decoder_layers)
    }


def exit_fields(shapes: Shapes, num_layers: int) -> dict[str, bool]:
    """Returns which fields of a config are true of a parameter tree.

    Args:
      shapes: Name and shape of every array.
      num_layers: Decoder depth L.

    Raises:
      ValueError: If some of the layers below the last have what others have not, or the last has it.
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
    """Refuses a config of a single layer whose lower layers have something.

    Raises:
      ValueError: If it is one.
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
    """Refuses what is not a tuple of ascending whole numbers.

    Args:
      name: What they are called, for the message.
      ids: The numbers.
      below: All must be from 0 to below it.

    Raises:
      ValueError: If they are not.
    """
    is_of_numbers = isinstance(ids, tuple) and all(type(index) is int and 0 <= index < below for index in ids)
    if not is_of_numbers or list(ids) != sorted(set(ids)):  # type: ignore[call-overload]
        raise ValueError(
            f"{name} must be different whole numbers from 0 to {below - 1}, ascending; got {cut(repr(ids))}."
        )


def cut(text: str) -> str:
    """Returns a text of a file for a message: at most 100 characters of it, and dots where it is longer."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def few(names: list[str]) -> str:
    """Returns names of a file for a message: four, and how many more there are; `none` without any."""
    shown = ", ".join(cut(name) for name in names[:4]) or "none"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
