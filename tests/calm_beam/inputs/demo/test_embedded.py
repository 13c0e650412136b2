"""The demo model and calibration set."""

import gzip
import json
import pathlib

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.exits.thresholds import descending_grid
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from tools.demo_task.sentences import normalized
from tools.demo_task.write_data import CALIBRATION, SEED, TRAINING, VALIDATION, write_data


def _inputs(path: pathlib.Path) -> list[str]:
    return [json.loads(line)["input"] for line in gzip.open(path, "rt", encoding="utf-8")]


def test_model_and_vocabulary_belong_together() -> None:
    """The demo model loads, has eight decoder layers that may exit, and a head for exactly its vocabulary."""
    checkpoint = load_checkpoint(embedded.MODEL)
    assert checkpoint.config.num_decoder_layers == 8
    assert checkpoint.vocabulary_path is not None
    assert Vocabulary(checkpoint.vocabulary_path).size == checkpoint.config.vocab_size


def test_the_embedded_files_are_small() -> None:
    """Model, vocabulary and calibration set take less than 8 MB."""
    files = [*embedded.MODEL.iterdir(), embedded.CALIBRATION_SET]
    assert sum(path.stat().st_size for path in files) < 8_000_000


def test_the_default_grid_is_in_testing_order() -> None:
    """The default thresholds are distinct and descending, as the fixed sequence test needs."""
    assert descending_grid(embedded.THRESHOLDS) == embedded.THRESHOLDS


@pytest.mark.slow
def test_training_never_saw_the_calibration_set(tmp_path: pathlib.Path) -> None:
    """The committed set is the generator's output, and none of its sentences is in the training data."""
    write_data(tmp_path, seed=SEED, training=TRAINING, validation=VALIDATION, calibration=CALIBRATION)
    committed = gzip.decompress(embedded.CALIBRATION_SET.read_bytes())
    assert committed == gzip.decompress((tmp_path / "calibration.jsonl.gz").read_bytes())
    calibration = {normalized(text) for text in _inputs(embedded.CALIBRATION_SET)}
    assert len(calibration) == CALIBRATION
    for name in ("training", "validation"):
        assert calibration.isdisjoint(normalized(text) for text in _inputs(tmp_path / f"{name}.jsonl.gz"))
