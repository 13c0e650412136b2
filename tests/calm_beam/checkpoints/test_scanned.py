"""Trees with scanned layers, stacked here independently, as T5X and Flaxformer do."""

import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.checkpoints import CheckpointError, load_checkpoint
from calm_beam.checkpoints.scanned import unstack_layers
from calm_beam.model import T5Config
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=2, num_decoder_layers=3)
_ARRAYS = build_arrays(_CONFIG, 0)


def _scan(
    config: T5Config, *, axis: int = 1, heads_apart: bool = False, library: str = "flaxformer"
) -> dict[str, np.ndarray]:
    """Returns the weights of `build_arrays` as a model that scans has them: stacked, with a table in each layer."""
    arrays = build_arrays(config, 0)
    stacked = {}
    for stack, depth in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        home = f"{stack}/{stack}" if library == "flaxformer" else f"{stack}/layers"
        table = "relpos_bias" if library == "flaxformer" else "relative_posemb"
        tables = [arrays.pop(f"{stack}/relpos_bias/rel_embedding")] * depth
        stacked[f"{home}/{table}/rel_embedding"] = np.stack(tables, axis)
        for name in [name for name in arrays if name.startswith(f"{stack}/layers_0/")]:
            rest = name.removeprefix(f"{stack}/layers_0/")
            layers = [arrays.pop(f"{stack}/layers_{index}/{rest}") for index in range(depth)]
            if heads_apart and "attention/" in rest:
                split = (config.num_heads, config.head_dim)
                shape = (*split, config.emb_dim) if "/out/" in rest else (config.emb_dim, *split)
                layers = [layer.reshape(shape) for layer in layers]
            stacked[f"{home}/{rest}"] = np.stack(layers, axis)
    return {**arrays, **stacked}


def _assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("library", ["flaxformer", "t5x"])
@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("gated_mlp", [False, True])
def test_layers_come_apart(gated_mlp: bool, heads_apart: bool, library: str) -> None:
    """A scanned tree of either library gives the arrays of the layers, heads joined or not, gated or not."""
    config = build_config(num_encoder_layers=2, num_decoder_layers=3, gated_mlp=gated_mlp)
    _assert_equal(unstack_layers(_scan(config, heads_apart=heads_apart, library=library)), build_arrays(config, 0))


@hypothesis.given(depths=st.tuples(st.integers(1, 12), st.integers(1, 12)))
@hypothesis.settings(max_examples=20, deadline=None)
def test_any_number_of_layers(depths: tuple[int, int]) -> None:
    """Layers keep their order at any depth; from ten on, names no longer sort as numbers do."""
    config = build_config(num_encoder_layers=depths[0], num_decoder_layers=depths[1])
    _assert_equal(unstack_layers(_scan(config)), build_arrays(config, 0))


def test_other_trees_stay_as_they_are() -> None:
    """A tree without scanned layers comes back array by array."""
    found = unstack_layers(_ARRAYS)
    assert found.keys() == _ARRAYS.keys()
    assert all(found[name] is _ARRAYS[name] for name in _ARRAYS)


def test_a_scanned_t5x_checkpoint(tmp_path: pathlib.Path) -> None:
    """A scanned checkpoint on disk is the same model as the unstacked one, fingerprint included."""
    write_t5x(tmp_path / "scanned", _scan(_CONFIG))
    write_t5x(tmp_path / "plain", _ARRAYS)
    scanned, plain = load_checkpoint(tmp_path / "scanned"), load_checkpoint(tmp_path / "plain")
    assert scanned.config == plain.config == _CONFIG
    assert scanned.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize("table", ["relpos_bias", "relative_posemb"])
def test_a_table_in_every_layer(table: str) -> None:
    """Equal tables in layers that are not stacked are shared too."""
    arrays = dict(_ARRAYS)
    shared = arrays.pop("decoder/relpos_bias/rel_embedding")
    arrays |= {f"decoder/layers_{index}/{table}/rel_embedding": shared for index in range(3)}
    _assert_equal(unstack_layers(arrays), _ARRAYS)


def test_tables_that_differ_are_refused(tmp_path: pathlib.Path) -> None:
    """Layers with relative positions of their own, as in UMT5, are refused by name, from the folder on."""
    arrays = _scan(_CONFIG)
    arrays["decoder/decoder/relpos_bias/rel_embedding"][0, 2, 5] += 1
    message = r"decoder/layers_2/relpos_bias/rel_embedding differs from the table of another layer: .*UMT5"
    with pytest.raises(ValueError, match=message):
        unstack_layers(arrays)
    folder = write_t5x(tmp_path, arrays)
    with pytest.raises(CheckpointError, match=f"checkpoint {folder}: {message}"):
        load_checkpoint(tmp_path)


def test_tables_of_both_kinds_are_refused(tmp_path: pathlib.Path) -> None:
    """A tree with a stack's table and a layer's is refused by name: which one counts is unknown."""
    shared = _ARRAYS["decoder/relpos_bias/rel_embedding"]
    write_t5x(tmp_path, {**_ARRAYS, "decoder/layers_0/relpos_bias/rel_embedding": shared})
    with pytest.raises(CheckpointError, match="unknown decoder/layers_0/relpos_bias/rel_embedding"):
        load_checkpoint(tmp_path)


def test_another_axis_is_refused() -> None:
    """Layers stacked first are refused with the shapes found and expected, and what to do."""
    with pytest.raises(ValueError, match="expected scanned layers on axis 1") as error:
        unstack_layers(_scan(_CONFIG, axis=0))
    message = str(error.value)
    assert "encoder/encoder/pre_mlp_layer_norm/scale (2, 16)" in message
    assert "so that norms are (16, layers). Move that axis, or split each array into layers_0, layers_1, ..." in message


def test_as_many_layers_as_columns_are_refused() -> None:
    """Where the model is as wide as deep, no shape tells the axis, and none is guessed."""
    config = build_config(num_encoder_layers=2, num_decoder_layers=16)
    with pytest.raises(ValueError, match=r"decoder/decoder/.*expected scanned layers on axis 1"):
        unstack_layers(_scan(config))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("decoder/decoder/mlp/wo/kernel", np.ones((32, 4, 16), np.float32)),
        ("decoder/decoder/mlp/wo/kernel", np.ones(16, np.float32)),
        ("decoder/decoder/pre_mlp_layer_norm/scale", None),
    ],
    ids=["depth", "flat", "norm"],
)
def test_stacks_that_do_not_agree_are_refused(name: str, array: np.ndarray | None) -> None:
    """An array with another number of layers than the norms, or without them, is refused, and so are missing norms."""
    arrays = _scan(_CONFIG)
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array
    with pytest.raises(ValueError, match="expected scanned layers on axis 1") as error:
        unstack_layers(arrays)
    assert re.search(f"{name} (has shape|is missing)", str(error.value))
