"""`--log_to`: what a command was asked, what it found and which files it wrote, as a run of an experiment tracker.

Their clients are optional, and set up as everywhere else: by `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`, by
`WANDB_PROJECT` and `WANDB_MODE`. Files of TensorBoard are written to `runs/`. A run begins with the first training step
or the result, so that what is refused leaves none. What a tracker cannot take is said, and ends no command: its result
stands without it.
"""

import contextlib
import csv
import io
import math
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from calm_beam import __version__
from calm_beam.errors import UsageError
from calm_beam.extras import MissingExtraError, imported
from calm_beam.storage import base_name, is_file, open_input

from .flags.requests import LOG_TO, TRACKERS
from .terminal import say
from .terminal.lines import Outcome

# What a promise came to, of whatever kind.
_FOUND = ("threshold", "layers", "cost", "risk")
_NAMED_BY = ("group", "consistency", "metric", "loss", "tail", "delta", "epsilon")
# All that MLflow takes in a name.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")
_SHOWN_ROWS = 500


class _Run(Protocol):
    """A run of one tracker; it begins when it is made, of a name and of what was asked."""

    def numbers(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Takes numbers: those of a training step, or of the result."""

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        """Takes files, which are gone afterwards; those in CSV are tables."""

    def end(self, *, failed: bool) -> None:
        """Ends the run."""


class _MLflow:
    def __init__(self, name: str, params: Mapping[str, str]) -> None:
        self._client: Any = _client("mlflow", "mlflow")
        self._client.start_run(run_name=name)
        self._client.log_params(params)

    def numbers(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        self._client.log_metrics(values, step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        for path in paths:
            self._client.log_artifact(str(path))

    def end(self, *, failed: bool) -> None:
        self._client.end_run("FAILED" if failed else "FINISHED")


class _WandB:
    def __init__(self, name: str, params: Mapping[str, str]) -> None:
        self._client: Any = _client("wandb", "wandb")
        self._name = name
        # What the terminal shows is not theirs to keep.
        settings = self._client.Settings(console="off", silent=True)
        # Flags now: a short run may end before an update of them is written.
        self._run = self._client.init(name=name, config=dict(params), settings=settings)

    def numbers(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        if step is None:
            self._run.summary.update(dict(values))
        else:
            self._run.log(dict(values), step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        kept = self._client.Artifact(self._name.replace(" ", "-"), type="result")
        for path in paths:
            kept.add_file(str(path))
            if path.suffix == ".csv" and (rows := _rows(path)):
                columns = list(rows[0])
                data = [[_number(row[column]) for column in columns] for row in rows]
                self._run.log({path.stem: self._client.Table(columns=columns, data=data)})
            elif path.suffix == ".html":
                self._run.log({path.stem: self._client.Html(str(path))})
        self._run.log_artifact(kept)

    def end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _TensorBoard:
    def __init__(self, name: str, params: Mapping[str, str]) -> None:
        self._writer = _client("tensorboardX", "tensorboard").SummaryWriter(comment=f"_{name.replace(' ', '-')}")
        self._writer.add_text("params", _markdown([{"flag": name, "value": value} for name, value in params.items()]))

    def numbers(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        for name, value in values.items():
            # Their names have no spaces.
            self._writer.add_scalar(name.replace(" ", "_"), value, step or 0)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        # It keeps no files: tables are shown, and pages stay where they are.
        for path in paths:
            if path.suffix == ".csv":
                self._writer.add_text(path.stem, _markdown(_rows(path)))

    def end(self, *, failed: bool) -> None:
        self._writer.add_text("status", "failed" if failed else "finished")
        self._writer.close()


_RUNS: Mapping[str, Callable[[str, Mapping[str, str]], _Run]] = {
    "mlflow": _MLflow,
    "wandb": _WandB,
    "tensorboard": _TensorBoard,
}
assert _RUNS.keys() == {*TRACKERS}


@contextlib.contextmanager
def tracked(tracker: str | None, command: str, *, flags: Sequence[str], outcome: Outcome) -> Iterator[None]:
    """Within it, what becomes of a command goes to a tracker, too.

    Args:
      tracker: Its name; None for none.
      command: The command.
      flags: Its flags, with those of `--config`.
      outcome: What becomes of it; takes training steps from here on.

    Raises:
      UsageError: If there is no such tracker, or its client is not installed.
    """
    if tracker is None:
        yield
        return
    log = _Log(tracker, command, flags=flags)
    outcome.on_step = log.step
    failed = True
    try:
        yield
        failed = outcome.status != 0
        if outcome.result is not None:
            log.result(outcome)
    finally:
        log.end(failed=failed)


class _Log:
    """The run of a command; after the first thing that its tracker does not take, it takes no more."""

    def __init__(self, tracker: str, command: str, *, flags: Sequence[str]) -> None:
        if tracker not in _RUNS:
            raise UsageError(f"{LOG_TO}={tracker}: expected {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}.")
        # Now, and not after hours of work.
        with _said_to_people():
            _import_client(tracker)
        self._tracker, self._command, self._flags = tracker, command, flags
        self._run: _Run | None = None
        self._gave_up = False

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a training step."""
        self._do(lambda run: run.numbers(_finite(values), step=step))

    def result(self, outcome: Outcome) -> None:
        """Takes the result of a command, and its files."""
        with tempfile.TemporaryDirectory() as folder:
            copies = []
            for path in filter(is_file, outcome.files):
                copies.append(pathlib.Path(folder, base_name(path)))
                with open_input(path) as source, open(copies[-1], "wb") as target:
                    shutil.copyfileobj(source, target)

            def take(run: _Run) -> None:
                run.numbers(_finite(_found(outcome.result)))
                run.files(copies)

            self._do(take)

    def end(self, *, failed: bool) -> None:
        """Ends the run, if one has begun."""
        if self._run is not None:
            self._do(lambda run: run.end(failed=failed))

    def _do(self, act: Callable[[_Run], None]) -> None:
        if self._gave_up:
            return
        # A server that is away, a name that it does not take: whatever it is, the command's work is not lost for it.
        try:
            with _said_to_people():
                if self._run is None:
                    params = {"command": self._command, "calm_beam": __version__, **_params(self._flags)}
                    self._run = _RUNS[self._tracker](f"calm-beam {self._command}", params)
                act(self._run)
        except Exception as error:
            self._gave_up = True
            say(f"caution: {LOG_TO}={self._tracker}: {error} Nothing more is logged; the command goes on without.")


def _client(module: str, extra: str) -> Any:
    return imported(module, extra=extra, needed_for=f"{LOG_TO}={extra}")


def _import_client(tracker: str) -> None:
    try:
        _client({"tensorboard": "tensorboardX"}.get(tracker, tracker), tracker)
    except MissingExtraError as error:
        raise UsageError(str(error)) from error


def _said_to_people() -> contextlib.AbstractContextManager[Any]:
    """Clients print where runs can be seen; standard output is for the command's own."""
    return contextlib.redirect_stdout(sys.stderr)


def _params(flags: Sequence[str]) -> dict[str, str]:
    """Returns flags by name; of one that was given twice the last, as the command takes it."""
    found: dict[str, str] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--"):
            name, given, value = flag[2:].partition("=")
            found[name] = value if given else "true"
        elif name:
            found[name] = flag
    return found


def _found(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a result: those of each promise by its name, else those that the result itself has."""
    entries = result.get("manifest", {}).get("calibrations")
    if entries is None:
        return {name: value for name, value in result.items() if isinstance(value, int | float)}
    return {
        f"{_named(entry)}/{key}": entry[key] for entry in entries for key in _FOUND if isinstance(entry.get(key), float)
    }


def _named(entry: Mapping[str, Any]) -> str:
    given = [(key, entry[key]) for key in _NAMED_BY if entry.get(key) is not None]
    return "/".join(f"{key} {value:g}" if isinstance(value, float) else str(value) for key, value in given)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {_NOT_IN_NAMES.sub("_", name): float(value) for name, value in values.items() if math.isfinite(value)}


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def _number(text: str) -> float | str | None:
    """Returns a value of a table, all of whose columns have one kind or are empty."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the head of a table as TensorBoard shows it."""
    if not rows:
        return "(empty)"
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows[:_SHOWN_ROWS])]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
