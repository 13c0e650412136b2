"""Every step of the device with thousands of rows, against the same rows in small parts and against numpy.

Fused reductions over many rows are compiled differently from those over few, and have been compiled wrongly.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla.steps import AskedRows, CopiedRows, EmbeddedRows, LayerRows, SkippedRows, ToldRows
from calm_beam.decoding.xla.tiles import grouped, ranks, source_positions, tile_rows, whole_tiles
from calm_beam.model import network_of
from tests.builders import build_arrays, build_config, checkpoint_of

_ROWS = 2048
_PART = max(64, tile_rows())
_RANKS = 8
_SOURCE = 5
_NODES = 3 * _ROWS
_CONFIG = build_config(exit_classifier=2)
_WINDOWS: dict[str, Any] = {"sliding_window": 7, "windowed_layers": (0, 1)}
_MODEL = network_of(_CONFIG)
_WIDTH, _HEADS, _HEAD = _CONFIG.emb_dim, _CONFIG.num_heads, _CONFIG.head_dim
_DEPTH = _CONFIG.num_decoder_layers
_ARRAYS = build_arrays(_CONFIG, 0)
_TREE = checkpoint_of(_CONFIG, _ARRAYS).parameters()
_LAYERS = [_TREE["decoder"][f"layers_{index}"] for index in range(_DEPTH)]
_CLASSIFIER = {"params": {"decoder": {"meta_cls": _TREE["decoder"]["meta_cls"]}}}
_HEAD_WEIGHTS = {"params": {"decoder": {name: _TREE["decoder"][name] for name in ("decoder_norm", "logits_dense")}}}
_GENERATOR = np.random.default_rng(0)
_STATES = _GENERATOR.standard_normal((_DEPTH + 1, _ROWS, _WIDTH)).astype(np.float32)
_BELOW, _BRANCHES = (_GENERATOR.permutation(_ROWS).astype(np.int32) for _ in range(2))
_STORES = [
    [_GENERATOR.standard_normal((_NODES, _HEADS * _HEAD)).astype(np.float32) for _ in range(2)] for _ in range(_DEPTH)
]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _parts() -> list[slice]:
    return [slice(start, start + _PART) for start in range(0, _ROWS, _PART)]


def _stores(layers: slice) -> list[tuple[jax.Array, ...]]:
    """Returns stores that may be donated."""
    return [tuple(jnp.array(values) for values in pair) for pair in _STORES[layers]]


def _weights(name: str) -> np.ndarray:
    return _ARRAYS[name].astype(np.float64)


def _normed(values: np.ndarray, scale: str) -> np.ndarray:
    values = values.astype(np.float64)
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6) * _weights(f"{scale}/scale")


def _kept(layer: int, states: np.ndarray) -> list[np.ndarray]:
    """Returns the keys and values that a layer, from 1, computes from states, (rows, heads * head_dim)."""
    name = f"decoder/layers_{layer - 1}"
    normed = _normed(states, f"{name}/pre_self_attention_layer_norm")
    return [normed @ _weights(f"{name}/self_attention/{kernel}/kernel") for kernel in ("key", "value")]


@pytest.mark.parametrize("measure", ["state", "classifier"])
@pytest.mark.parametrize("length", [16, 64])
def test_many_rows_go_through_a_layer_as_few_do(length: int, measure: str) -> None:
    """Output, keys, values and confidence of 2,048 rows equal those of few at a time to the bit, and numpy's."""
    generator = np.random.default_rng(length)
    steps = generator.integers(0, length, _ROWS).astype(np.int32)
    paths = generator.integers(0, _ROWS, (_ROWS, length)).astype(np.int32)
    nodes = (_ROWS + generator.permutation(_NODES - _ROWS)[:_ROWS]).astype(np.int32)
    paths[np.arange(_ROWS), steps] = nodes
    bias = generator.standard_normal((_HEADS, length)).astype(np.float32)
    # Later positions of a path belong to others and may hold anything.
    stores = [values.copy() for values in _STORES[1]]
    for values in stores:
        values[_ROWS - 1] = np.nan
    paths[(paths == _ROWS - 1) & (np.arange(length) <= steps[:, None])] = 0
    count, width = _ROWS // _RANKS, source_positions(_SOURCE)
    cross = tuple(generator.standard_normal((count, _HEADS, width, _HEAD)).astype(np.float32) for _ in range(2))
    mask = np.arange(width) <= generator.integers(0, _SOURCE, (count, 1))
    places = np.repeat(np.arange(count), _RANKS).astype(np.int32)

    def run(part: slice) -> tuple[np.ndarray, ...]:
        size = len(_BRANCHES[part])
        states, cache, (confidence,) = device_steps.run_layer(
            _MODEL,
            (measure,),
            parameters={"layer": _LAYERS[1], "classifier": _CLASSIFIER},
            states=jnp.array(_STATES),
            cache=tuple(jnp.array(values) for values in stores),
            keys_values=cross,
            source_mask=mask,
            terms=bias,
            layer=np.int32(2),
            rows=LayerRows(
                below=_BELOW[part],
                branches=_BRANCHES[part],
                nodes=nodes[part],
                paths=paths[part],
                steps=steps[part],
                prompt_lengths=np.ones(size, np.int32),
                **grouped(places[part], size),
            ).joined(),
        )
        kept = (np.asarray(values)[nodes[part]] for values in cache)
        return np.asarray(states)[2, _BRANCHES[part]], np.asarray(confidence), *kept

    many = run(slice(None))
    for values, few in zip(many, zip(*map(run, _parts()), strict=True), strict=True):
        np.testing.assert_array_equal(values, np.concatenate(few))
    inputs = _STATES[1, _BELOW]
    hidden = inputs + _attended_over_paths(inputs, [many[2], many[3]], stores, paths, nodes, steps, bias)
    expected = _rest_of_a_layer(hidden, cross, mask, places)
    np.testing.assert_allclose(many[0], expected, rtol=0, atol=1e-4)
    if measure == "state":
        norms = np.linalg.norm(inputs, axis=-1) * np.linalg.norm(expected, axis=-1)
        confidence = (inputs * expected).sum(-1) / norms
    else:
        scores = expected @ _weights("decoder/meta_cls/kernel") + _weights("decoder/meta_cls/bias")
        confidence = scipy.special.softmax(scores, axis=-1)[:, 1]
    np.testing.assert_allclose(many[1], confidence, rtol=0, atol=3e-5)


def _attended_over_paths(
    inputs: np.ndarray,
    made: list[np.ndarray],
    stores: list[np.ndarray],
    paths: np.ndarray,
    nodes: np.ndarray,
    steps: np.ndarray,
    bias: np.ndarray,
) -> np.ndarray:
    """Returns numpy's attention of rows to their paths; checks the keys and values computed from them."""
    kept = _kept(2, inputs)
    for values, expected in zip(made, kept, strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=2e-5)
    stores = [values.astype(np.float64) for values in stores]
    for store, new in zip(stores, kept, strict=True):
        store[nodes] = new
    name = "decoder/layers_1"
    queries = _normed(inputs, f"{name}/pre_self_attention_layer_norm") @ _weights(f"{name}/self_attention/query/kernel")
    outputs = np.zeros((_ROWS, _HEADS * _HEAD))
    for row in range(_ROWS):
        path = paths[row, : steps[row] + 1]
        keys, values = (store[path].reshape(-1, _HEADS, _HEAD) for store in stores)
        logits = np.einsum("hd,thd->ht", queries[row].reshape(_HEADS, _HEAD), keys) + bias[:, steps[row] :: -1]
        outputs[row] = np.einsum("ht,thd->hd", scipy.special.softmax(logits, axis=-1), values).reshape(-1)
    attended: np.ndarray = outputs @ _weights(f"{name}/self_attention/out/kernel")
    return attended


def _rest_of_a_layer(
    hidden: np.ndarray, cross: tuple[np.ndarray, ...], mask: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Returns numpy's output of a layer for states after self-attention."""
    name = "decoder/layers_1"
    attention = f"{name}/encoder_decoder_attention"
    normed = _normed(hidden, f"{name}/pre_cross_attention_layer_norm")
    queries = (normed @ _weights(f"{attention}/query/kernel")).reshape(_ROWS, _HEADS, _HEAD)
    logits = np.einsum("rhd,rhsd->rhs", queries, cross[0][places].astype(np.float64))
    logits = np.where(mask[places][:, None], logits, -np.inf)
    mixed = np.einsum("rhs,rhsd->rhd", scipy.special.softmax(logits, axis=-1), cross[1][places].astype(np.float64))
    hidden = hidden + mixed.reshape(_ROWS, -1) @ _weights(f"{attention}/out/kernel")
    normed = _normed(hidden, f"{name}/pre_mlp_layer_norm")
    gate, linear = (normed @ _weights(f"{name}/mlp/{kernel}/kernel") for kernel in ("wi_0", "wi_1"))
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return hidden + gelu * linear @ _weights(f"{name}/mlp/wo/kernel")


@pytest.mark.parametrize("lengths", [[1], [3, 1, 4, 1, 5, 9, 2, 6], [32, 32], [70, 1, 40]])
def test_groups_of_rows(lengths: list[int]) -> None:
    """Rows of one prompt are in few groups, each in one tile, at their own ranks; padding is in none."""
    places = np.repeat(np.random.default_rng(0).permutation(len(lengths)), lengths).astype(np.int32)
    size = whole_tiles(len(places))
    found = grouped(places, size)
    tiles = np.arange(size) // tile_rows()
    of_rows = tiles[: len(places)], found["groups"][: len(places)], found["ranks"][: len(places)]
    assert len(set(zip(*of_rows, strict=True))) == len(places)
    assert (found["groups"][: len(places)] < tile_rows()).all()
    assert (found["ranks"] < ranks()).all()
    np.testing.assert_array_equal(found["places"][of_rows[0] * tile_rows() + of_rows[1]], places)
    assert (found["groups"][len(places) :] >= tile_rows()).all()
    # Each prompt has full groups and one more in each tile.
    for tile, place in set(zip(of_rows[0].tolist(), places.tolist(), strict=True)):
        here = (of_rows[0] == tile) & (places == place)
        assert len(set(of_rows[1][here])) == -(-here.sum() // ranks())


@pytest.mark.parametrize("measure", ["softmax", "softmax_max"])
def test_many_rows_are_decided_as_few_are(measure: str) -> None:
    """Token and confidence of 2,048 states, of any layers, equal those of few at a time, and numpy's."""
    layers = np.random.default_rng(2).integers(1, _DEPTH + 1, _ROWS).astype(np.int32)

    def run(part: slice) -> tuple[np.ndarray, ...]:
        token, (confidence,), is_finite = device_steps.decide_rows(
            _MODEL,
            (measure,),
            head_layer=_DEPTH,
            parameters=_HEAD_WEIGHTS,
            states=_STATES,
            rows=AskedRows(branches=_BRANCHES[part], layers=layers[part]).joined(),
        )
        return tuple(map(np.asarray, (token, confidence, is_finite)))

    many = run(slice(None))
    for values, few in zip(many, zip(*map(run, _parts()), strict=True), strict=True):
        np.testing.assert_array_equal(values, np.concatenate(few))
    logits = _normed(_STATES[layers, _BRANCHES], "decoder/decoder_norm") @ _weights("decoder/logits_dense/kernel")
    ordered = np.sort(scipy.special.softmax(logits, axis=-1))
    np.testing.assert_array_equal(many[0], np.argmax(logits, axis=-1))
    expected = ordered[:, -1] - (ordered[:, -2] if measure == "softmax" else 0)
    np.testing.assert_allclose(many[1], expected, rtol=0, atol=1e-5)
    assert many[2].all()


def _skipped() -> tuple[np.ndarray, np.ndarray]:
    """Returns exit layers, (rows,), and the nodes of the layers above, (layers - 1, rows), none if not skipped."""
    generator = np.random.default_rng(3)
    layers = generator.integers(1, _DEPTH, _ROWS).astype(np.int32)
    nodes = np.stack([_ROWS + generator.permutation(_NODES - _ROWS)[:_ROWS] for _ in range(_DEPTH - 1)])
    nodes[np.arange(2, _DEPTH + 1)[:, None] <= layers] = _NODES
    return layers, nodes.astype(np.int32)


def _assert_stores(made: list[Any], nodes: np.ndarray, expected: dict[tuple[int, int], np.ndarray]) -> None:
    """Checks layers 2 to L: `expected` by layer and part, and everything else unchanged."""
    for layer, pair in enumerate(made, start=2):
        is_skipped = nodes[layer - 2] < _NODES
        for part, values in enumerate(pair):
            store = _STORES[layer - 1][part].astype(np.float64)
            store[nodes[layer - 2, is_skipped]] = expected[layer, part][is_skipped]
            np.testing.assert_allclose(values, store, rtol=0, atol=2e-5)


def test_many_rows_are_filled_as_numpy_does() -> None:
    """Skipped layers compute keys and values from 2,048 states as numpy does; all other nodes are unchanged."""
    layers, nodes = _skipped()
    made = device_steps.fill_skipped(
        _MODEL,
        _LAYERS[1:],
        terms=[None] * (_DEPTH - 1),
        cache=_stores(slice(1, None)),
        states=_STATES,
        rows=SkippedRows(
            branches=_BRANCHES, layers=layers, steps=layers, prompt_lengths=np.ones_like(layers), nodes=nodes.T
        ).joined(),
    )
    kept = _STATES[layers, _BRANCHES]
    expected = {(layer, part): new for layer in range(2, _DEPTH + 1) for part, new in enumerate(_kept(layer, kept))}
    _assert_stores(made, nodes, expected)


def test_many_rows_are_copied() -> None:
    """Skipped layers copy 2,048 keys and values, bit for bit; all other nodes are unchanged."""
    layers, nodes = _skipped()
    source_nodes = np.random.default_rng(4).permutation(_ROWS).astype(np.int32)
    told = CopiedRows(layers=layers, source_nodes=source_nodes, nodes=nodes.T)
    first, *made = device_steps.copy_skipped(_MODEL, _stores(slice(None)), rows=told.joined())
    stores = np.array(_STORES)
    expected = {
        (layer, part): stores[layers - 1, part, source_nodes] for layer in range(2, _DEPTH + 1) for part in range(2)
    }
    _assert_stores(made, nodes, expected)
    for values, before in zip(first, _STORES[0], strict=True):
        np.testing.assert_array_equal(values, before)


def test_many_sources_are_encoded_as_few_are() -> None:
    """Keys and values of 256 sources of 32 tokens are those of 8 at a time, and are stored at the given places."""
    tokens = np.random.default_rng(5).integers(0, _CONFIG.vocab_size, (256, 32)).astype(np.int32)
    places = np.random.default_rng(6).permutation(256).astype(np.int32)

    def run(part: slice) -> list[np.ndarray]:
        shape = (256, _HEADS, 32, _HEAD)
        cross: list[Any] = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(_DEPTH)]
        made, mask = device_steps.admit(
            _MODEL,
            {"params": _TREE},
            keys_values=cross,
            source_mask=jnp.zeros((256, 32), bool),
            source_tokens=tokens[part],
            lengths=np.full(len(tokens[part]), 32, np.int32),
            places=places[part],
        )
        np.testing.assert_array_equal(np.asarray(mask)[places[part]], tokens[part] != 0)
        return [np.asarray(values)[places[part]] for pair in made for values in pair]

    many = run(slice(None))
    few = [run(slice(start, start + 8)) for start in range(0, 256, 8)]
    for values, parts in zip(many, zip(*few, strict=True), strict=True):
        np.testing.assert_allclose(values, np.concatenate(parts), rtol=0, atol=5e-5)


def test_what_an_earlier_prompt_left_in_a_place_is_gone() -> None:
    """Sources narrower than their places are followed by zeros, since masked positions must be finite."""
    tokens = np.random.default_rng(5).integers(1, _CONFIG.vocab_size, (4, 16)).astype(np.int32)
    tokens[1, 9:] = 0
    places = np.array([5, 0, 8, 2], np.int32)
    shape = (8, _HEADS, 32, _HEAD)
    made, mask = device_steps.admit(
        _MODEL,
        {"params": _TREE},
        keys_values=[(jnp.full(shape, np.nan), jnp.full(shape, np.nan)) for _ in range(_DEPTH)],
        source_mask=jnp.ones((8, 32), bool),
        source_tokens=tokens,
        lengths=np.array([16, 9, 16, 16], np.int32),
        places=places,
    )
    # The third has no place.
    filled = places[[0, 1, 3]]
    others = np.setdiff1d(np.arange(8), filled)
    np.testing.assert_array_equal(np.asarray(mask)[filled], np.pad(tokens[[0, 1, 3]] != 0, ((0, 0), (0, 16))))
    assert np.asarray(mask)[others].all()
    for values in (np.asarray(values) for pair in made for values in pair):
        assert np.isfinite(values[filled, :, :16]).all()
        assert not values[filled, :, 16:].any()
        assert np.isnan(values[others]).all()


def _lowered(step: str) -> Any:
    """Returns a step, or a layer's end with a measure, lowered for few of 2,048 rows."""
    states = jnp.array(_STATES)
    # No other array here is as large.
    shape = (_ROWS // _RANKS, _HEADS, source_positions(_SOURCE), _HEAD)
    cross = (jnp.zeros(shape), jnp.zeros(shape))
    mask = jnp.ones((_ROWS // _RANKS, source_positions(_SOURCE)), bool)
    if step == "embed":
        embedding = {"params": {"token_embedder": {"embedding": jnp.zeros((_CONFIG.vocab_size, _WIDTH))}}}
        return device_steps.embed.lower(_MODEL, embedding, states=states, rows=_no_rows(EmbeddedRows))
    if step == "admit":
        tokens = jnp.ones((_RANKS, _SOURCE), jnp.int32)
        return device_steps.admit.lower(
            _MODEL,
            {"params": _TREE},
            keys_values=[cross] * _DEPTH,
            source_mask=mask,
            source_tokens=tokens,
            lengths=jnp.zeros(_RANKS, jnp.int32),
            places=jnp.zeros(_RANKS, jnp.int32),
        )
    if step == "fill_skipped":
        stores = _stores(slice(1, None))
        rows = _no_rows(SkippedRows, _DEPTH - 1)
        return device_steps.fill_skipped.lower(
            _MODEL, _LAYERS[1:], terms=[None] * (_DEPTH - 1), cache=stores, states=states, rows=rows
        )
    if step == "copy_skipped":
        return device_steps.copy_skipped.lower(_MODEL, _stores(slice(None)), rows=_no_rows(CopiedRows, _DEPTH - 1))
    return device_steps.run_layer.lower(
        _MODEL,
        () if step == "softmax" else (step,),
        parameters={"layer": _LAYERS[1], "classifier": _CLASSIFIER},
        states=states,
        cache=_stores(slice(1, 2))[0],
        keys_values=cross,
        source_mask=mask,
        terms=jnp.zeros((_HEADS, 16)),
        layer=np.int32(2),
        rows=_no_rows(LayerRows, 16),
    )


def _no_rows(kind: type[ToldRows], several: int = 0) -> jax.Array:
    return jnp.zeros((_PART, kind.num_columns(several)), jnp.int32)


@pytest.mark.parametrize(
    "step",
    ["embed", "admit", "softmax", "state", "classifier", "fill_skipped", "copy_skipped"],
)
def test_buffers_are_changed_in_place(step: str) -> None:
    """No step copies a donated buffer: with few rows in a large one, that would cost more than everything else."""
    compiled = _lowered(step).compile().as_text()
    buffers = {
        "embed": [_STATES.shape],
        "admit": [(_ROWS // _RANKS, _HEADS, source_positions(_SOURCE), _HEAD)],
        "fill_skipped": [_STORES[0][0].shape],
        "copy_skipped": [_STORES[0][0].shape],
    }.get(step, [_STATES.shape, _STORES[0][0].shape])
    for shape in buffers:
        kind = f"f32[{','.join(map(str, shape))}]"
        assert kind in compiled
        assert not re.search(rf"{re.escape(kind)}\S* copy\(", compiled)
