"""The list of plans that were asked of a set of outputs: it is stored next to them, and only ever extended.

`plans/00001.json`, `plans/00002.json`, ... in an output directory hold one event each: a plan was asked, or its result
may have been seen. Every file is sealed and names the digest of the one before it, so that a change or a gap is
detected. A file is written once, on the condition that it does not exist, so that if two runs add at the same time
neither is lost. Nothing removes the files: `--overwrite` deletes outputs and results, and leaves the list.

The list shows only plans asked through it. It cannot show what was asked of a copy of the outputs, or of the files
themselves, nor that its last files, or all of them, were removed.
"""

import dataclasses
import glob
from collections.abc import Sequence
from typing import Self

from calm_beam.errors import ManifestError, UsageError, os_error_in_words
from calm_beam.storage import base_name, is_file, joined, list_files, make_folder, parent
from calm_beam.storage.strict_json import content_digest, read_sealed, write_sealed

from ._plan import EarlierPlan, Plan, SettingPlan
from .files import MANIFEST, read_any_manifest, time_of_now

PLANS = "plans"
_SCHEMA = "calm-beam/plan-list/v1"
GENERATIONS = "generations"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedPlan:
    """A plan that is asked of some data.

    Attributes:
      plan: Digest of the plan.
      tests: Digest of the plan without its stopping rule, which may be changed without voiding anything.
      data: Identifies the data; None if unknown: any data may be meant.
      command: The command that asks, such as `calibrate`.
      decodes: Whether outputs are decoded for the plan, replacing any earlier ones.
    """

    plan: str
    tests: str
    data: str | None
    command: str
    decodes: bool = False

    @classmethod
    def of(cls, plan: Plan | SettingPlan, *, data: str | None, command: str, decodes: bool = False) -> Self:
        """Returns the list entry of a plan; other arguments are the attributes above."""
        return cls(plan=plan.digest, tests=plan.without_rule().digest, data=data, command=command, decodes=decodes)

    def is_same(self, other: Self) -> bool:
        """Returns whether this plan asks nothing that the other does not ask."""
        is_same_plan = self.plan == other.plan or self.tests == other.tests
        return is_same_plan and (None in (self.data, other.data) or self.data == other.data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Event:
    """A file of the list: a plan that was asked, when, and whether its result may have been seen since."""

    asked: AskedPlan
    time: str
    answered: bool


class PlanList:
    """The plans that were asked of the outputs in a directory.

    Attributes:
      home: The directory.
    """

    def __init__(self, home: str) -> None:
        """Reads the list of a directory, and a manifest there that the list does not know.

        Raises:
          UsageError: If the list is damaged.
        """
        self.home = home
        self._events, self._digests = _read(home)
        # A manifest by itself shows that its plan was asked and answered: by an earlier version, or by a pipeline whose
        # end no launcher has waited for.
        self._of_manifest = _of_manifest(home)

    def plans(self) -> tuple[EarlierPlan, ...]:
        """Returns every plan once, in the order in which they were first asked."""
        return tuple(_record(events) for events in self._by_plan())

    def data_of_outputs(self) -> str | None:
        """Returns the identity of the data of the present outputs; None if the list does not have it."""
        return next((event.asked.data for event in reversed(self._events) if event.asked.decodes), None)

    def ask(self, asked: AskedPlan, *, is_answered: bool) -> tuple[EarlierPlan, ...]:
        """Adds a plan, unless it is listed, and returns those that were asked before it.

        Args:
          asked: The plan. The same one again, as in a run that is resumed or repeated, is not counted twice.
          is_answered: Whether its result may be seen from now on, rather than only after `answer`.

        Raises:
          UsageError: If the list cannot be written.
        """
        for event in self._of_manifest:
            if self._place(event.asked) is None:
                self._add(event)
            if event.answered:
                self.answer(event.asked)
        self._of_manifest = []
        event = _Event(asked=asked, time=time_of_now(), answered=is_answered)
        if self._place(asked) is None or not self._knows_data(asked):
            self._add(event)
        if is_answered:
            self.answer(asked)
        place = self._place(asked)
        assert place is not None
        return self.plans()[:place]

    def answer(self, asked: AskedPlan) -> None:
        """Records that the result of an asked plan may be seen, unless the list says so already.

        Raises:
          UsageError: If the list cannot be written.
        """
        place = self._place(asked)
        assert place is not None, "was not asked"
        events = self._by_plan()[place]
        if not any(event.answered for event in events):
            known = next((event.asked for event in events if event.asked.data is not None), asked)
            self._add(_Event(asked=known, time=time_of_now(), answered=True))

    def is_answered(self, asked: AskedPlan) -> bool:
        """Returns whether a plan was asked, and its result may have been seen."""
        place = self._place(asked)
        return place is not None and any(event.answered for event in self._by_plan()[place])

    def _place(self, asked: AskedPlan) -> int | None:
        """Returns the index of a plan among all; None if it was not asked."""
        # A manifest does not name its data: they are those that were decoded last.
        places = [place for place, events in enumerate(self._by_plan()) if _are_about(events, asked)]
        return places[-1] if places else None

    def _knows_data(self, asked: AskedPlan) -> bool:
        """Returns whether the list has the data that a plan was asked of, if they are known now."""
        place = self._place(asked)
        assert place is not None
        known = any(event.asked.data is not None for event in self._by_plan()[place])
        return known or asked.data is None

    def _by_plan(self) -> list[list[_Event]]:
        found: list[list[_Event]] = []
        for event in self._events:
            same = next((events for events in found if _are_about(events, event.asked)), None)
            if same is None:
                found.append([event])
            else:
                same.append(event)
        return found

    def _add(self, event: _Event) -> None:
        """Adds an event as the next file; if another run is faster, as the one after that."""
        folder = joined(self.home, PLANS)
        while True:
            number = len(self._events) + 1
            content = {
                "schema": _SCHEMA,
                "number": number,
                "previous": self._digests[-1] if self._digests else None,
                **dataclasses.asdict(event.asked),
                "time": event.time,
                "answered": event.answered,
            }
            try:
                make_folder(folder)
                write_sealed(_path(self.home, number), content, replaces="")
            except OSError as error:
                known = number
                if isinstance(error, FileExistsError):
                    self._events, self._digests = _read(self.home)
                    known = len(self._events) + 1
                if known > number:
                    continue
                raise UsageError(
                    f"{folder}: cannot be written ({os_error_in_words(error)}), and every plan that is asked of "
                    "outputs is listed next to them. Ask who owns them for the right to write there."
                ) from error
            self._events = [*self._events, event]
            self._digests = [*self._digests, content_digest(content)]
            return


def home_of(folder: str) -> str:
    """Returns the directory of the list for a folder of generations: the output directory that contains it.

    A folder that was moved out of its output directory has its own list.
    """
    above = parent(folder)
    return parent(above) if base_name(above) == GENERATIONS else folder


def _are_about(events: Sequence[_Event], asked: AskedPlan) -> bool:
    return all(asked.is_same(event.asked) for event in events)


def _path(home: str, number: int) -> str:
    return joined(home, PLANS, f"{number:05d}.json")


def _read(home: str) -> tuple[list[_Event], list[str]]:
    """Returns the events of a list and the digests of its files; empty if there is no list."""
    events: list[_Event] = []
    digests: list[str] = []
    names = {base_name(path) for path in list_files(joined(glob.escape(home), PLANS, "*.json"))}
    for number in range(1, len(names) + 1):
        path = _path(home, number)
        if base_name(path) not in names:
            raise UsageError(f"{path}: is missing, and later plans are there. {_RESTORE}")
        content = read_sealed(path, schema=_SCHEMA, kind=UsageError, of="plans", again=_RESTORE)
        try:
            if (content["number"], content["previous"]) != (number, digests[-1] if digests else None):
                raise ValueError("it does not follow the file before it")
            fields = [field.name for field in dataclasses.fields(AskedPlan)]
            asked = AskedPlan(**{name: content[name] for name in fields})
            events.append(_Event(asked=asked, time=content["time"], answered=content["answered"]))
            _record(events[-1:])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: is not as calm-beam writes it ({error}). {_RESTORE}") from error
        digests.append(content["digest"])
    return events, digests


_RESTORE = (
    "The list of plans shows what was asked of these outputs: restore it, or take fresh examples and another output "
    "directory."
)


def _of_manifest(home: str) -> list[_Event]:
    """Returns the plans in a manifest of a directory: its own, and the earlier ones that it records."""
    path = joined(home, MANIFEST)
    if not is_file(path):
        return []
    try:
        manifest = read_any_manifest(path)
    except (ManifestError, OSError):
        # Code that needs the manifest reports what is wrong with it.
        return []
    earlier = [
        _Event(
            asked=AskedPlan(plan=each.plan, tests=each.plan, data=None, command=each.command),
            time=each.asked,
            answered=each.answered,
        )
        for each in manifest.earlier_plans or ()
    ]
    if manifest.plan is None:
        return earlier
    asked = AskedPlan.of(manifest.plan, data=None, command=_MADE_BY[type(manifest.plan)])
    return [*earlier, _Event(asked=asked, time=manifest.created, answered=True)]


_MADE_BY: dict[type, str] = {Plan: "calibrate", SettingPlan: "certify"}


def _record(events: Sequence[_Event]) -> EarlierPlan:
    """Returns a plan's record for manifests, given all its events."""
    first = events[0]
    return EarlierPlan(
        plan=first.asked.plan,
        command=first.asked.command,
        asked=first.time,
        answered=any(event.answered for event in events),
    )
