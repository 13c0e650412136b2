"""HELM: `per_instance_stats.json` of a run."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from calm_beam.inputs.losses.tables import name_of
from calm_beam.risk.testing import LossesError
from calm_beam.storage import base_name, is_file, joined, open_input, parent, strict_json

from .example import ScoredExample, agreed, cluster_of, digest_of_asked, loaded_object

_BEGINNING = 4096
_ASKED = ("instances.json", "scenario_state.json")
_SCHEMA = "schema.json"


class Helm:
    """A list with the statistics of every instance; the score of a metric is its mean."""

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
        """Returns the scenario, with which the name of the run's folder begins."""
        return re.split("[:,]", base_name(parent(path)), maxsplit=1)[0]

    def higher_is_better(self, path: str, metric: str) -> bool | None:
        """Returns what the schema says, which `helm-summarize` writes to the suite's folder above that of a run."""
        name = metric.partition(",")[0]
        said = {}
        for folder in (parent(path), parent(parent(path))):
            place = joined(folder, _SCHEMA)
            metrics = loaded_object(place).get("metrics") if is_file(place) else None
            for each in metrics if isinstance(metrics, list) else ():
                lower = each.get("lower_is_better") if isinstance(each, dict) and each.get("name") == name else None
                if isinstance(lower, bool):
                    said[place] = not lower
        return agreed(said, metric)

    def examples(self, path: str, *, cluster_key: str | None = None) -> Iterator[ScoredExample]:
        """Yields the instances, once for each class of metrics, as HELM writes them."""
        asked = _instances(parent(path))
        if cluster_key is not None and not asked:
            raise LossesError(
                f"{path}: --cluster_key={cluster_key} is looked for in {' or '.join(_ASKED)} next to it, and neither "
                "is there with an instance."
            )
        for number, row in enumerate(_listed(path), start=1):
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
            instance = asked.get(name)
            yield ScoredExample(
                id=name,
                scores=_means(row["stats"], where),
                content=None if instance is None else _content(instance),
                cluster=None if cluster_key is None else cluster_of(instance, cluster_key, where=where),
            )


def _listed(path: str) -> list[Any]:
    with open_input(path) as file:
        try:
            rows = strict_json.loads(file.read(), constants_allowed=True)
        except strict_json.StrictJSONError as error:
            raise LossesError(f"{path}: {error}.") from error
    return rows if isinstance(rows, list) else [None]


def _instances(folder: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the instances of a run by their ids, from any file of the run that has them; empty without one."""
    for name in _ASKED:
        path = joined(folder, name)
        if not is_file(path):
            continue
        if name == _ASKED[0]:
            listed: object = _listed(path)
        else:
            states = loaded_object(path).get("request_states")
            listed = (
                [each.get("instance") for each in states if isinstance(each, dict)] if isinstance(states, list) else []
            )
        found: dict[str, Mapping[str, Any]] = {}
        for each in listed if isinstance(listed, list) else ():
            # Perturbed instances are other questions; their statistics are refused elsewhere.
            if isinstance(each, dict) and isinstance(each.get("id"), str) and each.get("perturbation") is None:
                found.setdefault(each["id"], each)
        return found
    return {}


def _content(instance: Mapping[str, Any]) -> str:
    """Returns a digest of the question and its right answers, independent of how a HELM version nests them."""
    references = instance.get("references")
    return digest_of_asked(
        _text(instance.get("input")),
        [
            [_text(each.get("output")), each.get("tags")] if isinstance(each, dict) else each
            for each in (references if isinstance(references, list) else [])
        ],
    )


def _text(value: object) -> object:
    """Returns a text, which later versions wrap in an object, and the object's other values except picture folders."""
    if not isinstance(value, dict):
        return value
    media = value.get("multimedia_content")
    objects = media.get("media_objects") if isinstance(media, dict) else None
    if not isinstance(objects, list) or not objects:
        return value.get("text")
    return [value.get("text"), [_medium(each) for each in objects]]


def _medium(value: object) -> object:
    if not isinstance(value, dict):
        return value
    # The folder of a picture on disk differs between machines.
    location = value.get("location")
    return [value.get("text"), base_name(location) if isinstance(location, str) else None]


def _means(stats: list[Any], where: str) -> dict[str, object]:
    """Returns the means of statistics by name; if several have one name, by the differing keys too."""
    found: dict[str, list[tuple[Mapping[str, Any], object]]] = {}
    for stat in stats:
        name = stat.get("name") if isinstance(stat, dict) else None
        kind = name.get("name") if isinstance(name, dict) else None
        if not isinstance(name, dict) or not isinstance(kind, str):
            raise LossesError(f"{where}: has a statistic without name, count or sum.")
        rest = {key: value for key, value in name.items() if key != "name"}
        found.setdefault(kind, []).append((rest, _mean(stat, f"{where}: statistic {kind!r:.80}")))
    means: dict[str, object] = {}
    for of_kind, several in found.items():
        differing = _differing([rest for rest, _ in several])
        for others, mean in several:
            # After a comma, as metrics with filters are named: the part before it stands for all of them.
            full = ",".join([of_kind, *(f"{key}={others.get(key)}" for key in differing)])
            if full in means:
                raise LossesError(
                    f"{where}: has the statistic {full!r} several times, and nothing says which is meant. Take the "
                    "others out, or write losses to a file for --losses."
                )
            means[full] = mean
    return means


def _mean(stat: Mapping[str, Any], where: str) -> float | None:
    """Returns sum divided by count; None if the count is 0."""
    count, total = stat.get("count"), stat.get("sum")
    if not isinstance(count, int | float) or not isinstance(total, int | float):
        raise LossesError(f"{where}: has a statistic without name, count or sum.")
    if not count >= 0:
        raise LossesError(f"{where}: count must be at least 0, got {count!r:.80}.")
    try:
        return total / count if count else None
    except OverflowError:
        raise LossesError(f"{where}: sum is larger than any number that can be computed with.") from None


def _differing(several: list[Mapping[str, Any]]) -> list[str]:
    """Returns the keys whose values differ among several statistics of one name."""
    keys = {key for rest in several for key in rest}
    return sorted(key for key in keys if len({json.dumps(rest.get(key), sort_keys=True) for rest in several}) > 1)
