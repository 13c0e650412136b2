"""Sweeps with known losses, and logs in the formats of evaluation frameworks."""

import csv
import hashlib
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.calibration.settings_rounds import DeclaredExample
from calm_beam.inputs.losses.tables import LossRow

ORDER = ("8bit", "6bit", "4bit", "3bit")
_WRONG = (0.01, 0.03, 0.08, 0.3)


def coin_rows(count: int, *, seed: int = 0, wrong: Sequence[float] = _WRONG) -> list[LossRow]:
    """Returns losses of 0 and 1, more of them for lower settings; three groups, and clusters of four examples."""
    generator = np.random.default_rng(seed)
    return [
        LossRow(
            id=f"e{index}",
            setting=setting,
            loss=float(generator.random() < share),
            cost=float(setting[0]),
            group="abc"[index % 3],
            cluster=f"c{index // 4}",
        )
        for index in range(count)
        for setting, share in zip(ORDER, wrong, strict=True)
    ]


def declared_examples(count: int) -> list[DeclaredExample]:
    """Returns the examples that `coin_rows` has losses of, with their groups and clusters."""
    return [DeclaredExample(f"e{index}", "abc"[index % 3], f"c{index // 4}") for index in range(count)]


def row_values(row: LossRow) -> dict[str, Any]:
    """Returns the columns of a row."""
    return {
        "id": row.id,
        "setting": row.setting,
        "loss": row.loss,
        "cost": row.cost,
        "group": row.group,
        "cluster": row.cluster,
    }


def write_csv(path: pathlib.Path, rows: Iterable[LossRow], *, columns: Sequence[str] = ()) -> pathlib.Path:
    """Writes rows as CSV, of some of the columns if they are named, and returns the path."""
    values = [row_values(row) for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns or list(values[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(values)
    return path


def write_lm_eval(
    folder: pathlib.Path,
    scores: Mapping[str, Sequence[float]],
    *,
    task: str = "gsm8k",
    metric: str = "exact_match",
    first: int = 0,
    changed: Sequence[int] = (),
    higher: bool | None = None,
) -> pathlib.Path:
    """Writes scores as lm-evaluation-harness 0.4 does with `--log_samples`, and returns the output folder.

    Args:
      folder: Folder to write.
      scores: By filter, one per document.
      task: Name of the task.
      metric: Name of the metric.
      first: Number of the first document.
      changed: Documents that differ from those of the same number elsewhere.
      higher: Direction of the metric in the results; None for no entry.
    """
    place = folder / "org__model"
    place.mkdir(parents=True)
    lines = []
    for filter_, of_filter in scores.items():
        for index, score in enumerate(of_filter, start=first):
            question = f"What is {index} + 1?" + (" Really?" if index in changed else "")
            doc = {"question": question, "answer": str(index + 1), "passage": f"p{index // 2}"}
            answer = str(index + (1 if score else 2))
            lines.append(
                {
                    "doc_id": index,
                    "doc": doc,
                    "target": doc["answer"],
                    "arguments": {"gen_args_0": {"arg_0": question, "arg_1": {"until": ["\n"], "temperature": 0.0}}},
                    "resps": [[answer]],
                    "filtered_resps": [answer],
                    "filter": filter_,
                    "metrics": [metric],
                    "doc_hash": _hash(json.dumps(doc, indent=2)),
                    "prompt_hash": _hash(question),
                    "target_hash": _hash(doc["answer"]),
                    metric: score,
                }
            )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (place / f"samples_{task}_2026-01-31T12-00-00.000000.jsonl").write_text(text, encoding="utf-8")
    results = {"results": {task: {}}, "higher_is_better": {} if higher is None else {task: {metric: higher}}}
    (place / "results_2026-01-31T12-00-00.000000.json").write_text(json.dumps(results))
    return folder


def write_lighteval(
    folder: pathlib.Path,
    scores: Sequence[float],
    *,
    metric: str = "acc",
    hard: bool = False,
    higher: bool | None = None,
) -> pathlib.Path:
    """Writes scores as lighteval does with `--save-details`, and returns the output folder.

    Args:
      folder: Folder to write.
      scores: One per document.
      metric: Name of the metric.
      hard: Whether the questions are harder than elsewhere.
      higher: Direction of the metric in the results; None for no results.
    """
    import pyarrow
    import pyarrow.parquet

    place = folder / "details" / "org" / "model" / "2026-01-31T12-00-00.000000"
    place.mkdir(parents=True)
    rows = [
        {
            "doc": {
                "query": f"{'hard ' if hard else ''}question {index}",
                "choices": ["yes", "no"],
                "gold_index": 0,
                "id": str(index),
                "task_name": "boolq",
                "specific": {"passage": f"p{index // 2}"},
            },
            "metric": {metric: score, "em": 1.0},
            "model_response": {"text": ["yes"]},
        }
        for index, score in enumerate(scores)
    ]
    if higher is not None:
        results = folder / "results" / "org" / "model" / "results_2026-01-31T12-00-00.000000.json"
        results.parent.mkdir(parents=True)
        configured = [{"metric_name": metric, "higher_is_better": higher, "category": "GENERATIVE"}]
        results.write_text(json.dumps({"results": {}, "config_tasks": {"lighteval|boolq|0": {"metrics": configured}}}))
    path = place / "details_lighteval|boolq|0_2026-01-31T12-00-00.000000.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return folder


def write_inspect(
    path: pathlib.Path,
    grades: Sequence[object],
    *,
    status: str = "success",
    epochs: int = 1,
    scorer: str = "match",
    header: Mapping[str, object] | None = None,
    sample: Mapping[str, object] | None = None,
) -> pathlib.Path:
    """Writes grades as a log of Inspect, `.eval` or `.json`, and returns the path.

    Args:
      path: File to write.
      grades: One per sample.
      status: Status of the evaluation.
      epochs: Number of epochs of each sample.
      scorer: Name of the scorer.
      header: Further fields of the header.
      sample: Further fields of every sample.
    """
    header = {
        "version": 2,
        "status": status,
        "eval": {"task": "arithmetic", "model": "mockllm/model"},
        **(header or {}),
    }
    samples = [
        {
            "id": index,
            "epoch": epoch,
            "input": f"What is {index} + 1?",
            "target": str(index + 1),
            "metadata": {"passage": f"p{index // 2}"},
            "scores": {scorer: {"value": grade, "answer": "x"}},
            **(sample or {}),
        }
        for index, grade in enumerate(grades)
        for epoch in range(1, epochs + 1)
    ]
    if path.suffix == ".json":
        path.write_text(json.dumps({**header, "samples": samples}))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps(header))
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return path


ZSTANDARD = 93
"""Zstandard as a way of compression of ZIP files."""


def pack_in_zstandard(source: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Rewrites the members of a ZIP file with the compression that only later Pythons support, and returns the path."""
    import pyarrow

    with zipfile.ZipFile(source) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name in plain.namelist():
            content = plain.read(name)
            target.writestr(name, pyarrow.compress(content, codec="zstd", asbytes=True))
            info = target.infolist()[-1]
            # The directory's fields of a member: its compression, checksum and size.
            info.compress_type, info.CRC, info.file_size = ZSTANDARD, zlib.crc32(content), len(content)
    return path


def write_helm(
    folder: pathlib.Path,
    scores: Sequence[float],
    *,
    metric: str = "exact_match",
    asked: str | None = None,
    higher: bool | None = None,
    **changes: object,
) -> pathlib.Path:
    """Writes scores as HELM's `per_instance_stats.json`, and returns the folder.

    Args:
      folder: Folder to write.
      scores: One per instance.
      metric: Name of the statistic.
      asked: Beginning of every question in `scenario_state.json`; None for no such file.
      higher: Direction of the metric in the suite's schema; None for no schema.
      changes: Keys of the entries, changed.
    """
    place = folder / "gsm:model=org_model"
    place.mkdir(parents=True)
    if asked is not None:
        states = [
            {
                "instance": {
                    "input": {"text": f"{asked}question {index}"},
                    "references": [{"output": {"text": str(index)}, "tags": ["correct"]}],
                    "split": "test",
                    "id": f"id{index}",
                    "extra_data": {"passage": f"p{index // 2}"},
                },
                "request": {"prompt": "..."},
            }
            for index in range(len(scores))
        ]
        (place / "scenario_state.json").write_text(json.dumps({"adapter_spec": {}, "request_states": states}))
    if higher is not None:
        (folder / "schema.json").write_text(json.dumps({"metrics": [{"name": metric, "lower_is_better": not higher}]}))
    rows = [
        {"instance_id": f"id{index}", "train_trial_index": 0, "stats": [_stat(name, value)], **changes}
        for name, values in ((metric, scores), ("num_references", [1.0] * len(scores)))
        for index, value in enumerate(values)
    ]
    (place / "per_instance_stats.json").write_text(json.dumps(rows, indent=2))
    return folder


def _stat(name: str, value: float) -> dict[str, Any]:
    return {"name": {"name": name, "split": "test"}, "count": 1, "sum": value, "sum_squared": value**2, "mean": value}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
