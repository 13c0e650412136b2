"""Models in GGUF files, made here by the package's own writer: weights, metadata, tokenizers, refusals."""

import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file as load_safetensors

from calm_beam.checkpoints import CheckpointError, load_checkpoint, write_gguf_tokenizer
from calm_beam.checkpoints.gguf_file import GGUFFile
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.launch.cli import main
from calm_beam.model import network_of
from calm_beam.model.llama import LlamaConfig, RopeScaling
from tests.builders import train_vocabulary
from tests.calm_beam.checkpoints.gguf_files import fields_of, tensors_of, write_gguf
from tests.calm_beam.checkpoints.make_decoder_only_goldens import FOLDER, sequences
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

gguf: Any = pytest.importorskip("gguf", reason="needs the extra gguf")

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tied_head": True, "num_kv_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {"attention_bias": True}),
    "qwen3": ("qwen3", {"query_key_norms": True}),
    "gemma": ("gemma", {"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "tied_head": True}),
    "gemma2": (
        "gemma2",
        {
            **{"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "tied_head": True},
            **{"post_norms": True, "sliding_window": 5, "windowed_layers": (0, 2)},
            **{"attention_cap": 50.0, "logits_cap": 30.0},
        },
    ),
    "gemma3": (
        "gemma3",
        {
            **{"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "tied_head": True},
            **{"post_norms": True, "query_key_norms": True, "sliding_window": 5, "num_decoder_layers": 7},
            **{"windowed_layers": (0, 1, 2, 3, 4, 6), "local_rope_theta": 1e4, "rope_theta": 1e6},
        },
    ),
    "olmo2": ("olmo2", {"pre_norms": False, "post_norms": True, "query_key_norms": True, "whole_norms": True}),
    "granite": (
        "granite",
        {"embedding_factor": 12.0, "residual_factor": 0.25, "query_factor": 0.0625, "logits_divisor": 8.0},
    ),
    "smollm3": ("smollm3", {"num_decoder_layers": 5, "unturned_layers": (3,), "tied_head": True}),
    "phi3": ("phi3", {"sliding_window": 5, "windowed_layers": (0, 1, 2)}),
    "phi4": ("phi3", {}),
    "phi4_mini": (
        "phi3",
        {
            **{"turned_dim": 4, "tied_head": True, "max_positions": 48},
            "rope_scaling": RopeScaling(
                kind="longrope", original_max_positions=48, pair_factors=(1.5, 3.0), attention_factor=1.25
            ),
        },
    ),
}
_LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)


def _config(**changes: Any) -> LlamaConfig:
    # GGUF keeps numbers as float32.
    return build_llama_config(
        **{"emb_dim": 32, "head_dim": 8, "mlp_dim": 64, "norm_epsilon": float(np.float32(1e-5)), **changes}
    )


def _write(path: pathlib.Path, config: LlamaConfig, *, architecture: str = "llama", **changes: Any) -> pathlib.Path:
    tensors = tensors_of(config, build_llama_arrays(config, 1), architecture=architecture)
    fields = fields_of(config, architecture=architecture)
    for name, into in (("tensors", tensors), ("fields", fields)):
        for key, value in changes.pop(name, {}).items():
            if value is None:
                del into[key]
            else:
                into[key] = value
    return write_gguf(path, tensors, architecture=architecture, fields=fields, **changes)


@pytest.mark.parametrize(("architecture", "changes"), _FAMILIES.values(), ids=list(_FAMILIES))
def test_every_family_is_read(architecture: str, changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Config and arrays are read from the file, and from a folder that holds only the file."""
    config = _config(**changes)
    path = _write(tmp_path / "model.gguf", config, architecture=architecture)
    arrays = build_llama_arrays(config, 1)
    for checkpoint in (load_checkpoint(path), load_checkpoint(tmp_path)):
        assert (checkpoint.layout, checkpoint.uri, checkpoint.config) == ("gguf", str(path), config)
        assert checkpoint.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            # A scale to which 1 was added may lose its last digit.
            atol = 2e-7 if architecture.startswith("gemma") and name.endswith("/scale") else 0
            np.testing.assert_allclose(checkpoint.arrays[name], array, rtol=0, atol=atol)


_KINDS = [kind.name for kind in gguf.GGMLQuantizationType]


@pytest.mark.parametrize("kind", _KINDS)
def test_every_type_that_the_package_reads(kind: str, tmp_path: pathlib.Path) -> None:
    """For every type, values are those that the package computes from the bytes; other types are refused by name."""
    of = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[of]
    bytes_of_rows = np.random.default_rng(0).integers(0, 256, size=(6, 2 * 256 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("some", bytes_of_rows, raw_shape=bytes_of_rows.shape, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(
                bytes_of_rows.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)), of
            )
    except (KeyError, NotImplementedError):
        with pytest.raises(CheckpointError, match=f"some is of type {kind}, which the package gguf does not read"):
            GGUFFile(tmp_path / "model.gguf")
        return
    with np.errstate(all="ignore"):
        found = GGUFFile(tmp_path / "model.gguf").tensors["some"]
        assert found.shape == (6, 512)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found[2:5, 7:300], expected[2:5, 7:300])
        np.testing.assert_array_equal(found.T[3:400], expected.T[3:400])


def test_quantised_weights_are_those_of_the_package(tmp_path: pathlib.Path) -> None:
    """In a model of several types, kernels are the dequantised tensors, with heads in our order."""
    config = _config()
    arrays = build_llama_arrays(config, 1)
    kinds = {"blk.0.attn_q.weight": "Q4_1", "blk.1.ffn_down.weight": "Q8_0", "token_embd.weight": "BF16"}
    checkpoint = load_checkpoint(_write(tmp_path / "model.gguf", config, kinds=kinds))
    for name, kind, turned in (
        ("decoder/layers_0/self_attention/query/kernel", "Q4_1", True),
        ("decoder/layers_1/mlp/wo/kernel", "Q8_0", False),
        ("token_embedder/embedding", "BF16", False),
    ):
        of = gguf.GGMLQuantizationType[kind]
        tensor = arrays[name] if "embedding" in name else arrays[name].T
        if turned:
            tensor = tensor.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        tensor = gguf.dequantize(gguf.quantize(np.ascontiguousarray(tensor), of), of)
        if turned:
            tensor = tensor.reshape(-1, 4, 2, 32).swapaxes(1, 2).reshape(32, 32)
        np.testing.assert_array_equal(checkpoint.arrays[name], tensor if "embedding" in name else tensor.T)
        assert np.abs(np.asarray(checkpoint.arrays[name]) - arrays[name]).max() > 1e-4


def test_rows_of_fused_tensors_are_read_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a quantised fused tensor is read without its other rows."""
    config = _config()
    arrays = build_llama_arrays(config, 1)
    kinds = {"blk.0.attn_qkv.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1"}
    path = _write(tmp_path / "model.gguf", config, architecture="phi3", kinds=kinds)
    checkpoint = load_checkpoint(path)
    rows_read: list[int] = []
    dequantize = gguf.dequantize

    def counted(data: np.ndarray, kind: Any) -> np.ndarray:
        rows_read.append(len(data))
        values: np.ndarray = dequantize(data, kind)
        return values

    monkeypatch.setattr(gguf, "dequantize", counted)
    for name, kind in (("self_attention/key", "Q8_0"), ("self_attention/value", "Q8_0"), ("mlp/wi_1", "Q4_1")):
        of = gguf.GGMLQuantizationType[kind]
        kernel = np.ascontiguousarray(arrays[f"decoder/layers_0/{name}/kernel"].T)
        expected = dequantize(gguf.quantize(kernel, of), of).T
        rows_read.clear()
        found = checkpoint.arrays[f"decoder/layers_0/{name}/kernel"]
        np.testing.assert_array_equal(found[:, 3:7], expected[:, 3:7])
        assert rows_read == [4]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["phi3", "phi3_longrope"])
def test_phis_compute_what_transformers_does(name: str, tmp_path: pathlib.Path) -> None:
    """A model that transformers saved gives its logits when its fused tensors are those of a GGUF file, as converted.

    The one has a window in all layers; the other turns half of each head, by a table of factors.
    """
    folder = FOLDER / name
    fields = json.loads((folder / "config.json").read_text())
    stored = load_safetensors(folder / "model.safetensors")
    names = {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for key, tensor in stored.items():
        theirs = key.removesuffix(".weight")
        if theirs not in outside:
            _, _, index, sublayer = theirs.split(".", 3)
            tensors[f"blk.{index}.{names[sublayer]}.weight"] = tensor
        else:
            tensors[f"{outside[theirs]}.weight"] = tensor
    rope, heads = fields["rope_parameters"], fields["num_attention_heads"]
    positions = fields["max_position_embeddings"]
    original = fields.get("original_max_position_embeddings", positions)
    written: dict[str, Any] = {
        "context_length": positions,
        "rope.scaling.original_context_length": original,
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "block_count": fields["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * fields["hidden_size"]) // heads,
        "rope.freq_base": rope["rope_theta"],
        "attention.sliding_window": fields["sliding_window"] or 0,
    }
    if "long_factor" in rope:
        written["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(positions / original) / math.log(original))
        for length in ("short", "long"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    metadata = {f"phi3.{key}": value for key, value in written.items()} | {"tokenizer.ggml.eos_token_id": 2}
    checkpoint = load_checkpoint(write_gguf(tmp_path / "a.gguf", tensors, architecture="phi3", fields=metadata))
    assert checkpoint.config.max_positions == load_checkpoint(folder).config.max_positions
    apply = jax.jit(network_of(checkpoint.config).apply)
    with np.load(folder / "expected.npz") as expected:
        for place, tokens in enumerate(sequences(int(expected["seed"]))):
            logits = apply({"params": checkpoint.parameters()}, np.array([tokens], np.int32))
            np.testing.assert_allclose(logits[:, 0], expected[f"logits_{place}"], rtol=0, atol=1e-4)


def _factors(factor: float) -> np.ndarray:
    """Returns Llama 3.1's table for heads of 8, as the converter computes it."""
    found = []
    for frequency in 500000.0 ** -(np.arange(0, 8, 2) / 8):
        wave = 2 * np.pi / frequency
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(
    ("fields", "tensors", "scaling", "positions"),
    [
        ({"llama.rope.scaling.type": "none"}, {}, RopeScaling(), 64),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {},
            RopeScaling(kind="linear", factor=2.0),
            64,
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {},
            RopeScaling(kind="yarn", factor=4.0, original_max_positions=32, attention_factor=1 + 0.1 * math.log(4)),
            128,
        ),
        ({}, {"rope_freqs.weight": _factors(8.0)}, _LLAMA_3_1, 65536),
    ],
)
def test_stretched_positions(
    fields: dict[str, Any], tensors: dict[str, Any], scaling: RopeScaling, positions: int, tmp_path: pathlib.Path
) -> None:
    """Each kind of scaling is read from the metadata, and Llama 3.1's from the table of its factors."""
    # A base for which the table has waves of all three kinds.
    config = _config(rope_theta=500000.0)
    found = load_checkpoint(_write(tmp_path / "model.gguf", config, fields=fields, tensors=tensors)).config
    assert (found.rope_scaling, found.max_positions) == (scaling, positions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "falcon"}, "general.architecture is 'falcon'; expected one of 'llama', "),
        ({"fields": {"llama.expert_count": 8}}, "llama.expert_count is 8; that is not supported"),
        ({"fields": {"llama.attention.sliding_window": 16}}, "llama.attention.sliding_window is 16; that is not"),
        ({"fields": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count is 4; only 8 is supported"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "llama.rope.scaling.type is 'longrope'; only none"),
        ({"fields": {"llama.block_count": None}}, "llama.block_count must be a whole number of at least 1, got None"),
        ({"fields": {"llama.feed_forward_length": [64, 64, 32]}}, "llama.feed_forward_length must be a whole number"),
        ({"fields": {"tokenizer.ggml.eos_token_id": None}}, "no tokenizer.ggml.eos_token_id"),
        ({"fields": {"split.count": 3}}, "is one of 3 parts; merge them"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "missing blk.1.ffn_up.weight (1), unknown none (0)"),
        ({"tensors": {"blk.0.attn_output.bias": np.zeros(32, np.float32)}}, "unknown blk.0.attn_output.bias (1)"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight is missing, the embedding"),
        ({"tensors": {"rope_freqs.weight": np.array([1, 2, 5, 7], np.float32)}}, "in another way than Llama 3.1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """Each unsupported feature is refused by name, with the file."""
    path = _write(tmp_path / "model.gguf", _config(), **changes)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert f"{path}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {"final_logit_softcapping": None}, "gemma2.final_logit_softcapping must be a number, got None"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is 30.0; that is not supported"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0]}, "sliding_window_pattern is [1, 0]; expected a whole"),
        ("olmo2", {"attention.sliding_window": 4096}, "olmo2.attention.sliding_window is 4096; that is not supported"),
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False; that is not"),
        ("granite", {"logit_scale": None}, "granite.logit_scale must be a number, got None"),
        ("granite", {"expert_shared_feed_forward_length": 8}, "granite.expert_shared_feed_forward_length is 8; that"),
        ("llama", {"expert_count": 8}, "llama.expert_count is 8; that is not supported"),
    ],
)
def test_what_a_family_says_otherwise_is_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """Unsupported keys are refused: Olmo 3, Mixtral, Granite without positions or with experts, and missing fields."""
    architecture, changes = _FAMILIES[family]
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(_write(tmp_path / "model.gguf", _config(**changes), architecture=architecture, fields=named))
    assert message in str(caught.value)


_PAIRS = np.array([1.5, 3.0], np.float32)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {"fields": {"phi3.attention.sliding_window": None}}, "phi3.attention.sliding_window is missing"),
        ("phi3", {"fields": {"phi3.rope.dimension_count": 10}}, "phi3.rope.dimension_count is 10; only 8 is supported"),
        ("phi3", {"fields": {"phi3.rope.scaling.attn_factor": 1.2}}, "phi3.rope.scaling.attn_factor is 1.2"),
        ("phi3", {"fields": {"phi3.rope.scaling.type": "longrope"}}, "phi3.rope.scaling.type is 'longrope'; only none"),
        ("phi3", {"tensors": {"rope_freqs.weight": _PAIRS}}, "unknown rope_freqs.weight (1)"),
        ("phi3", {"tensors": {"blk.1.attn_q.weight": np.zeros((32, 32), np.float32)}}, "unknown blk.1.attn_q.weight"),
        (
            "phi3",
            {"tensors": {"blk.1.attn_qkv.weight": np.zeros((96, 32), np.float32)}},
            "blk.1.attn_qkv.weight has shape (96, 32), expected 64 rows: decoder/layers_1/self_attention/query/kernel",
        ),
        ("phi3", {"tensors": {"blk.1.ffn_up.weight": np.zeros(128, np.float32)}}, "decoder/layers_1/mlp/wi_0/kernel"),
        ("phi4_mini", {"tensors": {"rope_factors_long.weight": None}}, "rope_factors_short.weight; expected longrope"),
        ("phi4_mini", {"tensors": {"rope_factors_short.weight": None}}, "phi3.rope.scaling.attn_factor is 1.25; that"),
        ("phi4_mini", {"tensors": {"rope_factors_short.weight": np.ones(4, np.float32)}}, "each of 2 pairs, got 4"),
        ("phi4_mini", {"fields": {"phi3.rope.scaling.attn_factor": None}}, "attn_factor must be a number, got None"),
        ("phi4_mini", {"fields": {"phi3.rope.scaling.type": "yarn"}}, "phi3.rope.scaling.type is 'yarn', with factor"),
        ("phi4_mini", {"fields": {"phi3.rope.scaling.factor": 4.0}}, "with factor 4.0 and rope_factors_short.weight"),
        (
            "phi4_mini",
            {"fields": {"phi3.rope.scaling.original_context_length": None}},
            "original_max_positions must be",
        ),
    ],
)
def test_what_a_phi_file_leaves_open_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    """A missing window or factor is never guessed, and fused tensors have the rows of their parts."""
    architecture, of_family = _FAMILIES[family]
    path = _write(tmp_path / "model.gguf", _config(**of_family), architecture=architecture, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert f"{path}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"rope.freq_base_swa": 500.0}, {"local_rope_theta": 500.0}),
        ({"attention.sliding_window_pattern": 3}, {"windowed_layers": (0, 1, 3, 4, 6)}),
        ({"attention.sliding_window_pattern": [0, 1, 0, 0, 0, 0, 1]}, {"windowed_layers": (1, 6)}),
        (
            {"attention.sliding_window": None},
            {"sliding_window": None, "windowed_layers": (), "local_rope_theta": None},
        ),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_scaling": RopeScaling(kind="linear", factor=8.0)},
        ),
    ],
)
def test_gemma_3s_layers_are_of_two_kinds(
    fields: dict[str, Any], expected: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Windows are in the layers that the file says, or in five of six, and have a base of their own."""
    architecture, changes = _FAMILIES["gemma3"]
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    path = _write(tmp_path / "model.gguf", _config(**changes), architecture=architecture, fields=named)
    assert load_checkpoint(path).config == _config(**{**changes, **expected})


@pytest.mark.parametrize(("family", "depth"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_divide_queries_by_another_root(family: str, depth: int, tmp_path: pathlib.Path) -> None:
    """The largest Gemmas divide queries by the root of width / heads, which no key says; the depth shows it."""
    architecture, changes = _FAMILIES[family]
    some = [index for index in range(depth) if (index + 1) % (2 if family == "gemma2" else 6)]
    sizes = {"num_decoder_layers": depth, "windowed_layers": tuple(some), "mlp_dim": 8, "emb_dim": 16, "num_heads": 2}
    config = _config(**{**changes, **sizes, "head_dim": 6})
    path = _write(tmp_path / "model.gguf", config, architecture=architecture)
    assert load_checkpoint(path).config.query_factor == 8**-0.5


def test_a_damaged_file_is_refused(tmp_path: pathlib.Path) -> None:
    """A damaged file is refused, and one that is cut off."""
    path = _write(tmp_path / "model.gguf", _config())
    for content in (b"", b"GGUF", path.read_bytes()[:2000], b"x" * 4000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
            load_checkpoint(path)


def _letters() -> list[str]:
    """Returns how byte-level tokenizers write the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    texts = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [texts[byte] for byte in range(256)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "the 123 the", ["the", "Ġ", "12", "3", "Ġthe"]),
        ("smollm", "the 123 the", ["the", "Ġ", "1", "2", "3", "Ġthe"]),
        ("llama-bpe", "the 1234", ["<s>", "the", "Ġ", "12", "3", "4"]),
        ("qwen2", "the 123", ["the", "Ġ", "1", "2", "3"]),
    ],
)
def test_byte_level_tokenizers(pre: str, text: str, pieces: list[str], tmp_path: pathlib.Path) -> None:
    """Texts are split as `tokenizer.ggml.pre` says, special tokens are found, and the template is read."""
    pytest.importorskip("tokenizers")
    tokens = [*_letters(), "th", "the", "Ġthe", "12", "<s>", "</s>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 3],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2"],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.chat_template": "{{ messages[0].content }}</s>",
    }
    path = _write(tmp_path / "model.gguf", _config(vocab_size=262, end_ids=(261,)), fields=fields)
    vocabulary = open_vocabulary(write_gguf_tokenizer(path, tmp_path / "tokenizer"))
    ids, _ = vocabulary.encode_prompt(text, room=50)
    assert [tokens[index] for index in ids] == pieces
    assert vocabulary.encode("the</s>") == [257, 261]
    assert vocabulary.decode(vocabulary.encode("thé 12\n x")) == "thé 12\n x"
    assert (tmp_path / "tokenizer" / "chat_template.jinja").read_text() == "{{ messages[0].content }}</s>"
    for layout in ("native", "hugging_face"):
        output = tmp_path / layout
        assert main(["convert", f"--checkpoint={path}", f"--output={output}", f"--layout={layout}"]) == 0
        written = load_checkpoint(output)
        assert written.fingerprint() == load_checkpoint(path).fingerprint()
        assert written.vocabulary_path is not None
        assert open_vocabulary(written.vocabulary_path).fingerprint == vocabulary.fingerprint


def test_tokenizers_of_phi_are_refused(tmp_path: pathlib.Path) -> None:
    """Special tokens of Phi-3 and Phi-4 strip spaces, which no key says; the model's own tokenizer.json is used."""
    tokens = [*_letters(), "</s>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "dbrx",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 256,
    }
    config = _config(vocab_size=257, end_ids=(256,))
    path = _write(tmp_path / "model.gguf", config, architecture="phi3", fields=fields)
    with pytest.raises(CheckpointError, match="some special tokens of phi3 strip the spaces next to them"):
        write_gguf_tokenizer(path, tmp_path / "tokenizer")
    other = _write(tmp_path / "other.gguf", config, fields=fields)
    write_gguf_tokenizer(other, tmp_path)
    output = tmp_path / "native"
    assert main(["convert", f"--checkpoint={path}", f"--output={output}", "--layout=native"]) == 0
    assert load_checkpoint(output).vocabulary_path is not None


def test_tokenizers_of_pieces(tmp_path: pathlib.Path) -> None:
    """Ids are SentencePiece's own for the same pieces and scores, with bytes for unknown characters."""
    pytest.importorskip("tokenizers")
    trained = train_vocabulary(
        tmp_path / "trained.model",
        size=330,
        model_type="bpe",
        byte_fallback=True,
        pad_id=-1,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    size = pieces.get_piece_size()
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in range(size)
    ]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [pieces.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = _write(tmp_path / "model.gguf", _config(vocab_size=size), fields=fields)
    assert load_checkpoint(path).generation.token_ids == {"bos_token_id": 1}
    vocabulary = open_vocabulary(write_gguf_tokenizer(path, tmp_path / "tokenizer"))
    for text in ("The cat sat on the mat.", "a", "Zürich 東京 x", "two  spaces", "the the theory"):
        assert list(vocabulary.encode_prompt(text, room=200)[0]) == [1, *pieces.encode(text)]
        assert vocabulary.decode(pieces.encode(text)) == pieces.decode(pieces.encode(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no tokenizer (tokenizer.ggml.tokens)"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; only gpt2"),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"},
            "tokenizer.ggml.pre is 'tekken', which says how texts are cut; only gpt-2, ",
        ),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.model": "llama"},
            "tokenizer.ggml.scores must have a number for each token",
        ),
        (
            {
                "tokenizer.ggml.tokens": ["a", "b", "c"],
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": [0.0, 1.0, 2.0],
                "tokenizer.ggml.remove_extra_whitespaces": True,
            },
            "tokenizer.ggml.remove_extra_whitespaces is on",
        ),
    ],
)
def test_tokenizers_that_are_refused(fields: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """An unknown splitting rule is refused by name, since it would give other ids."""
    path = _write(tmp_path / "model.gguf", _config(end_ids=(0,)), fields=fields)
    with pytest.raises(CheckpointError) as caught:
        write_gguf_tokenizer(path, tmp_path / "tokenizer")
    assert message in str(caught.value)
