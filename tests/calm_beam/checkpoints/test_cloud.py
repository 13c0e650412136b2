"""Models on Cloud Storage, in every layout."""

import pathlib
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from calm_beam import storage
from calm_beam.checkpoints import Checkpoint, CheckpointError, Declared, load_checkpoint, store_model, write_native
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from tests.builders import build_arrays, build_config, write_hugging_face, write_t5x
from tests.pipelines import write_vocabulary

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

pytestmark = pytest.mark.timeout(120)

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2)
_ARRAYS = build_arrays(_CONFIG, 0)
# All but one array are in the msgpack file, so that there are few objects to move.
_INLINE = sorted(set(_ARRAYS) - {"decoder/decoder_norm/scale"})


def upload(folder: pathlib.Path, path: str) -> str:
    """Stores a local folder, and returns its address."""
    for file in folder.rglob("*"):
        if file.is_file():
            with storage.replacing(storage.joined(path, *file.relative_to(folder).parts)) as temporary:
                shutil.copyfile(file, temporary)
    return path


def _downloaded(cloud: "CloudService") -> list[str]:
    return sorted(place.split("/o/", 1)[1].split("?")[0] for _, place in cloud.guard.requests if "alt=media" in place)


def _assert_equal(found: Checkpoint, expected: Checkpoint) -> None:
    assert (found.layout, found.step, found.config) == (expected.layout, expected.step, expected.config)
    assert found.fingerprint() == expected.fingerprint()
    assert all(np.array_equal(found.arrays[name], array) for name, array in expected.arrays.items())


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small SentencePiece model."""
    return write_vocabulary(tmp_path_factory.mktemp("cloud") / "sentencepiece.model")


def test_a_native_model(bucket: str, tmp_path: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """A native folder reads as it does locally; weights and vocabulary have their addresses as sources."""
    write_native(tmp_path / "model", _CONFIG, arrays=_ARRAYS, vocabulary_path=vocabulary)
    path = upload(tmp_path / "model", f"{bucket}/models/tiny")
    for name in (path, f"{path}/", pathlib.PurePosixPath(path)):
        found = load_checkpoint(name)  # type: ignore[arg-type]
        _assert_equal(found, load_checkpoint(tmp_path / "model"))
        assert found.uri == path
        assert found.vocabulary_uri == f"{path}/sentencepiece.model"
        assert found.vocabulary_path is not None
        assert found.vocabulary_path.read_bytes() == vocabulary.read_bytes()


def test_a_bucket_may_be_a_model(bucket: str, tmp_path: pathlib.Path) -> None:
    """A model may be in a bucket without a folder."""
    write_native(tmp_path / "model", _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
    found = load_checkpoint(upload(tmp_path / "model", bucket))
    assert (found.uri, found.vocabulary_uri) == (bucket, None)


def test_what_stands_beside_the_steps_of_t5x(bucket: str, tmp_path: pathlib.Path) -> None:
    """`config.gin` next to the steps is read from the bucket too, under its address there, as are sentinels."""
    write_t5x(tmp_path / "run", _ARRAYS, inline=_INLINE)
    (tmp_path / "run" / "config.gin").write_text("network.T5Config.mlp_activations = ('swish', 'linear')")
    (tmp_path / "run" / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    write_vocabulary(tmp_path / "run" / "sentencepiece.model")
    path = upload(tmp_path / "run", f"{bucket}/runs/silu")
    for name in (path, f"{path}/checkpoint_1000"):
        found = load_checkpoint(name)
        assert found.config.activation == "silu"
        assert found.stated == (f"Activation is silu: {path}/config.gin says so.",)
        assert f"{path}/config.gin does not say" in found.assumed[0]
        assert found.vocabulary_uri is not None
        assert open_vocabulary(found.vocabulary_uri).extra_ids == 3
    with pytest.raises(CheckpointError, match=f"activation is silu by {path}/config.gin, but gelu was passed"):
        load_checkpoint(path, declared=Declared(activation="gelu"))


def test_the_latest_step_of_t5x(
    cloud: "CloudService", bucket: str, tmp_path: pathlib.Path, vocabulary: pathlib.Path
) -> None:
    """The highest step by number is read, with the vocabulary next to the steps; nothing else is copied."""
    for step in (9, 10):
        write_t5x(tmp_path / "run", build_arrays(_CONFIG, step), step=step, inline=_INLINE)
    (tmp_path / "run" / "checkpoint_11").mkdir()
    (tmp_path / "run" / "checkpoint_11" / "log").write_text("begun")
    (tmp_path / "run" / "train.log").write_text("...")
    shutil.copyfile(vocabulary, tmp_path / "run" / "sentencepiece.model")
    path = upload(tmp_path / "run", f"{bucket}/run")
    found = load_checkpoint(path)
    _assert_equal(found, load_checkpoint(tmp_path / "run"))
    assert (found.uri, found.step) == (f"{path}/checkpoint_10", 10)
    assert found.vocabulary_uri == f"{path}/sentencepiece.model"
    prefixes = {name.split("/")[1] for name in _downloaded(cloud)}
    assert prefixes == {"checkpoint_10", "sentencepiece.model"}
    # A step given by its own path has the run's vocabulary, too.
    found = load_checkpoint(f"{path}/checkpoint_9")
    _assert_equal(found, load_checkpoint(tmp_path / "run" / "checkpoint_9"))
    assert found.uri == f"{path}/checkpoint_9"
    assert found.vocabulary_uri == f"{path}/sentencepiece.model"


def test_hugging_face(cloud: "CloudService", bucket: str, tmp_path: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """A folder of transformers reads as it does locally; weights in other formats are not copied."""
    folder = tmp_path / "hf"
    write_hugging_face(folder, _CONFIG, _ARRAYS)
    shutil.copyfile(vocabulary, folder / "spiece.model")
    (folder / "pytorch_model.bin").write_bytes(b"large")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.json").write_text("{}")
    path = upload(folder, f"{bucket}/hf")
    found = load_checkpoint(path)
    _assert_equal(found, load_checkpoint(folder))
    assert found.vocabulary_uri == f"{path}/spiece.model"
    assert _downloaded(cloud) == ["hf/config.json", "hf/model.safetensors", "hf/spiece.model"]


@pytest.mark.parametrize("item", ["", "state"])
def test_orbax(bucket: str, tmp_path: pathlib.Path, item: str) -> None:
    """A step that Orbax wrote, plainly or in an item, reads as it does locally."""
    import flax.traverse_util
    import orbax.checkpoint

    tree = {"params": flax.traverse_util.unflatten_dict(_ARRAYS, sep="/")}
    folder = tmp_path / "run" / "checkpoint_7"
    orbax.checkpoint.PyTreeCheckpointer().save(folder / item if item else folder, tree)
    path = upload(tmp_path / "run", f"{bucket}/run")
    found = load_checkpoint(path)
    _assert_equal(found, load_checkpoint(tmp_path / "run"))
    assert (found.layout, found.uri) == ("orbax", f"{path}/checkpoint_7")


def test_no_model_is_told(bucket: str, tmp_path: pathlib.Path) -> None:
    """A folder without a model is refused with what was found; nothing is copied."""
    with pytest.raises(CheckpointError, match=r"checkpoint gs://.*/none: no such folder, or nothing in it\."):
        load_checkpoint(f"{bucket}/none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    path = upload(tmp_path / "other", f"{bucket}/other")
    with pytest.raises(CheckpointError, match=r"other: no model here\. Expected config\.json .* found notes\.txt\."):
        load_checkpoint(path)


def test_errors_name_the_cloud(bucket: str, tmp_path: pathlib.Path) -> None:
    """Errors name the address that the user gave, not the local copy."""
    write_native(tmp_path / "model", _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not safetensors")
    path = upload(tmp_path / "model", f"{bucket}/m")
    with pytest.raises(CheckpointError, match=rf"^{path}/model\.safetensors: cannot be read as safetensors"):
        load_checkpoint(path)


def test_a_lost_array_is_told(bucket: str, tmp_path: pathlib.Path) -> None:
    """An array with a missing chunk is an error, not zeros."""
    write_t5x(tmp_path / "run", _ARRAYS, step=3, inline=_INLINE)
    path = upload(tmp_path / "run", f"{bucket}/run")
    storage.remove_file(f"{path}/checkpoint_3/target.decoder.decoder_norm.scale/0")
    with pytest.raises(CheckpointError, match=rf"^{path}/checkpoint_3/checkpoint: cannot read its arrays"):
        load_checkpoint(path)


def test_a_model_is_stored_mark_last(cloud: "CloudService", bucket: str, tmp_path: pathlib.Path) -> None:
    """The file that marks a folder as a model is written last, and no model is overwritten."""
    for _ in range(2):
        write_native(tmp_path / "model", _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
        store_model(tmp_path / "model", f"{bucket}/m")
    assert load_checkpoint(f"{bucket}/m").fingerprint() == load_checkpoint(f"{bucket}/m").fingerprint()
    write_native(tmp_path / "model", _CONFIG, arrays=build_arrays(_CONFIG, 1), vocabulary_path=None)
    with pytest.raises(FileExistsError, match=r"m/model\.safetensors: was written by another process"):
        store_model(tmp_path / "model", f"{bucket}/m")
    cloud.guard.reset()
    write_t5x(tmp_path / "run", _ARRAYS, step=3, inline=_INLINE)
    store_model(tmp_path / "run", f"{bucket}/run")
    last = storage.stat(f"{bucket}/run/checkpoint_3/checkpoint")
    assert last is not None
    assert all(file.generation <= last.generation for file in storage.list_below(f"{bucket}/run"))
