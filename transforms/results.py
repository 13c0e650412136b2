"""What `RunInference` gives for prompts: answers, with or without keys."""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from apache_beam.ml.inference.base import PredictionResult

R = TypeVar("R")


def require_answer(result: R) -> R:
    """Returns a result that has an answer, and raises why there is none for others; for `with_postprocess_fn`.

    `RunInference(handler.with_postprocess_fn(require_answer))` fails at the first prompt without an answer. With
    `with_exception_handling()` after it, such prompts are among `failed_postprocessing[0]`, each with its reason.

    Args:
      result: A `PredictionResult`, or a key and one.

    Raises:
      PromptError: If the prompt was refused.
      OutputError: If it has no output.
    """
    from calm_beam.serving import Unanswered

    inference = prediction_of(result).inference
    if isinstance(inference, Unanswered):
        raise inference.error
    return result


def prediction_of(result: Any) -> "PredictionResult":
    """Returns a result without its key, if it has one."""
    # A result is a tuple, too, of three.
    return result[1] if len(result) == 2 else result
