"""Progress of a local run on the terminal."""

import contextlib
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calm_beam.transforms.progress import ProgressLog

_TERMINAL_SECONDS = 0.3
_LOG_SECONDS = 10.0


@contextlib.contextmanager
def shown_progress(*, enabled: bool) -> Iterator[ProgressLog]:
    """Shows how many prompts are decoded while the block runs: a bar on a terminal, else a line now and then.

    Args:
      enabled: False on runners whose workers do not share this machine's disk; then nothing is shown.

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
        watcher = threading.Thread(target=_watch, args=(path, done), daemon=True)
        watcher.start()
        try:
            yield ProgressLog(str(path))
        finally:
            done.set()
            watcher.join()


def _watch(path: pathlib.Path, done: threading.Event) -> None:
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    if not console.is_terminal:
        _log(path, done)
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading", total=None)
        while True:
            is_last = done.wait(_TERMINAL_SECONDS)
            read, decoded = _read_and_decoded(path)
            phase = "reading" if not decoded and not read else "decoding" if decoded < read else "scoring"
            progress.update(task, description=phase, total=read or None, completed=decoded)
            if is_last:
                return


def _log(path: pathlib.Path, done: threading.Event) -> None:
    """Prints a line every few seconds, for logs."""
    start = time.monotonic()
    while not done.wait(_LOG_SECONDS):
        read, decoded = _read_and_decoded(path)
        seconds = time.monotonic() - start
        eta = f", about {seconds / decoded * (read - decoded):.0f} s left" if decoded else ""
        print(f"decoded {decoded} of {read} prompts in {seconds:.0f} s{eta}", file=sys.stderr)


def _read_and_decoded(path: pathlib.Path) -> tuple[int, int]:
    """Returns how many prompts this run has to decode, and how many it has decoded.

    Those that an earlier run has stored take no time, and work that is done twice counts once at most.
    """
    counts = _read_counts(path)
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
