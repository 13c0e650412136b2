"""Runs the commands of pages, shortened, in a folder that has the files they name."""

import gzip
import json
import pathlib
import shutil
import string
from collections.abc import Sequence

from calm_beam.launch.cli import main
from calm_beam.launch.flags.requests import UNPROVED
from tests.builders import build_arrays, build_config, train_vocabulary, write_t5x
from tests.pipelines import SHORT_FLAGS, text_rows, write_rows
from tests.snippets import own_commands

CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2)
# Flags that shorten a command, appended to its own: the last of a kind counts.
_SHORTER = {
    "train": ("--steps=2", "--max_input_length=16", "--max_target_length=8"),
    "calibrate": SHORT_FLAGS,
    "evaluate": ("--max_examples=6",),
    "suitability": ("--max_examples=6", "--max_input_length=32", "--max_decode_length=6"),
    "verify": ("--batch_size=4",),
}
# A promise about a hardly trained model may be found broken.
_STATUSES = {"verify": (0, 3)}


def write_place(folder: pathlib.Path) -> None:
    """Writes data of several names, and a vocabulary."""
    # Every text of a hardly trained model contains some letter.
    rows = [row | {"references": [*row["references"], " ".join(string.ascii_lowercase)]} for row in text_rows(12)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in ("train-0", "calibration-0"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("validation", "fresh"):
        write_rows(folder / f"{name}.jsonl", rows[:10])
    # Ids above its pieces are a letter too, which every metric sees.
    train_vocabulary(folder / "sentencepiece.model", [row["input"] for row in text_rows(60)], 40, unk_surface=" z ")


def write_checkpoint(folder: pathlib.Path) -> None:
    """Writes a checkpoint of T5X with the vocabulary of the current folder."""
    write_t5x(folder, build_arrays(CONFIG, 0))
    shutil.copy("sentencepiece.model", folder)


def shortened(command: Sequence[str]) -> list[str]:
    """Returns a command with flags that shorten it."""
    shorter = [*command, *_SHORTER.get(command[0], ())]
    if "--validate_every=500" in command:
        shorter.append("--validate_every=1")
    return shorter


def run(command: Sequence[str]) -> None:
    """Runs a command in this process and checks that it succeeds."""
    allowed = _STATUSES.get(command[0], (0,))
    # With few examples and a hardly trained model, nothing may be proved.
    if "--require_threshold" in command:
        allowed = (*allowed, UNPROVED)
    assert main([*command]) in allowed, command


def run_shortened(page: pathlib.Path) -> None:
    """Runs all commands of a page, shortened, in order."""
    for command in own_commands(page):
        run(shortened(command))
