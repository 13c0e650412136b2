"""Random models against transformers itself, if it and torch are installed; its stored logits are always compared."""

import pathlib
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, load_checkpoint, write_hugging_face
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.model import network_of
from calm_beam.model.llama import RopeScaling
from tests.builders import build_arrays, build_config, checkpoint_of
from tests.calm_beam.checkpoints.gguf_files import fields_of, tensors_of, write_gguf
from tests.calm_beam.checkpoints.outputs import assert_generates, assert_gives
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("feed_forward_proj", ["relu", "gated-gelu"])
def test_logits_and_outputs(
    feed_forward_proj: str, tie_word_embeddings: bool, seed: int, tmp_path: pathlib.Path
) -> None:
    """Every layer's logits and the greedy outputs of saved T5s are those of transformers."""
    # Import here, since it imports torch.
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
    "name",
    [
        *("llama", "llama_tied", "llama3", "linear", "yarn", "mistral", "qwen2", "qwen3", "gemma"),
        *("olmo2", "phi3", "granite", "smollm3", "gemma3", "mixtral", "qwen3_moe", "qwen3_moe_normed"),
    ],
)
def test_logits_of_every_layer_of_decoder_only_models(name: str, seed: int, tmp_path: pathlib.Path) -> None:
    """Every layer's logits of saved decoder-only models are those of transformers' hidden states, norm and head."""
    from tests.calm_beam.checkpoints import make_decoder_only_goldens as reference

    family, _, changes = reference.MODELS[name]
    model = reference.build_model(family, seed, **changes, max_position_embeddings=96)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    network = network_of(checkpoint.config)
    for tokens in reference.sequences(seed):
        found = network.apply({"params": checkpoint.parameters()}, np.array([tokens], np.int32))
        np.testing.assert_allclose(found[:, 0], reference.layer_logits(model, tokens), rtol=0, atol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"tied_head": True, "num_kv_heads": 1}], ids=["own head", "tied"])
def test_a_gguf_file_of_phi_is_read_as_transformers_reads_it(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Every layer's logits are those of transformers' own dequantisation, with fused tensors of several types.

    transformers reads neither the window nor the tables of rotary factors: the file has none.
    """
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from tests.calm_beam.checkpoints import make_decoder_only_goldens as reference

    sizes = {"emb_dim": 128, "head_dim": 32, "mlp_dim": 64, "norm_epsilon": float(np.float32(1e-5))}
    config = build_llama_config(**sizes, **changes)
    write_gguf(
        tmp_path / "model.gguf",
        tensors_of(config, build_llama_arrays(config, 5), architecture="phi3"),
        architecture="phi3",
        fields={**fields_of(config, architecture="phi3"), "phi3.vocab_size": config.vocab_size},
        kinds={"blk.0.attn_qkv.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_1", "blk.2.attn_qkv.weight": "F16"},
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", pad_token_id=0)
    checkpoint = load_checkpoint(tmp_path / "model.gguf")
    network = network_of(checkpoint.config)
    for tokens in reference.sequences(41):
        found = network.apply({"params": checkpoint.parameters()}, np.array([tokens], np.int32))
        np.testing.assert_allclose(found[:, 0], reference.layer_logits(theirs.eval(), tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_head": True, "gated_mlp": False},
        {"activation": "silu", "end_ids": (1, 9), "start_id": 5},
        {"relative_bias_per_layer": True, "exit_norms": True, "exit_heads": True},
    ],
    ids=["T5 1.1", "original", "UL2", "UMT5 with exits"],
)
def test_it_generates_what_our_t5s_do(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """A T5 that we write is loaded without missing weights, and 50 greedy outputs are the same."""
    config = build_config(**{"num_encoder_layers": 3, "num_decoder_layers": 3, **changes})
    ours = checkpoint_of(config, build_arrays(config, 7))
    theirs = _loaded(ours, tmp_path, "AutoModelForSeq2SeqLM")
    lengths = np.random.default_rng(5).integers(1, 20, size=50)
    prompts = [np.random.default_rng(index).integers(2, 64, size=length) for index, length in enumerate(lengths)]
    found = dict(Decoder(ours, sweep_branches(ExitRule(), (0.5,), max_decode_length=12)).decode(prompts))
    for index, prompt in enumerate(prompts):
        tokens = theirs.generate(input_ids=torch.tensor(prompt[None]), max_new_tokens=12, do_sample=False)
        assert tokens[0, 1:].tolist() == found[index].tokens[0, : found[index].lengths[0]].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_heads": True, "end_ids": (2, 7)},
        {"attention_bias": True, "sliding_window": 5, "windowed_layers": (1, 2)},
        {"query_key_norms": True, "tied_head": True},
        {"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "tied_head": True},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, attention_factor=1.2)},
        {"pre_norms": False, "post_norms": True, "query_key_norms": True, "whole_norms": True},
        {"embedding_factor": 3.0, "residual_factor": 0.4, "query_factor": 0.2, "logits_divisor": 2.0},
        {"unturned_layers": (1,)},
        {
            **{"scaled_embedding": True, "unit_offset_norms": True, "query_key_norms": True, "post_norms": True},
            **{"activation": "gelu", "tied_head": True, "query_factor": 24**-0.5},
            **{"sliding_window": 5, "windowed_layers": (0, 2), "local_rope_theta": 100.0, "emb_dim": 24},
        },
        {
            **{"scaled_embedding": True, "unit_offset_norms": True, "post_norms": True, "activation": "gelu"},
            **{"tied_head": True, "query_factor": 24**-0.5, "attention_cap": 3.0, "logits_cap": 4.0},
            **{"sliding_window": 5, "windowed_layers": (0, 2), "emb_dim": 24},
        },
        {"sliding_window": 5, "windowed_layers": (0, 2)},
        {"num_experts": 4, "experts_per_token": 2, "normed_expert_weights": True, "mlp_dim": 32},
        {"num_experts": 5, "experts_per_token": 3, "query_key_norms": True, "mlp_dim": 20},
    ],
    ids=[
        "llama with exits",
        "qwen2",
        "qwen3",
        "gemma",
        "yarn",
        "olmo2",
        "granite",
        "smollm3",
        "gemma3",
        "gemma2",
        "ministral",
        "mixtral",
        "qwen3_moe",
    ],
)
def test_it_generates_what_our_decoder_only_models_do(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """The same holds for decoder-only models."""
    config = build_llama_config(**changes)
    ours = checkpoint_of(config, build_llama_arrays(config, 7))
    theirs = _loaded(ours, tmp_path, "AutoModelForCausalLM")
    lengths = np.random.default_rng(5).integers(1, 37, size=50)
    prompts = [np.random.default_rng(index).integers(0, 50, size=length) for index, length in enumerate(lengths)]
    decoder = Decoder(ours, sweep_branches(ExitRule(), (0.5,), max_decode_length=12), max_input_length=36)
    found = dict(decoder.decode(prompts))
    for index, prompt in enumerate(prompts):
        tokens = torch.tensor(prompt[None])
        made = theirs.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected = made[0, len(prompt) :].tolist()
        assert expected == found[index].tokens[0, : found[index].lengths[0]].tolist()


def _loaded(checkpoint: Checkpoint, folder: pathlib.Path, kind: str) -> Any:
    """Returns a model of transformers that has read exactly the weights that we wrote."""
    write_hugging_face(folder, checkpoint.config, arrays=checkpoint.arrays, vocabulary_path=None)
    model, notes = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert not notes["mismatched_keys"]
    return model.eval()
