"""The sizes of a decoder-only model, what else its arrays do not show, and the parameter tree that belongs to it.

The sizes also decide into which chunks prompts are cut, so that prefill takes little memory however long they are.
Nothing here needs JAX.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from calm_beam.model.architecture import Shapes, check_exit_fields, check_ids, cut, exit_fields, exit_shapes, few

# Between the kernels of a feed-forward layer: GELU in its tanh form, SiLU (also called swish), ReLU.
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

# Fields that names and shapes of arrays show, given the others.
_SEEN = {"vocab_size", "emb_dim", "mlp_dim", "num_decoder_layers", "tied_head", "exit_classifier"} | {
    "attention_bias",
    "query_key_norms",
    "exit_norms",
    "exit_heads",
}
# Fields that came after models had been written and fingerprinted: where they change nothing, nothing is said of them.
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
}
# Of these, those that native code does not compute.
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
)
_ADDED_TO_SCALINGS = {"pair_factors"}
# Far more than any model has, and few enough to write out the names of all arrays.
MOST_LAYERS = 1000
# What indices on devices are made of.
_TOO_LARGE = 2**31
# Of factors and bases; the largest known is 10 million.
_LARGEST_NUMBER = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies of rotary positions are stretched over a longer context than a model was first trained on.

    Source: transformers `modeling_rope_utils.py`; YaRN (Peng et al. 2023), section 3; Llama 3.1's model card.

    Attributes:
      kind: `default` (not at all), `linear` (all divided by `factor`), `dynamic` (as `default` up to the model's
        `max_positions`, with a base that grows with the length beyond), `llama3` or `yarn` (low ones divided, high ones
        not, those between in part), `longrope` (each divided by a factor of its own).
      factor: By how much, at least 1.
      original_max_positions: Positions the model was first trained on.
      low_freq_factor: Of `llama3`: wavelengths above `original_max_positions / low_freq_factor` are divided whole.
      high_freq_factor: Of `llama3`: those below `original_max_positions / high_freq_factor` stay.
      beta_fast: Of `yarn`: frequencies with more rotations than this in `original_max_positions` stay.
      beta_slow: Of `yarn`: those with fewer rotations are divided whole.
      attention_factor: Of `yarn` and `longrope`: what cosines and sines are multiplied by.
      pair_factors: Of `longrope`: the factors, one for each pair of values.
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
    """Sizes of a decoder-only model of Llama's family, and what else decides what it computes.

    Heads lie one after the other in the columns of the attention kernels, and rotary positions turn value i of a head
    with value i + head_dim / 2, as transformers has them. Query heads share keys and values in groups of neighbours:
    query head h has those of head h // (num_heads // num_kv_heads).

    Attributes:
      vocab_size: Rows of the embedding, and width of the output head.
      emb_dim: Model width d.
      num_heads: Attention heads of queries per layer.
      num_kv_heads: Attention heads of keys and values per layer, a divisor of `num_heads`.
      head_dim: Width of one head, even.
      mlp_dim: Width of the gated feed-forward layer.
      num_decoder_layers: Depth L; exit layers are counted from 1 to L.
      norm_epsilon: Added to the mean square in every norm.
      rope_theta: Base of the rotary frequencies, theta**(-2 i / head_dim).
      rope_scaling: How these are stretched.
      max_positions: Most tokens of prompt and output together.
      end_ids: Token ids of which each ends an output.
      attention_bias: Whether queries, keys and values have biases, as in Qwen2.
      query_key_norms: Whether queries and keys are normed in each head, before positions, as in Qwen3.
      whole_norms: Whether these norms are of all heads together, as in OLMo 2.
      pre_norms: Whether attention and feed-forward layers take normed states.
      post_norms: Whether what they give is normed before it is added, as in OLMo 2, which has no norms before them.
      turned_dim: How many values of a head positions turn, the first ones, as in Phi-4-mini; None for all.
      unturned_layers: Layers without rotary positions, as in SmolLM3, counted and ordered as `windowed_layers`.
      local_rope_theta: Base of the rotary frequencies in `windowed_layers`, where nothing is stretched, as in Gemma 3;
        None for that of all layers.
      query_factor: What queries are multiplied by; None for head_dim**-0.5.
      embedding_factor: What embeddings are multiplied by, as in Granite; the tied head's are not.
      residual_factor: What attention and feed-forward layers give is multiplied by before it is added.
      logits_divisor: What logits are divided by.
      attention_cap: What attention's logits are kept within by a hyperbolic tangent, as in Gemma 2; None if they are as
        they come.
      logits_cap: The same of the head's logits.
      tied_head: Whether the output head is the transposed embedding.
      sliding_window: Keys that a position sees in `windowed_layers`, itself included; None if it sees all everywhere.
      windowed_layers: Those layers, counted from 0 as in names of parameters, in ascending order.
      activation: One of `ACTIVATIONS`, of the gate.
      scaled_embedding: Whether embeddings are multiplied by sqrt(d), as in Gemma; the tied head's are not.
      unit_offset_norms: Whether norms multiply by 1 + scale, as in Gemma, rather than by the scale.
      exit_classifier: Logits of the early-exit classifier `decoder/meta_cls`: 0 if there is none, else 1 or 2.
      exit_norms: Whether every layer below the last has a norm of its own before the head.
      exit_heads: Whether each of these has the kernel of a head of its own.
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
        """How many values of a head positions turn."""
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


def config_of(fields: Mapping[str, Any]) -> LlamaConfig:
    """Returns the config that `dataclasses.asdict` made these fields of, as JSON gives them back.

    Args:
      fields: By name; lists stand for tuples, and an object for the rope scaling.

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
    """Returns the fields of a config, without those that came later and change nothing: older readers take the rest."""
    fields = _without_defaults(config, _ADDED_LATER)
    return {**fields, "rope_scaling": _without_defaults(config.rope_scaling, _ADDED_TO_SCALINGS)}


def _without_defaults(config: Any, names: set[str]) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name not in names or value != defaults[name]}


def unseen(config: LlamaConfig) -> str:
    """Returns all that decides what a model computes and that its arrays do not show, in one line of JSON."""
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
    """Returns name and shape of every parameter of a layer, without what they begin with: `decoder/layers_0/`."""
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
    shapes |= {f"mlp/{name}/kernel": (width, config.mlp_dim) for name in ("wi_0", "wi_1")}
    shapes["mlp/wo/kernel"] = (config.mlp_dim, width)
    if config.post_norms:
        shapes["post_mlp_layer_norm/scale"] = (width,)
    return shapes


def check_parameters(config: LlamaConfig, found: Shapes) -> None:
    """Refuses arrays that are not those of a model.

    Args:
      config: Sizes of the model.
      found: Name and shape of every array.

    Raises:
      ValueError: If an array is missing, unknown or of another shape; names it.
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
    """Makes a number a float, so that 10000 and 10000.0 are one model; refuses what is none, or not above 0."""
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


# What is held at a time beside keys and values: 256 MiB. With less, products have too few rows to be fast.
_MOST_NUMBERS = 1 << 26
_FEWEST_POSITIONS = 16


def chunk_positions(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many positions of each prompt go through the layers at a time: all, or equal parts.

    Args:
      config: Of the model.
      rows: Prompts that go through it together.
      source: Positions of each.
    """
    most = max(_FEWEST_POSITIONS, _MOST_NUMBERS // (rows * _position_numbers(config, source=source)))
    count = -(-source // most)
    return -(-source // count)


def chunk_numbers(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many numbers a layer makes of a chunk: attention before and after the softmax, and MLP."""
    return rows * chunk_positions(config, rows=rows, source=source) * _position_numbers(config, source=source)


def _position_numbers(config: LlamaConfig, *, source: int) -> int:
    return 2 * config.num_heads * source + 2 * config.mlp_dim
