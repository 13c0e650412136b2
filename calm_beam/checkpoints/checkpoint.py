"""Model weights, whatever layout they came from, and their fingerprint.

Also what readers and writers must know about an architecture, by the type of its config; what a user declares about a
model, for layouts that do not record it; and a layout reader's result.
"""

import abc
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

# Registers the name bfloat16 with numpy.
import ml_dtypes  # noqa: F401
import numpy as np

from calm_beam.model import ACTIVATIONS, T5Config, default_activation, infer_config
from calm_beam.model.llama import LlamaConfig, check_parameters, config_of, stored_fields, unseen
from calm_beam.precision import FLOAT32, Precision, held_type

from .metadata import CheckpointError
from .stored_array import Array, StoredArray, StoredArrays, pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """Settings of a model that its arrays do not show: a wrong one changes outputs and raises no error.

    Attributes:
      activation: One of `ACTIVATIONS`; None takes it from the files, or else T5's.
      relative_max_distance: Distance from which all positions share a bucket; None takes it from the files, or T5's.
    """

    activation: str | None = None
    relative_max_distance: int | None = None

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise CheckpointError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {self.activation!r}.")

    def check(self, *, activation: str | None, relative_max_distance: int | None, source: str) -> None:
        """Refuses a declared value that a file of the model contradicts.

        Args:
          activation: The file's value; None if it has none.
          relative_max_distance: The file's value; None if it has none.
          source: The file's name, for messages.

        Raises:
          CheckpointError: If the user declared another value.
        """
        for name, said, stored in (
            ("activation", self.activation, activation),
            ("relative_max_distance", self.relative_max_distance, relative_max_distance),
        ):
            if said is not None and stored is not None and said != stored:
                raise CheckpointError(
                    f"{name} is {stored} by {source}, but {said} was passed: leave {name} out, or fix that file."
                )


# Each architecture has its own type of config; this alias documents that one of them is meant.
Config = Any
Shapes = Mapping[str, tuple[int, ...]]

# Keys that a stored config may lack; without them a model is T5's.
_ADDED_LATER = {"activation", "relative_bias_per_layer", "exit_norms", "exit_heads", "start_id", "end_ids"}
_ACTIVATIONS = {"gelu": "GELU", "silu": "SiLU", "relu": "ReLU"}


class StoredArchitecture(abc.ABC):
    """How models of one architecture are stored. Arguments called `config` have its type of config.

    Attributes:
      name: Its name in the native layout.
    """

    name: str

    def fields(self, config: Any) -> Mapping[str, Any]:
        """Returns the config fields that the native layout writes, and that `config_of` reads."""
        return dataclasses.asdict(config)

    @abc.abstractmethod
    def config_of(self, fields: Mapping[str, Any]) -> Config:
        """Returns the config for fields of `dataclasses.asdict`.

        Raises:
          ValueError: If a field is unknown, missing or wrong.
        """

    @abc.abstractmethod
    def check(self, config: Any, shapes: Shapes) -> None:
        """Refuses arrays, given by shapes, that do not belong to a model of this config.

        Raises:
          ValueError: If they do not; says how they differ.
        """

    @abc.abstractmethod
    def unseen(self, config: Any) -> str:
        """Returns what a model's arrays do not show, as text for its fingerprint."""

    @abc.abstractmethod
    def declared(self, config: Any) -> Declared:
        """Returns what a worker must be told to load the model, whatever its files say."""

    @abc.abstractmethod
    def in_words(self, config: Any) -> str:
        """Returns a description of a model, as a sentence without its full stop."""


class _T5(StoredArchitecture):
    name = "t5"

    def fields(self, config: T5Config) -> Mapping[str, Any]:
        # T5's own start and end ids are omitted, since readers of earlier versions do not know these keys.
        own = {"start_id": T5Config.start_id, "end_ids": T5Config.end_ids}
        fields = dataclasses.asdict(config)
        return {name: value for name, value in fields.items() if name not in own or value != own[name]}

    def config_of(self, fields: Mapping[str, Any]) -> T5Config:
        known = {field.name for field in dataclasses.fields(T5Config)}
        unknown, missing = fields.keys() - known, known - fields.keys() - _ADDED_LATER
        if unknown or missing:
            raise ValueError(f"unknown keys {sorted(unknown)}, missing keys {sorted(missing)}.")
        ends = fields.get("end_ids")
        return T5Config(**{**fields, "end_ids": tuple(ends)} if isinstance(ends, list) else fields)

    def check(self, config: T5Config, shapes: Shapes) -> None:
        found = infer_config(shapes, activation=config.activation, relative_max_distance=config.relative_max_distance)
        found = dataclasses.replace(found, start_id=config.start_id, end_ids=config.end_ids)
        names = [field.name for field in dataclasses.fields(T5Config)]
        differing = [name for name in names if getattr(config, name) != getattr(found, name)]
        if differing:
            says, has = (", ".join(f"{name}={getattr(of, name)}" for name in differing) for of in (config, found))
            raise ValueError(f"config.json says {says}, the arrays are of {has}.")

    def unseen(self, config: T5Config) -> str:
        # T5's own activation is omitted, so that fingerprints from before other activations stay valid.
        is_t5 = config.activation == default_activation(gated_mlp=config.gated_mlp)
        text = f"{config.relative_max_distance}" + ("" if is_t5 else f", {config.activation}")
        # T5's own start and end ids are omitted too.
        if config.start_id != T5Config.start_id:
            text += f", starts {config.start_id}"
        if config.end_ids != T5Config.end_ids:
            text += f", ends {' '.join(map(str, config.end_ids))}"
        return text

    def declared(self, config: T5Config) -> Declared:
        return Declared(activation=config.activation, relative_max_distance=config.relative_max_distance)

    def in_words(self, config: T5Config) -> str:
        tables = "; every layer has a table of relative positions of its own" if config.relative_bias_per_layer else ""
        is_usual = (config.start_id, config.end_ids) == (T5Config.start_id, T5Config.end_ids)
        ends = " or ".join(map(str, config.end_ids))
        begins = "" if is_usual else f"; outputs begin with token {config.start_id} and end with {ends}"
        return (
            f"T5 with {'gated ' if config.gated_mlp else ''}{_ACTIVATIONS[config.activation]}: "
            f"{config.num_encoder_layers} encoder and {config.num_decoder_layers} decoder layers, "
            f"width {config.emb_dim}, {config.num_heads} heads of {config.head_dim}, feed-forward {config.mlp_dim}, "
            f"{config.vocab_size} token ids, {'tied' if config.tied_head else 'untied'} head{tables}{begins}"
            f"{_exits_in_words(config)}"
        )


class _Llama(StoredArchitecture):
    name = "llama"

    def fields(self, config: LlamaConfig) -> Mapping[str, Any]:
        return stored_fields(config)

    def config_of(self, fields: Mapping[str, Any]) -> LlamaConfig:
        return config_of(fields)

    def check(self, config: LlamaConfig, shapes: Shapes) -> None:
        check_parameters(config, shapes)

    def unseen(self, config: LlamaConfig) -> str:
        return f"{self.name} {unseen(config)}"

    def declared(self, config: LlamaConfig) -> Declared:
        # Their files record everything.
        return Declared()

    def in_words(self, config: LlamaConfig) -> str:
        kind = config.rope_scaling.kind
        scaling = "" if kind == "default" else f" scaled by {kind}"
        window = ""
        if config.sliding_window is not None:
            window = f", a window of {config.sliding_window} in {len(config.windowed_layers)} layers"
        experts = ""
        if config.num_experts > 1:
            experts = f" of {config.num_experts} experts, {config.experts_per_token} for a token"
        return (
            f"Decoder-only with gated {_ACTIVATIONS[config.activation]}: {config.num_decoder_layers} layers, width "
            f"{config.emb_dim}, {config.num_heads} heads of {config.head_dim} over {config.num_kv_heads} of keys, "
            f"feed-forward {config.mlp_dim}{experts}, rotary positions to base {config.rope_theta:g}{scaling}{window}, "
            f"{config.vocab_size} token ids, {'tied' if config.tied_head else 'untied'} head"
            f"{_exits_in_words(config)}"
        )


def _exits_in_words(config: T5Config | LlamaConfig) -> str:
    """Returns the end of a sentence on the exit norms and heads of the layers below the last."""
    own = [name for name, has_any in (("a norm", config.exit_norms), ("a head", config.exit_heads)) if has_any]
    return f"; every decoder layer below the last exits by {' and '.join(own)} of its own" if own else ""


_BY_CONFIG: Mapping[type, StoredArchitecture] = {T5Config: _T5(), LlamaConfig: _Llama()}
BY_NAME: Mapping[str, StoredArchitecture] = {each.name: each for each in _BY_CONFIG.values()}


def stored_architecture(config: Config) -> StoredArchitecture:
    """Returns the storage rules for models with such a config."""
    return _BY_CONFIG[type(config)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """The settings of a model's `generation_config.json` that are kept whatever layout the model is written in.

    Attributes:
      token_ids: Ids of the beginning and of padding, by transformers' keys. Nothing here uses them, but transformers
        does when it generates.
      stop_strings: Texts that end an output, which then stops before them.
    """

    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    stop_strings: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Returns them as content of `generation_config.json`."""
        return {**self.token_ids, **({"stop_strings": list(self.stop_strings)} if self.stop_strings else {})}


NO_FACTS = GenerationFacts()
"""Nothing is known of how a model's outputs are generated, besides their start and end."""

FloatArrays = Mapping[str, np.ndarray]
Arrays = Mapping[str, Array]
Watch = Callable[[str, np.ndarray], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's weights, with the place they were read from.

    Attributes:
      config: Sizes of the model.
      arrays: float32 arrays by name, in memory or read on demand (names as in `calm_beam.model.parameter_shapes`).
      directory: The local folder that holds the weights themselves; for GGUF, the file.
      vocabulary_path: `sentencepiece.model`, `spiece.model` or `tokenizer.json` in or next to that folder, or None; in
        a transformers folder, `tokenizer.json` comes first.
      layout: `native`, `hugging_face`, `gguf`, `t5x` or `orbax`.
      step: The training step in the folder's name, or None.
      cloud_directory: The folder on Cloud Storage that `directory` is a copy of, or None.
      cloud_vocabulary: The file on Cloud Storage that `vocabulary_path` is a copy of, or None.
      stated: Sentences on what the arrays do not show, with the source of each.
      assumed: Sentences on what neither the arrays nor any file shows, with the reason for each assumption.
      dropped: Names of stored arrays that were left out on request.
      rounded: The precision for which the arrays were rounded, and the fingerprint before; None if they were not.
      generation: What is kept of its `generation_config.json`.
    """

    config: Config
    arrays: Arrays
    directory: pathlib.Path
    vocabulary_path: pathlib.Path | None
    layout: str
    step: int | None = None
    cloud_directory: str | None = None
    cloud_vocabulary: str | None = None
    stated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    rounded: tuple[Precision, str] | None = None
    generation: GenerationFacts = NO_FACTS

    @property
    def uri(self) -> str:
        """The model's address for other machines, if it has one that they can reach."""
        return self.cloud_directory or str(self.directory)

    @property
    def vocabulary_uri(self) -> str | None:
        """The vocabulary's address for other machines; None if there is none."""
        return self.cloud_vocabulary or (str(self.vocabulary_path) if self.vocabulary_path else None)

    def parameters(self, precision: Precision = FLOAT32) -> dict[str, Any]:
        """Returns the tree that a network's `apply` takes as `{"params": tree}`, read into memory completely.

        Args:
          precision: Decides the types of the arrays, each rounded once.
        """
        import flax.traverse_util

        self.check_rounding(precision)
        arrays = {name: held(name, array, precision) for name, array in self.arrays.items()}
        self.check_unchanged()
        tree: dict[str, Any] = flax.traverse_util.unflatten_dict(arrays, sep="/")
        return tree

    def check_rounding(self, precision: Precision) -> None:
        """Raises if the arrays were rounded for another precision: then they are not the model's weights."""
        assert self.rounded is None or self.rounded[0] == precision, f"weights are those of {self.rounded}"

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if the files of the weights have changed since the model was loaded."""
        if isinstance(self.arrays, StoredArrays):
            self.arrays.check_unchanged()

    def fingerprint(self, watch: Watch | None = None) -> str:
        """Returns the fingerprint of the weights as read, and of what they do not show about the model.

        Args:
          watch: Called with the name and every piece of every array, if they must be read for this.

        Raises:
          CheckpointError: If the weights cannot be read, or their files have changed since the model was loaded.
        """
        if self.rounded is not None:
            return self.rounded[1]
        unseen = stored_architecture(self.config).unseen(self.config)
        known = self.arrays.known if isinstance(self.arrays, StoredArrays) else {}
        if unseen not in known:
            known[unseen] = fingerprint(self.arrays, unseen=unseen, watch=watch)
        self.check_unchanged()
        return known[unseen]


def held(name: str, array: Any, precision: Precision) -> Any:
    """Returns a numpy or JAX array of a model in the type that a precision gives it; unchanged if it has that type.

    Args:
      name: Name of the parameter.
      array: Its values; a stored array is read.
      precision: Decides the type.
    """
    values = np.asarray(array) if isinstance(array, StoredArray) else array
    dtype = np.dtype(held_type(name, precision))
    return values if values.dtype == dtype else values.astype(dtype)


def fingerprint(arrays: Arrays, *, unseen: str = "128", watch: Watch | None = None) -> str:
    """Returns a digest of names, shapes and float32 values, which does not depend on layout or stored precision.

    Args:
      arrays: Arrays by name. Values are compared as float32, so weights that float16 can hold exactly have the same
        fingerprint stored as float16 or as float32.
      unseen: What else decides what the model computes, as text; the default is for the most common kind of T5.
      watch: Called with the name and every piece of every array.

    Returns:
      `sha256:` followed by 64 hexadecimal digits.
    """
    digest = hashlib.sha256(f"calm-beam model v1, {unseen}\n".encode())
    for name in sorted(arrays):
        shape = arrays[name].shape or (1,)
        digest.update(f"{name} {','.join(map(str, shape))}\n".encode())
        # Piece by piece and through memory views, so that hashing neither holds nor copies a large model.
        for values in pieces(arrays[name]):
            digest.update(values.data)
            if watch is not None:
                watch(name, values)
    return f"sha256:{digest.hexdigest()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model as a layout stores it; its config is not yet checked against its arrays.

    Attributes:
      config: The config that the files give.
      arrays: Arrays by name, to be read as float32 (names as in the architecture's `parameter_shapes`).
      stated: Sentences on what the arrays do not show, with the source of each.
      assumed: Sentences on what neither the arrays nor any file shows, with the reason for each assumption.
      generation: What is kept of its `generation_config.json`.
    """

    config: Config
    arrays: StoredArrays
    stated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    generation: GenerationFacts = NO_FACTS
