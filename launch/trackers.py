"""`--log_to`: logs the flags, results and files of a command as a run of an experiment tracker.

The trackers' clients are optional. They read their usual settings: `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`,
or `WANDB_PROJECT` and `WANDB_MODE`. TensorBoard files are written to `runs/`. A run begins with the first training step
or the result, so a command that is refused leaves no run. A tracker that fails causes a printed warning and does not
end the command: the command's result is complete without it.
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

# The numbers that are logged for each promise, of any kind.
_FOUND = ("threshold", "layers", "cost", "risk")
_NAMED_BY = ("group", "consistency", "metric", "loss", "tail", "delta", "epsilon")
# Characters that MLflow does not accept in a name.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")
_SHOWN_ROWS = 500


class _Run(Protocol):
    """A run of one tracker; it begins when it is constructed from a name and the flags."""

    def numbers(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Logs the numbers of a training step, or of the result."""

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        """Logs files, which are removed afterwards; CSV files are tables."""

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
        # The tracker does not record the terminal's output.
        settings = self._client.Settings(console="off", silent=True)
        # Flags are passed now: a short run may end before an update of them is written.
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
            # TensorBoard's names have no spaces.
            self._writer.add_scalar(name.replace(" ", "_"), value, step or 0)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        # TensorBoard stores no files: tables are logged as text, and pages stay where they are.
        for path in paths:
            if path.suffix == ".csv":
                self._writer.add_text(path.stem, _markdown(_rows(path)))

    def end(self, *, failed: bool) -> None:
        say(f"{LOG_TO}=tensorboard: {self._writer.logdir}")
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
    """Logs the result of the command that runs within this context to a tracker.

    Args:
      tracker: Name of the tracker; None for none.
      command: The command.
      flags: The command's flags, with those of `--config`.
      outcome: The command's outcome; training steps that it receives are logged from here on.

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
    """The run of a command; after the tracker's first failure nothing more is logged."""

    def __init__(self, tracker: str, command: str, *, flags: Sequence[str]) -> None:
        if tracker not in _RUNS:
            raise UsageError(f"{LOG_TO}={tracker}: expected {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}.")
        # A missing client is reported now, and not after hours of work.
        with _said_to_people():
            _import_client(tracker)
        self._tracker, self._command, self._flags = tracker, command, flags
        self._run: _Run | None = None
        self._gave_up = False

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of a training step."""
        self._do(lambda run: run.numbers(_finite(values), step=step))

    def result(self, outcome: Outcome) -> None:
        """Logs the result of a command, and its files."""
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
        # The server may be down, or refuse a name: no failure of a tracker may lose the command's work.
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
    """Sends what clients print, such as the address of a run, to standard error: standard output is the command's."""
    return contextlib.redirect_stdout(sys.stderr)


def _params(flags: Sequence[str]) -> dict[str, str]:
    """Returns flags by name; the last value wins for a repeated flag, as it does in the command."""
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
    """Returns the numbers of each promise by its name, or of the result itself if it has no promises."""
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
    """Returns a cell of a table as a number if it is one; cells of one column have one type or are empty."""
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
