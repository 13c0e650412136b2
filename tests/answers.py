"""Manifests, prompts and answers for tests of `calm-beam generate` on workers."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_vocabulary
from calm_beam.manifest import ModelRecord, write_manifest
from calm_beam.outputs import AnswerJob
from calm_beam.outputs.request import AnswerAssignment
from calm_beam.outputs.rows import write_answers
from calm_beam.outputs.shards import AnsweredShard, Failure
from calm_beam.serving import Answer
from calm_beam.serving.answer import Tally
from tests.calm_beam.manifest.builders import build_manifest
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import text_rows, write_model, write_rows, write_vocabulary

_STEPS = 48
# The most by which other prompts in the batch move a confidence.
_ROUNDING = 1e-5
THRESHOLD = 0.3
"""Of the manifest in a served folder."""


def write_embedded_manifest(path: pathlib.Path, *, threshold: float = 0.9) -> pathlib.Path:
    """Writes a manifest with an entry about the demo model, which was not calibrated for it; returns its path."""
    checkpoint = load_checkpoint(embedded.MODEL)
    vocabulary = open_vocabulary(checkpoint.vocabulary_uri or "", extra_ids=None)
    entry = build_entry(threshold, threshold_by_position=(float(np.float32(threshold)),) * _STEPS)
    decode = {"max_input_length": 64, "max_decode_length": _STEPS}
    write_manifest(build_served_manifest(checkpoint, (entry,), vocabulary=vocabulary, decode=decode), path)
    return path


def write_served_folder(folder: pathlib.Path, *, prompts: int = 40) -> pathlib.Path:
    """Writes a tiny model with a vocabulary, `model`, its manifest, and texts with ids, `rows.jsonl`; returns it."""
    folder.mkdir(exist_ok=True)
    model = write_model(folder / "model", vocabulary=write_vocabulary(folder / "v.model"))
    manifest = build_served_manifest(
        load_checkpoint(model), (build_entry(THRESHOLD),), vocabulary=Vocabulary(folder / "v.model")
    )
    write_manifest(manifest, folder / "manifest.json")
    write_rows(folder / "rows.jsonl", named_rows(prompts))
    return folder


def named_rows(count: int) -> list[dict[str, Any]]:
    """Returns rows of short texts with ids, each fifth equal to the first."""
    return [{"id": f"row-{index:03d}", "input": row["input"]} for index, row in enumerate(text_rows(count))]


def assert_same_answers(rows: Iterable[Mapping[str, Any]], answers: Mapping[str, Answer], *, threshold: float) -> int:
    """Asserts that every prompt has one row, equal to its answer but for near ties; returns the number that differ.

    Args:
      rows: Rows of files.
      answers: Expected answers by id.
      threshold: Threshold at which tokens exit.
    """
    found = {row["id"]: row for row in rows}
    assert found.keys() == answers.keys()
    differing = 0
    for name, answer in answers.items():
        row = found[name]
        same = list(zip(row["tokens"], row["exit_layers"], strict=True)) == list(
            zip(answer.tokens, answer.exit_layers, strict=True)
        )
        if same:
            assert (row["text"], row["truncated"]) == (answer.text, answer.truncated)
            assert row["finish_reason"] == answer.finish_reason
            assert (row["layers_used"], row["layers_saved"]) == (answer.layers_used, answer.layers_saved)
            np.testing.assert_allclose(row["confidences"], answer.confidences, rtol=0, atol=_ROUNDING)
            continue
        differing += 1
        assert _is_near_tie(row, answer, threshold=threshold), name
    return differing


def _is_near_tie(row: Mapping[str, Any], answer: Answer, *, threshold: float) -> bool:
    """Returns whether the first decision that differs depended on the last digits of a confidence."""
    ours, theirs = (
        list(zip(one["tokens"], one["exit_layers"], strict=True)) for one in (row, dataclasses.asdict(answer))
    )
    step = next(index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    near = min(abs(one[step] - threshold) for one in (row["confidences"], answer.confidences))
    return bool(near <= _ROUNDING or min(row["confidences"][step], answer.confidences[step]) <= _ROUNDING)


def build_answer_assignment(folder: pathlib.Path, *, num_shards: int = 2, **changes: Any) -> AnswerAssignment:
    """Returns an assignment to answer into a folder by a manifest of no model; `changes` are fields of its job."""
    manifest = build_manifest()
    job: dict[str, Any] = {
        "manifest": manifest.digest,
        "calibration": 0,
        "model": ModelRecord(uri="model", fingerprint="sha256:0", layers=4),
        "vocabulary": None,
        "output_format": "parquet",
        "patterns": ("rows.jsonl",),
        "files": ("/rows.jsonl",),
        "reading": {},
        "group_key": None,
        "num_shards": num_shards,
        "probe": None,
        "software": {"jax": "1"},
    }
    return AnswerAssignment(
        directory=str(folder),
        job=AnswerJob(**{**job, **changes}),
        manifest=manifest,
        declared=Declared(),
        vocabulary_path=None,
    )


def write_shard(
    assignment: AnswerAssignment,
    shard: int,
    *,
    ids: Sequence[str],
    failed: Sequence[str] = (),
    digest: str = "sha256:1",
    **changes: Any,
) -> AnsweredShard:
    """Writes a shard of made-up answers of two tokens, and returns its metadata."""
    rows = [
        {
            "id": name,
            "text": f"to {name}",
            "tokens": [5, 1],
            "exit_layers": [1, 2],
            "confidences": [0.75, 0.5],
            "layers_used": 3,
            "layers_saved": 5,
            "truncated": False,
            "finish_reason": "stop",
        }
        for name in ids
    ]
    about: dict[str, Any] = {
        "digest": digest,
        "failures": tuple(Failure(id=name, reason="it is broken") for name in failed),
        "losses": (),
        "tallies": {
            None: Tally(
                prompts=len(ids) + len(failed),
                failed=len(failed),
                tokens=2 * len(ids),
                layers_used=3 * len(ids),
                layers_saved=5 * len(ids),
            )
        },
    }
    answered = AnsweredShard.of(shard, **{**about, **changes})
    pathlib.Path(assignment.shard_path(shard)).parent.mkdir(exist_ok=True)
    write_answers(assignment.shard_path(shard), rows, shard=answered, has_groups=False)
    return answered
