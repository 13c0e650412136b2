"""Invalid checkpoints end with one of our errors, quickly and in little memory."""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import struct
from collections.abc import Callable
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import orbax.checkpoint
import pytest
import safetensors.numpy

from calm_beam.checkpoints import CheckpointError, load_checkpoint, write_native
from calm_beam.errors import CalmBeamError
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_vocabulary
from tests.builders import build_arrays, build_config, train_vocabulary, write_hugging_face, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=1, exit_classifier=2)
_ARRAYS = build_arrays(_CONFIG, 0)
_NESTED = "[" * 100_000
_TABLE = "decoder/relpos_bias/rel_embedding"
_EMBEDDING = "token_embedder/embedding"
_MOST_MEMORY = 2 << 30


def _native(folder: pathlib.Path) -> pathlib.Path:
    write_native(folder, _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
    return folder


def _hugging_face(folder: pathlib.Path) -> pathlib.Path:
    config = build_config(num_encoder_layers=1, num_decoder_layers=1)
    return write_hugging_face(folder, config, build_arrays(config, 0))


def _t5x(folder: pathlib.Path) -> pathlib.Path:
    write_t5x(folder, _ARRAYS, inline=["decoder/meta_cls/bias"])
    return folder


def _change_json(path: pathlib.Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _refused(folder: pathlib.Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(folder)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < _MOST_MEMORY


@pytest.mark.parametrize("write", [_native, _hugging_face], ids=["native", "hugging_face"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_NESTED, "config.json: cannot be read as JSON: .*nested deeper"),
        ('{"a":' * 50_000, "config.json: cannot be read as JSON: .*nested deeper"),
        ('{"format": "x", "format": "y"}', 'key "format" occurs twice'),
        ('{"num_layers": 1' + "0" * 5000 + "}", "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON: not UTF-8"),
        ("", "cannot be read as JSON"),
        ("null", "expected a JSON object"),
    ],
    ids=["nested", "objects", "repeated", "long", "bytes", "empty", "null"],
)
def test_configs_that_are_no_json(
    tmp_path: pathlib.Path, write: Callable[[pathlib.Path], pathlib.Path], content: str, message: str
) -> None:
    """A config that is nested without end, repeats a key or is not JSON is refused by name."""
    (write(tmp_path) / "config.json").write_text(content, errors="surrogateescape")
    _refused(tmp_path, message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("num_decoder_layers", "num_heads", "vocab_size", "emb_dim", "mlp_dim", "head_dim")
          for value in (10**9, 0, -1, 1.0, "8", True, None, [8], 10**30)),
        ("num_encoder_layers", 10**9),
        ("relative_max_distance", 1), ("relative_max_distance", 1e30), ("relative_max_distance", 10**30),
        ("relative_buckets", 1), ("relative_buckets", 33), ("exit_classifier", 7), ("exit_classifier", -1),
        ("gated_mlp", "yes"), ("gated_mlp", 1), ("tied_head", None), ("relative_bias_per_layer", 0),
        ("relative_bias_per_layer", True), ("activation", "tanh"), ("activation", 5), ("activation", ["gelu"]),
        ("format", 5), ("new", 1), ("num_heads", "9" * 100_000),
    ],
)  # fmt: skip
def test_absurd_sizes_of_a_native_model(tmp_path: pathlib.Path, field: str, value: Any) -> None:
    """Impossible sizes, or sizes of another type, are refused with the names of file and size."""
    _change_json(_native(tmp_path) / "config.json", **{field: value})
    _refused(tmp_path, f"{re.escape(str(tmp_path))}.*(config.json.*)?{field}|expected a JSON object with .format")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("num_layers", "num_decoder_layers", "num_heads", "vocab_size", "d_model", "d_ff")
          for value in (10**9, 0, -1, 1.0, "8", True, 10**30)),
        ("relative_attention_max_distance", 1), ("relative_attention_max_distance", 1e30),
        ("relative_attention_max_distance", 10**30), ("relative_attention_num_buckets", 1),
        ("feed_forward_proj", 5), ("feed_forward_proj", ["gated"]), ("feed_forward_proj", "x" * 100_000),
        ("model_type", ["t5"]), ("model_type", "m" * 100_000), ("tie_word_embeddings", "yes"), ("pad_token_id", [[0]]),
    ],
)  # fmt: skip
def test_absurd_sizes_of_a_hugging_face_model(tmp_path: pathlib.Path, field: str, value: Any) -> None:
    """The same holds for configs that transformers wrote."""
    _change_json(_hugging_face(tmp_path) / "config.json", **{field: value})
    _refused(tmp_path, re.escape(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (_TABLE, np.ones((0, 32), np.float32)),
        (_TABLE, np.ones((2, 0), np.float32)),
        (_TABLE, np.ones((2,), np.float32)),
        (_TABLE, np.float32(1)),
        (_TABLE, np.ones((2, 2), np.float32)),
        (_TABLE, np.ones((3, 32), np.float32)),
        (_TABLE, np.ones((64, 32), np.float32)),
        ("decoder/meta_cls/kernel", np.float32(1)),
        ("decoder/meta_cls/kernel", np.ones((16, 3), np.float32)),
        ("decoder/meta_cls/kernel", np.ones((16, 0), np.float32)),
        (_EMBEDDING, np.float32(1)),
        (_EMBEDDING, np.ones((0, 16), np.float32)),
        (_EMBEDDING, np.ones((64, 16, 1), np.float32)),
        ("decoder/layers_0/self_attention/query/kernel", np.ones((16, 0), np.float32)),
        ("decoder/layers_0/self_attention/query/kernel", np.ones((1, 1, 1, 1), np.float32)),
        ("decoder/layers_0/mlp/wi_0/kernel", np.ones((16,), np.float32)),
        ("decoder/decoder_norm/scale", np.float32(1)),
        ("decoder/layers_99999999999999999999/mlp/wi_0/kernel", np.ones((16, 32), np.float32)),
        ("decoder/decoder/mlp/wi_0/kernel", np.float32(1)),
        ("decoder/decoder/mlp/wi_0/kernel", np.ones((16, 0, 32), np.float32)),
        (_EMBEDDING, np.full((64, 16), np.nan, np.float32)),
        (_EMBEDDING, np.ones((64, 16), np.int32)),
        ("x" * 100_000, np.ones(3, np.float32)),
    ],
)
@pytest.mark.parametrize("layout", ["native", "t5x"])
def test_odd_shapes(tmp_path: pathlib.Path, layout: str, name: str, array: np.ndarray) -> None:
    """An array of another rank or type, or without values or dimensions, is refused in every layout."""
    arrays = {**_ARRAYS, name: np.asarray(array)}
    if layout == "native":
        safetensors.numpy.save_file(arrays, _native(tmp_path) / "model.safetensors")
    else:
        # The tree itself holds arrays that are odd for zarr.
        write_t5x(tmp_path, arrays, inline=[name])
    _refused(tmp_path, re.escape(str(tmp_path)))


def test_weights_that_are_not_finite_are_named(tmp_path: pathlib.Path) -> None:
    """Every array with NaN or infinities is named with their number, and the model is refused."""
    arrays = {name: array.copy() for name, array in _ARRAYS.items()}
    arrays[_EMBEDDING][3, :2] = np.nan
    arrays["decoder/decoder_norm/scale"][5] = -np.inf
    write_t5x(tmp_path, arrays)
    _refused(
        tmp_path,
        r"not finite numbers in .*decoder/decoder_norm/scale \(1 of 16 values\).*token_embedder/embedding \(2 of 1024",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**9, 10**9]},
        {"shape": [10**9, 10**9], "chunks": [10**9, 10**9]},
        {"chunks": [10**9, 10**9]},
        {"shape": [10**5, 10**5]},
        {"shape": [10**6, 1], "chunks": [1, 1]},
        {"shape": [0, 16]},
        {"shape": [-1, 16]},
        {"shape": []},
        {"shape": [64.0, 16]},
        {"shape": "64"},
        {"shape": None},
        {"chunks": [64]},
        {"dtype": "<i4"},
        {"dtype": "|S1000000000"},
        {"dtype": 7},
        {"compressor": {"id": "unknown"}},
        {"zarr_format": 3},
        {"order": "F", "filters": [1]},
    ],
    ids=str,
)
def test_what_zarr_claims(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    """Metadata that claim more than is stored, or nonsense, are refused before allocation."""
    folder = _t5x(tmp_path) / "checkpoint_1000"
    _change_json(folder / "target.token_embedder.embedding" / ".zarray", **changes)
    _refused(tmp_path, "checkpoint_1000/checkpoint: cannot read its arrays: ")


def test_metadata_that_would_end_the_process(tmp_path: pathlib.Path) -> None:
    """Metadata that are nested without end, repeated, no file or a pipe are refused before TensorStore reads them."""
    path = _t5x(tmp_path) / "checkpoint_1000" / "target.token_embedder.embedding" / ".zarray"
    text = path.read_text()
    for content, message in (
        (f'{text[:-1]}, "attributes": {_NESTED}{"]" * 100_000}}}', "nested deeper"),
        (f'{text[:-1]}, "shape": [2, 2]}}', 'key "shape" occurs twice'),
        (text[:-9], "cannot read its .zarray: not JSON"),
    ):
        path.write_text(content)
        _refused(tmp_path, message)
    path.unlink()
    _refused(tmp_path, "No such file")
    os.mkfifo(path)
    _refused(tmp_path, "expected a regular file, found a folder, a pipe")
    path.unlink()
    path.write_text(text)
    chunk = path.parent / "0.0"
    chunk.unlink()
    os.mkfifo(chunk)
    _refused(tmp_path, "expected a regular file, found a folder, a pipe")


@pytest.mark.parametrize(
    "metadata", [_NESTED, '{"tree_metadata": {}, "tree_metadata": {}}', "{}", '{"tree_metadata": 3}'], ids=range(4)
)
def test_what_orbax_says(tmp_path: pathlib.Path, metadata: str) -> None:
    """Orbax's `_METADATA` is read as strictly."""
    folder = tmp_path / "checkpoint_7"
    _save_orbax(folder, {"target": {"a": np.ones(3, np.float32)}})
    (folder / "_METADATA").write_text(metadata)
    _refused(tmp_path, "_METADATA: (cannot be read as JSON|expected tree_metadata)")


def _nested_msgpack(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\x01"


@pytest.mark.parametrize(
    "content",
    [
        _nested_msgpack(100_000),
        _nested_msgpack(900),
        b"\x81\xa9optimizer\x81\xa6target" + _nested_msgpack(400),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        flax.serialization.msgpack_serialize({"optimizer": {"target": {"a": {"b": None}}}}),
        b"\x81\xa9optimizer\x81\xa6target\x81\x05\x06",
    ],
    ids=["deep", "deep enough", "deep target", "long list", "long bytes", "none", "number"],
)
def test_what_msgpack_says(tmp_path: pathlib.Path, content: bytes) -> None:
    """Msgpack that is nested without end, or claims more bytes than it has, is refused."""
    (_t5x(tmp_path) / "checkpoint_1000" / "checkpoint").write_bytes(content)
    _refused(tmp_path, "checkpoint_1000")


def test_what_safetensors_claims(tmp_path: pathlib.Path) -> None:
    """A header's lengths and shapes are checked against the size of the file."""
    path = _native(tmp_path) / "model.safetensors"
    header = {"x": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}}
    for content in (
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", len(_NESTED)) + _NESTED.encode(),
        struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode(),
        path.read_bytes()[:-100],
    ):
        path.write_bytes(content)
        _refused(tmp_path, "model.safetensors: cannot be read as safetensors: ")
    path.unlink()
    os.mkfifo(path)
    _refused(tmp_path, "model.safetensors: cannot be read as safetensors: expected a regular file")


@pytest.mark.parametrize(
    "index",
    [_NESTED, '{"weight_map": {}, "weight_map": {}}', "{}", '{"weight_map": []}', '{"weight_map": {"a": "/dev/zero"}}',
     '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "a\\u0000b"}}', '{"weight_map": {"a": 5}}'],
    ids=["nested", "repeated", "empty", "list", "device", "folder", "nul", "number"],
)  # fmt: skip
def test_what_an_index_says(tmp_path: pathlib.Path, index: str) -> None:
    """An index of parts is read strictly, and parts must be regular files."""
    (_hugging_face(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    _refused(tmp_path, re.escape(str(tmp_path)))


def test_paths_that_lead_nowhere(tmp_path: pathlib.Path) -> None:
    """A link to itself, a name that is too long, and one with a NUL are refused with clear messages."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("x" * 5000), f"{tmp_path}/a\0b", loop / "model"):
        with pytest.raises(CheckpointError, match=r"cannot be opened: .*\w"):
            load_checkpoint(path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint_5").symlink_to(loop)
    _refused(tmp_path / "run", "no model here")


@pytest.mark.parametrize("path", ["google/t5-v1_1-small", "https://huggingface.co/google/t5-v1_1-small"])
def test_a_name_on_the_hub(path: str) -> None:
    """A name on the Hub given as a path is answered with the command that downloads it."""
    command = "hf download google/t5-v1_1-small --local-dir t5-v1_1-small"
    with pytest.raises(CheckpointError, match=f"{path}: no such directory.*{command}"):
        load_checkpoint(path)


def test_a_huge_text_file(tmp_path: pathlib.Path) -> None:
    """A sparse config of five gigabytes is refused without being read."""
    with (_native(tmp_path) / "config.json").open("r+b") as file:
        file.truncate(5 << 30)
    _refused(tmp_path, "config.json: is larger than 64 MiB")


def test_arrays_larger_than_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with an array larger than memory is refused with the needed size, in every layout."""
    folders = [write(tmp_path / write.__name__) for write in (_native, _hugging_face, _t5x)]
    monkeypatch.setattr("calm_beam.checkpoints.metadata.available_bytes", lambda: 4_000)
    message = r"as float32, .* of shape .* GiB of memory, of which .* GiB are free|is larger than"
    for folder in folders:
        _refused(folder, message)


# Mutated files are small, so that hundreds of cases take seconds.

_CASES = 120


def _save_orbax(folder: pathlib.Path, tree: dict[str, Any]) -> None:
    orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()).save(folder, tree)


def _orbax(folder: pathlib.Path) -> pathlib.Path:
    _save_orbax(folder / "checkpoint_3", {"target": flax.traverse_util.unflatten_dict(dict(_ARRAYS), sep="/")})
    return folder


_WRITERS = {"native": _native, "hugging_face": _hugging_face, "t5x": _t5x, "orbax": _orbax}


@pytest.mark.slow
@pytest.mark.parametrize("layout", _WRITERS)
def test_mutated_checkpoints(tmp_path: pathlib.Path, layout: str) -> None:
    """A checkpoint with bytes flipped, cut or added, or values replaced, is read or refused with our message."""
    whole = _WRITERS[layout](tmp_path / "whole")
    (whole / "config.gin").write_text("network.T5Config.mlp_activations = ('gelu', 'linear')\n")
    generator = random.Random(f"checkpoints {layout}")
    messages = []
    for _ in range(_CASES):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        # Small files are parsed; there are many arrays.
        chosen = [path for path in files if path.name in _INTERPRETED] if generator.random() < 0.7 else files
        path = generator.choice(chosen)
        path.write_bytes(_mutated(path.read_bytes(), generator))
        try:
            load_checkpoint(copy)
        except CalmBeamError as error:
            messages.append(str(error))
        shutil.rmtree(copy)
    assert len(messages) > _CASES // 3
    assert not [message for message in messages if "\n" in message]


_INTERPRETED = (
    ".zarray",
    "_METADATA",
    "checkpoint",
    "config.gin",
    "config.json",
    "manifest.ocdbt",
    "model.safetensors",
)


@pytest.mark.slow
def test_mutated_vocabularies(tmp_path: pathlib.Path) -> None:
    """The same holds for a SentencePiece model and the tokenizer's file next to it."""
    whole = train_vocabulary(tmp_path / "whole.model").read_bytes()
    generator = random.Random("vocabularies")
    path, beside = tmp_path / "sentencepiece.model", tmp_path / "tokenizer_config.json"
    refused = 0
    for _ in range(2 * _CASES):
        path.write_bytes(_mutated(whole, generator))
        beside.write_bytes(_mutated(b'{"extra_ids": 3, "additional_special_tokens": ["<extra_id_0>"]}', generator))
        for opened in (Vocabulary, open_vocabulary):
            try:
                vocabulary = opened(path)
                vocabulary.decode(vocabulary.encode("the cat sat on a small red boat"))
            except CalmBeamError:
                refused += 1
    assert refused > _CASES


_REPLACEMENTS = (b"1e9", b"1000000000", b"-1", b"0", b"null", b"[]", b"{}", b'"x"', b"true", b"1e400", b"NaN")


def _mutated(content: bytes, generator: random.Random) -> bytes:
    """Returns a file as a damaged disk or an attacker would leave it."""
    kind = generator.randrange(5)
    if kind == 0:
        return content[: generator.randrange(len(content) + 1)]
    if kind == 1:
        values = re.findall(rb'[-\d.]+|true|false|null|"[^"]*"', content)
        return content.replace(generator.choice(values or [b"a"]), generator.choice(_REPLACEMENTS), 1)
    damaged = bytearray(content or b"\0")
    for _ in range(generator.choice([1, 1, 4, 32])):
        place = generator.randrange(len(damaged))
        if kind == 2:
            damaged[place] ^= 1 << generator.randrange(8)
        elif kind == 3:
            damaged[place:place] = bytes(generator.randrange(256) for _ in range(generator.randrange(1, 9)))
        else:
            del damaged[place : place + generator.randrange(1, 9)]
            damaged = damaged or bytearray(b"\0")
    return bytes(damaged)
