"""Trees with scanned layers, stacked here independently, as T5X and Flaxformer do."""

import collections
import dataclasses
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.checkpoints import Arrays, CheckpointError, StoredArray, load_checkpoint
from calm_beam.checkpoints import write_t5x as write_step
from calm_beam.checkpoints.orbax import read_arrays
from calm_beam.checkpoints.rearranged import unstack_layers
from calm_beam.checkpoints.t5x import read_t5x
from calm_beam.model import EarlyExitT5, T5Config
from tests.builders import build_arrays, build_config, write_t5x

from .scalable_trees import ARRAYS, DECODER_INPUTS, MLP_ACTIVATIONS, SCALABLE, SOURCES, scalable_tree

_CONFIG = build_config(num_encoder_layers=2, num_decoder_layers=3)
_ARRAYS = build_arrays(_CONFIG, 0)


def _scan(
    config: T5Config, *, axis: int = 1, heads_apart: bool = False, library: str = "flaxformer"
) -> dict[str, np.ndarray]:
    """Returns the weights of `build_arrays` as a scanning model has them: stacked, with a table in each layer."""
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


def _assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("library", ["flaxformer", "t5x"])
@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("gated_mlp", [False, True])
def test_layers_come_apart(gated_mlp: bool, heads_apart: bool, library: str) -> None:
    """A scanned tree of either library gives the layers' arrays, with heads joined or not, gated or not."""
    config = build_config(num_encoder_layers=2, num_decoder_layers=3, gated_mlp=gated_mlp)
    _assert_equal(unstack_layers(_scan(config, heads_apart=heads_apart, library=library)), build_arrays(config, 0))


@hypothesis.given(depths=st.tuples(st.integers(1, 12), st.integers(1, 12)))
@hypothesis.settings(max_examples=20, deadline=None)
def test_any_number_of_layers(depths: tuple[int, int]) -> None:
    """Layers keep their order at any depth, also from ten on, where names no longer sort as numbers do."""
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


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_are_stored_apart_are_read_apart(axis: int, heads_apart: bool) -> None:
    """If each layer is a chunk, kernels are read on demand; if layers are stored together, they are read once."""
    reads: collections.Counter[str] = collections.Counter()

    def stored(name: str, values: np.ndarray, chunk: tuple[int, ...]) -> StoredArray:
        def read(slices: tuple[slice, ...]) -> np.ndarray:
            reads[name] += 1
            return values[slices]

        return StoredArray(values.shape, values.dtype, read=read, chunk=chunk)

    scanned = _scan(_CONFIG, axis=axis, heads_apart=heads_apart)
    kernels = {name for name in scanned if "decoder/decoder/" in name and "rel_embedding" not in name}
    apart = {
        name: stored(name, values, tuple(1 if each == axis else size for each, size in enumerate(values.shape)))
        for name, values in scanned.items()
    }
    found = unstack_layers(apart)
    assert not kernels & reads.keys()
    _assert_equal(found, _ARRAYS)
    reads.clear()
    found = unstack_layers({name: stored(name, values, values.shape) for name, values in scanned.items()})
    _assert_equal(found, _ARRAYS)
    assert {reads[name] for name in kernels} == {1}


def test_layers_that_are_stored_together_have_to_fit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers stored together are refused if they do not fit into memory."""
    folder = write_t5x(tmp_path, _scan(_CONFIG))
    arrays = read_t5x(folder, keeps=lambda name: True)
    monkeypatch.setattr("calm_beam.checkpoints.metadata.available_bytes", lambda: 1000)
    with pytest.raises(CheckpointError, match="it stores layers together, so that its arrays have to be held"):
        unstack_layers(arrays)


@pytest.mark.parametrize("table", ["relpos_bias", "relative_posemb"])
def test_a_table_in_every_layer(table: str) -> None:
    """Equal tables in layers that are not stacked are shared too."""
    arrays = dict(_ARRAYS)
    shared = arrays.pop("decoder/relpos_bias/rel_embedding")
    arrays |= {f"decoder/layers_{index}/{table}/rel_embedding": shared for index in range(3)}
    _assert_equal(unstack_layers(arrays), _ARRAYS)


def test_tables_that_differ_stay(tmp_path: pathlib.Path) -> None:
    """If one stack has tables of its own in each layer, those of the other, equal or shared, become the layers'."""
    arrays = _scan(_CONFIG)
    arrays["decoder/decoder/relpos_bias/rel_embedding"][0, 2, 5] += 1
    expected = dict(_ARRAYS)
    for stack, depth in (("encoder", 2), ("decoder", 3)):
        shared = expected.pop(f"{stack}/relpos_bias/rel_embedding")
        expected |= {f"{stack}/layers_{index}/relpos_bias/rel_embedding": shared.copy() for index in range(depth)}
    expected["decoder/layers_2/relpos_bias/rel_embedding"][0, 5] += 1
    _assert_equal(unstack_layers(arrays), expected)
    of_a_layer = arrays.pop("encoder/encoder/relpos_bias/rel_embedding")[:, 0]
    arrays["encoder/relpos_bias/rel_embedding"] = of_a_layer
    _assert_equal(unstack_layers(arrays), expected)
    write_t5x(tmp_path, arrays)
    assert load_checkpoint(tmp_path).config == dataclasses.replace(_CONFIG, relative_bias_per_layer=True)


@pytest.mark.parametrize("scan_axis", [None, 0, 1])
def test_what_scalable_t5_computes(tmp_path: pathlib.Path, scan_axis: int | None) -> None:
    """T5X's own network with our weights has our logits, however its layers are stacked."""
    goldens = np.load(pathlib.Path(__file__).parent / "scalable_t5_goldens.npz")
    write_t5x(tmp_path, scalable_tree(SCALABLE, ARRAYS, scan_axis=scan_axis))
    (tmp_path / "config.gin").write_text(f"network.T5Config.mlp_activations = {MLP_ACTIVATIONS}\n")
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == SCALABLE
    logits = EarlyExitT5(SCALABLE).apply({"params": checkpoint.parameters()}, SOURCES, DECODER_INPUTS)[-1]
    np.testing.assert_allclose(logits, goldens["logits"], rtol=0, atol=1e-4)


def test_scalable_t5_restores_what_is_written(tmp_path: pathlib.Path) -> None:
    """A model whose layers have their own tables is written as that network has it without scanning."""
    folder = write_step(tmp_path, SCALABLE, arrays=ARRAYS, step=3, vocabulary_path=None)
    places = {
        name: {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / f'target.{name}'}/"}}
        for name in (path.name.removeprefix("target.") for path in folder.glob("target.*"))
    }
    found = read_arrays(folder, places)
    expected = scalable_tree(SCALABLE, ARRAYS, scan_axis=None)
    assert {name: array.shape for name, array in found.items()} == {
        name.replace("/", "."): array.shape for name, array in expected.items()
    }
    written = load_checkpoint(tmp_path)
    assert written.config == SCALABLE
    _assert_equal(written.arrays, ARRAYS)


def test_tables_of_both_kinds_are_refused(tmp_path: pathlib.Path) -> None:
    """A tree with a stack's table and a layer's is refused by name, since either could apply."""
    shared = _ARRAYS["decoder/relpos_bias/rel_embedding"]
    write_t5x(tmp_path, {**_ARRAYS, "decoder/layers_0/relpos_bias/rel_embedding": shared})
    with pytest.raises(CheckpointError, match="unknown decoder/layers_0/relpos_bias/rel_embedding"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("library", ["flaxformer", "t5x"])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_layers_on_axis_0(heads_apart: bool, library: str) -> None:
    """Layers stacked first are separated as well, since shapes show the axis."""
    _assert_equal(unstack_layers(_scan(_CONFIG, axis=0, heads_apart=heads_apart, library=library)), _ARRAYS)


@pytest.mark.parametrize("axis", [0, 1])
def test_as_many_layers_as_columns(axis: int) -> None:
    """If width and depth are equal, norms do not show the axis, but the other arrays do."""
    config = build_config(num_encoder_layers=2, num_decoder_layers=16)
    _assert_equal(unstack_layers(_scan(config, axis=axis)), build_arrays(config, 0))


def test_an_axis_that_nothing_tells_is_refused() -> None:
    """If every size equals the depth, no shape shows the axis, and the tree is refused."""
    config = build_config(
        emb_dim=4, num_heads=4, head_dim=1, mlp_dim=4, relative_buckets=4, num_encoder_layers=4, num_decoder_layers=4
    )
    with pytest.raises(
        ValueError, match=r"(en|de)coder/pre_mlp_layer_norm/scale has shape \(4, 4\): .*both are possible"
    ):
        unstack_layers(_scan(config))


def test_another_axis_is_refused() -> None:
    """Layers stacked last are refused with the shapes found and expected, and what to do."""
    arrays = _scan(_CONFIG)
    arrays |= {
        name: np.moveaxis(array, 1, -1) for name, array in arrays.items() if "/kernel" in name and array.ndim > 2
    }
    with pytest.raises(ValueError, match=r"expected scanned layers on axis 1 or on axis 0") as error:
        unstack_layers(arrays)
    message = str(error.value)
    assert "encoder/encoder/pre_mlp_layer_norm/scale (16, 2)" in message
    assert (
        "(16, layers) or (layers, 16); neither is possible here. Split each array into layers_0, layers_1," in message
    )


def test_absurdly_many_layers_are_refused() -> None:
    """An array that claims a million layers is refused before names are made for them."""
    with pytest.raises(ValueError, match="at most 1000"):
        unstack_layers({**_scan(_CONFIG), "decoder/decoder/pre_mlp_layer_norm/scale": np.ones((16, 1_000_000), "f4")})


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
    """Arrays that disagree with the norms on the number of layers are refused, as are missing norms."""
    arrays = _scan(_CONFIG)
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array
    with pytest.raises(ValueError, match="expected scanned layers on axis 1") as error:
        unstack_layers(arrays)
    assert re.search(f"{name} (has shape|is missing)", str(error.value))
