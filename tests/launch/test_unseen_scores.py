"""Scores that see no text are reported and counted by every command, and too many end the run."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import calm_beam as calm
from calm_beam.inputs.set_parts import CONFIRMING, part_of, salt_of
from calm_beam.launch.cli import main
from calm_beam.launch.runners import PipelineError
from tests.pipelines import SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary

_ROWS = 40
# A tokeniser of a-z sees only a number.
_RUSSIAN = "в 2024 году лето было жарким"
_ENGLISH = "the cat the owl"
_FEW = "its tokeniser drops more than half of the letters and digits of a text"
_GOAL = ("--consistency=risk,textual", "--delta=0.9", "--epsilon=0.5")


def _rows(is_russian: Callable[[int], bool]) -> list[dict[str, Any]]:
    """Returns rows with ids, some of which have a reference that `rouge_l` hardly sees."""
    return [
        {**row, "id": f"row-{index}", "references": [_RUSSIAN if is_russian(index) else _ENGLISH]}
        for index, row in enumerate(text_rows(_ROWS))
    ]


def _confirms(index: int) -> bool:
    return part_of(f"row-{index}", salt=salt_of(0), holdout_share=0.3) == CONFIRMING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model, data of which four examples of forty, or five, are hardly seen, and a calibration of each."""
    folder = tmp_path_factory.mktemp("unseen")
    write_model(folder / "model", vocabulary=write_vocabulary(folder / "trained.model"))
    for few in (4, 5):
        write_rows(folder / f"{few}.jsonl", _rows(lambda index, few=few: index < few))  # type: ignore[misc]
        assert _run(folder, "calibrate", few, folder / f"{few}") == 0
    return folder


def _run(folder: pathlib.Path, command: str, few: int, output: pathlib.Path, *flags: str) -> int:
    paths = [f"--checkpoint={folder / 'model'}", f"--data={folder / f'{few}.jsonl'}", f"--output={output}"]
    return main([command, *paths, *SHORT_FLAGS, *_GOAL, *flags])


def _manifest(output: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    return found


def test_the_default_metric_reads_every_script(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The default metric is `rouge_l_unicode`, which sees all these texts, on the command line and in Python."""
    named = _manifest(folder / "5")
    assert {entry["metric"] for entry in named["calibrations"]} == {"rouge_l_unicode"}
    assert "unseen" not in named["data"]
    manifest = calm.calibrate(
        model=folder / "model",
        data=str(folder / "5.jsonl"),
        output=tmp_path / "out",
        thresholds=(0.9, 0.5),
        max_input_length=32,
        max_decode_length=6,
        batch_size=4,
    )
    assert [entry.metric for entry in manifest.calibrations] == ["rouge_l_unicode"]
    assert main(["evaluate", f"--generations={folder / '5'}", f"--output={tmp_path / 'splits'}", "--trials=2"]) == 0
    assert "rouge_l_unicode" in (tmp_path / "splits" / "splits.csv").read_text(encoding="utf-8")


def test_a_tenth_is_counted_and_shown(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of forty are counted in the manifest, on the terminal, in the report, and by `inspect`."""
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "out"
    words = "rouge_l drops more than half of the letters of a text in 4 examples."
    assert main(["calibrate", f"--generations={folder / '4'}", f"--output={out}", *_GOAL, "--metric=rouge_l"]) == 0
    assert words in capsys.readouterr().out
    assert _manifest(out)["data"]["unseen"] == [{"metric": "rouge_l", "no_token": 0, "few_letters": 4}]
    assert main(["inspect", str(out)]) == 0
    assert words in capsys.readouterr().out
    assert words in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("calibrate", []),
        ("calibrate", ["--metric=token_f1,rouge_l"]),
        ("calibrate", ["--tail=0.5", "--consistency=risk"]),
        ("evaluate", ["--trials=2"]),
    ],
)
def test_more_than_a_tenth_end_the_run(
    command: str, flags: Sequence[str], folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of forty end the run with status 1 and the metrics that see the texts; nothing is written."""
    goal = ["--metric=rouge_l", "--consistency=risk", "--delta=0.9", "--epsilon=0.5"]
    assert main([command, f"--generations={folder / '5'}", f"--output={tmp_path / 'out'}", *goal, *flags]) == 1
    printed = capsys.readouterr().err
    assert f'metric "rouge_l" says too little here: in 5 of 40 examples {_FEW}' in printed
    assert "Metrics that see such texts: rouge_l_unicode, token_f1, exact_match, " in printed
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_sequential_run_ends(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds of a sequential run are counted together, also when resumed, and no manifest is written."""
    out = tmp_path / "out"
    rounds = ["--metric=rouge_l", "--delta=0.01", "--sequential", "--round_examples=20"]
    for again in ([], ["--resume"]):
        assert _run(folder, "calibrate", 5, out, *rounds, *again) == 1
        assert f"in 5 of 40 examples {_FEW}" in capsys.readouterr().err
        assert not (out / "manifest.json").exists()
    assert len(list(out.rglob("round-*.json"))) == 2


def test_variants_are_counted_once(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two variants of forty examples are forty examples."""
    both = ["--metric=rouge_l", "--min_exit_layer=1,2"]
    assert _run(folder, "calibrate", 5, tmp_path / "five", *both) == 1
    assert f"in 5 of 40 examples {_FEW}" in capsys.readouterr().err
    assert _run(folder, "calibrate", 4, tmp_path / "four", *both) == 0
    (unseen,) = _manifest(tmp_path / "four")["data"]["unseen"]
    assert (unseen["metric"], unseen["few_letters"]) == ("rouge_l", 4)


@pytest.mark.parametrize("few", [1, 3])
def test_examples_that_confirm_are_looked_at_too(
    few: int,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the holdout, as in the selection, a tenth is counted, and more confirms nothing."""
    monkeypatch.setenv("COLUMNS", "400")
    confirming = [index for index in range(_ROWS) if _confirms(index)]
    assert 10 <= len(confirming) < 20
    data = write_rows(tmp_path / "rows.jsonl", _rows(lambda index: index in confirming[:few]))
    paths = [f"--checkpoint={folder / 'model'}", f"--data={data}", f"--output={tmp_path / 'out'}"]
    status = main(["calibrate", *paths, *SHORT_FLAGS, *_GOAL, "--metric=rouge_l", "--holdout_share=0.3"])
    printed = capsys.readouterr()
    if few == 1:
        assert status == 0
        assert "rouge_l drops more than half of the letters of a text in 1 example." in printed.out
        assert _manifest(tmp_path / "out")["confirmation"]["data"]["unseen"][0]["few_letters"] == 1
        assert "unseen" not in _manifest(tmp_path / "out")["data"]
    else:
        assert status == 1
        assert f"in {few} of {len(confirming)} examples {_FEW}" in printed.err
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("few", [4, 5])
def test_fresh_examples_are_looked_at_too(
    few: int,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`verify` counts a tenth and says so; with more it neither breaks a promise nor proves it again."""
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "out"
    assert main(["calibrate", f"--generations={folder / '4'}", f"--output={out}", *_GOAL, "--metric=rouge_l"]) == 0
    rows = [{**row, "id": f"fresh-{row['id']}"} for row in _rows(lambda index: index < few)]
    fresh = write_rows(tmp_path / "fresh.jsonl", rows)
    capsys.readouterr()
    status = main(["verify", f"--manifest={out}", f"--data={fresh}", "--batch_size=4", "--num_shards=3"])
    printed = capsys.readouterr()
    if few == 4:
        assert status == 0
        assert "rouge_l drops more than half of the letters of a text in 4 examples." in printed.out
    else:
        assert status == 1
        assert f'metric "rouge_l" says too little here: in 5 of 40 examples {_FEW}' in printed.err
        assert printed.out == ""


def test_python_ends_as_the_command_does(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`calm.calibrate` raises the command's error, and writes no manifest."""
    with pytest.raises(PipelineError, match=f"in 5 of 40 examples {_FEW}"):
        calm.calibrate(
            model=folder / "model",
            data=str(folder / "5.jsonl"),
            guarantees=[calm.Guarantee("risk", "rouge_l", delta=0.9)],
            output=tmp_path / "out",
            thresholds=(0.9, 0.5),
            max_input_length=32,
            max_decode_length=6,
            batch_size=4,
        )
    assert not (tmp_path / "out" / "manifest.json").exists()
