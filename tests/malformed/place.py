"""A valid folder, made once and copied for each case to damage."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from calm_beam.checkpoints import load_checkpoint
from tests.builders import build_arrays, build_config, write_hugging_face, write_t5x
from tests.pipelines import CONFIG, SHORT_FLAGS, text_rows, write_model, write_rows, write_vocabulary

from .forks import run_command

CALIBRATE = (
    "calibrate",
    "--checkpoint=model",
    "--data=rows.jsonl",
    "--output=out",
    "--metric=token_f1",
    "--delta=0.3",
    "--epsilon=0.1",
    *SHORT_FLAGS,
)
"""Flags of a calibration that succeeds."""

_METRICS = """
import sys

def constant(candidate, references):
    return 1.0

def leaves(candidate, references):
    sys.exit(0)

def interrupts(candidate, references):
    raise GeneratorExit

def words(candidate, references):
    return "good"

def not_a_number(candidate, references):
    return float("nan")

def share(candidate, references):
    return max(len(set(candidate.split()) & set(each.split())) / (1 + len(set(each.split()))) for each in references)
"""


def build_place(folder: pathlib.Path) -> pathlib.Path:
    """Makes the folder `folder / "here"`: models of four layouts, data, metrics, and a finished calibration."""
    here = folder / "here"
    here.mkdir(parents=True)
    vocabulary = write_vocabulary(folder / "v.model")
    write_model(here / "model", vocabulary=vocabulary)
    write_model(here / "ids_model")
    arrays = build_arrays(CONFIG, 0)
    write_t5x(here / "t5x", arrays)
    shutil.copy(vocabulary, here / "t5x" / "sentencepiece.model")
    write_hugging_face(here / "hugging_face", CONFIG, arrays)
    shutil.copy(vocabulary, here / "hugging_face" / "spiece.model")
    write_model(here / "classifier", vocabulary=vocabulary, config=build_config(exit_classifier=2))
    write_rows(here / "rows.jsonl", [{"id": f"r{index}", **row} for index, row in enumerate(text_rows(12))])
    (here / "own_metrics.py").write_text(_METRICS)
    (here / "leaves_at_import.py").write_text("import sys\nsys.exit(0)\n")
    # So lax that a threshold is found on twelve examples.
    flags = [*CALIBRATE, "--output=done", "--metric=own_metrics:share", "--delta=0.95", "--epsilon=0.5"]
    ended = run_command(flags, folder=folder, stdin=b"", environment={}, limit=300)
    assert ended.status == 0, ended.err
    return here


def edit_json(path: pathlib.Path, **changes: Any) -> None:
    """Sets keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_arrays(folder: pathlib.Path, changes: Mapping[str, Any]) -> None:
    """Sets arrays of a native model; None removes one."""
    stored = {name: np.asarray(array) for name, array in load_checkpoint(folder).arrays.items()}
    arrays = {**stored, **changes}
    kept = {name: array for name, array in arrays.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
