"""Progress of a local run on the terminal."""

import contextlib
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from calm_beam.transforms.metrics import ProgressLog

from . import say

SCORING = "scoring"
"""What runs do that decode nothing: nobody reports how far they are."""
STARTING = "starting worker processes"
"""What runs in several processes begin with."""

_READING, _LOADING, _COMPILING = "reading", "loading the model", "compiling"
_DECODING = "decoding"
_PREDICTING = "computing what every layer predicts"
_TIMING = "compiling and measuring speed"
_BEFORE_THE_FIRST = (_LOADING, _COMPILING)
# Without a count of what is done, seconds tell that something is.
_TIMED = (STARTING, _READING, *_BEFORE_THE_FIRST, _PREDICTING, _TIMING, SCORING)

_TERMINAL_SECONDS = 0.3
_LOG_SECONDS = 10.0


@contextlib.contextmanager
def shown_progress(*, enabled: bool, first: str = _READING, unit: str = "prompts") -> Iterator[ProgressLog]:
    """Shows how many prompts are decoded while the block runs: a bar on a terminal, else a line now and then.

    Args:
      enabled: False on runners whose workers do not share this machine's disk; then nothing is shown.
      first: What is done while nobody has reported anything.
      unit: What is counted, in the plural: outputs where every prompt has several.

    Yields:
      Where workers report.
    """
    if not enabled:
        yield ProgressLog(None)
        return
    with tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
        path = pathlib.Path(folder) / "progress"
        path.touch()
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(path, done, first, unit), daemon=True)
        watcher.start()
        try:
            yield ProgressLog(str(path))
        finally:
            done.set()
            watcher.join()


def timing_in(progress: ProgressLog) -> Callable[[int, int], None]:
    """Returns what reports prompts decoded to measure speed: called with those newly decoded, and all there will be."""
    known = 0

    def report(newly: int, in_all: int) -> None:
        nonlocal known
        progress.report("to_time", in_all - known)
        progress.report("timed", newly)
        known = in_all

    return report


class _Remaining(TimeRemainingColumn):
    """Time to the end; nothing where it is unknown, or over."""

    def render(self, task: Task) -> Text:
        if task.finished or task.time_remaining is None:
            return Text("")
        return Text.assemble("ETA ", super().render(task))


def _watch(path: pathlib.Path, done: threading.Event, first: str, unit: str) -> None:
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        _Remaining(),
    )
    if not console.is_terminal:
        _log(path, done, first, unit)
        return
    phases = _Phases(first)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(first, total=None, counts="")
        while True:
            is_last = done.wait(_TERMINAL_SECONDS)
            counts = _read_counts(path)
            phase, seconds, _ = phases.see(counts)
            completed, total = _completed_of(counts, phase)
            description = f"{phase} {seconds:.0f} s" if phase in _TIMED else phase
            progress.update(
                task,
                description=description,
                total=total or None,
                completed=completed,
                counts=f"{completed}/{total} {unit}" if total else "",
            )
            if is_last:
                return


def _completed_of(counts: Mapping[str, int], phase: str) -> tuple[int, int]:
    """Returns how many prompts a phase has done, and of how many: 0 of 0 if that is unknown."""
    if phase == _TIMING:
        in_all = counts.get("to_time", 0)
        return min(counts.get("timed", 0), in_all), in_all
    read, decoded = _read_and_decoded(counts)
    if read:
        return decoded, read
    # All are stored.
    return counts.get("read", 0), counts.get("read", 0)


def _log(path: pathlib.Path, done: threading.Event, first: str, unit: str) -> None:
    """Prints a line every few seconds, for logs."""
    start = last_line = time.monotonic()
    phases = _Phases(first)
    while not done.wait(min(_TERMINAL_SECONDS, _LOG_SECONDS)):
        counts = _read_counts(path)
        phase, seconds, newly = phases.see(counts)
        now = time.monotonic()
        if now - last_line >= _LOG_SECONDS:
            last_line = now
            if phase == _TIMING:
                completed, total = _completed_of(counts, phase)
                say(f"{phase} for {seconds:.0f} s: {completed} of {total} {unit}")
                continue
            read, decoded = _read_and_decoded(counts)
            say(_line(phase, read, decoded=decoded, newly=newly, in_phase=seconds, in_all=now - start, unit=unit))


def _line(
    phase: str, read: int, *, decoded: int, newly: int, in_phase: float, in_all: float, unit: str = "prompts"
) -> str:
    """Returns where a run stands, for a log.

    Args:
      phase: What it does.
      read: Prompts to decode.
      decoded: Those that are decoded.
      newly: Those of them that were decoded within `in_phase`.
      in_phase: Seconds of the phase so far.
      in_all: Seconds of the run so far.
      unit: What is counted, in the plural.
    """
    prompts = f"{read} {unit.removesuffix('s') if read == 1 else unit}"
    if phase in _BEFORE_THE_FIRST:
        return f"{phase} for {in_phase:.0f} s; {prompts} to decode"
    if phase == _READING or not read:
        return f"{phase} for {in_phase:.0f} s"
    done = f"decoded {decoded} of {prompts} in {in_all:.0f} s"
    if phase != _DECODING:
        return f"{done}; {phase}{f' for {in_phase:.0f} s' if phase in _TIMED else ''}"
    # Time before the first prompts (loading, compiling) is not repeated, and tells nothing of the rest. Prompts of a
    # batch are reported one after the other, so that the first moments tell nothing either.
    if not newly or in_phase < _LOG_SECONDS:
        return done
    return f"{done}, about {in_phase / newly * (read - decoded):.0f} s left"


class _Phases:
    """The current activity of a run, and its duration."""

    def __init__(self, first: str) -> None:
        self._first = first
        self._phase, self._since, self._decoded = first, time.monotonic(), 0

    def see(self, counts: Mapping[str, int]) -> tuple[str, float, int]:
        """Returns the phase that counts show, and the seconds and the prompts decoded since it was first seen."""
        phase, (_, decoded) = _phase_of(counts, self._first), _read_and_decoded(counts)
        if phase != self._phase:
            self._phase, self._since, self._decoded = phase, time.monotonic(), decoded
        return phase, time.monotonic() - self._since, decoded - self._decoded


def _phase_of(counts: Mapping[str, int], first: str = _READING) -> str:
    read, decoded = _read_and_decoded(counts)
    if decoded < read:
        if decoded:
            return _DECODING
        # Each is told when it begins; once a prompt is decoded, all of them are over.
        return _COMPILING if "compiling" in counts else _LOADING if "loading" in counts else _READING
    if "to_time" in counts:
        return _TIMING
    if "predicting" in counts:
        return _PREDICTING
    return SCORING if counts.get("read") else first


def _read_and_decoded(counts: Mapping[str, int]) -> tuple[int, int]:
    """Returns how many prompts this run has to decode, and how many it has decoded.

    Those that an earlier run has stored take no time, and work that is done twice counts once at most.
    """
    read = counts.get("read", 0) - counts.get("stored", 0)
    return read, min(read, counts.get("decoded", 0))


def _read_counts(path: pathlib.Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        for line in file:
            # The last line may still be being written.
            if line.endswith("\n"):
                event, count = line.split()
                counts[event] = counts.get(event, 0) + int(count)
    return counts
