"""What `calm-beam train` does once its flags are parsed: prepare, run, and tell what was found, of both stages."""

import contextlib
import tempfile
from collections.abc import Iterator

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import PlainConsole, give
from calm_beam.launch.terminal.interrupts import INTERRUPTED

from .prepare import prepare_classifier, prepare_training
from .report import tell_classifier, tell_model
from .request import TrainRequest
from .run import LOG, ResumableInterruptError, run_classifier, run_training


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
