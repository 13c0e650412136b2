"""What reading and writing models must know of an architecture, by the type of its config."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from calm_beam.model import T5Config, default_activation, infer_config
from calm_beam.model.llama import LlamaConfig, check_parameters, config_of, stored_fields, unseen

from .declared import Declared

# Each architecture has its own; what takes one of them only says which.
Config = Any
Shapes = Mapping[str, tuple[int, ...]]

# Keys of a stored config without which a model is T5's.
_ADDED_LATER = {"activation", "relative_bias_per_layer", "exit_norms", "exit_heads", "start_id", "end_ids"}
_ACTIVATIONS = {"gelu": "GELU", "silu": "SiLU", "relu": "ReLU"}


class StoredArchitecture(abc.ABC):
    """How models of one architecture are stored. Arguments called `config` are of its own kind of config.

    Attributes:
      name: What the native layout calls it.
    """

    name: str

    def fields(self, config: Any) -> Mapping[str, Any]:
        """Returns what the native layout writes of a config, from which `config_of` makes it again."""
        return dataclasses.asdict(config)

    @abc.abstractmethod
    def config_of(self, fields: Mapping[str, Any]) -> Config:
        """Returns the config that `dataclasses.asdict` made these fields of.

        Raises:
          ValueError: If a field is unknown, missing or wrong.
        """

    @abc.abstractmethod
    def check(self, config: Any, shapes: Shapes) -> None:
        """Refuses arrays that are not those of a model of this config, given their shapes by name.

        Raises:
          ValueError: If they are not; says how they differ.
        """

    @abc.abstractmethod
    def unseen(self, config: Any) -> str:
        """Returns what no array shows of a model, for its fingerprint."""

    @abc.abstractmethod
    def declared(self, config: Any) -> Declared:
        """Returns what a worker that loads the model must be told, whatever its files say."""

    @abc.abstractmethod
    def in_words(self, config: Any) -> str:
        """Returns what a model is, in one sentence without its end."""


class _T5(StoredArchitecture):
    name = "t5"

    def fields(self, config: T5Config) -> Mapping[str, Any]:
        # Without T5's own start and end, which readers of earlier versions do not know.
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
        # Of T5's own activation nothing is said: their fingerprints are older than other activations.
        is_t5 = config.activation == default_activation(gated_mlp=config.gated_mlp)
        text = f"{config.relative_max_distance}" + ("" if is_t5 else f", {config.activation}")
        # Nor of T5's own start and end.
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
        # Their files say everything.
        return Declared()

    def in_words(self, config: LlamaConfig) -> str:
        kind = config.rope_scaling.kind
        scaling = "" if kind == "default" else f" scaled by {kind}"
        window = ""
        if config.sliding_window is not None:
            window = f", a window of {config.sliding_window} in {len(config.windowed_layers)} layers"
        return (
            f"Decoder-only with gated {_ACTIVATIONS[config.activation]}: {config.num_decoder_layers} layers, width "
            f"{config.emb_dim}, {config.num_heads} heads of {config.head_dim} over {config.num_kv_heads} of keys, "
            f"feed-forward {config.mlp_dim}, rotary positions to base {config.rope_theta:g}{scaling}{window}, "
            f"{config.vocab_size} token ids, {'tied' if config.tied_head else 'untied'} head"
            f"{_exits_in_words(config)}"
        )


def _exits_in_words(config: T5Config | LlamaConfig) -> str:
    """Returns what the layers below the last have of their own, as the end of a sentence."""
    own = [name for name, has_any in (("a norm", config.exit_norms), ("a head", config.exit_heads)) if has_any]
    return f"; every decoder layer below the last exits by {' and '.join(own)} of its own" if own else ""


_BY_CONFIG: Mapping[type, StoredArchitecture] = {T5Config: _T5(), LlamaConfig: _Llama()}
BY_NAME: Mapping[str, StoredArchitecture] = {each.name: each for each in _BY_CONFIG.values()}


def stored_architecture(config: Config) -> StoredArchitecture:
    """Returns how models with such a config are stored."""
    return _BY_CONFIG[type(config)]
