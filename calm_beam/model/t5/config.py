"""The config of a T5 model: its sizes and settings, and the parameter tree that they determine."""

import dataclasses
import re
from collections.abc import Mapping

from calm_beam.model.architecture import Shapes, check_exit_fields, check_ids, cut, exit_fields, exit_shapes, few

# Activations of a feed-forward layer: GELU in its tanh form, SiLU (also called swish), ReLU.
ACTIVATIONS = ("gelu", "silu", "relu")

# Padding at any position of a prompt, and the start token unless the config names another id.
PAD_ID = 0
_EOS_ID = 1
# Far more than any T5 has, and few enough to write out the names of all arrays.
MOST_LAYERS = 1000
# Indices on devices are 32-bit integers.
_TOO_LARGE = 2**31
# Half of the encoder's buckets are for each direction, and half of those hold one distance each.
_LEAST_BUCKETS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes and settings of a T5 encoder-decoder: the original T5, T5 1.1, T5X's `scalable_t5`, or a mixture.

    Attributes:
      vocab_size: Rows of the embedding, and width of the output head.
      emb_dim: Model width d.
      num_heads: Attention heads per layer.
      head_dim: Width of one head.
      mlp_dim: Width of the feed-forward layer.
      num_encoder_layers: Encoder depth.
      num_decoder_layers: Decoder depth L; exit layers are counted from 1 to L.
      relative_buckets: Buckets of the relative position bias.
      relative_max_distance: Distance from which all positions share one bucket.
      gated_mlp: Whether the feed-forward layer is gated, as T5 1.1's is; the original T5's is not.
      activation: One of `ACTIVATIONS`; by default T5 1.1's GELU if gated, and the original T5's ReLU if not.
      relative_bias_per_layer: Whether every layer has its own relative position bias, as in T5X's `scalable_t5`; T5 has
        one for each stack.
      tied_head: Whether the output head is the transposed embedding, with hidden states scaled by 1/sqrt(d), as in the
        original T5.
      exit_classifier: Logits of the early-exit classifier `decoder/meta_cls`: 2 as in the released T5X code, 1 for the
        d + 1 weights of the paper, 0 if there is none.
      exit_norms: Whether every decoder layer below the last has its own norm before the head.
      exit_heads: Whether every decoder layer below the last has its own head kernel, which takes the normed states
        unscaled.
      start_id: Token id that the decoder reads in the first step.
      end_ids: Token ids that end an output, ascending.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    relative_buckets: int = 32
    relative_max_distance: int = 128
    gated_mlp: bool = True
    activation: str = ""
    relative_bias_per_layer: bool = False
    tied_head: bool = False
    exit_classifier: int = 0
    exit_norms: bool = False
    exit_heads: bool = False
    start_id: int = PAD_ID
    end_ids: tuple[int, ...] = (_EOS_ID,)

    @property
    def num_kv_heads(self) -> int:
        """Attention heads of keys and values: every head has its own."""
        return self.num_heads

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{field.name} must be true or false, got {cut(repr(value))}.")
            if field.type is int and field.name != "start_id":
                _check_size(field.name, value)
        self._check_begin_and_ends()
        if self.activation == "":
            object.__setattr__(self, "activation", default_activation(gated_mlp=self.gated_mlp))
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {cut(repr(self.activation))}.")
        if self.exit_classifier not in (0, 1, 2):
            raise ValueError(f"exit_classifier must be 0, 1 or 2 logits, got {self.exit_classifier}.")
        check_exit_fields(self)
        if self.relative_buckets < _LEAST_BUCKETS:
            raise ValueError(f"relative_buckets must be at least {_LEAST_BUCKETS}, got {self.relative_buckets}.")
        # The decoder's first buckets hold one distance each; the others share what is left.
        exact = self.relative_buckets // 2
        if self.relative_max_distance <= exact:
            raise ValueError(
                f"relative_max_distance must be above {exact}, half of the {self.relative_buckets} buckets, got "
                f"{self.relative_max_distance}. T5 has {T5Config.relative_max_distance}."
            )

    def _check_begin_and_ends(self) -> None:
        if type(self.start_id) is not int or not 0 <= self.start_id < self.vocab_size:
            raise ValueError(
                f"start_id must be a whole number from 0 to {self.vocab_size - 1}, got {cut(repr(self.start_id))}."
            )
        check_ids("end_ids", self.end_ids, below=self.vocab_size)
        if not self.end_ids:
            raise ValueError("end_ids must name at least one id: without one, no output ends.")


def default_activation(*, gated_mlp: bool) -> str:
    """Returns the activation of T5 1.1 if the feed-forward layer is gated, else that of the original T5."""
    return "gelu" if gated_mlp else "relu"


def parameter_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every parameter, as the T5X trees name them.

    Args:
      config: Sizes of the model.

    Returns:
      Mapping from a name such as `decoder/layers_0/mlp/wi_0/kernel` to a shape; kernels are [in, out].
    """
    width, inner = config.emb_dim, config.num_heads * config.head_dim
    attention = {"query": (width, inner), "key": (width, inner), "value": (width, inner), "out": (inner, width)}
    inputs = ("wi_0", "wi_1") if config.gated_mlp else ("wi",)
    mlp = {**dict.fromkeys(inputs, (width, config.mlp_dim)), "wo": (config.mlp_dim, width)}
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (config.vocab_size, width)}

    def add_stack(stack: str, depth: int, *, attentions: Mapping[str, str]) -> None:
        layers = [f"{stack}/layers_{index}" for index in range(depth)]
        for home in layers if config.relative_bias_per_layer else [stack]:
            shapes[f"{home}/relpos_bias/rel_embedding"] = (config.num_heads, config.relative_buckets)
        shapes[f"{stack}/{stack}_norm/scale"] = (width,)
        for layer in layers:
            shapes[f"{layer}/pre_mlp_layer_norm/scale"] = (width,)
            for name, norm in attentions.items():
                shapes[f"{layer}/{norm}/scale"] = (width,)
                shapes.update({f"{layer}/{name}/{kernel}/kernel": shape for kernel, shape in attention.items()})
            shapes.update({f"{layer}/mlp/{kernel}/kernel": shape for kernel, shape in mlp.items()})

    add_stack("encoder", config.num_encoder_layers, attentions={"attention": "pre_attention_layer_norm"})
    add_stack(
        "decoder",
        config.num_decoder_layers,
        attentions={
            "self_attention": "pre_self_attention_layer_norm",
            "encoder_decoder_attention": "pre_cross_attention_layer_norm",
        },
    )
    if not config.tied_head:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    if config.exit_classifier:
        shapes["decoder/meta_cls/kernel"] = (width, config.exit_classifier)
        shapes["decoder/meta_cls/bias"] = (config.exit_classifier,)
    return shapes | exit_shapes(config)


def infer_config(
    shapes: Shapes, *, activation: str = "", relative_max_distance: int = T5Config.relative_max_distance
) -> T5Config:
    """Returns the config of the model with a parameter tree.

    Args:
      shapes: Name and shape of every array, names as in `parameter_shapes`.
      activation: See `T5Config`; it does not follow from shapes.
      relative_max_distance: See `T5Config`; it does not follow from shapes.

    Returns:
      The config, whose `parameter_shapes` equal `shapes`.

    Raises:
      ValueError: If the tree is not a T5 encoder-decoder; the message has the names expected and found.
    """
    check_dimensions(shapes)
    gated_mlp = "decoder/layers_0/mlp/wi/kernel" not in shapes
    mlp_input = f"decoder/layers_0/mlp/{'wi_0' if gated_mlp else 'wi'}/kernel"
    table = "decoder/relpos_bias/rel_embedding"
    per_layer = table not in shapes and "decoder/layers_0/relpos_bias/rel_embedding" in shapes
    if per_layer:
        table = "decoder/layers_0/relpos_bias/rel_embedding"
    landmarks = ("token_embedder/embedding", table, "decoder/layers_0/self_attention/query/kernel", mlp_input)
    missing = [name for name in landmarks if name not in shapes]
    if missing:
        found = ", ".join(cut(name) for name in sorted(shapes)[:8]) or "nothing"
        raise ValueError(
            f"not a T5 parameter tree: expected {', '.join(missing)}; found {len(shapes)} arrays ({found}, ...)."
        )
    for name in landmarks:
        if len(shapes[name]) != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {shapes[name]}.")
    num_heads, buckets = shapes[table]
    vocab_size, emb_dim = shapes["token_embedder/embedding"]
    inner = shapes["decoder/layers_0/self_attention/query/kernel"][1]
    num_decoder_layers = _depth(shapes, "decoder")
    exits = exit_fields(shapes, num_decoder_layers)
    config = T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=inner // num_heads,
        mlp_dim=shapes[mlp_input][1],
        num_encoder_layers=_depth(shapes, "encoder"),
        num_decoder_layers=num_decoder_layers,
        relative_buckets=buckets,
        relative_max_distance=relative_max_distance,
        gated_mlp=gated_mlp,
        activation=activation,
        relative_bias_per_layer=per_layer,
        tied_head="decoder/logits_dense/kernel" not in shapes,
        exit_classifier=shapes.get("decoder/meta_cls/kernel", (0,))[-1],
        exit_norms=exits["exit_norms"],
        exit_heads=exits["exit_heads"],
    )
    _check_tree(shapes, parameter_shapes(config))
    return config


def check_dimensions(shapes: Shapes) -> None:
    """Checks that no array is without dimensions or without values.

    Raises:
      ValueError: If there is one; the message names it.
    """
    for name, shape in shapes.items():
        if not shape or min(shape) < 1:
            raise ValueError(f"{cut(name)} has shape {tuple(shape)}, expected dimensions of at least 1.")


def _check_size(name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {cut(repr(value))}.")
    if value < 1 and name != "exit_classifier":
        raise ValueError(f"{name} must be at least 1, got {cut(str(value))}.")
    if value >= _TOO_LARGE:
        raise ValueError(f"{name} must be below 2**31, got {cut(str(value))}.")
    if value > MOST_LAYERS and name.endswith("_layers"):
        raise ValueError(f"{name} must be at most {MOST_LAYERS}, got {value}.")


def _depth(shapes: Shapes, stack: str) -> int:
    pattern = re.compile(rf"{stack}/layers_(\d+)/")
    return len({match.group(1) for name in shapes if (match := pattern.match(name))})


def _check_tree(found: Shapes, expected: Shapes) -> None:
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            "not a T5 parameter tree: "
            f"missing {few(missing)}; unknown {few(unknown)}. Expected {len(expected)} arrays, found {len(found)}."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(found[name])}, expected {shape} from the sizes of other arrays.")
