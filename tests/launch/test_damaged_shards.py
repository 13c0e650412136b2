"""No command that resumes marks an output with a damaged shard as successful."""

import pathlib
import shutil
from collections.abc import Callable

import pyarrow.parquet
import pytest

from calm_beam.launch.cli import main
from calm_beam.outputs import read_answers
from tests.answers import write_served_folder
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows
from tests.sampling import sampled

_MARKS = ("complete.json", "stopped.json")


def _flip_a_bit(path: pathlib.Path) -> None:
    """Damages the tokens of a shard, but not its metadata."""
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    tokens = next(column for column in columns if "tokens" in column.path_in_schema)
    content = bytearray(path.read_bytes())
    start = tokens.dictionary_page_offset or tokens.data_page_offset
    content[start + tokens.total_compressed_size - 4] ^= 1
    path.write_bytes(content)


def _without_result(output: pathlib.Path) -> None:
    """Removes the mark of a finished run, as if the run was killed at its very end."""
    for name in ("manifest.json", "risk_table.csv", "report.html", *_MARKS):
        for path in output.rglob(name):
            path.unlink()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, data, a manifest, and finished runs of each kind."""
    here = tmp_path_factory.mktemp("damaged")
    write_served_folder(here / "served")
    write_model(here / "model")
    write_rows(here / "rows.jsonl", id_rows(60))
    for argv in (_calibrate(here), _sequential(here, "--stop_at_threshold=0.9"), _confirm(here), *_generates(here)):
        assert main(argv) == 0
    return here


def _flags(here: pathlib.Path, output: str, *flags: str) -> list[str]:
    paths = [f"--checkpoint={here / 'model'}", f"--data={here / 'rows.jsonl'}", f"--output={here / output}"]
    asked = ["--consistency=textual", "--metric=token_f1", "--delta=0.7", "--epsilon=0.2"]
    return ["calibrate", *paths, *SHORT_FLAGS, *asked, *flags]


def _calibrate(here: pathlib.Path, *flags: str) -> list[str]:
    return _flags(here, "whole", *flags)


def _sequential(here: pathlib.Path, *flags: str) -> list[str]:
    return _flags(here, "rounds", "--num_shards=12", "--sequential", "--round_examples=10", *flags)


def _confirm(here: pathlib.Path, *flags: str) -> list[str]:
    return _flags(here, "confirmed", "--holdout_share=50%", "--delta=0.95", *flags)


def _generates(here: pathlib.Path, *flags: str) -> list[list[str]]:
    served = here / "served"
    paths = [f"--manifest={served}", f"--checkpoint={served / 'model'}", f"--input={served / 'rows.jsonl'}"]
    return [
        ["generate", *paths, "--num_shards=3", f"--output={here / kind}/", f"--output_format={kind}", *flags]
        for kind in ("parquet", "jsonl")
    ]


@pytest.mark.parametrize(
    ("output", "shards", "command"),
    sampled(
        [
            ("whole", "generations/*/*.parquet", _calibrate),
            # By another rule, for which nothing more is decoded.
            (
                "rounds",
                "generations/*/*.parquet",
                lambda here, *more: _sequential(here, "--stop_at_threshold=0.95", *more),
            ),
            ("rounds", "generations/*/*.parquet", _sequential),
            ("confirmed", "confirmation/generations/*/*.parquet", _confirm),
            ("confirmed", "generations/*/*.parquet", _confirm),
            ("parquet", "*.parquet", lambda here, *more: _generates(here, *more)[0]),
            ("jsonl", "parts/*.parquet", lambda here, *more: _generates(here, *more)[1]),
        ],
        # Each kind of outputs, and a run that decodes nothing more.
        keep=[0, 1, 3, 5],
    ),
    ids=["calibrate", "another rule", "no rule", "confirm", "choose", "generate", "generate jsonl"],
)
def test_a_damaged_shard_gets_no_mark(
    output: str,
    shards: str,
    command: Callable[..., list[str]],
    here: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that resumes names a shard with a flipped bit, and writes neither a mark nor a manifest."""
    kept = tmp_path / "kept"
    # The copy takes its place, since paths are part of what is resumed.
    shutil.copytree(here / output, kept)
    _without_result(here / output)
    damaged = sorted((here / output).glob(shards))[-1]
    whole = damaged.read_bytes()
    _flip_a_bit(damaged)
    try:
        assert main(command(here, "--resume")) == 1
        message = capsys.readouterr().err
        assert f"{damaged}: is damaged (" in message
        assert "--resume: the shard is then" in message
        places = (damaged.parent, here / output)
        assert not [name for name in ("manifest.json", *_MARKS) for place in places if (place / name).exists()]
        # The undamaged shard is resumed (the twin).
        damaged.write_bytes(whole)
        assert main(command(here, "--resume")) == 0
    finally:
        shutil.rmtree(here / output)
        shutil.copytree(kept, here / output)


def test_damaged_lines_are_published_again(here: pathlib.Path) -> None:
    """Damaged JSON lines are written again from their shards before the mark of success."""
    output = here / "jsonl"
    (output / "complete.json").unlink()
    path = sorted(output.glob("*.jsonl.gz"))[0]
    before, rows = path.read_bytes(), list
    path.write_bytes(before[:-9])
    assert main(_generates(here, "--resume")[1]) == 0
    assert path.read_bytes() == before
    assert rows(read_answers(str(output)))
