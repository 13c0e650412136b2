"""Hugging Face folders: those that transformers saved, with its logits, and every way of not being a T5."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint, write_t5x
from calm_beam.checkpoints.model_folder import write_native
from calm_beam.model import T5Config
from tests.builders import build_arrays, build_config, hugging_face_tensors, write_hugging_face
from tests.calm_beam.checkpoints.outputs import GOLDENS, assert_generates, assert_gives

_NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
_T5_1_1 = build_config(num_encoder_layers=1, num_decoder_layers=2)
_ORIGINAL = build_config(num_encoder_layers=1, num_decoder_layers=2, tied_head=True, gated_mlp=False)
_LOGITS = "decoder/logits_dense/kernel"


def _write(folder: pathlib.Path, config: T5Config = _T5_1_1, **fields: Any) -> pathlib.Path:
    """Writes a model whose config has the given fields changed, or left out where they are None."""
    write_hugging_face(folder, config, build_arrays(config, 0))
    path = folder / "config.json"
    changed = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return folder


def _save(folder: pathlib.Path, changes: Mapping[str, np.ndarray | None], config: T5Config = _T5_1_1) -> pathlib.Path:
    """Writes a model with tensors added, replaced, or left out where they are None."""
    _write(folder, config)
    tensors = {**hugging_face_tensors(config, build_arrays(config, 0)), **changes}
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", _NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """For every kind of T5, every layer's logits are those that transformers computed."""
    with np.load(GOLDENS / name / "expected.npz") as expected:
        assert_gives(load_checkpoint(GOLDENS / name), expected["source"], expected["target"], expected["logits"])


# For the others, compiling the decoder would take most of this file's time.
@pytest.mark.parametrize("name", ["original", "t5_1_1", "umt5", "own_ends", "own_start", "start_by_bos"])
def test_outputs_are_those_of_transformers(name: str) -> None:
    """The full model's greedy outputs are those that transformers generated."""
    with np.load(GOLDENS / name / "expected.npz") as expected:
        assert_generates(load_checkpoint(GOLDENS / name), expected["source"], expected["greedy"])


def test_the_goldens_are_of_all_kinds() -> None:
    """Among them are both feed-forward layers, both heads in either, tables in every layer, and bfloat16 in parts."""
    configs = [load_checkpoint(GOLDENS / name).config for name in _NAMES]
    assert {(config.gated_mlp, config.tied_head) for config in configs} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    assert {config.activation for config in configs} == {"gelu", "relu", "silu"}
    assert {config.relative_bias_per_layer for config in configs} == {True, False}
    assert len({config.num_encoder_layers == config.num_decoder_layers for config in configs}) == 2
    assert len(list((GOLDENS / "bfloat16_in_parts").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("config", [_T5_1_1, _ORIGINAL], ids=["1.1", "original"])
def test_names_and_turns(config: T5Config, tmp_path: pathlib.Path) -> None:
    """Every array comes back under its name, [in, out], with the sizes of the config."""
    arrays = build_arrays(config, 0)
    checkpoint = load_checkpoint(write_hugging_face(tmp_path, config, arrays))
    assert checkpoint.config == config
    assert (checkpoint.layout, checkpoint.directory, checkpoint.step) == ("hugging_face", tmp_path, None)
    assert checkpoint.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array)


def test_the_vocabulary_by_its_other_name(tmp_path: pathlib.Path) -> None:
    """`spiece.model` is the vocabulary, `sentencepiece.model` precedes it; one in the folder above is ignored."""
    folder = _write(tmp_path / "model")
    (tmp_path / "spiece.model").write_bytes(b"x")
    assert load_checkpoint(folder).vocabulary_path is None
    for name in ("spiece.model", "sentencepiece.model"):
        (folder / name).write_bytes(b"x")
        assert load_checkpoint(folder).vocabulary_path == folder / name


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (_ORIGINAL, ["feed_forward_proj", "tie_word_embeddings"]),
        (_ORIGINAL, ["relative_attention_max_distance", "relative_attention_num_buckets", "decoder_start_token_id"]),
        (_T5_1_1, ["layer_norm_epsilon", "pad_token_id", "eos_token_id", "is_encoder_decoder"]),
    ],
)
def test_what_a_config_leaves_out(config: T5Config, left_out: list[str], tmp_path: pathlib.Path) -> None:
    """A missing field has the default of transformers, such as the original T5's ReLU."""
    folder = _write(tmp_path, config, **dict.fromkeys(left_out))
    assert load_checkpoint(folder).config == config


def test_both_stacks_are_as_deep_by_default(tmp_path: pathlib.Path) -> None:
    """Without `num_decoder_layers`, or with null, the decoder is as deep as the encoder; other nulls have no effect."""
    config = build_config(num_encoder_layers=2, num_decoder_layers=2)
    folder = _write(tmp_path, config, num_decoder_layers=None)
    assert load_checkpoint(folder).config == config
    path = folder / "config.json"
    nulls = {"num_decoder_layers": None, "decoder_start_token_id": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), **nulls}))
    assert load_checkpoint(folder).config == config


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": [1]},
        {"is_gated_act": True, "dense_act_fn": "gelu_new"},
        {"feed_forward_proj": "gated-gelu_new"},
        {"task_specific_params": {"summarization": {"prefix": "summarize: "}}, "n_positions": 512},
    ],
    ids=str,
)
def test_other_words_for_the_same(fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Configs with other spellings of the same, or with irrelevant fields, are read."""
    assert load_checkpoint(_write(tmp_path, **fields)).config == _T5_1_1


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (dataclasses.replace(_T5_1_1, activation="silu"), {"feed_forward_proj": "gated-silu"}),
        (dataclasses.replace(_T5_1_1, activation="silu"), {"feed_forward_proj": "gated-swish"}),
        (dataclasses.replace(_T5_1_1, activation="relu"), {"feed_forward_proj": "gated-relu"}),
        (dataclasses.replace(_T5_1_1, activation="silu"), {"dense_act_fn": "silu"}),
        (dataclasses.replace(_ORIGINAL, activation="gelu"), {"feed_forward_proj": "gelu_new"}),
        (dataclasses.replace(_ORIGINAL, activation="silu"), {"feed_forward_proj": "silu"}),
    ],
    ids=str,
)
def test_other_activations(config: T5Config, fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Gated SiLU, as in UL2, and the other supported activations, gated or not, are read."""
    assert load_checkpoint(_write(tmp_path, config, **fields)).config == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bart"}, "model_type is 'bart'; expected one of 't5', 'mt5', 'umt5', 'llama', 'mistral'"),
        (
            {"feed_forward_proj": "gated-tanh"},
            r"feed_forward_proj is 'gated-tanh', .*\(True, 'tanh'\); expected 'gated",
        ),
        ({"feed_forward_proj": "doubly-gelu_new"}, r"feed_forward_proj is 'doubly-gelu_new', .*\(False, 'gelu_new'\)"),
        ({"feed_forward_proj": "relu"}, r"tensors are not those of the T5 in config\.json; missing .*wi\.weight"),
        ({"feed_forward_proj": "gelu"}, r"feed_forward_proj is 'gelu', .*\(False, 'gelu'\)"),
        ({"dense_act_fn": "gelu"}, r"feed_forward_proj is 'gated-gelu', .*\(True, 'gelu'\)"),
        ({"dense_act_fn": ["relu"]}, r"\(True, \['relu'\]\)"),
        ({"is_gated_act": False}, r"missing .*wi\.weight"),
        ({"is_gated_act": "yes"}, r"\('yes', 'gelu_new'\)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05; only 1e-06 is supported"),
        ({"pad_token_id": 3}, "pad_token_id is 3; only 0 is supported"),
        ({"eos_token_id": 64}, r"config.json: end_ids must be different whole numbers from 0 to 63.*got \(64,\)"),
        ({"eos_token_id": []}, r"config.json: eos_token_id is \[\]; expected the id of the token that ends an output"),
        ({"eos_token_id": [1, "5"]}, r"config.json: eos_token_id is \[1, '5'\]; expected the id"),
        ({"eos_token_id": True}, "config.json: eos_token_id is True; expected the id"),
        ({"decoder_start_token_id": -1}, "config.json: start_id must be a whole number from 0 to 63, got -1"),
        ({"decoder_start_token_id": [0, 1]}, r"config.json: decoder_start_token_id is \[0, 1\]; expected the id"),
        ({"num_layers": 10**9}, "num_encoder_layers must be at most 1000, got 1000000000"),
        ({"num_decoder_layers": 10**9}, "num_decoder_layers must be at most 1000, got 1000000000"),
        ({"relative_attention_num_buckets": 10**12}, "relative_buckets must be below"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is False; only True is supported"),
        ({"d_model": "16"}, "d_model must be a whole number of at least 1, got '16'"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, got 0"),
        ({"num_layers": True}, "num_layers must be a whole number of at least 1, got True"),
        ({"d_ff": 33}, "config.json says .*mlp_dim=33.*mlp_dim=32"),
        ({"num_heads": 4}, "config.json says .*num_heads=4.*num_heads=2"),
        ({"vocab_size": 65}, "config.json says .*vocab_size=65.*vocab_size=64"),
        ({"relative_attention_num_buckets": 16}, "config.json says .*relative_buckets=16.*relative_buckets=32"),
        ({"num_decoder_layers": 3}, r"missing decoder\.block\.2\..* \(14\), unknown none \(0\)"),
        ({"num_decoder_layers": 1}, r"missing none \(0\), unknown decoder\.block\.1\..* \(14\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_other_models_are_refused(fields: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """A config that asks for other arithmetic, or does not fit the tensors, is refused with field and value."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_write(tmp_path, **fields))


def test_the_distance_where_positions_end(tmp_path: pathlib.Path) -> None:
    """The distance, the one size that no shape shows, is read from the config and changes the fingerprint."""
    checkpoint = load_checkpoint(_write(tmp_path / "a", relative_attention_max_distance=20))
    assert checkpoint.config.relative_max_distance == 20
    assert checkpoint.fingerprint() != load_checkpoint(_write(tmp_path / "b")).fingerprint()


def test_copies_of_the_embedding(tmp_path: pathlib.Path) -> None:
    """The embedding may be stored under all its names, or under another alone; copies that differ are refused."""
    embedding = build_arrays(_T5_1_1, 0)["token_embedder/embedding"]
    stacks = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    expected = load_checkpoint(_write(tmp_path / "plain")).fingerprint()
    three = _save(tmp_path / "three", dict.fromkeys(stacks, embedding))
    assert load_checkpoint(three).fingerprint() == expected
    renamed = _save(tmp_path / "renamed", {"shared.weight": None, stacks[0]: embedding})
    assert load_checkpoint(renamed).fingerprint() == expected
    differing = _save(tmp_path / "differing", {stacks[1]: embedding + 1})
    with pytest.raises(CheckpointError, match=r"decoder\.embed_tokens\.weight differs from shared\.weight"):
        load_checkpoint(differing)
    with pytest.raises(CheckpointError, match=r"shared\.weight is missing, the embedding"):
        load_checkpoint(_save(tmp_path / "none", {"shared.weight": None}))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("_orig_mod.", r"_orig_mod\..*Every name begins with '_orig_mod\.': torch\.compile puts that there"),
        ("module.", r"Every name begins with 'module\.', which the model's own do not"),
        ("module._orig_mod.", r"Every name begins with 'module\._orig_mod\.', which the model's own do not"),
    ],
)
def test_what_stands_before_all_names_is_said(prefix: str, words: str, tmp_path: pathlib.Path) -> None:
    """Name prefixes of torch.compile and training wrappers are refused with the prefix and the way out."""
    tensors = hugging_face_tensors(_T5_1_1, build_arrays(_T5_1_1, 0))
    changes = {**dict.fromkeys(tensors), **{f"{prefix}{name}": tensor for name, tensor in tensors.items()}}
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(_save(tmp_path, changes))


def _load_with(folder: pathlib.Path, generation: dict[str, Any], **fields: Any) -> Checkpoint:
    _write(folder, **fields)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "fields", "start", "ends"),
    [
        ({}, {}, 0, (1,)),
        ({"eos_token_id": 5}, {}, 0, (5,)),
        ({"eos_token_id": [9, 1, 5, 1]}, {"eos_token_id": 7}, 0, (1, 5, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [1, 5]}, 0, (1, 5)),
        ({"decoder_start_token_id": 4}, {"decoder_start_token_id": 0}, 4, (1,)),
        ({"decoder_start_token_id": [4]}, {}, 4, (1,)),
        ({"bos_token_id": 6}, {}, 6, (1,)),
        ({"bos_token_id": 6, "decoder_start_token_id": 0}, {}, 0, (1,)),
        ({}, {"decoder_start_token_id": 3, "bos_token_id": 6}, 3, (1,)),
    ],
)
def test_where_outputs_begin_and_end(
    generation: dict[str, Any], fields: dict[str, Any], start: int, ends: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    """`generation_config.json` precedes `config.json`, is reported, and is in the fingerprint and converted model."""
    checkpoint = _load_with(tmp_path / "theirs", generation, **fields)
    assert (checkpoint.config.start_id, checkpoint.config.end_ids) == (start, ends)
    plain = load_checkpoint(_write(tmp_path / "plain"))
    is_usual = (start, ends) == (0, (1,))
    assert (checkpoint.fingerprint() == plain.fingerprint()) == is_usual
    assert (checkpoint.stated == ()) == is_usual
    write_native(tmp_path / "ours", checkpoint.config, arrays=checkpoint.arrays, vocabulary_path=None)
    again = load_checkpoint(tmp_path / "ours")
    assert (again.config, again.fingerprint()) == (checkpoint.config, checkpoint.fingerprint())
    assert ("start_id" in (tmp_path / "ours" / "config.json").read_text()) == (start != 0)


def test_t5x_cannot_hold_other_ends(tmp_path: pathlib.Path) -> None:
    """A model with other start or end tokens is refused for T5X's layout, which cannot hold them."""
    checkpoint = _load_with(tmp_path / "theirs", {"eos_token_id": [1, 5], "decoder_start_token_id": 4})
    with pytest.raises(ValueError, match=r"cannot say that outputs begin with token 4 and end with 1 or 5: .*native"):
        write_t5x(tmp_path / "t5x", checkpoint.config, arrays=checkpoint.arrays, step=1, vocabulary_path=None)
    assert not (tmp_path / "t5x").exists()


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"num_beams": 4, "do_sample": False}, "generation_config.json sets num_beams, which does not count here"),
        ({"do_sample": True, "top_p": 0.9}, "sets do_sample, which"),
        ({"repetition_penalty": 1.1, "min_length": 5}, "sets repetition_penalty, min_length, which"),
        ({"forced_eos_token_id": 1, "suppress_tokens": [3]}, "sets suppress_tokens, forced_eos_token_id, which"),
        (
            {
                "stop_strings": None,
                "num_beams": 1,
                "repetition_penalty": 1.0,
                "no_repeat_ngram_size": 0,
                "bad_words_ids": None,
            },
            "",
        ),
    ],
)
def test_settings_that_do_not_count_are_said(generation: dict[str, Any], words: str, tmp_path: pathlib.Path) -> None:
    """Decoding here is greedy; a file that asks for another method is named, with its settings."""
    stated = " ".join(_load_with(tmp_path, generation).stated)
    assert words in stated
    assert bool(stated) == bool(words)


def test_stop_strings_of_a_folder(tmp_path: pathlib.Path) -> None:
    """`stop_strings` are a text or several, each once; anything else is refused by name."""
    for name, given, found in (("one", "END", ("END",)), ("two", ["b", "a", "b"], ("b", "a")), ("none", None, ())):
        assert _load_with(tmp_path / name, {"stop_strings": given}).generation.stop_strings == found
    for place, wrong in enumerate((5, ["END", 5], [""])):
        with pytest.raises(
            CheckpointError, match=r"generation_config\.json: stop_strings is .*; expected a list of texts"
        ):
            _load_with(tmp_path / f"wrong_{place}", {"stop_strings": wrong})


def test_the_vocabulary_that_transformers_reads(tmp_path: pathlib.Path) -> None:
    """With both files `tokenizer.json` is read, since tokens added to it are not in `spiece.model`."""
    folder = _write(tmp_path)
    (folder / "spiece.model").write_bytes(b"x")
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert load_checkpoint(folder).vocabulary_path == folder / "tokenizer.json"


def test_a_tied_head_in_the_file(tmp_path: pathlib.Path) -> None:
    """A tied head may be stored; one that differs is refused, since versions of transformers treat it differently."""
    embedding = build_arrays(_ORIGINAL, 0)["token_embedder/embedding"]
    assert load_checkpoint(_save(tmp_path / "same", {"lm_head.weight": embedding}, _ORIGINAL)).config == _ORIGINAL
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from shared\.weight, but the config ties them"):
        load_checkpoint(_save(tmp_path / "other", {"lm_head.weight": embedding + 1}, _ORIGINAL))


def test_a_head_that_is_missing(tmp_path: pathlib.Path) -> None:
    """Without a tie, a missing head is refused; from version 5 on it is the embedding, without its scale."""
    folder = _save(tmp_path, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, and tie_word_embeddings is false"):
        load_checkpoint(folder)
    path = folder / "config.json"
    newer = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **newer}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == _T5_1_1
    np.testing.assert_array_equal(checkpoint.arrays[_LOGITS], checkpoint.arrays["token_embedder/embedding"].T)


def test_an_unused_table_of_old_files(tmp_path: pathlib.Path) -> None:
    """The relative positions that old files have in cross-attention are ignored, as transformers does."""
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((32, 2), np.float32)}
    assert load_checkpoint(_save(tmp_path, unused)).config == _T5_1_1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder.block.0.layer.0.SelfAttention.q.bias": np.ones(16, np.float32)}, r"unknown encoder.*q\.bias \(1\)"),
        ({"encoder.final_layer_norm.weight": None}, r"missing encoder\.final_layer_norm\.weight \(1\)"),
        ({"shared.weight": np.ones((64, 16), np.int8)}, r"shared\.weight is int8, expected float32, float16, bfloat16"),
        ({"shared.weight": np.ones((64, 16), np.float64)}, r"shared\.weight is float64, expected float32"),
        (
            {"decoder.final_layer_norm.weight": np.ones(17, np.float32)},
            r"decoder_norm/scale has shape \(17,\), expected",
        ),
    ],
    ids=["unknown", "missing", "integers", "doubles", "shape"],
)
def test_other_tensors_are_refused(changes: dict[str, np.ndarray | None], message: str, tmp_path: pathlib.Path) -> None:
    """Unknown, missing and misshapen tensors are refused by name."""
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_save(tmp_path, changes))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_become_float32(dtype: Any, tmp_path: pathlib.Path) -> None:
    """Weights of 16 bits are read as the float32 of the same value."""
    arrays = {name: array.astype(dtype) for name, array in build_arrays(_T5_1_1, 0).items()}
    checkpoint = load_checkpoint(write_hugging_face(tmp_path, _T5_1_1, arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.arrays[name], array.astype(np.float32))


def _split(folder: pathlib.Path) -> pathlib.Path:
    """Puts the tensors of a written model into two files, and returns their index."""
    _write(folder)
    (folder / "model.safetensors").unlink()
    tensors = hugging_face_tensors(_T5_1_1, build_arrays(_T5_1_1, 0))
    files = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        safetensors.numpy.save_file(part, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return index


def test_a_model_in_parts(tmp_path: pathlib.Path) -> None:
    """A model in several files is the model in one."""
    index = _split(tmp_path / "parts")
    assert load_checkpoint(index.parent).fingerprint() == load_checkpoint(_write(tmp_path / "one")).fingerprint()


def test_a_missing_part_is_refused(tmp_path: pathlib.Path) -> None:
    """A missing part is refused by its name, as is one that lacks a tensor."""
    index = _split(tmp_path)
    part = tmp_path / "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file({"shared.weight": np.ones(2, np.float32)}, part)
    with pytest.raises(CheckpointError, match=rf"{part}: does not hold the tensors that {index.name} says it holds"):
        load_checkpoint(tmp_path)
    part.unlink()
    with pytest.raises(CheckpointError, match=rf"{part}: cannot be read as safetensors: "):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_refused(content: str, tmp_path: pathlib.Path) -> None:
    """An invalid index is refused by name."""
    _split(tmp_path).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: (expected|cannot be read as JSON)"):
        load_checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path: pathlib.Path) -> None:
    """A folder with weights only in another format is refused with what to do."""
    folder = _write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors, nor .*pytorch_model\.bin, are not read: save"):
        load_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_damaged_weights_are_refused(kept: int, tmp_path: pathlib.Path) -> None:
    """A weights file that was cut anywhere is refused by name."""
    path = _write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors: "):
        load_checkpoint(tmp_path)


def _without_tables(config: T5Config) -> dict[str, np.ndarray]:
    tensors = hugging_face_tensors(config, build_arrays(config, 0))
    return {name: tensor for name, tensor in tensors.items() if "relative_attention_bias" not in name}


def test_mt5_is_read_as_t5_1_1(tmp_path: pathlib.Path) -> None:
    """MT5 differs from T5 1.1 only in its vocabulary, and in defaults of sizes."""
    t5 = load_checkpoint(_write(tmp_path / "t5"))
    mt5 = load_checkpoint(_write(tmp_path / "mt5", model_type="mt5", feed_forward_proj=None))
    assert mt5.config == t5.config
    assert mt5.fingerprint() == t5.fingerprint()
    with pytest.raises(CheckpointError, match=r"not those of the T5 in config\.json; missing .*block\.1\."):
        load_checkpoint(_write(tmp_path / "deep", model_type="mt5", num_layers=None))


def test_umt5_has_tables_in_every_layer(tmp_path: pathlib.Path) -> None:
    """Each self-attention layer's own table comes back under its name, [heads, buckets]."""
    config = dataclasses.replace(_T5_1_1, relative_bias_per_layer=True)
    generator = np.random.default_rng(5)
    tables = {
        f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight": generator.standard_normal(
            (config.relative_buckets, config.num_heads)
        ).astype(np.float32)
        for stack, depth in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
        for index in range(depth)
    }
    _write(tmp_path, model_type="umt5")
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in {**_without_tables(_T5_1_1), **tables}.items()}
    safetensors.numpy.save_file(kept, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == config
    table = tables["decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"]
    np.testing.assert_array_equal(checkpoint.arrays["decoder/layers_1/relpos_bias/rel_embedding"], table.T)
    np.testing.assert_array_equal(
        checkpoint.arrays["encoder/layers_0/relpos_bias/rel_embedding"],
        tables["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].T,
    )


@pytest.mark.parametrize("model_type", ["mt5", "umt5"])
@pytest.mark.parametrize("fields", [{"tie_word_embeddings": True}, {"tie_word_embeddings": None}])
def test_heads_that_versions_scale_differently_are_refused(
    model_type: str, fields: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """A tied head whose scale depends on the version of transformers is refused."""
    shown = fields["tie_word_embeddings"]
    with pytest.raises(CheckpointError, match=f"tie_word_embeddings is {shown}. What {model_type} computes"):
        load_checkpoint(_write(tmp_path, model_type=model_type, **fields))
