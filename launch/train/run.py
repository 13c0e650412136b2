"""Training, from preparing to reporting: the steps of a model, or the exit classifier of one, and what either writes.

Both stages show their progress and keep a log of it, and print what they are at the start and what they found at the
end.
"""

import contextlib
import functools
import math
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from calm_beam.checkpoints import FloatArrays, write_native
from calm_beam.decoding.compilation import CompileTime, use_compilation_cache
from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import PlainConsole, give
from calm_beam.launch.terminal.interrupts import INTERRUPTED
from calm_beam.launch.terminal.lines import PlainTable, give_step
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.text import counted
from calm_beam.training.saved_state import StateFolder, TrainedModel
from calm_beam.training.train import Progress, TrainingLog, train
from calm_beam.training.train_classifier import TrainedClassifier, train_classifier

from .prepare import PreparedClassifier, PreparedTraining, prepare_classifier, prepare_training
from .request import TrainRequest

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
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=None, completed=done)
        self._phase, self._phase_start = "compiling, then the first steps", self._start
        self._step_ended = self._compiled = 0.0
        self._compiling = CompileTime()
        self._is_shown = False
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StepBar":
        self._compiling.__enter__()
        self._bar.start()
        if not self._console.is_terminal:
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._bar.stop()
        self._compiling.__exit__(None, None, None)

    def _watch(self) -> None:
        """Says now and then that steps are computed, until the first one is shown: compiling may take minutes."""
        while not (self._ended.wait(_SECONDS_BETWEEN_LINES) or self._is_shown):
            self.say(f"{self._phase}, for {time.monotonic() - self._phase_start:.0f} s")

    @property
    def elapsed(self) -> float:
        """Seconds since the start, not 0."""
        return max(time.monotonic() - self._start, 1e-9)

    def begin(self, phase: str = "compiling, then the first steps", *, after: str = "") -> None:
        """Says what takes time from now on, and what went before it; on a terminal, the bar says what takes time."""
        self._phase, self._phase_start = phase, time.monotonic()
        self._bar.update(self._task, description=phase)
        if not self._console.is_terminal:
            self.say(f"{after}{phase}")

    def show_first(self, done: int, steps: int) -> None:
        """Says that the first step is compiled (0 done), or how long it took; forecasts the time after the second.

        Seconds of a step are without compiling, which the second step repeats if its batch has another shape.
        """
        self._bar.update(self._task, total=steps, completed=self._first + done)
        now, compiled = time.monotonic(), self._compiling.seconds()
        seconds = max(now - self._step_ended - (compiled - self._compiled), 0.0)
        left = steps - self._first - done
        if done == 0:
            self.begin("computing the first step", after=f"compiled in {now - self._phase_start:.0f} s; ")
        elif done == 1:
            self.begin("computing the second step", after=f"first step computed in {seconds:.1f} s; ")
        elif left:
            self._phase, self._phase_start = "computing steps", now
            self._bar.update(self._task, description=self._phase)
            self.say(
                f"{seconds:.1f} s a step: about {_in_words(seconds * left)} for {counted(left, 'further step')}, "
                "without validating and compiling"
            )
        self._step_ended, self._compiled = now, compiled

    def show(self, step: int, steps: int, *, text: str) -> None:
        """Shows that a step of `steps` is done, with some text about it."""
        self._is_shown = True
        self._bar.update(self._task, total=steps, completed=step, description=text)
        is_due = time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES or step == steps
        if not self._console.is_terminal and is_due:
            self._last_line = time.monotonic()
            computing = max(self.elapsed - self._compiling.seconds(), 0.0)
            remaining = computing / (step - self._first) * (steps - step)
            self.say(f"step {step}/{steps}, {text}, {_in_words(remaining)} left")

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.say(line)


def _in_words(seconds: float) -> str:
    """Returns a duration, such as `40 s`, `12 min` or `33 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


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


def say_start(console: PlainConsole, run: PreparedTraining) -> None:
    """Says what is trained, on how much, and with which reservations."""
    model, config = run.model, run.config
    if model.exit_classifier:
        console.say("The exit classifier is kept as it is, and was trained for the weights before these.")
    if run.gets_exits:
        console.say("Exits begin with the final norm and the output head, and are trained apart from them.")
    console.say(
        f"Training {architecture_of(model).layers_in_words(model)} of width {model.emb_dim} on "
        f"{counted(len(run.learned.pairs), 'pair')} for {counted(config.steps, 'step')}; "
        f"{counted(len(run.measured.pairs), 'pair')} to validate on."
    )
    # The end takes one place.
    cut_targets = sum(len(target) >= config.max_target_length for _, target in run.learned.pairs)
    if run.learned.cut or cut_targets:
        console.say(
            f"Cut {counted(run.learned.cut, 'input')} to --max_input_length={config.max_input_length} and "
            f"{counted(cut_targets, 'reference')} to --max_target_length={config.max_target_length}."
        )
    _say_end(console, run.end_id, model=model)
    if run.saved is not None:
        console.say(run.going_on)


def say_classifier_start(console: PlainConsole, run: PreparedClassifier) -> None:
    """Says with what references end, and whether the model had a classifier before."""
    _say_end(console, run.end_id, model=run.checkpoint.config)
    if run.checkpoint.config.exit_classifier:
        console.say(f"Replacing the exit classifier of {run.request.named_model}.")


def tell_model(console: PlainConsole, run: PreparedTraining, *, model: TrainedModel) -> None:
    """Says how good a model has become, and where it is."""
    request, chosen = run.request, "the last"
    if model.validation is not None:
        console.print(_loss_table(model.validation.losses))
        value = model.validation.losses[-1] if model.validation.score is None else model.validation.score
        if request.validate_every:
            chosen = f"the best of those validated by {run.best_by} ({value:.4f})"
    console.say(f"Wrote {request.output}: the weights after step {model.step}, {chosen}.")
    if request.validation_data is not None:
        console.say(f"Next, whether it can exit early:\n  {_suitability(request)}")


def tell_classifier(console: PlainConsole, run: PreparedClassifier, *, trained: TrainedClassifier) -> None:
    """Says how good a classifier has become, and where the model with it is."""
    console.print(_quality_table(trained))
    console.say(
        f"Learned from {counted(trained.tokens, 'token')} in {counted(trained.newton_steps, 'Newton step')}. Loss "
        "per token: "
        f"{trained.training_loss:.4f} on them, {trained.validation_loss:.4f} on the validation data."
    )
    console.say(f"Wrote {run.request.output}: the same model with an exit classifier; its other weights are unchanged.")


def _suitability(request: TrainRequest) -> str:
    """Returns the command that asks a model whether it can exit early, by what it was validated on."""
    flags = {
        "checkpoint": request.output,
        "data": ",".join(request.validation_data or ()),
        "task_prefix": request.task_prefix or None,
        "chat_template": request.chat_template,
        "system": request.system,
    }
    given = (f"--{name}={shlex.quote(str(value))}" for name, value in flags.items() if value is not None)
    return " ".join(["calm-beam suitability", *given])


def _say_end(console: PlainConsole, end_id: int, *, model: ModelConfig) -> None:
    """Says with which id references end, where the model's outputs may end with several."""
    if len(model.end_ids) > 1:
        console.say(f"References end with id {end_id}, of {', '.join(map(str, model.end_ids))}.")


def _loss_table(losses: Sequence[float]) -> Table:
    """Returns the validation loss of every layer as a table."""
    table = PlainTable("Validation loss")
    table.add_numbers("decoder\nlayer", "nats a target\ntoken")
    for layer, loss in enumerate(losses, start=1):
        table.add_row(str(layer), f"{loss:.3f}")
    return table


def _quality_table(trained: TrainedClassifier) -> Table:
    """Returns the classifier's quality on the validation data as a table, one line per layer but the last."""
    title = "Exit classifier, on validation data"
    table = PlainTable(title)
    table.add_numbers("decoder\nlayer", "tokens that agree\nwith the last layer", "F1 of\ndon't exit", "AUC")
    for layer, quality in enumerate(trained.quality, start=1):
        values = (quality.agreeing, quality.f1, quality.auc)
        table.add_row(str(layer), *("-" if math.isnan(value) else f"{value:.3f}" for value in values))
    return table


LOG = "training_log.jsonl"
"""The log of the steps, in the folder of the model."""


class ResumableInterruptError(CalmBeamError):
    """Ctrl-C, in a run that can be resumed."""


def run_training(run: PreparedTraining, console: PlainConsole) -> TrainedModel:
    """Trains a model and writes it, with the log of its steps.

    Raises:
      ResumableInterruptError: If it is interrupted, and has a state to resume from; says which.
      ResumeError: If the state to go on from is of another run.
      FloatingPointError: If the loss is no longer finite.
      ValueError: If the data or the weights do not fit the model.
    """
    done, tokens = (run.saved.step, run.saved.target_tokens) if run.saved else (0, 0)
    log = TrainingLog(run.states.path / LOG, after_step=done)

    def begin() -> None:
        # Not before: a run that is refused leaves an earlier one as it was.
        if run.saved is None:
            run.states.delete()
        log.begin()
        say_start(console, run)
        bar.begin("compiling the first step")

    with _kept_if_resumable(run.states, log), StepBar(console, done=done) as bar:
        model = train(
            run.config,
            run.model,
            pairs=run.learned.pairs,
            validation_pairs=run.measured.pairs,
            end_id=run.end_id,
            initial=run.initial,
            score=run.score,
            on_start=begin,
            on_first_steps=lambda done: bar.show_first(done, run.config.steps),
            on_progress=TrainingReporter(bar, log, steps=run.config.steps, target_tokens=tokens).report,
            on_save=run.states.save,
            resume_from=run.saved,
        )
    _write(run, model.arrays, console=console)
    log.move_to(run.output / LOG)
    run.states.delete()
    return model


def run_classifier(run: PreparedClassifier, console: PlainConsole) -> TrainedClassifier:
    """Trains an exit classifier, and writes the model with it."""
    say_classifier_start(console, run)
    with StepBar(console) as bar:
        bar.begin()
        trained = train_classifier(
            run.config,
            run.checkpoint.config,
            arrays=run.checkpoint.arrays,
            pairs=run.learned.pairs,
            validation_pairs=run.measured.pairs,
            end_id=run.end_id,
            on_progress=lambda step, steps: bar.show(step, steps, text="batches of states"),
        )
    write_native(
        run.output,
        trained.config,
        arrays=trained.arrays,
        vocabulary_path=run.vocabulary_path,
        extra_ids=run.vocabulary.extra_ids,
        dtype=run.request.stored_dtype,
        generation=run.checkpoint.generation,
    )
    return trained


@contextlib.contextmanager
def _kept_if_resumable(states: StateFolder, log: TrainingLog) -> Iterator[None]:
    """Deletes the log of a run that ends early, unless it can be resumed; says so of one that was interrupted."""
    try:
        yield
    except BaseException as error:
        if not log.has_begun:
            raise
        steps = states.steps()
        if not steps:
            log.delete()
        elif isinstance(error, KeyboardInterrupt):
            raise ResumableInterruptError(f"step {steps[-1]}") from error
        raise


def _write(run: PreparedTraining, arrays: FloatArrays, *, console: PlainConsole) -> None:
    """Writes the model; in float32 if float16 cannot hold it, rather than losing it."""
    write = functools.partial(
        write_native,
        run.output,
        run.model,
        arrays=arrays,
        vocabulary_path=run.vocabulary_path,
        extra_ids=run.vocabulary.extra_ids,
        generation=run.generation,
    )
    try:
        write(dtype=run.request.stored_dtype)
    except ValueError as error:
        console.say(f"{error} Writing float32 instead.")
        write()


class TrainingError(CalmBeamError):
    """A run that has failed; says why."""


def train_command(request: TrainRequest) -> int:
    """Trains a model, or its exit classifier, writes it, and returns the exit status of the command.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      TrainingError: If training fails.
      KeyboardInterrupt: If interrupted without a state to resume from.
    """
    console = PlainConsole(stderr=True)
    with _as_failure():
        if request.stage == "classifier":
            asked = prepare_classifier(request)
            classifier = run_classifier(asked, console)
            tell_classifier(console, asked, trained=classifier)
            give({"output": str(asked.output), "loss": classifier.training_loss, "validation": classifier.quality})
            return 0
        use_compilation_cache()
        # Of a new model, whose vocabulary is made first.
        with tempfile.TemporaryDirectory() as folder:
            run = prepare_training(request, folder=folder)
            try:
                trained = run_training(run, console)
            except ResumableInterruptError as interrupt:
                console.say(f"calm-beam train: interrupted. With --resume, the same command goes on after {interrupt}.")
                return INTERRUPTED
        tell_model(console, run, model=trained)
        found = {"output": str(run.output), "step": trained.step, "validation": trained.validation}
        give(found, files=[str(run.output / LOG)])
    return 0


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Turns what goes wrong with numbers into a failure of the run."""
    try:
        yield
    except CalmBeamError:
        raise
    except (FloatingPointError, ValueError) as error:
        raise TrainingError(str(error)) from error
