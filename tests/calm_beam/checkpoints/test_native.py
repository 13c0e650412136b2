"""The native layout."""

import json
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from calm_beam.checkpoints import CheckpointError, fingerprint, load_checkpoint, write_native
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_classifier=2)
_ARRAYS = build_arrays(_CONFIG, 0)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Gives a native model folder with a fake vocabulary file, which no checkpoint reader opens."""
    return _write(tmp_path / "model")


def _write(folder: pathlib.Path, **options: Any) -> pathlib.Path:
    vocabulary = folder.parent / "stand_in.model"
    vocabulary.write_bytes(b"pieces")
    write_native(folder, _CONFIG, arrays=_ARRAYS, vocabulary_path=vocabulary, **options)
    return folder


def _change_config(folder: pathlib.Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_float32_comes_back_exactly(folder: pathlib.Path) -> None:
    """Config, weights and vocabulary come back, and the folder holds these three files."""
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == _CONFIG
    assert checkpoint.layout == "native"
    assert checkpoint.directory == folder
    assert checkpoint.arrays.keys() == _ARRAYS.keys()
    for name, array in _ARRAYS.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array)
    assert {child.name for child in folder.iterdir()} == {"config.json", "model.safetensors", "sentencepiece.model"}
    assert (folder / "sentencepiece.model").read_bytes() == b"pieces"


def test_float16_rounds_and_halves(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As float16 the file is about half as large and every weight is the nearest float16, read as float32."""
    half = _write(tmp_path / "half", dtype="float16")
    checkpoint = load_checkpoint(half)
    for name, array in _ARRAYS.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array.astype(np.float16).astype(np.float32))
    sizes = [(each / "model.safetensors").stat().st_size for each in (half, folder)]
    assert 0.45 < sizes[0] / sizes[1] < 0.75


def test_one_model_has_one_fingerprint(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Both layouts give one fingerprint; so do weights that float16 holds exactly, in float16."""
    write_t5x(tmp_path / "t5x", _ARRAYS)
    assert load_checkpoint(folder).fingerprint() == load_checkpoint(tmp_path / "t5x").fingerprint()
    assert load_checkpoint(folder).fingerprint() == fingerprint(_ARRAYS)
    exact = {name: array.astype(np.float16).astype(np.float32) for name, array in _ARRAYS.items()}
    prints = set()
    for dtype in ("float32", "float16"):
        write_native(
            tmp_path / dtype, _CONFIG, arrays=exact, vocabulary_path=folder / "sentencepiece.model", dtype=dtype
        )
        prints.add(load_checkpoint(tmp_path / dtype).fingerprint())
    write_t5x(tmp_path / "exact", exact)
    assert prints == {load_checkpoint(tmp_path / "exact").fingerprint()}


def test_every_size_is_kept(tmp_path: pathlib.Path) -> None:
    """Sizes that no shape shows, such as the distance where relative positions end, are read from the config."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=1, relative_max_distance=20)
    (tmp_path / "stand_in.model").write_bytes(b"pieces")
    write_native(
        tmp_path / "model", config, arrays=build_arrays(config, 0), vocabulary_path=tmp_path / "stand_in.model"
    )
    assert load_checkpoint(tmp_path / "model").config == config


def test_bfloat16_is_not_written(tmp_path: pathlib.Path) -> None:
    """A type that rounds too coarsely is refused before anything is written."""
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, got 'bfloat16'"):
        _write(tmp_path / "model", dtype="bfloat16")
    assert not (tmp_path / "model").exists()


def test_a_failed_write_leaves_no_config(tmp_path: pathlib.Path) -> None:
    """The config is written last, so an incomplete folder is not a model."""
    with pytest.raises(FileNotFoundError):
        write_native(tmp_path / "model", _CONFIG, arrays=_ARRAYS, vocabulary_path=tmp_path / "nowhere.model")
    assert list((tmp_path / "model").iterdir()) == []
    with pytest.raises(CheckpointError, match="no model here"):
        load_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("content", ["", "{", "\udcff"], ids=["empty", "half", "bytes"])
def test_a_config_that_is_no_json_is_refused(folder: pathlib.Path, content: str) -> None:
    """A damaged config is refused by name."""
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON: "):
        load_checkpoint(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "calm-beam/model/v2"}', '{"type": "t5"}'])
def test_a_config_of_another_format_is_refused(folder: pathlib.Path, content: str) -> None:
    """A config of another version or program is refused with the expected format."""
    (folder / "config.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r'config\.json: expected a JSON object with "format": "calm-beam/model/v1'
    ):
        load_checkpoint(folder)


def test_unknown_and_missing_keys_are_refused(folder: pathlib.Path) -> None:
    """Unknown and missing keys of the config are named."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["num_head"] = fields.pop("num_heads")
    path.write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"config\.json: unknown keys \['num_head'\], missing keys \['num_heads'\]"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "changes", [{"emb_dim": 0}, {"emb_dim": "16"}, {"emb_dim": None}, {"tied_head": "no"}, {"num_heads": 4}], ids=str
)
def test_sizes_that_do_not_fit_are_refused(folder: pathlib.Path, changes: dict[str, Any]) -> None:
    """A size that is out of range, of the wrong type or not the weights' is refused with the file's name."""
    _change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=r"model.*config"):
        load_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_damaged_weights_are_refused(folder: pathlib.Path, kept: int) -> None:
    """A weights file that was cut anywhere is refused by name."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors: "):
        load_checkpoint(folder)


def test_missing_weights_are_refused(folder: pathlib.Path) -> None:
    """A config without weights is refused by the name of the file that is missing."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors: .*[Nn]o such file"):
        load_checkpoint(folder)


def test_weights_of_an_unreadable_type_are_refused(folder: pathlib.Path) -> None:
    """Tensors of a type that numpy does not have are refused by name."""
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x38\x38")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors: "):
        load_checkpoint(folder)


def test_weights_of_another_model_are_refused(folder: pathlib.Path) -> None:
    """Weights that are no T5 1.1, or not of the sizes in the config, are refused by folder."""
    safetensors.numpy.save_file({"wte": np.zeros((3, 2), np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model: not a T5 parameter tree"):
        load_checkpoint(folder)
    larger = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
    safetensors.numpy.save_file(build_arrays(larger, 0), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json says .*num_decoder_layers=2.*num_decoder_layers=3"):
        load_checkpoint(folder)


def test_weights_beyond_float16_are_refused(tmp_path: pathlib.Path) -> None:
    """A weight that would become infinite in float16 is refused by name, and nothing is written."""
    arrays = {**_ARRAYS, "token_embedder/embedding": _ARRAYS["token_embedder/embedding"] + np.float32(1e6)}
    with pytest.raises(ValueError, match="token_embedder/embedding has values that are not finite in float16"):
        write_native(tmp_path / "model", _CONFIG, arrays=arrays, vocabulary_path=tmp_path / "v", dtype="float16")
    assert not (tmp_path / "model").exists()


def test_without_a_vocabulary(folder: pathlib.Path) -> None:
    """Without a vocabulary none is left in the folder, where an old one would be taken for the model's."""
    write_native(folder, _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
    assert load_checkpoint(folder).vocabulary_path is None
    assert {child.name for child in folder.iterdir()} == {"config.json", "model.safetensors"}
