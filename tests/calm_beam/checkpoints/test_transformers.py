"""Random models against transformers itself, where it and torch are installed; its stored logits are checked always."""

import pathlib
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.model import network_of
from tests.calm_beam.checkpoints.outputs import assert_generates, assert_gives

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("feed_forward_proj", ["relu", "gated-gelu"])
def test_logits_and_outputs(
    feed_forward_proj: str, tie_word_embeddings: bool, seed: int, tmp_path: pathlib.Path
) -> None:
    """Whatever transformers saves, we compute every layer's logits and its greedy outputs."""
    # Here, since it imports torch.
    from tests.calm_beam.checkpoints import make_hugging_face_goldens as reference

    sizes: dict[str, Any] = {"num_layers": 1 + seed % 2, "num_decoder_layers": 2 + seed % 3, "d_kv": 2 + seed % 5}
    model = reference.build_model(
        "T5", seed, feed_forward_proj=feed_forward_proj, tie_word_embeddings=tie_word_embeddings, **sizes
    )
    model.save_pretrained(tmp_path)
    source, target = reference.inputs(seed, vocab_size=model.config.vocab_size)
    checkpoint = load_checkpoint(tmp_path)
    assert_gives(checkpoint, source, target, reference.layer_logits(model, source, target))
    assert_generates(checkpoint, source, reference.greedy(model, source, length=12))


@pytest.mark.parametrize("seed", [31, 32])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "llama3", "linear", "yarn", "mistral", "qwen2", "qwen3", "gemma"]
)
def test_logits_of_every_layer_of_decoder_only_models(name: str, seed: int, tmp_path: pathlib.Path) -> None:
    """Whatever transformers saves, every layer's logits are those of its hidden states, norm and head."""
    from tests.calm_beam.checkpoints import make_decoder_only_goldens as reference

    family, _, changes = reference.MODELS[name]
    model = reference.build_model(family, seed, **changes, max_position_embeddings=96)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    network = network_of(checkpoint.config)
    for tokens in reference.sequences(seed):
        found = network.apply({"params": checkpoint.parameters()}, np.array([tokens], np.int32))
        np.testing.assert_allclose(found[:, 0], reference.layer_logits(model, tokens), rtol=0, atol=1e-3)
