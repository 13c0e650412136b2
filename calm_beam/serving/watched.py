"""Losses of a model in service, held against a promise: how they are written, and messages about their findings."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.inputs.examples import check_utf_8
from calm_beam.manifest import Calibration, Manifest, ManifestError
from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.storage import check_writable, is_cloud_path, is_folder, parent, strict_json
from calm_beam.text import counted, written_float

_MISSING = "missing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """An entry, as far as it is watched.

    Attributes:
      promise: What losses are held against.
      tail: What a loss has to exceed to count as 1, and else as 0; None where losses count as they are.
      words: Description of the entry.
      remedy: What to do at an alarm.
    """

    promise: WatchedPromise
    tail: float | None
    words: str
    remedy: str

    @property
    def belongs_to(self) -> dict[str, str | int]:
        """Fields of probe rows and states that identify their promise."""
        return {"manifest": self.promise.manifest, "calibration": self.promise.calibration}


class MonitorError(CalmBeamError, ValueError):
    """Losses or a stored state that cannot be used."""


def make_losses_file(path: str) -> None:
    """Makes the empty local file that losses are added to, if there is none: `calm-beam monitor` may read it at once.

    Raises:
      OSError: If it cannot be written, or is no local file; says why.
    """
    if is_cloud_path(path):
        raise OSError(f"{path}: losses are added to a local file; copy it to Cloud Storage from there.")
    if not is_folder(parent(path)):
        raise FileNotFoundError(f"{path}: the folder {parent(path)} does not exist.")
    check_writable(path)
    with open(path, "ab"):
        pass


def check_watchable(manifest: Manifest) -> None:
    """Raises ManifestError for a manifest whose promises single requests tell nothing about."""
    if manifest.data.clusters is not None:
        raise ManifestError(
            "the manifest is about clusters of prompts, whose mean losses are watched: single requests do not "
            "give them. Measure whole clusters, and give calm-beam monitor their means."
        )


def check_exits(entry: Calibration) -> None:
    """Raises ManifestError for an entry that has no risk."""
    if entry.threshold is None:
        raise ManifestError("the entry says never exit: there is no risk to watch.")


def check_sampled(manifest: Manifest, entry: Calibration) -> None:
    """Refuses to sample where losses of answers, as they are given, tell nothing about the promise.

    Args:
      manifest: The manifest.
      entry: Its entry that is served.

    Raises:
      ManifestError: If the promise is about clusters of prompts, or about losses that need references.
    """
    check_watchable(manifest)
    if entry.consistency == "risk":
        raise ManifestError(
            "the entry is of risk consistency, whose losses need references, which prompts do not have. Sample under "
            "an entry of textual consistency, or test labelled data with calm-beam verify."
        )


def read_losses(lines: Iterable[tuple[int, str]], name: str, *, watched: Watched) -> Iterator[float | None]:
    """Yields the losses of a text, one a line; None for one that is missing.

    Args:
      lines: Each with its number.
      name: Of the text, for messages.
      watched: What the losses are of.

    Raises:
      MonitorError: If a line is no loss of what is watched; names it.
    """
    low = -1 if watched.promise.is_signed else 0
    for number, line in lines:
        check_utf_8(line, f"{name}, line {number}")
        try:
            loss = _loss(line, watched)
        except UsageError as error:
            raise MonitorError(f"{name}, line {number}: {error}") from error
        except strict_json.StrictJSONError as error:
            raise MonitorError(f"{name}, line {number}: expected a loss or a row of a probe, got {error}.") from error
        except ValueError:
            loss = math.nan
        if loss is None:
            yield None
            continue
        if not low <= loss <= 1:
            raise MonitorError(f"{name}, line {number}: expected a loss in [{low}, 1], got {line.strip()!r:.100}.")
        if watched.tail is not None and loss not in (0, 1):
            raise MonitorError(
                f"{name}, line {number}: the entry is about the share of outputs that lose more than "
                f"{watched.tail:g}: expected 1 where one does and else 0, got {line.strip()!r:.100}."
            )
        yield loss


def entry_of_row(line: str, *, digest: str) -> int | None:
    """Returns the place of the entry that a row of a `LossProbe` is about; None for a line that is none of a manifest.

    Args:
      line: Any line of a file of losses.
      digest: Of the manifest.
    """
    try:
        row = strict_json.loads(line)
    except ValueError:
        return None
    place = row.get("calibration") if isinstance(row, dict) and row.get("manifest") == digest else None
    return place if isinstance(place, int) and not isinstance(place, bool) and place >= 0 else None


def _loss(line: str, watched: Watched) -> float | None:
    """Returns the loss in a line: a number, or a row that a `LossProbe` wrote for the same promise; None if missing."""
    if line.strip() == _MISSING:
        return None
    if not line.lstrip().startswith("{"):
        return written_float(line)
    row = strict_json.loads(line)
    if missing := [key for key in ("loss", *watched.belongs_to) if key not in row]:
        raise UsageError(
            f"has no {' and no '.join(missing)}: expected a row as calm-beam generate --probe_share writes it, or a "
            "number alone."
        )
    if any(row.get(key) != value for key, value in watched.belongs_to.items()):
        raise UsageError(
            "was measured for another manifest or entry. The losses of one promise say nothing about another: name "
            "the one that it was measured for."
        )
    failure = row.get("failure")
    if not (failure is None or isinstance(failure, str)):
        raise UsageError(f"failure must be a text, or null where the loss was measured, got {failure!r:.100}.")
    if failure is not None:
        return None
    loss = row.get("loss")
    return math.nan if isinstance(loss, bool) or not isinstance(loss, int | float) else loss


def shown_in_words(monitor: RiskMonitor, entry: Watched) -> str:
    """Returns what a monitor has found of an entry."""
    watched = f"{entry.words}: {counted(monitor.n, 'loss', several='losses')}"
    if monitor.missing:
        watched += f", {monitor.missing} of them missing"
    if monitor.mean_loss is not None:
        watched += f", mean {monitor.mean_loss:.4f}"
    lowest = "-1" if monitor.is_signed else "0"
    if monitor.alarm_at:
        whatever = f", even if each missing one is {lowest}" if monitor.missing else ""
        return (
            f"{watched}.\nALARM at loss {monitor.alarm_at}: the losses show that the risk exceeds delta "
            f"{monitor.delta:g}{whatever}. If it never had, the chance of this would be at most {monitor.alpha:g}. "
            f"{entry.remedy}"
        )
    raised = f"{1 / monitor.alpha:g}"
    if monitor.missing_alarm_at:
        return (
            f"{watched}.\nALARM at loss {monitor.missing_alarm_at}: the risk exceeds delta {monitor.delta:g}, or "
            f"losses are missing. With each missing one counted as 1 the capital has reached {raised}; with each "
            f"counted as {lowest} it is {monitor.capital:.3g}, which does not prove that the risk exceeds "
            "delta. Find out why losses are missing, and test labelled data with calm-beam verify."
        )
    worst = f" ({monitor.worst_capital:.3g} with each missing loss counted as 1)" if monitor.missing else ""
    return f"{watched}.\nNo alarm: the capital is {monitor.capital:.3g}{worst}; {raised} raises an alarm."
