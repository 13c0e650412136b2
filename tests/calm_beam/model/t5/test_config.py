"""Sizes from shapes, and shapes from sizes."""

import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from calm_beam.model import EarlyExitT5, infer_config, parameter_shapes
from tests.builders import build_config

_QUERY = "decoder/layers_0/self_attention/query/kernel"


@pytest.mark.parametrize("exit_classifier", [0, 1, 2])
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("gated_mlp", [True, False])
def test_sizes_are_read_off_the_shapes(gated_mlp: bool, tied_head: bool, exit_classifier: int) -> None:
    """Every size comes back from the shapes alone, for any heads and feed-forward layers."""
    config = build_config(
        vocab_size=50,
        emb_dim=12,
        num_heads=3,
        head_dim=5,
        mlp_dim=7,
        num_encoder_layers=1,
        num_decoder_layers=11,
        relative_buckets=16,
        gated_mlp=gated_mlp,
        tied_head=tied_head,
        exit_classifier=exit_classifier,
    )
    assert infer_config(parameter_shapes(config)) == config


@pytest.mark.parametrize("exit_classifier", [0, 1, 2])
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("gated_mlp", [True, False])
def test_the_tree_is_that_of_the_network(gated_mlp: bool, tied_head: bool, exit_classifier: int) -> None:
    """The named shapes are exactly the parameters that Flax declares."""
    config = build_config(gated_mlp=gated_mlp, tied_head=tied_head, exit_classifier=exit_classifier)
    tokens = jnp.ones((1, 3), jnp.int32)
    tree = jax.eval_shape(EarlyExitT5(config).init, jax.random.key(0), tokens, tokens)["params"]
    declared = {name: leaf.shape for name, leaf in flax.traverse_util.flatten_dict(tree, sep="/").items()}
    assert declared == parameter_shapes(config)


def test_kernels_are_stored_input_first() -> None:
    """Kernels are [in, out], except the attention's output kernel."""
    shapes = parameter_shapes(build_config(emb_dim=12, num_heads=3, head_dim=5, mlp_dim=7))
    assert shapes[_QUERY] == (12, 15)
    assert shapes["decoder/layers_3/encoder_decoder_attention/out/kernel"] == (15, 12)
    assert shapes["encoder/layers_1/mlp/wi_0/kernel"] == (12, 7)
    assert shapes["encoder/layers_1/mlp/wo/kernel"] == (7, 12)
    assert shapes["encoder/relpos_bias/rel_embedding"] == (3, 32)


def test_an_empty_tree_is_refused() -> None:
    """Without any array, the message says that nothing was found."""
    with pytest.raises(ValueError, match=r"not a T5 parameter tree: expected token_embedder/embedding.*0 arrays"):
        infer_config({})


def test_another_model_is_refused() -> None:
    """A tree of another model is refused with what was expected and found."""
    shapes = {"wte": (50, 12), "h_0/attn/kernel": (12, 36)}
    with pytest.raises(ValueError, match=r"expected token_embedder/embedding.*found 2 arrays \(h_0/attn/kernel, wte"):
        infer_config(shapes)


@pytest.mark.parametrize(
    "name",
    ["encoder/encoder_norm/scale", "decoder/layers_2/mlp/wo/kernel", "decoder/layers_1/pre_mlp_layer_norm/scale"],
)
def test_a_missing_array_is_named(name: str) -> None:
    """A tree that lacks an array is refused, naming it and the numbers of arrays."""
    shapes = parameter_shapes(build_config())
    del shapes[name]
    with pytest.raises(ValueError, match=rf"missing {name}; unknown none.*Expected {len(shapes) + 1} arrays, found"):
        infer_config(shapes)


def test_a_missing_layer_is_not_a_shorter_model() -> None:
    """A gap in the numbers of layers is refused, not closed."""
    shapes = {
        name: shape for name, shape in parameter_shapes(build_config()).items() if "decoder/layers_1/" not in name
    }
    with pytest.raises(ValueError, match=r"missing decoder/layers_1/.* and 10 more; unknown decoder/layers_3/"):
        infer_config(shapes)


def test_half_a_classifier_is_refused() -> None:
    """A classifier without its bias is refused, and so is a bias without its kernel."""
    shapes = parameter_shapes(build_config(exit_classifier=2))
    without_bias = {name: shape for name, shape in shapes.items() if name != "decoder/meta_cls/bias"}
    with pytest.raises(ValueError, match="missing decoder/meta_cls/bias; unknown none"):
        infer_config(without_bias)
    without_kernel = {name: shape for name, shape in shapes.items() if name != "decoder/meta_cls/kernel"}
    with pytest.raises(ValueError, match="missing none; unknown decoder/meta_cls/bias"):
        infer_config(without_kernel)


def test_exits_are_read_off_the_shapes() -> None:
    """Norms and heads of layers below the last are recognised with those of all other sizes."""
    for exits in ({"exit_norms": True}, {"exit_heads": True}, {"exit_norms": True, "exit_heads": True}):
        config = build_config(num_decoder_layers=11, **exits)
        shapes = parameter_shapes(config)
        assert infer_config(shapes) == config
        found = {name: shape for name, shape in shapes.items() if "decoder/exit_" in name}
        assert len(found) == 10 * len(exits)
        assert found.get("decoder/exit_norms_9/scale") == ((16,) if "exit_norms" in exits else None)
        assert found.get("decoder/exit_heads_9/kernel") == ((16, 64) if "exit_heads" in exits else None)


@pytest.mark.parametrize(
    ("field", "kind", "layer", "message"),
    [
        ("exit_norms", "scale", 1, "decoder/exit_norms_1/scale is missing: of 4 decoder layers, each below the last"),
        ("exit_heads", "kernel", 0, "decoder/exit_heads_0/kernel is missing: .* has a head of its own"),
        ("exit_norms", "scale", 3, "decoder/exit_norms_3/scale is unknown: .* has a norm of its own"),
        ("exit_heads", "kernel", 7, "decoder/exit_heads_7/kernel is unknown"),
        ("exit_heads", "bias", 0, "decoder/exit_heads_0/bias is unknown"),
    ],
)
def test_some_exits_alone_are_refused(field: str, kind: str, layer: int, message: str) -> None:
    """All layers below the last have one, or none has; missing and unexpected ones are named."""
    shapes = parameter_shapes(build_config(**{field: True}))
    name = f"decoder/{field}_{layer}/{kind}"
    if name in shapes:
        del shapes[name]
    else:
        shapes[name] = (16,)
    with pytest.raises(ValueError, match=message):
        infer_config(shapes)


def test_a_single_layer_has_no_exit() -> None:
    """A model with a single layer has no exits below it."""
    with pytest.raises(ValueError, match="exit_norms is true, but needs at least 2 decoder layers"):
        build_config(num_decoder_layers=1, exit_norms=True)
    with pytest.raises(ValueError, match="decoder/exit_norms_0/scale is unknown: of 1 decoder layers"):
        infer_config({**parameter_shapes(build_config(num_decoder_layers=1)), "decoder/exit_norms_0/scale": (16,)})


def test_an_unknown_array_is_named() -> None:
    """An array that T5 1.1 lacks is refused, since its part of the computation would be missing."""
    shapes = {**parameter_shapes(build_config()), "encoder/layers_0/mlp/wi_0/bias": (32,)}
    with pytest.raises(ValueError, match="missing none; unknown encoder/layers_0/mlp/wi_0/bias"):
        infer_config(shapes)


def test_the_original_feed_forward() -> None:
    """The original T5's feed-forward layer has one input kernel, `wi`, and is recognised by it."""
    shapes = parameter_shapes(build_config(gated_mlp=False))
    assert shapes["encoder/layers_1/mlp/wi/kernel"] == (16, 32)
    assert not any("/wi_" in name for name in shapes)
    assert infer_config(shapes).gated_mlp is False


def test_layers_of_both_kinds_are_refused() -> None:
    """A tree in which some layers are gated and some are not is refused by name."""
    name = "encoder/layers_0/mlp/wi_1/kernel"
    shapes = parameter_shapes(build_config())
    shapes["encoder/layers_0/mlp/wi/kernel"] = shapes.pop(name)
    with pytest.raises(ValueError, match=f"missing {name}; unknown encoder/layers_0/mlp/wi/kernel"):
        infer_config(shapes)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("decoder/layers_2/self_attention/out/kernel", (16, 15), r"\(16, 16\)"),
        ("encoder/relpos_bias/rel_embedding", (2, 31), r"\(2, 32\)"),
        ("decoder/logits_dense/kernel", (64, 16), r"\(16, 64\)"),
        ("decoder/decoder_norm/scale", (16, 1), r"\(16,\)"),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], expected: str) -> None:
    """An array whose shape does not fit the others is refused with both shapes."""
    shapes = {**parameter_shapes(build_config()), name: shape}
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected {expected} from the sizes of other arrays"):
        infer_config(shapes)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    """Five heads cannot share sixteen columns; the first mis-shaped kernel is named."""
    shapes = {**parameter_shapes(build_config()), "decoder/relpos_bias/rel_embedding": (5, 32)}
    with pytest.raises(ValueError, match=r"has shape .*, expected .* from the sizes of other arrays"):
        infer_config(shapes)


def test_a_kernel_of_three_axes_is_refused() -> None:
    """A kernel that is not a matrix is refused with its shape."""
    shapes = {**parameter_shapes(build_config()), _QUERY: (16, 4, 16)}
    with pytest.raises(ValueError, match=rf"{_QUERY} must have 2 dimensions, got shape \(16, 4, 16\)\."):
        infer_config(shapes)


@pytest.mark.parametrize("field", ["vocab_size", "head_dim", "num_encoder_layers", "relative_buckets"])
def test_sizes_below_one_are_refused(field: str) -> None:
    """Every size must be at least 1, and the message names field and value."""
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        build_config(**{field: 0})
