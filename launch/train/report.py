"""What `train` says at the start and the end of a run, of both stages."""

import math
import shlex
from collections.abc import Sequence

from rich.table import Table

from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.text import counted
from calm_beam.training.saved_state import TrainedModel
from calm_beam.training.train_classifier import TrainedClassifier

from .prepare import PreparedClassifier, PreparedTraining
from .request import TrainRequest


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
