"""lighteval: `details_TASK_DATE.parquet`, as `--save-details` writes it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from calm_beam.inputs.losses.tables import name_of
from calm_beam.risk.testing import LossesError
from calm_beam.storage import base_name, joined, list_files, open_input, parent

from .example import ScoredExample, agreed, cluster_of, digest_of_asked, glob_of, loaded_object

_NAME = re.compile(r"details_(.+)_(\d{4}-\d{2}-\d{2}T.*)\.parquet")
_BATCH = 256
_MAGIC = b"PAR1"
# The fields of a document that make up the question.
_ASKED = ("query", "choices", "gold_index")
# Folder levels between the output folder and a log: details, organisation, model, date.
_LEVELS = 4


class Lighteval:
    """One row per example, whose id is in its `doc`, with scores in the struct `metric`."""

    name = "lighteval"
    files: tuple[str, ...] = ("details_*.parquet",)

    def is_of(self, path: str) -> bool:
        """Returns whether it is Parquet with the columns `doc` and `metric`."""
        if not path.endswith(".parquet"):
            return False
        with open_input(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        import pyarrow
        import pyarrow.parquet

        try:
            with open_input(path) as raw:
                return {"doc", "metric"} <= set(pyarrow.parquet.read_schema(raw).names)
        except (pyarrow.ArrowException, OSError, ValueError):
            return False

    def task(self, path: str) -> str:
        """Returns the task in the file's name."""
        found = _NAME.fullmatch(base_name(path))
        return found[1] if found else base_name(path)

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns what the results of the same run say, in the folder `results` of the same output folder."""
        found = _NAME.fullmatch(base_name(path))
        folder, places = parent(path), dict[str, None]()
        for _ in range(_LEVELS + 1):
            for level in range(_LEVELS if found else 0):
                names = joined(glob_of(folder), "results", *["*"] * level, f"results_{found[2] if found else ''}.json")
                places.update(dict.fromkeys(list_files(names)))
            folder = parent(folder)
        said = {
            place: each
            for place in places
            if (each := _said(loaded_object(place), self.task(path), metric)) is not None
        }
        return agreed(said, metric)

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the metrics of each row."""
        # Imported here because it is slow to import.
        import pyarrow
        import pyarrow.parquet

        columns = ["doc.id", *(f"doc.{name}" for name in _ASKED), "metric"]
        number = 0
        try:
            with (
                open_input(path) as raw,
                pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
            ):
                if cluster_key is not None:
                    # The whole column is read, since keys below it may contain dots.
                    columns.append(cluster_key.partition(".")[0])
                for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield _example(row, cluster_key=cluster_key, where=f"{path}, row {number}")
        except LossesError:
            raise
        except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # An error of the disk, and not of the file's content.
                raise
            text = " ".join(str(error).split())
            raise LossesError(f"{path}: damaged Parquet data after row {number} ({text}).") from error


def _example(row: Mapping[str, Any], *, cluster_key: str | None, where: str) -> ScoredExample:
    doc, metric = row.get("doc"), row.get("metric")
    if not isinstance(doc, dict) or not isinstance(metric, dict):
        raise LossesError(f"{where}: is not a detail of {Lighteval.name}, which has doc.id and metric.")
    asked = {name: doc[name] for name in _ASKED if name in doc}
    return ScoredExample(
        id=name_of(doc.get("id"), "doc.id", where=where),
        scores={str(name): value for name, value in metric.items() if value is not None},
        content=digest_of_asked(asked) if asked else None,
        cluster=None if cluster_key is None else cluster_of(row, cluster_key, where=where),
    )


def _said(results: Mapping[str, Any], task: str, metric: str) -> bool | None:
    """Returns whether the configuration of a task says that higher is better."""
    tasks = results.get("config_tasks")
    config = tasks.get(task) if isinstance(tasks, dict) else None
    for key in ("metrics", "metric"):
        listed = config.get(key) if isinstance(config, dict) else None
        for each in listed if isinstance(listed, list) else ():
            if not isinstance(each, dict):
                continue
            names, higher = each.get("metric_name"), each.get("higher_is_better")
            if isinstance(higher, dict):
                # Metrics that are computed together are listed by name.
                higher = higher.get(metric)
            elif metric not in (names if isinstance(names, list) else [names]):
                continue
            if isinstance(higher, bool):
                return higher
    return None
