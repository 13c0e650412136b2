r"""`calm-beam monitor`: watches the losses of a model in service, and raises an alarm when they show a broken bound.

    calm-beam monitor --manifest=calibration --consistency=textual --delta=0.05 \
        --losses=losses.jsonl --state=monitor.json

One loss per line, measured on served prompts as the calibration measured it: a number, the word `missing` for a loss
that could not be measured, or a row that `calm_beam.serving.LossProbe` wrote, whose loss is missing if it has a
`failure`. With `--losses=-` they are taken from standard input as they come, and the command ends at an alarm.
`--state` keeps what was learnt from one call to the next, and which part of which file it counted: called again, for a
file that has grown, the command reads on from there. A rotated file counts as a new one, a probe's file that was moved
as what it was. A last line counts once it ends with a line break. From standard input, give every loss once.

There are two alarms, each of which is false with probability at most alpha:

* the risk exceeds delta (status 3). Missing losses count as the lowest loss there is.
* the risk exceeds delta, or losses are missing (status 4). Missing losses count as 1. If labels never come, this alarm
  says just that. With `--state`, another call goes on until the first alarm.

As long as the expected next loss, given all losses before it, is at most delta, the chance that the first alarm is ever
raised is at most alpha, however long the stream is and however often it is looked at. Independent prompts whose risk is
at most delta are such a stream. Losses that come in clusters, such as questions on one text, are not:
give the mean loss of each cluster, as the calibration with `--cluster_key` took it. Which prompts are measured must not
depend on their losses.

Exit status: 0 no alarm, 1 failure, 2 bad usage, 3 the risk exceeds delta, 4 it does or losses are missing,
130 interrupted (with `--losses=-`, after the state was kept).
"""

import dataclasses
import io
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.inputs.examples import bounded_lines
from calm_beam.launch.flags import FlagParser, naming, parsed, request_parser
from calm_beam.launch.flags.requests import with_result
from calm_beam.launch.flags.shared_options import (
    check_parent,
    entry_choice,
    entry_in_words,
    find_manifest,
    watched_entry,
)
from calm_beam.launch.terminal import give, say, tell
from calm_beam.launch.terminal.interrupts import INTERRUPTED
from calm_beam.manifest import (
    ANY_ENTRY,
    Calibration,
    EntryChoice,
    Manifest,
    ManifestError,
    SettingManifest,
    read_any_manifest,
)
from calm_beam.options import Options, option
from calm_beam.options.groups import Entry, NamedManifest, OfSettings
from calm_beam.options.kinds import number
from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.serving.counted_files import CountedFile, UncountedLines
from calm_beam.serving.watched import MonitorError, Watched, entry_of_row, read_losses, shown_in_words
from calm_beam.storage import (
    check_writable,
    exists,
    is_file,
    open_input,
    replacing,
    strict_json,
    why_no_file,
)
from calm_beam.text import counted, printable_line

STREAM = "-"
"""Names standard input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses(Options):
    """Which losses are watched, and how."""

    losses: str = option(
        dataclasses.MISSING, "file with one loss per line: a number, `missing`, or a row of a loss probe; - for stdin"
    )
    alpha: float = option(0.05, "chance of ever raising a false alarm, in (0, 1)", kind=number)
    state: str | None = option(
        None, "file that keeps the state, and what was counted of which file, between calls; made if there is none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise UsageError(f"--alpha must be in (0, 1), got {self.alpha:g}. It is a probability: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorRequest(NamedManifest, Losses, Entry, OfSettings):
    """Losses of a model in service, held against a promise."""


def prepare(request: MonitorRequest) -> Watched:
    """Returns the entry that losses are tested against, and prints which losses it needs.

    Raises:
      UsageError: If there is no such entry, or no file of losses.
    """
    manifest = read_any_manifest(find_manifest(request.manifest))
    choice = entry_choice(request, manifest)
    with naming("--losses"):
        if request.losses != STREAM and not is_file(request.losses):
            raise UsageError(
                f"--losses {request.losses}: {why_no_file(request.losses)} calm-beam generate writes it with "
                "--probe_share; pass - for standard input."
            )
        if choice == ANY_ENTRY and request.losses != STREAM:
            choice = _choice_of_rows(request.losses, manifest)
    watched = _watched(manifest, choice)
    _say_what_losses_are(manifest, watched)
    return watched


def _choice_of_rows(path: str, manifest: Manifest | SettingManifest) -> EntryChoice:
    """Returns the entry that the first row of a probe is about, if this manifest has it; else any entry."""
    with open_input(path) as raw, io.TextIOWrapper(raw, "utf-8", errors="surrogateescape") as file:
        first = next((line for _, line in bounded_lines(file, name=path)), "")
    place = entry_of_row(first, digest=manifest.digest)
    if place is None or place >= len(manifest.calibrations):
        return ANY_ENTRY
    return EntryChoice.named_by(manifest.calibrations[place])


def _watched(manifest: Manifest | SettingManifest, choice: EntryChoice) -> Watched:
    """Returns the entry that is chosen."""
    if isinstance(manifest, SettingManifest):
        return _watched_setting(manifest, choice)
    return watched_entry(manifest, _chosen_entry(manifest, choice))


def _watched_setting(manifest: SettingManifest, choice: EntryChoice) -> Watched:
    try:
        entry = manifest.calibration(choice)
    except ManifestError as error:
        raise UsageError(f"{error} Choose by --group, --tail, --delta and --epsilon.") from error
    if entry.setting is None:
        raise UsageError("what was asked for found no safe setting: there is no risk to watch.")
    of_group = "all examples" if entry.group is None else f"group {entry.group}"
    above = "" if entry.tail is None else f" > {entry.tail:g}"
    return Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.tail,
        words=f"{of_group}, loss{above}, delta {entry.delta:g}, epsilon {entry.epsilon:g} (setting {entry.setting})",
        remedy="Go back to a safer setting, and certify again.",
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


def _say_what_losses_are(manifest: Manifest | SettingManifest, watched: Watched) -> None:
    """Prints what each line must be the loss of, unless it is an example drawn from all prompts."""
    if manifest.data.clusters is not None:
        say("the manifest is about clusters: every line has to be the mean loss of one")
    if manifest.data.groups:
        group = watched.promise.group
        whose = "all groups, as they come" if group is None else f"group {printable_line(group)} alone"
        what, where = ("prompts", "at this entry's threshold")
        if isinstance(manifest, SettingManifest):
            what, where = ("examples", "under this entry's setting")
        say(f"the manifest distinguishes groups: these have to be losses of {what} of {whose}, {where}")


_SCHEMA = "calm-beam/monitor/v3"
_FIRST_SCHEMA = "calm-beam/monitor/v1"
# They do not say which files were counted.
_SCHEMAS_WITHOUT_FILES = (_FIRST_SCHEMA, "calm-beam/monitor/v2")
_LOSSES_BETWEEN_SAVES = 100
# In bytes; states have a few hundred, and as many for each file.
_LARGEST_STATE = 10_000_000


def _checked_schema(content: Any, *, names: Collection[str]) -> str:
    """Returns the schema of a stored state after checking its keys; adds an empty list of files where none are kept.

    Args:
      content: As read from JSON.
      names: Of the fields that identify its promise.

    Raises:
      ValueError: If it is no state.
    """
    if not isinstance(content, dict):
        raise ValueError("expected an object.")
    schema = content.get("schema")
    if schema not in (_SCHEMA, *_SCHEMAS_WITHOUT_FILES):
        raise ValueError(f'schema is {schema!r:.60}, this calm-beam knows "{_SCHEMA}".')
    if schema in _SCHEMAS_WITHOUT_FILES:
        content.setdefault("files", [])
    if content.keys() != {"schema", *names, "monitor", "files"}:
        raise ValueError(f"expected an object with the keys schema, {', '.join(names)}, monitor and files.")
    for name, kind, words in (("monitor", dict, "an object"), ("files", list, "a list")):
        if not isinstance(content[name], kind):
            raise ValueError(f"{name} must be {words}.")
    return str(schema)


class Session:
    """A monitor, the files that it has counted, and the file that keeps both.

    Attributes:
      monitor: The monitor.
    """

    def __init__(self, entry: Watched, request: MonitorRequest) -> None:
        """Resumes the stored state, or starts from zero."""
        self._entry = entry
        self._path: str | None = request.state or None
        # Identifies the promise of the state: losses of one promise must not test another.
        self._promise = entry.belongs_to
        self.monitor = RiskMonitor.of_promise(entry.promise, alpha=request.alpha)
        self._counted: tuple[CountedFile, ...] = ()
        if self._path is None:
            return
        with naming("--state"):
            check_parent("--state", self._path)
            check_writable(self._path)
            is_stored = exists(self._path)
        if is_stored:
            stored, self._counted = self._load()
            if stored.alpha != request.alpha:
                raise UsageError(
                    f"--state {self._path}: was kept with --alpha={stored.alpha:g}, now it is {request.alpha:g}. An "
                    "alpha changed on the way promises nothing: go on with the old one, or start a new state."
                )
            self.monitor = stored

    def _load(self) -> tuple[RiskMonitor, tuple[CountedFile, ...]]:
        assert self._path is not None
        try:
            with open_input(self._path) as file:
                content = strict_json.loads(file.read(_LARGEST_STATE))
            schema = _checked_schema(content, names=self._promise)
            files = tuple(map(CountedFile.from_dict, content["files"]))
            is_of_first_version = content["schema"] == _FIRST_SCHEMA
            read = RiskMonitor.from_first_version if is_of_first_version else RiskMonitor.from_dict
            monitor = read(content["monitor"])
        except ValueError as error:
            raise MonitorError(f"state {self._path}: {error}") from error
        promise = {name: content[name] for name in self._promise}
        if promise != self._promise or (monitor.delta, monitor.is_signed) != (
            self.monitor.delta,
            self.monitor.is_signed,
        ):
            raise UsageError(
                f"--state {self._path}: was kept for another manifest or entry than {self._entry.words} of "
                "this one. Name those that it was kept for, or start a new state."
            )
        if schema in _SCHEMAS_WITHOUT_FILES:
            say(
                f"state {self._path}: is of a version that did not keep which files it had counted. Give it no file "
                "again that was counted then: from now on files are known again"
            )
        if is_of_first_version:
            say(
                f"state {self._path}: is of a version that counted missing losses as 1 and did not say which they are. "
                'Its findings go into the alarm "the risk exceeds delta, or losses are missing"; the proof that '
                "the risk exceeds delta begins again"
            )
        return monitor, files

    def _save(self) -> None:
        if self._path is not None:
            files = [dataclasses.asdict(part) for part in self._counted]
            content = {"schema": _SCHEMA, **self._promise, "monitor": self.monitor.to_dict(), "files": files}
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def take_file(self, path: str) -> None:
        """Adds all losses of a file that were not counted before, and saves the state.

        Raises:
          MonitorError: If a line is no loss; then nothing is counted.
        """
        with open_input(path) as file:
            lines = UncountedLines(file, path=path, counted=self._counted)
            before = lines.before.losses if lines.before else 0
            numbered = (
                (number, line.decode("utf-8", errors="surrogateescape"))
                for number, line in bounded_lines(lines, name=path, first=before + 1)
            )
            losses = list(read_losses(numbered, path, watched=self._entry))
        if before:
            say(f"{path}: {counted(before, 'loss', several='losses')} counted before, {len(losses):,} new")
        if lines.has_unfinished:
            say(f"{path}: the last line has no line break; it is counted once it has one")
        self.monitor = self.monitor.observe(losses)
        self._counted = lines.added_to(self._counted, losses=len(losses))
        self._save()

    def follow(self, losses: Iterator[float | None]) -> None:
        """Adds losses one by one up to an alarm, and saves the state regularly, at the end, and on errors.

        An earlier alarm about missing losses does not end it: the risk may still be proved to exceed delta.
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


ALARM = 3
MISSING_ALARM = 4


def watch(request: MonitorRequest) -> int:
    """Tests losses against a promise, prints what they show, and returns the exit status of the command."""
    watched = prepare(request)
    session = Session(watched, request)
    try:
        if request.losses == STREAM:
            name = "standard input"
            session.follow(read_losses(bounded_lines(sys.stdin, name=name), name, watched=watched))
        else:
            session.take_file(request.losses)
    except KeyboardInterrupt:
        tell(shown_in_words(session.monitor, watched))
        return INTERRUPTED
    except CalmBeamError:
        raise
    except ValueError as error:
        raise MonitorError(str(error)) from error
    monitor = session.monitor
    tell(shown_in_words(monitor, watched))
    give(
        {
            "promise": watched.promise,
            "losses": monitor.n,
            "missing": monitor.missing,
            "mean_loss": monitor.mean_loss,
            "alpha": monitor.alpha,
            "capital": monitor.capital,
            "worst_capital": monitor.worst_capital,
            "alarm_at": monitor.alarm_at,
            "missing_alarm_at": monitor.missing_alarm_at,
        }
    )
    if session.monitor.alarm_at:
        return ALARM
    return MISSING_ALARM if session.monitor.missing_alarm_at else 0


_ESSENTIALS = ("--manifest", "--losses", "--alpha", "--state", "--delta", "--consistency", "--metric")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(request_parser("monitor", MonitorRequest, doc=__doc__, essentials=_ESSENTIALS)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    return watch(parsed(MonitorRequest, argv, parser=parser))
