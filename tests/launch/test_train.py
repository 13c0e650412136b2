"""`calm-beam train`: what it refuses, and a short run."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from calm_beam.checkpoints import fingerprint, load_checkpoint
from calm_beam.launch.train import main
from calm_beam.vocabulary import Vocabulary

_SIZES = [
    *("--vocab_size=28", "--emb_dim=16", "--num_heads=2", "--head_dim=8", "--mlp_dim=16"),
    *("--num_encoder_layers=1", "--num_decoder_layers=2"),
]
# Everything is cut to one length, so that there is one shape to compile.
_SHORT = ["--steps=3", "--batch_tokens=16", "--max_input_length=4", "--max_target_length=4"]


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Nine rows, of which the first has two references."""
    nouns, others = ("cat", "dog", "owl"), ("mouse", "house", "bird")
    rows = [
        {"input": f"the {noun} sees a {other}", "references": [f"{other} {noun}"]} for noun in nouns for other in others
    ]
    rows[0]["references"] = ["mouse cat", "a mouse and a cat sees the house"]
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _train(*flags: str) -> int:
    return main([*_SHORT, *flags])


def test_a_short_run_writes_a_model(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps write a model that loads, with its vocabulary; progress and losses go to stderr only."""
    flags = [
        f"--data={data}",
        f"--validation_data={data}",
        f"--output={tmp_path / 'model'}",
        "--dtype=float16",
        *_SIZES,
    ]
    assert _train(*flags) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "on 10 pairs for 3 steps; 9 pairs to validate on" in printed.err
    assert "Cut 10 inputs to --max_input_length=4 and " in printed.err
    assert "step 3/3, loss" in printed.err
    assert "Validation loss" in printed.err
    checkpoint = load_checkpoint(tmp_path / "model")
    assert (checkpoint.config.emb_dim, checkpoint.config.num_decoder_layers) == (16, 2)
    assert checkpoint.vocabulary_path is not None
    assert Vocabulary(checkpoint.vocabulary_path).size == 28
    # Stored in half precision: rounding again changes nothing.
    assert all(np.array_equal(array, array.astype(np.float16)) for array in checkpoint.arrays.values())


def test_fine_tuning_keeps_the_vocabulary(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run from a checkpoint writes other weights with the same sizes and the same vocabulary."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'one'}", *_SIZES) == 0
    assert _train(f"--data={data}", f"--output={tmp_path / 'two'}", f"--checkpoint={tmp_path / 'one'}") == 0
    one, two = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "two")
    assert one.config == two.config
    assert fingerprint(one.arrays) != fingerprint(two.arrays)
    assert one.vocabulary_path is not None
    assert two.vocabulary_path is not None
    assert one.vocabulary_path.read_bytes() == two.vocabulary_path.read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=3"], "unknown flag --step. Did you mean --steps?"),
        (["--steps=few"], "argument --steps: invalid int value: 'few'"),
        (["--steps=0"], "--steps must be at least 1, got 0."),
        (["--dropout=1"], "--dropout must be in [0, 1), got 1.0."),
        (["--emb_dim=0"], "--emb_dim must be at least 1, got 0."),
        (["--dtype=bfloat16"], "argument --dtype: invalid choice: 'bfloat16'"),
        (["--muon_learning_rate=0"], "--muon_learning_rate must be positive and finite, got 0.0."),
        (["--vocab_size=9000"], "--vocab_size=9000: vocabulary: 19 texts do not give one of vocab_size=9000"),
        (["--data=nothing-*.jsonl"], "--data nothing-*.jsonl: no such file."),
        (["--validation_data=gs://b/x.jsonl"], "--validation_data gs://b/x.jsonl: object stores are not supported yet"),
        (["--output=gs://b/model"], "--output gs://b/model: object stores are not supported yet"),
        (["--checkpoint=nowhere"], "--checkpoint: checkpoint nowhere: no such directory."),
        (["--checkpoint=nowhere", "--emb_dim=64"], "--emb_dim: a model from --checkpoint has its own sizes."),
    ],
)
def test_bad_usage_is_explained(
    flags: list[str],
    message: str,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each bad flag gives status 2, says what was wrong, and writes nothing."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'model'}", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without data and output, the status is 2 and both are named."""
    assert main([]) == 2
    assert "--data, --output" in capsys.readouterr().err


def test_a_full_output_is_kept(data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with files in it is refused unless --overwrite is given."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    flags = [f"--data={data}", f"--output={tmp_path / 'model'}", *_SIZES]
    assert _train(*flags) == 2
    assert "is not empty. Name another folder, or pass --overwrite." in capsys.readouterr().err
    assert _train(*flags, "--overwrite") == 0
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: expected a JSON object, got list"),
        ('{"input": " ", "references": ["a"]}', "line 2: input is empty"),
        ('{"input": "a"}', "line 2: training needs input as text, and references"),
        ('{"input": "a", "references": [1]}', "line 2: references must be a list of texts"),
    ],
)
def test_bad_rows_are_located(
    line: str, message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A malformed row gives status 2 and its file and line."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a", "references": ["b"]}\n' + line + "\n")
    assert _train(f"--data={path}", f"--output={tmp_path / 'model'}") == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_a_checkpoint_without_vocabulary_is_refused(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuning needs the checkpoint's own vocabulary."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'one'}", *_SIZES) == 0
    (tmp_path / "one" / "sentencepiece.model").unlink()
    assert _train(f"--data={data}", f"--output={tmp_path / 'two'}", f"--checkpoint={tmp_path / 'one'}") == 2
    assert "has no vocabulary. Put its sentencepiece.model beside it." in capsys.readouterr().err


def test_divergence_is_a_failure(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is no longer finite gives status 1, and no model is written."""
    flags = [f"--data={data}", f"--output={tmp_path / 'model'}", "--muon_learning_rate=1e38", *_SIZES]
    assert _train(*flags, "--adam_learning_rate=1e38") == 1
    assert "the training loss is" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
