"""Writes the demo task as JSONL files: the training data of the demo model, and its calibration set.

python -m tools.demo_task.write_data --output=demo_data
"""

import argparse
import gzip
import json
import pathlib
from collections.abc import Sequence

from calm_beam.storage import replacing

from .sentences import SentencePair, training_and_calibration

SEED = 20221
TRAINING, VALIDATION, CALIBRATION = 60_000, 1_000, 1_000


def write_data(directory: pathlib.Path, *, seed: int, training: int, validation: int, calibration: int) -> None:
    """Writes `training`, `validation` and `calibration` as `.jsonl.gz`; no sentence is in two of them.

    Args:
      directory: The folder to write to; made if needed.
      seed: Decides all sentences.
      training: Number of training sentences, each with one translation.
      validation: Number of validation sentences, each with one translation.
      calibration: Number of calibration sentences, each with all its translations.
    """
    seen, unseen = training_and_calibration(seed=seed, training=training + validation, calibration=calibration)
    directory.mkdir(parents=True, exist_ok=True)
    one_each = [SentencePair(english=pair.english, french=pair.french[:1]) for pair in seen]
    _write(directory / "training.jsonl.gz", one_each[:training], "train")
    _write(directory / "validation.jsonl.gz", one_each[training:], "validation")
    _write(directory / "calibration.jsonl.gz", unseen, "calibration")


def _write(path: pathlib.Path, pairs: Sequence[SentencePair], prefix: str) -> None:
    rows = (
        {"id": f"{prefix}-{index:05d}", "input": pair.english, "references": list(pair.french)}
        for index, pair in enumerate(pairs)
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with replacing(path) as temporary:
        # No time and no name in the header, so that equal sentences give equal bytes.
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def _folder(name: str) -> pathlib.Path:
    # An empty path would be the current folder.
    if not name.strip():
        raise argparse.ArgumentTypeError("is empty")
    return pathlib.Path(name)


def main() -> None:
    """Writes the files from which the demo model was trained."""
    parser = argparse.ArgumentParser(description="Writes the demo task as JSONL files.")
    parser.add_argument("--output", type=_folder, required=True, help="directory to write to")
    write_data(parser.parse_args().output, seed=SEED, training=TRAINING, validation=VALIDATION, calibration=CALIBRATION)


if __name__ == "__main__":
    main()
