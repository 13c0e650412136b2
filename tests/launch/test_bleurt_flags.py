"""The metric bleurt on the command line."""

import pathlib
import re
import string

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest
from calm_beam.metrics.bleurt import Bleurt
from calm_beam.outputs import read_generations
from tests.bleurt_builder import write_bleurt
from tests.pipelines import SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary

# With these pieces, metrics can read what an untrained model writes: single letters and unknown pieces.
_LETTERS = tuple(f"{before}{letter}" for before in ("", "##") for letter in (*string.ascii_lowercase, "⁇"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, data, two BLEURT checkpoints and a calibration by the first of them."""
    folder = tmp_path_factory.mktemp("bleurt")
    write_model(folder / "model", vocabulary=write_vocabulary(folder / "sentencepiece.model"))
    write_rows(folder / "a.jsonl", text_rows(20))
    write_bleurt(folder / "bleurt", spread=2.0, more_pieces=_LETTERS)
    write_bleurt(folder / "other", seed=1, more_pieces=_LETTERS)
    return folder


def _calibrate(place: pathlib.Path, *flags: str) -> int:
    paths = [f"--checkpoint={place / 'model'}", f"--data={place / 'a.jsonl'}", f"--output={place / 'out'}"]
    return main(["calibrate", *paths, *SHORT_FLAGS, "--metric=bleurt", "--delta=0.9", "--epsilon=0.4", *flags])


def test_calibration_by_bleurt(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest names the checkpoint, losses are those of its scores, and clipped scores are counted and printed."""
    assert _calibrate(place, f"--bleurt_checkpoint={place / 'bleurt'}") == 0
    found = re.search(
        r"workers: (\d+) scores of a metric lay outside \[0, 1\] and were clipped\.", capsys.readouterr().err
    )
    manifest = read_manifest(place / "out" / "manifest.json")
    (entry,) = manifest.calibrations
    assert re.fullmatch("bleurt@[0-9a-f]{16}", entry.metric)
    assert "tensorflow" in manifest.software
    bleurt, losses, clipped = Bleurt(place / "bleurt"), [], 0
    for path in (place / "out").glob("generations/*/*.parquet"):
        for item in read_generations(path):
            full, *early = (output.text for output in item.outputs)
            losses.append(1 - bleurt(early[0], [full]))
            raw = [bleurt.score(reference=full, candidate=text) for text in dict.fromkeys(early) if text != full]
            clipped += sum(not 0 <= score <= 1 for score in raw)
    assert clipped > 0
    assert found is not None
    assert int(found[1]) == clipped
    assert entry.path[0].risk == pytest.approx(sum(losses) / len(losses), abs=1e-8)


def test_verification_wants_the_same_checkpoint(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest by one checkpoint is verified neither by another nor without any."""
    fresh = write_rows(place / "fresh.jsonl", [{"input": f"the hen {row['input']}"} for row in text_rows(12)])
    flags = ["verify", f"--manifest={place / 'out'}", f"--data={fresh}", "--batch_size=4"]
    assert main(flags) == 2
    assert "needs a checkpoint, which does not come with calm-beam: pass --bleurt_checkpoint" in capsys.readouterr().err
    assert main([*flags, f"--bleurt_checkpoint={place / 'other'}"]) == 2
    assert "Scores of different checkpoints are not comparable." in capsys.readouterr().err
    assert main([*flags, f"--bleurt_checkpoint={place / 'bleurt'}"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), 'metric "bleurt" needs a checkpoint'),
        (("--bleurt_checkpoint=/no/such",), "BLEURT checkpoint /no/such: no such folder."),
        (("--bleurt_checkpoint=s3://b/x",), "of object stores only Google Cloud Storage is supported"),
        (
            ("--p_value=exact_binomial", "--bleurt_checkpoint={place}/bleurt"),
            "for losses of 0 and 1 only, and those of",
        ),
    ],
)
def test_what_bleurt_lacks_is_said_first(
    flags: tuple[str, ...],
    message: str,
    place: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a readable checkpoint nothing is decoded."""
    assert _calibrate(place, f"--output={tmp_path / 'out'}", *(flag.format(place=place) for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
