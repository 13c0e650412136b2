"""lm-evaluation-harness: `samples_TASK_DATE.jsonl`, as `--log_samples` writes it."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from calm_beam.inputs.examples import numbered_lines
from calm_beam.inputs.losses.tables import name_of
from calm_beam.risk.testing import LossesError
from calm_beam.storage import base_name, is_file, joined, list_files, open_input, parent, strict_json

from .example import ScoredExample, agreed, cluster_of, digest_of_asked, glob_of, loaded_object

_NAME = re.compile(r"samples_(.+)_(\d{4}-\d{2}-\d{2}T[^_]*)\.jsonl(\.gz)?")
_KEYS = {"doc_id", "metrics", "resps"}


class LmEval:
    """One line per example and filter; metrics are called `METRIC,FILTER`, as in the results of the harness."""

    name = "lm-evaluation-harness"
    files: tuple[str, ...] = ("samples_*.jsonl", "samples_*.jsonl.gz")

    def is_of(self, path: str) -> bool:
        """Returns whether the first line is a sample."""
        if not path.endswith((".jsonl", ".jsonl.gz")):
            return False
        try:
            return next((row.keys() >= _KEYS for _, row in itertools.islice(_rows(path), 1)), False)
        except ValueError:
            return False

    def task(self, path: str) -> str:
        """Returns the task in the file's name."""
        found = _NAME.fullmatch(base_name(path))
        return found[1] if found else base_name(path)

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns what the results next to the samples say: those of the same run, or of any run if it has none."""
        name, task = metric.partition(",")[0], self.task(path)
        said = {}
        for place in _results(path):
            found = _said(loaded_object(place), task, name)
            if found is not None:
                said[place] = found
        return agreed(said, metric)

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the metrics of each line."""
        for where, row in _rows(path):
            metrics = row.get("metrics")
            is_whole = row.keys() >= _KEYS and isinstance(metrics, list)
            # Early versions have no filters and write none.
            filter_ = row.get("filter", "none")
            if not is_whole or not all(isinstance(name, str) and name in row for name in metrics or ()):
                raise LossesError(
                    f"{where}: is not a sample of {self.name}, which has doc_id, resps, metrics, and a value for each "
                    "of these."
                )
            if not isinstance(filter_, str):
                raise LossesError(f"{where}: filter must be a name, got {filter_!r:.80}.")
            content = row.get("doc_hash")
            if "doc" in row:
                content = digest_of_asked(row["doc"])
            yield ScoredExample(
                id=name_of(row["doc_id"], "doc_id", where=where),
                scores={f"{name},{filter_}": row[name] for name in metrics or ()},
                content=content if isinstance(content, str) else None,
                cluster=None if cluster_key is None else cluster_of(row, cluster_key, where=where),
            )


def _results(path: str) -> tuple[str, ...]:
    """Returns the results files next to a log: those with its date, or else all."""
    found = _NAME.fullmatch(base_name(path))
    if found and is_file(own := joined(parent(path), f"results_{found[2]}.json")):
        return (own,)
    return list_files(joined(glob_of(parent(path)), "results_*.json"))


def _said(results: Mapping[str, Any], task: str, metric: str) -> bool | None:
    """Returns whether results say that higher is better, among the metrics of a task or in its configuration."""
    by_task = results.get("higher_is_better")
    of_task = _of_task(by_task, task) if isinstance(by_task, dict) else None
    found = of_task.get(metric) if isinstance(of_task, dict) else of_task
    if isinstance(found, bool):
        return found
    configs = results.get("configs")
    config = _of_task(configs, task) if isinstance(configs, dict) else None
    listed = config.get("metric_list") if isinstance(config, dict) else None
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("metric") == metric and isinstance(each.get("higher_is_better"), bool):
            return bool(each["higher_is_better"])
    return None


def _of_task(by_task: Mapping[str, Any], task: str) -> Any:
    """Returns a task's value; the name of the task in file names lacks special characters."""
    if task in by_task:
        return by_task[task]
    return next(
        (value for name, value in by_task.items() if re.sub(r"\W", "_", name) == re.sub(r"\W", "_", task)), None
    )


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_input(path) as raw:
        for number, line in numbered_lines(raw, path=path):
            where = f"{path}, line {number}"
            try:
                # Unread parts, such as the arguments, may contain NaN.
                row = strict_json.loads(line, constants_allowed=True)
            except strict_json.StrictJSONError as error:
                raise LossesError(f"{where}: {error}.") from error
            if not isinstance(row, dict):
                raise LossesError(f"{where}: expected an object.")
            yield where, row
