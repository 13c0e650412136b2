"""What `train` shows while it runs, and what it keeps of that."""

import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.results import give_step
from calm_beam.training.log import TrainingLog
from calm_beam.training.train import Progress

_SECONDS_BETWEEN_LINES = 10.0


class StepBar:
    """A bar on a terminal, elsewhere a line every ten seconds and at the end; each with the time left."""

    def __init__(self, console: PlainConsole, *, done: int = 0) -> None:
        """Prepares to show a run of which some steps were `done` by an earlier process."""
        self._console = console
        self._first = done
        self._start = self._last_line = time.monotonic()
        self._bar = ProgressBar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=None, completed=done)

    def __enter__(self) -> "StepBar":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since the start, not 0."""
        return max(time.monotonic() - self._start, 1e-9)

    def begin(self) -> None:
        """Says that the first step is compiled now, which may take minutes, where no bar says so."""
        if not self._console.is_terminal:
            self.say("compiling, then the first steps")

    def show(self, step: int, steps: int, *, text: str) -> None:
        """Shows that a step of `steps` is done, with some text about it."""
        self._bar.update(self._task, total=steps, completed=step, description=text)
        is_due = time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES or step == steps
        if not self._console.is_terminal and is_due:
            self._last_line = time.monotonic()
            remaining = self.elapsed / (step - self._first) * (steps - step)
            self.say(f"step {step}/{steps}, {text}, {remaining:.0f} s left")

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.say(line)


class TrainingReporter:
    """Shows each report of the training loop, appends it to the log, and gives it to who draws curves."""

    def __init__(self, bar: StepBar, log: TrainingLog, *, steps: int, target_tokens: int = 0) -> None:
        """Prepares to report on a run of `steps` steps; `target_tokens` were seen by an earlier process."""
        self._bar, self._log, self._steps, self._earlier_tokens = bar, log, steps, target_tokens

    def report(self, progress: Progress) -> None:
        """Takes one report."""
        tokens_per_second = (progress.target_tokens - self._earlier_tokens) / self._bar.elapsed
        if progress.validation is not None:
            losses = " ".join(f"{loss:.3f}" for loss in progress.validation.losses)
            score = "" if progress.validation.score is None else f"; score {progress.validation.score:.4f}"
            self._bar.say(f"step {progress.step}: validation loss of the layers {losses}{score}")
        self._bar.show(
            progress.step, self._steps, text=f"loss {progress.loss:.3f}, {tokens_per_second:,.0f} target tokens/s"
        )
        self._log.append(progress)
        values = {"loss": progress.loss, "target_tokens_per_second": tokens_per_second}
        if progress.validation is not None:
            values |= layer_losses(progress.validation.losses)
            if progress.validation.score is not None:
                values["validation_score"] = progress.validation.score
        give_step(progress.step, values)


def layer_losses(losses: Sequence[float]) -> dict[str, float]:
    """Returns the validation loss of every decoder layer by name."""
    return {f"validation_loss/layer_{layer}": float(loss) for layer, loss in enumerate(losses, start=1)}
