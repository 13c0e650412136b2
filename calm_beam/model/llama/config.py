"""The config of a decoder-only model: its sizes and settings, and the parameter tree that they determine.

The sizes also determine the chunks of a prefill, so that it takes little memory for prompts of any length. This module
needs no JAX.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from calm_beam.model.architecture import Shapes, check_exit_fields, check_ids, cut, exit_fields, exit_shapes, few

# Activations of a feed-forward layer: GELU in its tanh form, SiLU (also called swish), ReLU.
ACTIVATIONS = ("silu", "gelu", "relu")

# Numbers of `RopeScaling` that each kind uses; the others keep their defaults.
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("original_max_positions", "pair_factors", "attention_factor"),
}
ROPE_SCALINGS = tuple(_SCALINGS)

# Fields that follow from names and shapes of arrays, given the other fields.
_SEEN = {"vocab_size", "emb_dim", "mlp_dim", "num_decoder_layers", "tied_head", "exit_classifier"} | {
    "num_experts",
    "attention_bias",
    "query_key_norms",
    "exit_norms",
    "exit_heads",
}
# Fields that are newer than some stored models and fingerprints: defaults are omitted, so old fingerprints stay valid.
_ADDED_LATER = {
    "pre_norms",
    "post_norms",
    "whole_norms",
    "turned_dim",
    "query_factor",
    "embedding_factor",
    "residual_factor",
    "logits_divisor",
    "unturned_layers",
    "local_rope_theta",
    "attention_cap",
    "logits_cap",
    "num_experts",
    "experts_per_token",
    "normed_expert_weights",
}
# Those of these fields that native code does not compute.
NOT_NATIVE = (
    "pre_norms",
    "post_norms",
    "whole_norms",
    "turned_dim",
    "residual_factor",
    "unturned_layers",
    "local_rope_theta",
    "attention_cap",
    "logits_cap",
    "num_experts",
)
_ADDED_TO_SCALINGS = {"pair_factors"}
# Far more than any model has, and few enough to write out the names of all arrays.
MOST_LAYERS = 1000
# Indices on devices are 32-bit integers.
_TOO_LARGE = 2**31
# Bound of factors and bases; the largest known is 10 million.
_LARGEST_NUMBER = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies of rotary positions are stretched over a longer context than the original one.

    Source: transformers `modeling_rope_utils.py`; YaRN (Peng et al. 2023), section 3; Llama 3.1's model card.

    Attributes:
      kind: `default` (not at all), `linear` (all divided by `factor`), `dynamic` (as `default` up to the model's
        `max_positions`, with a base that grows with the length beyond), `llama3` or `yarn` (low frequencies divided,
        high ones not, those between in part), `longrope` (each divided by its own factor).
      factor: Factor of the stretching, at least 1.
      original_max_positions: Positions of the original context, on which the model was first trained.
      low_freq_factor: For `llama3`: wavelengths above `original_max_positions / low_freq_factor` are divided fully.
      high_freq_factor: For `llama3`: wavelengths below `original_max_positions / high_freq_factor` stay.
      beta_fast: For `yarn`: frequencies with more rotations than this in `original_max_positions` stay.
      beta_slow: For `yarn`: frequencies with fewer rotations than this are divided fully.
      attention_factor: For `yarn` and `longrope`: factor of cosines and sines.
      pair_factors: For `longrope`: the factors, one for each pair of values.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    pair_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _SCALINGS:
            raise ValueError(
                f"rope_scaling: kind must be one of {', '.join(ROPE_SCALINGS)}; got {cut(repr(self.kind))}."
            )
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in _SCALINGS[self.kind]:
                if value != field.default:
                    raise ValueError(
                        f"rope_scaling: {field.name} is {cut(repr(value))}, but kind {self.kind} has no such number."
                    )
            elif field.type is int:
                _check_size(f"rope_scaling: {field.name}", value)
            elif field.name == "pair_factors":
                _check_factors(value)
            else:
                _set_positive(self, field.name, shown=f"rope_scaling: {field.name}")
        if self.factor < 1:
            raise ValueError(f"rope_scaling: factor must be at least 1, got {self.factor}.")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor must be below high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}."
            )
        if self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"rope_scaling: beta_slow must be below beta_fast, got {self.beta_slow} and {self.beta_fast}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and settings of a decoder-only model of Llama's family.

    Heads follow each other in the columns of the attention kernels, and rotary positions turn value i of a head with
    value i + head_dim / 2, as in transformers. Query heads share keys and values in groups of neighbours: query head h
    has those of head h // (num_heads // num_kv_heads).

    Attributes:
      vocab_size: Rows of the embedding, and width of the output head.
      emb_dim: Model width d.
      num_heads: Attention heads of queries per layer.
      num_kv_heads: Attention heads of keys and values per layer, a divisor of `num_heads`.
      head_dim: Width of one head, even.
      mlp_dim: Width of the gated feed-forward layer, of all its experts together.
      num_decoder_layers: Depth L; exit layers are counted from 1 to L.
      norm_epsilon: Added to the mean square in every norm.
      rope_theta: Base of the rotary frequencies, theta**(-2 i / head_dim).
      rope_scaling: How the rotary frequencies are stretched.
      max_positions: Most tokens of prompt and output together.
      end_ids: Token ids that end an output.
      attention_bias: Whether queries, keys and values have biases, as in Qwen2.
      query_key_norms: Whether queries and keys are normed in each head, before positions, as in Qwen3.
      whole_norms: Whether `query_key_norms` are over all heads together, as in OLMo 2.
      pre_norms: Whether attention and feed-forward layers take normed states.
      post_norms: Whether their outputs are normed before the residual is added, as in OLMo 2, which has no `pre_norms`.
      turned_dim: How many values of a head rotary positions turn, the first ones, as in Phi-4-mini; None for all.
      unturned_layers: Layers without rotary positions, as in SmolLM3, counted and ordered like `windowed_layers`.
      local_rope_theta: Base of the rotary frequencies in `windowed_layers`, which are not stretched, as in Gemma 3;
        None for that of all layers.
      query_factor: Factor of queries; None for head_dim**-0.5.
      embedding_factor: Factor of embeddings, as in Granite; it does not apply to a tied head.
      residual_factor: Factor of the outputs of attention and feed-forward layers before the residual is added.
      logits_divisor: Divisor of logits.
      attention_cap: Cap on attention's logits, by a hyperbolic tangent, as in Gemma 2; None if there is none.
      logits_cap: Cap on the head's logits, by a hyperbolic tangent; None if there is none.
      num_experts: Experts of a feed-forward layer, a divisor of `mlp_dim`: of its columns, the first are the first
        expert's, and so on. 1 if it is not a mixture.
      experts_per_token: How many of them a token uses: those with the largest weights, by a softmax over all.
      normed_expert_weights: Whether the weights of a token's experts are divided by their sum, as in Mixtral.
      tied_head: Whether the output head is the transposed embedding.
      sliding_window: Keys that a position sees in `windowed_layers`, itself included; None if it sees all everywhere.
      windowed_layers: Layers with a sliding window, counted from 0 as in names of parameters, ascending.
      activation: Activation of the gate, one of `ACTIVATIONS`.
      scaled_embedding: Whether embeddings are multiplied by sqrt(d), as in Gemma; it does not apply to a tied head.
      unit_offset_norms: Whether norms multiply by 1 + scale, as in Gemma, rather than by the scale.
      exit_classifier: Logits of the early-exit classifier `decoder/meta_cls`: 0 if there is none, else 1 or 2.
      exit_norms: Whether every layer below the last has its own norm before the head.
      exit_heads: Whether every layer below the last has its own head kernel.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_decoder_layers: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    max_positions: int
    end_ids: tuple[int, ...]
    attention_bias: bool = False
    query_key_norms: bool = False
    tied_head: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    activation: str = "silu"
    scaled_embedding: bool = False
    unit_offset_norms: bool = False
    exit_classifier: int = 0
    exit_norms: bool = False
    exit_heads: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    whole_norms: bool = False
    turned_dim: int | None = None
    unturned_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_factor: float | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_divisor: float = 1.0
    attention_cap: float | None = None
    logits_cap: float | None = None
    num_experts: int = 1
    experts_per_token: int = 1
    normed_expert_weights: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{field.name} must be true or false, got {cut(repr(value))}.")
            if field.type is int:
                _check_size(field.name, value, least=0 if field.name == "exit_classifier" else 1)
            if field.type is float:
                _set_positive(self, field.name, shown=field.name)
        if self.num_decoder_layers > MOST_LAYERS:
            raise ValueError(f"num_decoder_layers must be at most {MOST_LAYERS}, got {self.num_decoder_layers}.")
        if not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be a RopeScaling, got {cut(repr(self.rope_scaling))}.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {cut(repr(self.activation))}.")
        if self.exit_classifier not in (0, 1, 2):
            raise ValueError(f"exit_classifier must be 0, 1 or 2 logits, got {self.exit_classifier}.")
        check_exit_fields(self)
        check_ids("end_ids", self.end_ids, below=self.vocab_size)
        if not self.end_ids:
            raise ValueError("end_ids must name at least one id: without one, no output ends.")
        self._check_heads()
        self._check_window()
        self._check_experts()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}: query heads share "
                "keys and values in groups of equal size."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}: rotary positions turn pairs of values.")
        if self.turned_dim is not None:
            _check_size("turned_dim", self.turned_dim)
            if self.turned_dim % 2 or self.turned_dim >= self.head_dim:
                raise ValueError(
                    f"turned_dim must be even and below head_dim, {self.head_dim}, got {self.turned_dim}; leave it out "
                    "if positions turn all values."
                )
        for name in ("query_factor", "local_rope_theta", "attention_cap", "logits_cap"):
            if getattr(self, name) is not None:
                _set_positive(self, name, shown=name)
        factors = self.rope_scaling.pair_factors
        if self.rope_scaling.kind == "longrope" and len(factors) != self.turned // 2:
            raise ValueError(
                f"rope_scaling: pair_factors must have a number for each of {self.turned // 2} pairs, got "
                f"{len(factors)}."
            )
        if self.whole_norms and not self.query_key_norms:
            raise ValueError("whole_norms is true, but without query_key_norms there are none.")

    @property
    def turned(self) -> int:
        """How many values of a head rotary positions turn."""
        return self.turned_dim or self.head_dim

    def _check_window(self) -> None:
        check_ids("windowed_layers", self.windowed_layers, below=self.num_decoder_layers)
        check_ids("unturned_layers", self.unturned_layers, below=self.num_decoder_layers)
        if self.local_rope_theta is not None and not self.windowed_layers:
            raise ValueError("local_rope_theta is for windowed_layers, and there are none.")
        if (self.sliding_window is None) != (not self.windowed_layers):
            raise ValueError(
                "sliding_window and windowed_layers go together, got "
                f"{cut(repr(self.sliding_window))} and {cut(repr(self.windowed_layers))}."
            )
        if self.sliding_window is not None:
            _check_size("sliding_window", self.sliding_window)

    def _check_experts(self) -> None:
        if self.mlp_dim % self.num_experts:
            raise ValueError(
                f"num_experts must divide mlp_dim, got {self.num_experts} and {self.mlp_dim}: experts have equal "
                "shares of its columns."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts, got {self.experts_per_token} and {self.num_experts}."
            )
        if self.normed_expert_weights and self.num_experts == 1:
            raise ValueError("normed_expert_weights is true, but with a single expert there are no weights.")


def config_of(fields: Mapping[str, Any]) -> LlamaConfig:
    """Returns the config with the given fields, which came from `dataclasses.asdict` through JSON.

    Args:
      fields: Values by name; lists in place of tuples, and an object for the rope scaling.

    Raises:
      ValueError: If a field is unknown, missing or wrong.
    """
    values = dict(fields)
    _check_fields(LlamaConfig, values, shown="")
    scaling = values.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling must be an object, got {cut(repr(scaling))}.")
    _check_fields(RopeScaling, scaling, shown="rope_scaling: ")
    if isinstance(scaling.get("pair_factors"), list):
        values["rope_scaling"] = RopeScaling(**{**scaling, "pair_factors": tuple(scaling["pair_factors"])})
    else:
        values["rope_scaling"] = RopeScaling(**scaling)
    for name in ("end_ids", "windowed_layers", "unturned_layers"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return LlamaConfig(**values)


def stored_fields(config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of a config; defaults of newer fields are omitted, so that older readers accept it."""
    fields = _without_defaults(config, _ADDED_LATER)
    return {**fields, "rope_scaling": _without_defaults(config.rope_scaling, _ADDED_TO_SCALINGS)}


def _without_defaults(config: Any, names: set[str]) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name not in names or value != defaults[name]}


def unseen(config: LlamaConfig) -> str:
    """Returns the settings of a model that do not follow from its arrays, in one line of JSON."""
    fields = {name: value for name, value in stored_fields(config).items() if name not in _SEEN}
    return json.dumps(fields, sort_keys=True)


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every parameter.

    Args:
      config: Sizes of the model.

    Returns:
      Mapping from a name such as `decoder/layers_0/mlp/wi_0/kernel` (the gate; `wi_1` is multiplied by it) to a shape;
      kernels are [in, out].
    """
    width = config.emb_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (config.vocab_size, width)}
    for index in range(config.num_decoder_layers):
        shapes |= {f"decoder/layers_{index}/{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["decoder/decoder_norm/scale"] = (width,)
    if not config.tied_head:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    if config.exit_classifier:
        shapes["decoder/meta_cls/kernel"] = (width, config.exit_classifier)
        shapes["decoder/meta_cls/bias"] = (config.exit_classifier,)
    return shapes | exit_shapes(config)


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every parameter of a layer; names are without the prefix `decoder/layers_0/`."""
    width = config.emb_dim
    shapes: dict[str, tuple[int, ...]] = {}
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {"query": queries, "key": keys, "value": keys}
    if config.pre_norms:
        shapes["pre_self_attention_layer_norm/scale"] = (width,)
    shapes |= {f"self_attention/{name}/kernel": (width, size) for name, size in projections.items()}
    if config.attention_bias:
        shapes |= {f"self_attention/{name}/bias": (size,) for name, size in projections.items()}
    if config.query_key_norms:
        for name in ("query", "key"):
            shapes[f"self_attention/{name}_norm/scale"] = (
                projections[name] if config.whole_norms else config.head_dim,
            )
    shapes["self_attention/out/kernel"] = (queries, width)
    if config.post_norms:
        shapes["post_self_attention_layer_norm/scale"] = (width,)
    if config.pre_norms:
        shapes["pre_mlp_layer_norm/scale"] = (width,)
    if config.num_experts > 1:
        shapes["mlp/router/kernel"] = (width, config.num_experts)
    shapes |= {f"mlp/{name}/kernel": (width, config.mlp_dim) for name in ("wi_0", "wi_1")}
    shapes["mlp/wo/kernel"] = (config.mlp_dim, width)
    if config.post_norms:
        shapes["post_mlp_layer_norm/scale"] = (width,)
    return shapes


def check_parameters(config: LlamaConfig, found: Shapes) -> None:
    """Checks that arrays are those of a model.

    Args:
      config: Sizes of the model.
      found: Name and shape of every array.

    Raises:
      ValueError: If an array is missing, unknown or of another shape; the message names it.
    """
    exit_fields(found, config.num_decoder_layers)
    expected = parameter_shapes(config)
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"arrays are not those of the decoder-only model that the config describes: missing {few(missing)}; "
            f"unknown {few(unknown)}. Expected {len(expected)} arrays, found {len(found)}."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(found[name])}, expected {shape} by the config.")


def _check_fields(config: type, fields: Mapping[str, Any], *, shown: str) -> None:
    known = {field.name: field for field in dataclasses.fields(config)}
    unknown = sorted(fields.keys() - known.keys())
    missing = sorted(
        name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields
    )
    if unknown or missing:
        raise ValueError(f"{shown}unknown keys {cut(str(unknown))}, missing keys {missing}.")


def _check_size(name: str, value: object, *, least: int = 1) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {cut(repr(value))}.")
    if not least <= value < _TOO_LARGE:
        raise ValueError(f"{name} must be at least {least} and below 2**31, got {cut(str(value))}.")


def _set_positive(config: object, name: str, *, shown: str) -> None:
    """Converts a number to float, so that 10000 and 10000.0 are one model; refuses other types, and 0 or less."""
    value = getattr(config, name)
    if type(value) not in (int, float) or not 0 < value < _LARGEST_NUMBER:
        raise ValueError(f"{shown} must be a number above 0 and below 1e30, got {cut(repr(value))}.")
    object.__setattr__(config, name, float(value))


def _check_factors(values: object) -> None:
    is_list = isinstance(values, tuple) and all(
        type(value) is float and 0 < value < _LARGEST_NUMBER for value in values
    )
    if not is_list:
        raise ValueError(f"rope_scaling: pair_factors must be numbers above 0 and below 1e30, got {cut(repr(values))}.")


# Intermediate results that a prefill holds at a time: 256 MiB. With less, products have too few rows to be fast.
_MOST_NUMBERS = 1 << 26
_FEWEST_POSITIONS = 16


def chunk_positions(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many positions of each prompt are prefilled at a time: all, or equal parts.

    Args:
      config: The model's config.
      rows: Prompts that are prefilled together.
      source: Positions of each prompt.
    """
    most = max(_FEWEST_POSITIONS, _MOST_NUMBERS // (rows * _position_numbers(config, source=source)))
    count = -(-source // most)
    return -(-source // count)


def chunk_numbers(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many numbers a layer computes for a chunk: attention before and after the softmax, and MLP."""
    return rows * chunk_positions(config, rows=rows, source=source) * _position_numbers(config, source=source)


def _position_numbers(config: LlamaConfig, *, source: int) -> int:
    return 2 * config.num_heads * source + 2 * config.mlp_dim
