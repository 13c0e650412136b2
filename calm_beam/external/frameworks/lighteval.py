"""lighteval: `details_TASK_DATE.parquet`, as `--save-details` writes it."""

import re
from collections.abc import Iterator

from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import base_name, open_input

from ..rows import name_of
from .example import ScoredExample

_NAME = re.compile(r"details_(.+)_\d{4}-\d{2}-\d{2}T.*\.parquet")
_BATCH = 256
_MAGIC = b"PAR1"


class Lighteval:
    """A row for each example, whose id is that of its `doc`, with the struct `metric`."""

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
        except (pyarrow.ArrowException, OSError):
            return False

    def task(self, path: str) -> str:
        """Returns what the file's name says."""
        found = _NAME.fullmatch(base_name(path))
        return found[1] if found else base_name(path)

    def examples(self, path: str) -> Iterator[ScoredExample]:
        """Yields a row's metrics."""
        # Here, since importing it takes long.
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
                for batch in file.iter_batches(_BATCH, columns=["doc.id", "metric"], use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        where = f"{path}, row {number}"
                        doc, metric = row.get("doc"), row.get("metric")
                        if not isinstance(doc, dict) or not isinstance(metric, dict):
                            raise LossesError(f"{where}: is not a detail of {self.name}, which has doc.id and metric.")
                        yield ScoredExample(
                            id=name_of(doc.get("id"), "doc.id", where=where),
                            scores={str(name): value for name, value in metric.items() if value is not None},
                        )
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # Of the disk, and not of what is on it.
                raise
            raise LossesError(f"{path}: damaged Parquet data after row {number} ({error}).") from error
