"""The sizes of a model, and the parameter tree that belongs to them."""

import dataclasses
import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes of a T5 encoder-decoder: the original T5, T5 1.1, or a mixture of both.

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
      gated_mlp: Whether the feed-forward layer is T5 1.1's gated GELU; if not, it is the original T5's ReLU.
      tied_head: Whether the output head is the transposed embedding, with hidden states scaled by 1/sqrt(d), as in the
        original T5.
      exit_classifier: Logits of the early-exit classifier `decoder/meta_cls`: 2 as the released T5X code has it, 1 for
        the d + 1 weights of the paper, 0 if there is none.
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
    tied_head: bool = False
    exit_classifier: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and type(value) is not int:
                raise ValueError(f"{field.name} must be a whole number, got {value!r}.")
            if field.type is int and value < 1 and field.name != "exit_classifier":
                raise ValueError(f"{field.name} must be at least 1, got {value}.")
        if self.exit_classifier not in (0, 1, 2):
            raise ValueError(f"exit_classifier must be 0, 1 or 2 logits, got {self.exit_classifier}.")


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

    def add_stack(stack: str, depth: int, attentions: Mapping[str, str]) -> None:
        shapes[f"{stack}/relpos_bias/rel_embedding"] = (config.num_heads, config.relative_buckets)
        shapes[f"{stack}/{stack}_norm/scale"] = (width,)
        for index in range(depth):
            layer = f"{stack}/layers_{index}"
            shapes[f"{layer}/pre_mlp_layer_norm/scale"] = (width,)
            for name, norm in attentions.items():
                shapes[f"{layer}/{norm}/scale"] = (width,)
                shapes.update({f"{layer}/{name}/{kernel}/kernel": shape for kernel, shape in attention.items()})
            shapes.update({f"{layer}/mlp/{kernel}/kernel": shape for kernel, shape in mlp.items()})

    add_stack("encoder", config.num_encoder_layers, {"attention": "pre_attention_layer_norm"})
    add_stack(
        "decoder",
        config.num_decoder_layers,
        {
            "self_attention": "pre_self_attention_layer_norm",
            "encoder_decoder_attention": "pre_cross_attention_layer_norm",
        },
    )
    if not config.tied_head:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    if config.exit_classifier:
        shapes["decoder/meta_cls/kernel"] = (width, config.exit_classifier)
        shapes["decoder/meta_cls/bias"] = (config.exit_classifier,)
    return shapes


def infer_config(shapes: Shapes) -> T5Config:
    """Returns the sizes of the model that a parameter tree belongs to.

    Args:
      shapes: Name and shape of every array, names as in `parameter_shapes`.

    Returns:
      The config, whose `parameter_shapes` equal `shapes`.

    Raises:
      ValueError: If the tree is not a T5 encoder-decoder; says which names were expected and found.
    """
    gated_mlp = "decoder/layers_0/mlp/wi/kernel" not in shapes
    mlp_input = f"decoder/layers_0/mlp/{'wi_0' if gated_mlp else 'wi'}/kernel"
    landmarks = (
        "token_embedder/embedding",
        "decoder/relpos_bias/rel_embedding",
        "decoder/layers_0/self_attention/query/kernel",
        mlp_input,
    )
    missing = [name for name in landmarks if name not in shapes]
    if missing:
        found = ", ".join(sorted(shapes)[:8]) or "nothing"
        raise ValueError(
            f"not a T5 parameter tree: expected {', '.join(missing)}; found {len(shapes)} arrays ({found}, ...)."
        )
    for name in landmarks:
        if len(shapes[name]) != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {shapes[name]}.")
    num_heads, buckets = shapes["decoder/relpos_bias/rel_embedding"]
    vocab_size, emb_dim = shapes["token_embedder/embedding"]
    inner = shapes["decoder/layers_0/self_attention/query/kernel"][1]
    config = T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=inner // num_heads,
        mlp_dim=shapes[mlp_input][1],
        num_encoder_layers=_depth(shapes, "encoder"),
        num_decoder_layers=_depth(shapes, "decoder"),
        relative_buckets=buckets,
        gated_mlp=gated_mlp,
        tied_head="decoder/logits_dense/kernel" not in shapes,
        exit_classifier=shapes.get("decoder/meta_cls/kernel", (0,))[-1],
    )
    _check_tree(shapes, parameter_shapes(config))
    return config


def _depth(shapes: Shapes, stack: str) -> int:
    pattern = re.compile(rf"{stack}/layers_(\d+)/")
    return len({match.group(1) for name in shapes if (match := pattern.match(name))})


def _check_tree(found: Shapes, expected: Shapes) -> None:
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            "not a T5 parameter tree: "
            f"missing {_few(missing)}; unknown {_few(unknown)}. Expected {len(expected)} arrays, found {len(found)}."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{name} has shape {tuple(found[name])}, expected {shape} from the sizes of other arrays.")


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4]) or "none"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
