"""Folders written for transformers give our reader the same model, under the names that transformers writes."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from calm_beam.checkpoints import CheckpointError, load_checkpoint, write_hugging_face
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.model.llama import LlamaConfig, RopeScaling
from tests.builders import build_arrays, build_config, train_vocabulary
from tests.calm_beam.checkpoints import make_decoder_only_goldens, make_hugging_face_goldens
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer

_T5S: dict[str, tuple[str, dict[str, Any]]] = {
    "T5 1.1": ("t5", {}),
    "original": ("t5", {"tied_head": True, "gated_mlp": False}),
    "UL2": ("t5", {"activation": "silu"}),
    "gated ReLU": ("t5", {"activation": "relu"}),
    "GELU without a gate": ("t5", {"activation": "gelu", "gated_mlp": False}),
    "tables": ("umt5", {"relative_bias_per_layer": True}),
    "ends and start": ("t5", {"end_ids": (1, 9), "start_id": 5, "relative_buckets": 8, "relative_max_distance": 20}),
    "exits": ("t5", {"exit_norms": True, "exit_heads": True, "exit_classifier": 2, "tied_head": True}),
}
_LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)
_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, attention_factor=1.2, beta_fast=20.0)
_EXPERTS = {"num_experts": 4, "experts_per_token": 2, "mlp_dim": 28}
_LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tied_head": True, "num_kv_heads": 1, "activation": "gelu"}),
    "llama3": ("llama", {"rope_scaling": _LLAMA3, "max_positions": 128, "end_ids": (2, 7)}),
    "yarn": ("llama", {"rope_scaling": _YARN, "max_positions": 64}),
    "dynamic": ("llama", {"rope_scaling": RopeScaling(kind="dynamic", factor=2.0)}),
    "linear": ("llama", {"rope_scaling": RopeScaling(kind="linear", factor=2.5), "rope_theta": 50.0}),
    "windows": ("mistral", {"sliding_window": 3, "windowed_layers": (0, 1, 2)}),
    "biases": ("qwen2", {"attention_bias": True}),
    "biases and windows": ("qwen2", {"attention_bias": True, "sliding_window": 5, "windowed_layers": (0, 2)}),
    "norms of heads": ("qwen3", {"query_key_norms": True, "tied_head": True}),
    "gemma": ("gemma", {"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "tied_head": True}),
    "OLMo 2": ("olmo2", {"pre_norms": False, "post_norms": True, "query_key_norms": True, "whole_norms": True}),
    "SmolLM3": ("smollm3", {"unturned_layers": (1,)}),
    "windows in some layers": ("ministral", {"sliding_window": 3, "windowed_layers": (0, 2)}),
    "Mixtral": (
        "mixtral",
        {**_EXPERTS, "normed_expert_weights": True, "sliding_window": 3, "windowed_layers": (0, 1, 2)},
    ),
    "Qwen3 MoE": ("qwen3_moe", {**_EXPERTS, "query_key_norms": True}),
    "Qwen3 MoE with normed weights": (
        "qwen3_moe",
        {**_EXPERTS, "query_key_norms": True, "normed_expert_weights": True, "exit_norms": True},
    ),
    "Gemma 2": (
        "gemma2",
        {
            "scaled_embedding": True,
            "unit_offset_norms": True,
            "post_norms": True,
            "activation": "gelu",
            "tied_head": True,
            "query_factor": 24**-0.5,
            "sliding_window": 5,
            "windowed_layers": (1,),
            "attention_cap": 3.0,
            "logits_cap": 4.0,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            "scaled_embedding": True,
            "unit_offset_norms": True,
            "query_key_norms": True,
            "post_norms": True,
            "activation": "gelu",
            "tied_head": True,
            "query_factor": 24**-0.5,
            "sliding_window": 5,
            "windowed_layers": (0, 2),
            "local_rope_theta": 100.0,
        },
    ),
    "Granite": (
        "granite",
        {"embedding_factor": 3.0, "residual_factor": 0.4, "query_factor": 0.2, "logits_divisor": 2.0},
    ),
    "exits": ("llama", {"exit_norms": True, "exit_heads": True, "exit_classifier": 1}),
    "classifier": ("qwen3", {"query_key_norms": True, "exit_classifier": 2}),
}


def _model(config: Any) -> dict[str, np.ndarray]:
    return build_llama_arrays(config, 3) if isinstance(config, LlamaConfig) else build_arrays(config, 3)


def _write(folder: pathlib.Path, config: Any, **changes: Any) -> pathlib.Path:
    write_hugging_face(folder, config, **{"arrays": _model(config), "vocabulary_path": None, **changes})
    return folder


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        *((model_type, build_config(**changes)) for model_type, changes in _T5S.values()),
        *((model_type, build_llama_config(**changes)) for model_type, changes in _LLAMAS.values()),
    ],
    ids=[*(f"T5: {name}" for name in _T5S), *_LLAMAS],
)
def test_our_reader_gives_the_same_model(model_type: str, config: Any, tmp_path: pathlib.Path) -> None:
    """Config, arrays and fingerprint are equal; exit norms, heads and classifiers are in a file of their own."""
    found = load_checkpoint(_write(tmp_path, config))
    assert (found.layout, found.config) == ("hugging_face", config)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    arrays = _model(config)
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    own = {name for name in arrays if "exit_" in name or "meta_cls" in name}
    path = tmp_path / "calm_beam_exits.safetensors"
    assert path.exists() == bool(own)
    if own:
        assert safetensors.numpy.load_file(path).keys() == own


_GOLDENS = {
    f"{folder.name}/{path.name}": path
    for folder in (make_hugging_face_goldens.FOLDER, make_decoder_only_goldens.FOLDER)
    for path in sorted(folder.iterdir())
    # Phi-3's fused parts are written separately, and not all of longrope is kept.
    if (path / "model.safetensors").is_file() and not path.name.startswith("phi3")
}


@pytest.mark.parametrize("path", _GOLDENS.values(), ids=list(_GOLDENS))
def test_what_transformers_wrote_comes_back(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The tensors of a folder that transformers saved are written again with the same names and values."""
    checkpoint = load_checkpoint(path)
    _write(tmp_path, checkpoint.config, arrays=checkpoint.arrays)
    theirs, ours = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (path, tmp_path))
    for name, tensor in ours.items():
        np.testing.assert_array_equal(theirs[name], tensor)
    # Copies of a tied embedding, and a table that transformers does not read either.
    left_out = {name for name in theirs.keys() - ours.keys() if "embed_tokens" not in name}
    assert left_out <= {"lm_head.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}
    assert load_checkpoint(tmp_path).fingerprint() == checkpoint.fingerprint()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (build_config(relative_bias_per_layer=True, tied_head=True), "depends on the version of transformers"),
        (
            build_llama_config(attention_bias=True, query_key_norms=True),
            "transformers has no model that computes the same; the nearest is qwen2: query_key_norms is False there "
            "and True here.",
        ),
        (
            build_llama_config(sliding_window=3, windowed_layers=(0, 1, 2), logits_cap=30.0),
            "the nearest is mistral: logits_cap is None there and 30.0 here.",
        ),
        (
            build_llama_config(**_EXPERTS),
            "the nearest is mixtral: normed_expert_weights is True there and False here.",
        ),
        (
            build_llama_config(
                rope_scaling=RopeScaling(
                    kind="longrope", original_max_positions=64, pair_factors=(1.0, 2.0, 3.0), attention_factor=1.2
                )
            ),
            "of longrope, the factors beyond the positions of the first training are not kept",
        ),
    ],
)
def test_what_transformers_cannot_hold(config: Any, message: str, tmp_path: pathlib.Path) -> None:
    """Features that transformers cannot hold are refused by name before anything is written."""
    with pytest.raises(ValueError, match=r"transformers") as caught:
        _write(tmp_path / "folder", config)
    assert message in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_a_model_without_exits_takes_the_place_of_one_with_them(tmp_path: pathlib.Path) -> None:
    """A model without exits that overwrites one with them has none when it is read."""
    _write(tmp_path, build_llama_config(exit_norms=True))
    plain = build_llama_config()
    assert load_checkpoint(_write(tmp_path, plain)).config == plain


def test_exits_are_held_against_the_model(tmp_path: pathlib.Path) -> None:
    """An exit array with an unknown name is refused, as are norms of some layers only."""
    _write(tmp_path, build_llama_config())
    path = tmp_path / "calm_beam_exits.safetensors"
    safetensors.numpy.save_file({"token_embedder/embedding": np.zeros((50, 12), np.float32)}, path)
    with pytest.raises(CheckpointError, match=r"calm_beam_exits.safetensors: unknown token_embedder/embedding"):
        load_checkpoint(tmp_path)
    safetensors.numpy.save_file({"decoder/exit_norms_1/scale": np.zeros(12, np.float32)}, path)
    with pytest.raises(CheckpointError, match=r"decoder/exit_norms_0/scale is missing"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("encoder", [2, 4])
def test_a_decoder_deeper_than_its_encoder_is_generated_without_cache(encoder: int, tmp_path: pathlib.Path) -> None:
    """A KV cache of transformers 5 has as many layers as the encoder of a T5; fewer than the decoder's are an error."""
    config = build_config(num_encoder_layers=encoder, num_decoder_layers=3)
    _write(tmp_path, config)
    written = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert written.get("use_cache") is (False if encoder < 3 else None)


def test_half_precision(tmp_path: pathlib.Path) -> None:
    """As float16, tensors and config say so, and values beyond float16 are refused."""
    config = build_llama_config()
    _write(tmp_path, config, dtype="float16")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float16"
    arrays = {**_model(config), "decoder/decoder_norm/scale": np.full(12, 1e6, np.float32)}
    with pytest.raises(ValueError, match=r"decoder_norm/scale has values that are not finite in float16"):
        _write(tmp_path / "large", config, arrays=arrays, dtype="float16")


@pytest.mark.parametrize("extra_ids", [0, 5])
def test_pieces_have_the_name_and_the_sentinels_of_transformers(extra_ids: int, tmp_path: pathlib.Path) -> None:
    """A SentencePiece model becomes `spiece.model`, and having no sentinels is written, since the default is 100."""
    vocabulary = train_vocabulary(tmp_path / "sentencepiece.model")
    folder = _write(tmp_path / "folder", build_config(), vocabulary_path=vocabulary, extra_ids=extra_ids)
    assert (folder / "spiece.model").read_bytes() == vocabulary.read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"extra_ids": extra_ids}
    found = load_checkpoint(folder).vocabulary_path
    assert found == folder / "spiece.model"
    assert open_vocabulary(found).extra_ids == extra_ids


def test_a_tokenizer_goes_along_with_what_reads_it(tmp_path: pathlib.Path) -> None:
    """`tokenizer.json` is read unchanged, not by the model type's class, which may read it differently."""
    path = write_word_tokenizer(tmp_path / "tokenizer.json", 50, ends=(2,))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folder = _write(tmp_path / "folder", build_llama_config(), vocabulary_path=path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == {"eos_token": "w2", "tokenizer_class": "PreTrainedTokenizerFast"}
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert open_vocabulary(folder / "tokenizer.json").fingerprint == open_vocabulary(path).fingerprint
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    again = _write(tmp_path / "again", build_llama_config(), vocabulary_path=folder / "tokenizer.json")
    assert json.loads((again / "tokenizer_config.json").read_text()) == {"tokenizer_class": "GemmaTokenizer"}
