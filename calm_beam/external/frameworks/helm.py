"""HELM: `per_instance_stats.json` of a run."""

import re
from collections.abc import Iterator
from typing import Any

from calm_beam import strict_json
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import base_name, open_input, parent

from ..rows import name_of
from .example import ScoredExample

_BEGINNING = 4096


class Helm:
    """A list with the statistics of every instance; of a metric, the mean is the score."""

    name = "HELM"
    files: tuple[str, ...] = ("per_instance_stats.json",)

    def is_of(self, path: str) -> bool:
        """Returns whether it is JSON that begins with a list of instances."""
        with open_input(path) as file:
            beginning = file.read(_BEGINNING)
        return (
            path.endswith(".json")
            and beginning.lstrip().startswith(b"[")
            and all(key in beginning for key in (b'"instance_id"', b'"stats"'))
        )

    def task(self, path: str) -> str:
        """Returns what the folder of the run begins with, its scenario."""
        return re.split("[:,]", base_name(parent(path)), maxsplit=1)[0]

    def examples(self, path: str) -> Iterator[ScoredExample]:
        """Yields the instances: once for each class of metrics, as HELM writes them."""
        with open_input(path) as file:
            try:
                rows = strict_json.loads(file.read(), constants_allowed=True)
            except strict_json.StrictJSONError as error:
                raise LossesError(f"{path}: {error}.") from error
        for number, row in enumerate(rows if isinstance(rows, list) else [None], start=1):
            where = f"{path}, entry {number}"
            if not isinstance(row, dict) or not isinstance(row.get("stats"), list):
                raise LossesError(f"{where}: is not the statistics of an instance, as {self.name} writes them.")
            name = name_of(row.get("instance_id"), "instance_id", where=where)
            if row.get("perturbation") is not None or row.get("train_trial_index", 0) != 0:
                raise LossesError(
                    f"{where}: instance {name!r} is there in several forms (perturbations or trials), which are not "
                    "independent draws. Run without them, or write all losses to a file for --losses, with the "
                    "instance as --cluster_key."
                )
            yield ScoredExample(id=name, scores=_means(row["stats"], where))


def _means(stats: list[Any], where: str) -> dict[str, object]:
    """Returns the means of statistics by name; of several of one name, by what else tells them apart too."""
    found: dict[str, list[tuple[dict[str, Any], object]]] = {}
    for stat in stats:
        try:
            name, count, total = dict(stat["name"]), stat["count"], stat["sum"]
            found.setdefault(str(name.pop("name")), []).append((name, total / count if count else None))
        except (KeyError, TypeError, ValueError) as error:
            raise LossesError(f"{where}: has a statistic without name, count or sum.") from error
    means: dict[str, object] = {}
    for kind, several in found.items():
        differing = {key for rest, _ in several for other, _ in several for key in rest if rest[key] != other.get(key)}
        for rest, mean in several:
            # After a comma, as metrics are told apart by their filters: what comes before it names all of them.
            full = ",".join([kind, *(f"{key}={rest.get(key)}" for key in sorted(differing))])
            if full in means:
                raise LossesError(
                    f"{where}: has the statistic {full!r} several times, and nothing says which is meant. Take the "
                    "others out, or write losses to a file for --losses."
                )
            means[full] = mean
    return means
