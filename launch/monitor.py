"""`calm-beam monitor`: watches the losses of a model in service, and raises an alarm when they show a broken bound.

    calm-beam monitor --manifest=calibration --losses=losses.txt --state=monitor.json --alpha=0.05

One loss per line, measured on served prompts as the calibration measured it: a number, the word `missing` for a loss
that could not be measured, or a row that `calm_beam.serving.LossProbe` wrote, whose loss is missing if it has a
`failure`. With `--losses=-` they are taken from standard input as they come, and the command ends at an alarm.
`--state` keeps what was learnt from one call to the next: give every loss once.

There are two alarms, and each is right in what it says but with a chance of alpha:

* the risk exceeds delta (status 3). Missing losses count as the lowest loss there is.
* the risk exceeds delta, or losses are missing (status 4). Missing losses count as 1. If labels never come, this alarm
  tells just that. With `--state`, another call goes on until the first alarm.

As long as the expected next loss, given all losses before it, is at most delta, the chance that the first alarm is ever
raised is at most alpha, however long the stream is and however often it is looked at. Independent prompts whose risk is
at most delta are such a stream. Losses that come in clusters, such as questions on one text, are not:
give the mean loss of each cluster, as the calibration with `--cluster_key` took it. Which prompts are measured must not
depend on their losses.

Exit status: 0 no alarm, 1 failure, 2 bad usage, 3 the risk exceeds delta, 4 it does or losses are missing,
130 interrupted (with `--losses=-`, after the state was kept).
"""

import argparse
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import IO

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import bounded_lines, check_utf_8
from calm_beam.manifest import (
    Calibration,
    EntryChoice,
    Manifest,
    ManifestError,
    SettingManifest,
    read_any_manifest,
)
from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.storage import (
    check_writable,
    exists,
    is_cloud_path,
    is_file,
    is_folder,
    open_input,
    parent,
    replacing,
    strict_json,
    why_no_file,
)
from calm_beam.text import counted, printable_line, written_float

from .flags import FlagParser, UsageError, naming, parse_own_flags
from .flags.manifest import add_entry_flags, add_setting_flags, entry_choice, entry_in_words, find_manifest
from .terminal import say, tell

ALARM = 3
MISSING_ALARM = 4
_INTERRUPTED = 130
_SCHEMA = "calm-beam/monitor/v2"
_FIRST_SCHEMA = "calm-beam/monitor/v1"
_MISSING = "missing"
_STREAM = "-"
_LOSSES_BETWEEN_SAVES = 100
# In bytes; states have some hundred.
_LARGEST_STATE = 100_000
_ESSENTIALS = ("--manifest", "--losses", "--alpha", "--state", "--delta", "--consistency", "--metric")


class MonitorError(CalmBeamError, ValueError):
    """Losses or a stored state that cannot be used."""


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (_parser(),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    flags = parse_own_flags(_parser(), argv)
    if not 0 < flags.alpha < 1:
        raise UsageError(f"--alpha must be in (0, 1), got {flags.alpha:g}. It is a probability: for 5 % pass 0.05.")
    manifest = read_any_manifest(find_manifest(flags.manifest))
    watched = _watched(manifest, entry_choice(flags, manifest))
    with naming("--losses"):
        if flags.losses != _STREAM and not is_file(flags.losses):
            raise UsageError(f"--losses {flags.losses}: {why_no_file(flags.losses)} Pass - for standard input.")
    _say_what_losses_are(manifest, watched)
    session = _Session(watched, flags=flags)
    try:
        if flags.losses == _STREAM:
            session.follow(_losses(sys.stdin, "standard input", session=session))
        else:
            with open_input(flags.losses) as raw, io.TextIOWrapper(raw, "utf-8", errors="surrogateescape") as file:
                session.take(list(_losses(file, flags.losses, session=session)))
    except KeyboardInterrupt:
        tell(session.report())
        return _INTERRUPTED
    except CalmBeamError:
        raise
    except ValueError as error:
        raise MonitorError(str(error)) from error
    tell(session.report())
    if session.monitor.alarm_at:
        return ALARM
    return MISSING_ALARM if session.monitor.missing_alarm_at else 0


def _say_what_losses_are(manifest: Manifest | SettingManifest, watched: "_Watched") -> None:
    """Says of what every line has to be the loss, where that is not an example of all prompts."""
    if manifest.data.clusters is not None:
        say("the manifest is about clusters: every line has to be the mean loss of one")
    if manifest.data.groups:
        group = watched.promise.group
        whose = "all groups, as they come" if group is None else f"group {printable_line(group)} alone"
        what, where = ("prompts", "at this entry's threshold")
        if isinstance(manifest, SettingManifest):
            what, where = ("examples", "under this entry's setting")
        say(f"the manifest tells groups apart: these have to be losses of {what} of {whose}, {where}")


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam monitor", doc=__doc__, essentials=_ESSENTIALS)
    parser.add_argument("--manifest", required=True, help="a manifest, or the calibration directory that holds one")
    parser.add_argument(
        "--losses",
        required=True,
        help="file with one loss per line: a number, `missing`, or a row of a loss probe; - for stdin",
    )
    parser.add_argument("--alpha", type=float, default=0.05, help="chance of ever raising a false alarm, in (0, 1)")
    parser.add_argument("--state", help="file that keeps the state between calls; made if there is none")
    add_entry_flags(parser)
    add_setting_flags(parser)
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched:
    """An entry, as far as it is watched.

    Attributes:
      promise: What losses are held against.
      tail: What a loss has to exceed to count as 1, and else as 0; None where losses count as they are.
      words: The entry in words.
      remedy: What to do at an alarm.
    """

    promise: WatchedPromise
    tail: float | None
    words: str
    remedy: str


def _watched(manifest: Manifest | SettingManifest, choice: EntryChoice) -> _Watched:
    """Returns the entry that is chosen."""
    if isinstance(manifest, SettingManifest):
        return _watched_setting(manifest, choice)
    entry = _chosen_entry(manifest, choice)
    return _Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.objective.tail,
        words=entry_in_words(entry),
        remedy="Serve the full model, and calibrate anew.",
    )


def _watched_setting(manifest: SettingManifest, choice: EntryChoice) -> _Watched:
    try:
        entry = manifest.calibration(choice)
    except ManifestError as error:
        raise UsageError(f"{error} Choose by --group, --tail, --delta and --epsilon.") from error
    if entry.setting is None:
        raise UsageError("what was asked for found no safe setting: there is no risk to watch.")
    of_group = "all examples" if entry.group is None else f"group {entry.group}"
    above = "" if entry.tail is None else f" > {entry.tail:g}"
    return _Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.tail,
        words=f"{of_group}, loss{above}, delta {entry.delta:g}, epsilon {entry.epsilon:g} (setting {entry.setting})",
        remedy="Go back to a safer setting, and certify anew.",
    )


def _chosen_entry(manifest: Manifest, choice: EntryChoice) -> Calibration:
    try:
        named = manifest.matching(choice)
    except ManifestError as error:
        raise UsageError(f"--group: {error}") from error
    found = [entry for entry in named if entry.threshold is not None]
    if named and not found:
        raise UsageError("what was asked for says never exit: there is no risk to watch.")
    if len(found) != 1:
        there = "; ".join(entry_in_words(entry) for entry in manifest.of_group(choice.group))
        raise UsageError(
            f"{len(found)} entries of the manifest have a threshold and match what was asked; exactly one is watched. "
            "Choose by --consistency, --metric, --loss, --delta and --epsilon, the entry's own. "
            f"The manifest has: {there}."
        )
    return found[0]


def _losses(lines: IO[str], name: str, *, session: "_Session") -> Iterator[float | None]:
    """Yields the losses of a text, one a line; None for one that is missing."""
    low = -1 if session.monitor.is_signed else 0
    for number, line in bounded_lines(lines, name=name):
        check_utf_8(line, f"{name}, line {number}")
        try:
            loss = _loss(line, session)
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
        if session.tail is not None and loss not in (0, 1):
            raise MonitorError(
                f"{name}, line {number}: the entry is about the share of outputs that lose more than "
                f"{session.tail:g}: expected 1 where one does and else 0, got {line.strip()!r:.100}."
            )
        yield loss


def _loss(line: str, session: "_Session") -> float | None:
    """Returns the loss in a line: a number, or a row that a `LossProbe` wrote for the same promise; None if missing."""
    if line.strip() == _MISSING:
        return None
    if not line.lstrip().startswith("{"):
        return written_float(line)
    row = strict_json.loads(line)
    if any(row.get(key) != value for key, value in session.promise.items()):
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


class _Session:
    """A monitor, and the file that keeps it."""

    def __init__(self, entry: _Watched, *, flags: argparse.Namespace) -> None:
        """Takes up the stored state, or starts anew."""
        self._entry = entry
        self._path: str | None = flags.state or None
        # What the state belongs to: another promise would be tested with losses that are not its own.
        self.promise = {"manifest": entry.promise.manifest, "calibration": entry.promise.calibration}
        self.tail = entry.tail
        self.monitor = RiskMonitor.of_promise(entry.promise, alpha=flags.alpha)
        if self._path is None:
            return
        with naming("--state"):
            if not is_cloud_path(self._path) and not is_folder(parent(self._path)):
                raise UsageError(f"--state {self._path}: the folder {parent(self._path)} does not exist.")
            check_writable(self._path)
            is_stored = exists(self._path)
        if is_stored:
            stored = self._load()
            if stored.alpha != flags.alpha:
                raise UsageError(
                    f"--state {self._path}: was kept with --alpha={stored.alpha:g}, now it is {flags.alpha:g}. An "
                    "alpha changed on the way promises nothing: go on with the old one, or start a new state."
                )
            self.monitor = stored

    def _load(self) -> RiskMonitor:
        assert self._path is not None
        try:
            with open_input(self._path) as file:
                content = strict_json.loads(file.read(_LARGEST_STATE))
            if not isinstance(content, dict) or content.keys() != {"schema", *self.promise, "monitor"}:
                raise ValueError(f"expected an object with the keys schema, {', '.join(self.promise)} and monitor.")
            if not isinstance(content["monitor"], dict):
                raise ValueError("monitor must be an object.")
            if content["schema"] not in (_SCHEMA, _FIRST_SCHEMA):
                raise ValueError(f'schema is {content["schema"]!r:.60}, this calm-beam knows "{_SCHEMA}".')
            is_of_first_version = content["schema"] == _FIRST_SCHEMA
            read = RiskMonitor.from_first_version if is_of_first_version else RiskMonitor.from_dict
            monitor = read(content["monitor"])
        except ValueError as error:
            raise MonitorError(f"state {self._path}: {error}") from error
        promise = {name: content[name] for name in self.promise}
        if promise != self.promise or (monitor.delta, monitor.is_signed) != (
            self.monitor.delta,
            self.monitor.is_signed,
        ):
            raise UsageError(
                f"--state {self._path}: was kept for another manifest or entry than {self._entry.words} of "
                "this one. Name those that it was kept for, or start a new state."
            )
        if is_of_first_version:
            say(
                f"state {self._path}: is of a version that counted missing losses as 1 and did not say which they are. "
                'What it has found goes into the alarm "the risk exceeds delta, or losses are missing"; the proof that '
                "the risk exceeds delta begins anew"
            )
        return monitor

    def _save(self) -> None:
        if self._path is not None:
            content = {"schema": _SCHEMA, **self.promise, "monitor": self.monitor.to_dict()}
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def take(self, losses: Sequence[float | None]) -> None:
        """Takes in all losses, and keeps the state."""
        self.monitor = self.monitor.observe(losses)
        self._save()

    def follow(self, losses: Iterator[float | None]) -> None:
        """Takes in losses one by one up to an alarm, and keeps the state now and then, at the end, and on errors.

        An alarm about missing losses that was raised before does not end it: a proof may still come.
        """
        ended_by_missing = self.monitor.missing_alarm_at is None
        try:
            while self.monitor.alarm_at is None:
                if ended_by_missing and self.monitor.missing_alarm_at is not None:
                    return
                try:
                    loss = next(losses)
                except StopIteration:
                    return
                self.monitor = self.monitor.observe([loss])
                if self.monitor.n % _LOSSES_BETWEEN_SAVES == 0:
                    self._save()
        finally:
            self._save()

    def report(self) -> str:
        """Returns the finding in words."""
        monitor, entry = self.monitor, self._entry
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
                f"losses are missing. With each missing one counted as 1 the evidence has reached {raised}; with each "
                f"counted as {lowest} it stands at {monitor.capital:.3g}, which does not prove that the risk exceeds "
                "delta. Find out why losses are missing, and test labelled data with calm-beam verify."
            )
        worst = f" ({monitor.worst_capital:.3g} with each missing loss counted as 1)" if monitor.missing else ""
        return f"{watched}.\nNo alarm: the evidence stands at {monitor.capital:.3g}{worst}; {raised} raises it."
