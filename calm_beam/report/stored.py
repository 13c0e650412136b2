"""Reads the stored files of a calibration and its measured speedups, and checks that they belong together."""

import csv
import dataclasses
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, Self

from calm_beam.calibration.publish import decode_record, read_failures
from calm_beam.calibration.result import RiskRow, read_risk_table
from calm_beam.errors import CalmBeamError
from calm_beam.manifest import MANIFEST, Calibration, DecodeRecord, Manifest, PathEntry, read_manifest
from calm_beam.manifest.files import RISK_TABLE
from calm_beam.outputs import DecodeJob, FinishedSweep, Generation, read_generations, stored_examples
from calm_beam.outputs.totals import content_sum_of, fingerprint_text, merged_sums
from calm_beam.storage import joined, open_input, strict_json

# Examples are counted and drawn from whole shards until they are so many. A shard holds the prompts of a hash, so some
# of the shards are a fair sample of all.
_ENOUGH_EXAMPLES = 20_000
# As `evaluate` calls them.
_PROVENANCE = "splits.json"
_TABLE = "splits.csv"


class ReportError(CalmBeamError, ValueError):
    """Files that do not belong together, or hold more than a page can show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A finished calibration.

    Attributes:
      manifest: Its manifest.
      table: For each entry of the manifest, the lines of the risk table in descending order of thresholds.
      failures: Id and reason of the examples that failed.
    """

    manifest: Manifest
    table: tuple[tuple[RiskRow, ...], ...]
    failures: tuple[tuple[str, str], ...]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The grid, as far as it was decoded; descending."""
        return tuple(row.threshold for row in self.table[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredOutputs:
    """The generations of a calibration, or as many shards of them as a report looks at.

    Attributes:
      job: What they are generations of.
      paths: Their files.
      ids: The examples in them, those of each file.
      examples: Number of examples of all shards.
    """

    job: DecodeJob
    paths: tuple[str, ...]
    ids: tuple[tuple[str, ...], ...]
    examples: int

    @property
    def looked_at(self) -> int:
        """Number of examples in the files."""
        return sum(map(len, self.ids))

    @classmethod
    def read(cls, folder: str, manifest: Manifest, *, entry: Calibration | None = None) -> Self:
        """Returns the generations in a folder, having checked that the manifest is about them.

        Args:
          folder: As `DecodeJob.read` takes it.
          manifest: Of the calibration.
          entry: The promise whose variant was decoded; None if there are no variants.

        Raises:
          OutputsError: If they are not complete.
          ReportError: If they are others than were calibrated.
        """
        job = DecodeJob.read(folder)
        finished = FinishedSweep.read(folder, job, or_stopped=True)
        decode = manifest.decode if entry is None else manifest.decode_of(entry)
        _check_same_decoding(folder, job, finished=finished, manifest=manifest, decode=decode)
        paths: list[str] = []
        ids: list[tuple[str, ...]] = []
        sums = []
        for shard in sorted(finished.shards, key=lambda shard: _rank(str(shard.shard), seed=0)):
            if sum(map(len, ids)) >= _ENOUGH_EXAMPLES:
                break
            paths.append(job.shard_path(folder, shard.shard))
            examples = stored_examples(paths[-1])
            ids.append(tuple(example.id for example in examples))
            sums.append(content_sum_of(examples))
        if len(paths) == len(finished.shards):
            found = fingerprint_text(merged_sums(sums))
            if found != manifest.data.fingerprint:
                raise ReportError(
                    f"{folder}: its examples have fingerprint {found}, those of the manifest "
                    f"{manifest.data.fingerprint}. The report needs the generations that were calibrated."
                )
        return cls(job=job, paths=tuple(paths), ids=tuple(ids), examples=finished.examples)

    def sample(self, most: int, *, seed: int) -> Iterator[Generation]:
        """Yields up to so many of the examples, drawn by their ids alone; a larger sample begins with a smaller one."""
        drawn = sorted((name for names in self.ids for name in names), key=lambda name: _rank(name, seed=seed))[:most]
        found: dict[str, Generation] = {}
        for path, names in zip(self.paths, self.ids, strict=True):
            wanted = sorted(set(drawn) & set(names))
            if wanted:
                found.update((item.example.id, item) for item in read_generations(path, only=wanted))
        yield from (found[name] for name in drawn)


def read_calibrated(directory: str) -> Calibrated:
    """Returns what a calibration has written into its output directory, but for its generations.

    Raises:
      ManifestError: If the manifest cannot be trusted.
      ReportError: If the risk table is not that of the manifest.
      OSError: If a file is missing or cannot be read.
    """
    manifest = read_manifest(joined(directory, MANIFEST))
    path = joined(directory, RISK_TABLE)
    try:
        rows = read_risk_table(path, RiskRow)
    except ValueError as error:
        raise ReportError(str(error)) from error
    entries = manifest.calibrations
    size, rest = divmod(len(rows), len(entries))
    table = tuple(rows[index * size : (index + 1) * size] for index in range(len(entries)))
    if rest or not all(_is_of(lines, entry) for lines, entry in zip(table, entries, strict=True)):
        raise ReportError(
            f"{path}: is not the risk table of the manifest next to it. Both are written by the same run: restore "
            "them, or calibrate again from the stored generations (--generations)."
        )
    try:
        failures = read_failures(directory)
    except ValueError as error:
        raise ReportError(str(error)) from error
    return Calibrated(manifest=manifest, table=table, failures=failures)


def read_speedups(directory: str, manifest: Manifest) -> dict[float, float]:
    """Returns how many times faster than the full model the decoder was, by threshold.

    Args:
      directory: Output directory of `evaluate`.
      manifest: Of the calibration.

    Raises:
      ReportError: If the files are none of evaluate's, or of another model or decoding, or if none of the manifest's
        thresholds was measured.
      OSError: If they cannot be read.
    """
    with open_input(joined(directory, _PROVENANCE)) as file:
        content = file.read()
    try:
        provenance = strict_json.loads(content)
        fingerprint, longest = provenance["model"]["fingerprint"], provenance["max_decode_length"]
        names = [measure["name"] for measure in provenance["measures"] if _is_alike(measure["rule"], manifest)]
        with open_input(joined(directory, _TABLE)) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
            measured = {
                float(row["threshold"]): float(row["speedup"])
                for row in csv.DictReader(text)
                if row["measure"] in names and row["threshold"] and row["speedup"]
            }
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ReportError(
            f"{directory}: holds no results of calm-beam evaluate as this version writes them "
            f"({type(error).__name__}: {error})."
        ) from error
    if (fingerprint, longest) != (manifest.model.fingerprint, manifest.decode.max_decode_length) or not names:
        raise ReportError(f"{directory}: is about another model, or another way of decoding, than the manifest.")
    promised = {entry.threshold for entry in manifest.calibrations}
    speedups = {threshold: factor for threshold, factor in measured.items() if threshold in promised}
    if not speedups:
        raise ReportError(
            f"{directory}: no threshold of the manifest was timed there. Pass --speedup to calm-beam evaluate, with "
            "the tolerances of the manifest."
        )
    return speedups


def _is_of(lines: Sequence[RiskRow], entry: Calibration) -> bool:
    """Returns whether lines of the risk table are those of an entry, and say of each tested threshold what it says."""
    promised = (entry.consistency, entry.metric, entry.delta, entry.epsilon, entry.group)
    tested = sorted((row for row in lines if row.tested), key=lambda row: row.place or 0)
    return tuple(PathEntry.of(row) for row in tested) == entry.path and all(
        (row.consistency, row.metric, row.delta, row.epsilon, row.group) == promised for row in lines
    )


def _check_same_decoding(
    folder: str, job: DecodeJob, *, finished: FinishedSweep, manifest: Manifest, decode: DecodeRecord
) -> None:
    for what, theirs, ours in (
        ("model", job.model.fingerprint, manifest.model.fingerprint),
        ("vocabulary", job.vocabulary, manifest.vocabulary),
        ("decoding", decode_record(job.settings), decode),
        ("number of examples", finished.examples, manifest.data.examples),
    ):
        if theirs != ours:
            raise ReportError(
                f"{folder}: {what} is {theirs} there, {ours} in the manifest. The report needs the generations that "
                "were calibrated."
            )


def _rank(name: str, *, seed: int) -> bytes:
    """Returns a digest whose order is a draw of its own for every seed."""
    return hashlib.sha256(f"calm-beam report {seed} {name}".encode()).digest()


def _is_alike(rule: dict[str, Any], manifest: Manifest) -> bool:
    """Returns whether a measure exits as the manifest says."""
    names = ("confidence", "schedule", "tau", "state_propagation", "min_exit_layer", "exit_interval", "patience")
    return all(rule.get(name) == getattr(manifest.decode, name) for name in names)
