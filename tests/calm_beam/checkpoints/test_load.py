"""Finding models and vocabularies in folders."""

import pathlib

import pytest

from calm_beam.checkpoints import CheckpointError, find_model, load_checkpoint, write_native
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=1)
_ARRAYS = build_arrays(_CONFIG, 0)


def test_a_missing_folder_is_refused(tmp_path: pathlib.Path) -> None:
    """A path that does not exist, or is a file, is refused as the caller wrote it."""
    with pytest.raises(CheckpointError, match="checkpoint no/such/model: no such directory"):
        load_checkpoint("no/such/model")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CheckpointError, match=f"checkpoint {file}: no such directory"):
        load_checkpoint(file)


def test_a_folder_without_a_model_is_refused(tmp_path: pathlib.Path) -> None:
    """The message says what was looked for and what is there."""
    with pytest.raises(CheckpointError, match=r"no model here\. Expected config\.json .*T5X.*Orbax\); found nothing"):
        load_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "checkpoint_last").mkdir()
    with pytest.raises(CheckpointError, match=r"found checkpoint_last, notes\.txt"):
        load_checkpoint(tmp_path)


def test_the_vocabulary_beside_the_steps(tmp_path: pathlib.Path) -> None:
    """T5X's vocabulary next to the step folders is found from the run's folder and from the step's."""
    step = write_t5x(tmp_path, _ARRAYS)
    beside = tmp_path / "sentencepiece.model"
    beside.write_bytes(b"x")
    assert load_checkpoint(tmp_path).vocabulary_path == beside
    assert load_checkpoint(step).vocabulary_path == beside


def test_the_vocabulary_inside_comes_first(tmp_path: pathlib.Path) -> None:
    """A vocabulary in the step's own folder is preferred to the one next to the steps."""
    step = write_t5x(tmp_path, _ARRAYS)
    for folder in (tmp_path, step):
        (folder / "sentencepiece.model").write_bytes(b"x")
    assert load_checkpoint(tmp_path).vocabulary_path == step / "sentencepiece.model"


def test_a_native_models_vocabulary_is_its_own(tmp_path: pathlib.Path) -> None:
    """A native folder's vocabulary is in it; one in the folder above is ignored."""
    above = tmp_path / "sentencepiece.model"
    above.write_bytes(b"x")
    folder = tmp_path / "model"
    write_native(folder, _CONFIG, arrays=_ARRAYS, vocabulary_path=above)
    assert load_checkpoint(folder).vocabulary_path == folder / "sentencepiece.model"
    (folder / "sentencepiece.model").unlink()
    assert load_checkpoint(folder).vocabulary_path is None


def test_a_model_is_found_before_it_is_read(tmp_path: pathlib.Path) -> None:
    """Finding a model returns its layout, folder and step, without a look at the weights."""
    assert find_model(tmp_path) is None
    for step in (5, 40):
        (tmp_path / f"checkpoint_{step}").mkdir()
        (tmp_path / f"checkpoint_{step}" / "checkpoint").write_bytes(b"damaged")
    found = find_model(tmp_path)
    assert found is not None
    assert (found.layout, found.directory, found.step) == ("t5x", tmp_path / "checkpoint_40", 40)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    found = find_model(tmp_path)
    assert found is not None
    assert (found.layout, found.directory, found.step) == ("hugging_face", tmp_path, None)
    (tmp_path / "config.json").write_text("damaged")
    found = find_model(tmp_path)
    assert found is not None
    assert found.layout == "native"
