"""MaxText's trees, stacked and separate, give MaxText's computations."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np
import orbax.checkpoint
import pytest
import yaml

from calm_beam.checkpoints import CheckpointError, load_checkpoint
from calm_beam.model.llama import RopeScaling

_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _DEPTH = 12, 4, 2, 6, 2
_CONFIG: dict[str, Any] = {
    "decoder_block": "llama2",
    "rope_type": "default",
    "rope_max_timescale": 10_000,
    "normalization_layer_epsilon": 1e-5,
    "mlp_activations": ["silu", "linear"],
    "logits_via_embedding": False,
    "max_target_length": 64,
    "attention_type": "global",
    "num_experts": 1,
}


def _layers(seed: int, *, bias: bool) -> dict[str, np.ndarray]:
    """Returns arrays of all layers by their names in a layer, layers on the first axis."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "pre_self_attention_layer_norm/scale": (_WIDTH,),
        "post_self_attention_layer_norm/scale": (_WIDTH,),
        "self_attention/query/kernel": (_WIDTH, _HEADS, _HEAD_DIM),
        "self_attention/key/kernel": (_WIDTH, _KV_HEADS, _HEAD_DIM),
        "self_attention/value/kernel": (_WIDTH, _KV_HEADS, _HEAD_DIM),
        "self_attention/out/kernel": (_HEADS, _HEAD_DIM, _WIDTH),
        "mlp/wi_0/kernel": (_WIDTH, 10),
        "mlp/wi_1/kernel": (_WIDTH, 10),
        "mlp/wo/kernel": (10, _WIDTH),
    }
    if bias:
        shapes["self_attention/query/bias"] = (_HEADS, _HEAD_DIM)
        shapes["self_attention/key/bias"] = shapes["self_attention/value/bias"] = (_KV_HEADS, _HEAD_DIM)
    return {name: generator.standard_normal((_DEPTH, *shape)).astype(np.float32) for name, shape in shapes.items()}


def _write(
    folder: pathlib.Path, layers: Mapping[str, np.ndarray], *, stacked: bool = False, **changes: Any
) -> pathlib.Path:
    """Writes a step of a run, config and end tokens in the run's folder; returns the folder of the steps."""
    generator = np.random.default_rng(9)
    decoder: dict[str, np.ndarray] = {
        "decoder_norm/scale": np.ones(_WIDTH, np.float32),
        "logits_dense/kernel": generator.standard_normal((_WIDTH, 40)).astype(np.float32),
    }
    for name, array in layers.items():
        if stacked:
            decoder[f"layers/{name}"] = np.moveaxis(array, 0, 1)
        else:
            decoder |= {f"layers_{index}/{name}": layer for index, layer in enumerate(array)}
    embedding = generator.standard_normal((40, _WIDTH)).astype(np.float32)
    tree = flax.traverse_util.unflatten_dict(decoder, sep="/")
    weights = {"token_embedder": {"embedding": embedding}, "decoder": tree}
    state = {"params": {"params": weights}, "opt_state": {"mu": np.zeros(3)}, "step": np.asarray(7)}
    item = folder / "checkpoints" / "7" / "items"
    item.parent.mkdir(parents=True)
    orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()).save(item, state)
    config = {key: value for key, value in {**_CONFIG, **changes}.items() if value is not ...}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    return folder / "checkpoints"


def _turn_neighbours(values: np.ndarray, position: int) -> np.ndarray:
    """Returns heads, (heads, head_dim), with each pair of neighbours rotated as a complex number."""
    frequencies = 10_000.0 ** (-np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
    turned = (values[:, ::2] + 1j * values[:, 1::2]) * np.exp(1j * position * frequencies)
    return np.stack([turned.real, turned.imag], -1).reshape(values.shape)


def _turn_halves(values: np.ndarray, position: int) -> np.ndarray:
    """Returns heads with each value of the first half and its partner in the second rotated as a complex number."""
    frequencies = 10_000.0 ** (-np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
    half = _HEAD_DIM // 2
    turned = (values[:, :half] + 1j * values[:, half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("changes", "neighbours", "holds_factor"),
    [
        ({}, False, True),
        ({"decoder_block": "mistral"}, False, True),
        ({"rope_type": "llama3.1", "rope_use_scale": False}, True, True),
        ({"model_name": "llama3.1-8b", "rope_use_scale": False}, True, True),
        ({"decoder_block": "qwen2"}, False, False),
    ],
)
def test_attention_is_maxtexts(
    changes: dict[str, Any], neighbours: bool, holds_factor: bool, stacked: bool, tmp_path: pathlib.Path
) -> None:
    """Attention logits are those of MaxText's rule for its own kernels, which never divides where they do."""
    layers = _layers(0, bias=changes.get("decoder_block") == "qwen2")
    checkpoint = load_checkpoint(_write(tmp_path, layers, stacked=stacked, **changes))
    config, arrays = checkpoint.config, checkpoint.arrays
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (_HEADS, _KV_HEADS, _HEAD_DIM)
    assert (config.end_ids, config.max_positions, config.num_decoder_layers) == ((2, 3), 64, _DEPTH)
    assert (checkpoint.layout, checkpoint.step) == ("orbax", 7)
    assert config.rope_scaling == RopeScaling()
    inputs = np.random.default_rng(1).standard_normal((2, _WIDTH))
    for index in range(_DEPTH):
        theirs, ours = {}, {}
        for which, position in (("query", 9), ("key", 4)):
            row = inputs[0 if which == "query" else 1]
            heads = np.einsum("d,dhk->hk", row, layers[f"self_attention/{which}/kernel"][index])
            heads = heads + layers.get(f"self_attention/{which}/bias", np.zeros((_DEPTH, 1, 1)))[index]
            theirs[which] = (_turn_neighbours if neighbours else _turn_halves)(heads, position)
            home = f"decoder/layers_{index}/self_attention/{which}"
            flat = row @ np.asarray(arrays[f"{home}/kernel"]) + np.asarray(arrays.get(f"{home}/bias", 0))
            ours[which] = _turn_halves(flat.reshape(-1, _HEAD_DIM), position)
        factor = 1 if holds_factor else _HEAD_DIM**-0.5
        expected = factor * theirs["query"] @ theirs["key"].T
        np.testing.assert_allclose(ours["query"] @ ours["key"].T / np.sqrt(_HEAD_DIM), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(
            arrays[f"decoder/layers_{index}/self_attention/out/kernel"],
            layers["self_attention/out/kernel"][index].reshape(-1, _WIDTH),
        )
        np.testing.assert_array_equal(
            arrays[f"decoder/layers_{index}/pre_mlp_layer_norm/scale"],
            layers["post_self_attention_layer_norm/scale"][index],
        )


def test_what_the_config_says_is_read(tmp_path: pathlib.Path) -> None:
    """Base, scaling, epsilon and a tied head come from the run's config."""
    changes: dict[str, Any] = {
        "rope_type": "llama3.1",
        "rope_max_timescale": 500_000,
        "normalization_layer_epsilon": 1e-6,
    }
    config = load_checkpoint(_write(tmp_path, _layers(0, bias=False), **changes)).config
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)
    assert (config.rope_theta, config.norm_epsilon, config.activation) == (500_000.0, 1e-6, "silu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_block": "gemma"}, "decoder_block is 'gemma'; only llama2, mistral, qwen2, qwen3 are supported"),
        ({"rope_type": "yarn"}, "rope_type is 'yarn'; only default and llama3.1 are supported"),
        ({"rope_max_timescale": ...}, "does not say rope_max_timescale, which no array shows"),
        ({"num_experts": 8}, "num_experts is 8, which is not supported"),
        ({"attention_type": "mla"}, "attention_type is 'mla', which is not supported"),
        ({"mlp_activations": ["silu"]}, r"mlp_activations is \['silu'\]; expected \[NAME, linear\]"),
        ({"logits_via_embedding": True}, "normalize_embedding_logits is on, which is not supported"),
        ({"normalization_layer_epsilon": "small"}, "norm_epsilon must be a number above 0.*got 'small'"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """Unsupported computations are refused, and facts that no array shows are not guessed."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_write(tmp_path, _layers(0, bias=False), **changes))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.yml", r"no config.yml, the config of the run .*put it there"),
        ("generation_config.json", r"no generation_config.json, which names what ends an output"),
    ],
)
def test_files_that_are_missing_are_named(name: str, message: str, tmp_path: pathlib.Path) -> None:
    """A missing file is named with its content and the place where it is expected."""
    steps = _write(tmp_path, _layers(0, bias=False))
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(steps)
