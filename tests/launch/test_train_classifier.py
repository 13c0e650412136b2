"""`calm-beam train --stage=classifier`: a model gets an exit classifier and stays as it is."""

import json
import pathlib

import numpy as np
import pytest

from calm_beam.checkpoints import load_checkpoint, write_native
from calm_beam.launch.cli import main
from tests.builders import build_arrays, build_config, train_vocabulary

_SHORT = ["--stage=classifier", "--batch_tokens=40", "--max_input_length=6", "--max_target_length=6"]


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twelve rows of text."""
    words = ("the cat", "a dog", "the rain", "a boat")
    rows = [
        {"input": f"{one} and {two}", "references": [f"{two} {one}"]} for one in words for two in words if one != two
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_model(directory: pathlib.Path, *, dtype: str = "float32", **exits: int) -> pathlib.Path:
    config = build_config(vocab_size=48, num_encoder_layers=1, **exits)
    vocabulary = train_vocabulary(directory.parent / "v.model")
    write_native(directory, config, arrays=build_arrays(config, 0), vocabulary_path=vocabulary, dtype=dtype)
    return directory


def _backbone(directory: pathlib.Path) -> dict[str, bytes]:
    arrays = load_checkpoint(directory).arrays
    return {name: np.asarray(array).tobytes() for name, array in arrays.items() if "meta_cls" not in name}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_classifier_is_added(
    dtype: str, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The written model has a classifier of two logits, its other weights have the bits they had; a table says F1."""
    model = _write_model(tmp_path / "model", dtype=dtype)
    output = tmp_path / "out"
    flags = [f"--checkpoint={model}", f"--data={data}", f"--validation_data={data}", f"--output={output}"]
    assert main(["train", *_SHORT, *flags, f"--stored_dtype={dtype}"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    for words in ("F1 of", "AUC", "tokens that agree", "Newton steps. Loss per token:", "other weights are unchanged"):
        assert words in printed.err
    checkpoint = load_checkpoint(output)
    assert checkpoint.config.exit_classifier == 2
    assert np.any(checkpoint.arrays["decoder/meta_cls/kernel"])
    assert _backbone(output) == _backbone(model)


def test_exits_keep_their_norms_and_heads(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Exit norms and heads are kept, as other weights are."""
    model, output = _write_model(tmp_path / "model", exit_norms=True, exit_heads=True), tmp_path / "out"
    flags = [f"--checkpoint={model}", f"--data={data}", f"--validation_data={data}", f"--output={output}"]
    assert main(["train", *_SHORT, *flags]) == 0
    assert "decoder/exit_heads_2/kernel" in _backbone(output)
    assert _backbone(output) == _backbone(model)


def test_a_classifier_is_replaced_by_one_of_one_logit(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new classifier replaces an old one, in the paper's form with the flag, with a message."""
    model = _write_model(tmp_path / "model", exit_classifier=2)
    flags = [f"--checkpoint={model}", f"--data={data}", f"--validation_data={data}", f"--output={model}"]
    before = _backbone(model)
    options = ["--objective=geometric", "--classifier_logits=1", "--steps=2"]
    assert main(["train", *_SHORT, *flags, *options]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["train", *_SHORT, *flags, *options, "--overwrite"]) == 0
    assert f"Replacing the exit classifier of {model}." in capsys.readouterr().err
    assert load_checkpoint(model).arrays["decoder/meta_cls/kernel"].shape == (16, 1)
    assert _backbone(model) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint=nowhere"], "--checkpoint: checkpoint nowhere: no such directory."),
        (["--steps=0"], "--steps must be at least 1, got 0."),
        (["--objective=joint"], "argument --objective: invalid choice: 'joint'"),
        (
            ["--objective=geometric", "--balance_classes"],
            "--balance_classes needs objective independent, got geometric",
        ),
        (["--classifier_logits=3"], "argument --classifier_logits: invalid choice: 3"),
        (["--sampled_layers=0"], "--sampled_layers: not a flag of --stage=classifier. Leave it out."),
        (["--resume", "--dropout=0.1"], "--dropout, --resume: not a flag of --stage=classifier. Leave them out."),
        (["--stored_dtype=float16"], "--stored_dtype=float16: would change "),
    ],
)
def test_bad_usage_is_explained(
    flags: list[str], message: str, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bad flag gives status 2, says what was wrong, and writes nothing."""
    model = _write_model(tmp_path / "model")
    needed = [f"--checkpoint={model}", f"--data={data}", f"--validation_data={data}", f"--output={tmp_path / 'out'}"]
    assert main(["train", *_SHORT, *needed, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_validation_data_are_needed(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training a classifier without validation data is refused."""
    model = _write_model(tmp_path / "model")
    assert main(["train", *_SHORT, f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'out'}"]) == 2
    assert "--validation_data is missing: --stage=classifier needs rows to measure it on." in capsys.readouterr().err
