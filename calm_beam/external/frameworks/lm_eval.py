"""lm-evaluation-harness: `samples_TASK_DATE.jsonl`, as `--log_samples` writes it."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from calm_beam import strict_json
from calm_beam.examples import numbered_lines
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import base_name, open_input

from ..rows import name_of
from .example import ScoredExample

_NAME = re.compile(r"samples_(.+)_\d{4}-\d{2}-\d{2}T[^_]*\.jsonl(\.gz)?")
_KEYS = {"doc_id", "metrics", "resps"}


class LmEval:
    """A line for each example and filter; metrics are called `METRIC,FILTER`, as in the results of the harness."""

    name = "lm-evaluation-harness"
    files: tuple[str, ...] = ("samples_*.jsonl", "samples_*.jsonl.gz")

    def is_of(self, path: str) -> bool:
        """Returns whether the first line is one."""
        if not path.endswith((".jsonl", ".jsonl.gz")):
            return False
        try:
            return next((row.keys() >= _KEYS for _, row in itertools.islice(_rows(path), 1)), False)
        except ValueError:
            return False

    def task(self, path: str) -> str:
        """Returns what the file's name says."""
        found = _NAME.fullmatch(base_name(path))
        return found[1] if found else base_name(path)

    def examples(self, path: str) -> Iterator[ScoredExample]:
        """Yields a line's metrics."""
        for where, row in _rows(path):
            metrics = row.get("metrics")
            if not row.keys() >= _KEYS or not isinstance(metrics, list) or not all(name in row for name in metrics):
                raise LossesError(
                    f"{where}: is not a sample of {self.name}, which has doc_id, resps, metrics, and a value for each "
                    "of these."
                )
            # Early versions write none, and do not filter.
            filter_ = row.get("filter", "none")
            content = row.get("doc_hash")
            yield ScoredExample(
                id=name_of(row["doc_id"], "doc_id", where=where),
                scores={f"{name},{filter_}": row[name] for name in metrics},
                content=content if isinstance(content, str) else None,
            )


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_input(path) as raw:
        for number, line in numbered_lines(raw, path=path):
            where = f"{path}, line {number}"
            try:
                # Where nobody looks, such as among the arguments, there may be NaN.
                row = strict_json.loads(line, constants_allowed=True)
            except strict_json.StrictJSONError as error:
                raise LossesError(f"{where}: {error}.") from error
            if not isinstance(row, dict):
                raise LossesError(f"{where}: expected an object.")
            yield where, row
