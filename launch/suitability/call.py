"""The forecast as one function of Python."""

from calm_beam.evaluation.suitability import Suitability
from calm_beam.launch.flags.call import calling

from .job import measure
from .request import SuitabilityRequest


@calling(SuitabilityRequest)
def suitability(request: SuitabilityRequest) -> Suitability:
    """Says whether a model can exit early at all, from one pass over a sample of prompts: a forecast, no promise.

        found = calm.suitability(checkpoint="checkpoints/my_t5", data="prompts/*.jsonl.gz")
        print(found.verdict, found.advice)

    It is what `calm-beam suitability` runs, and takes all of its options, by the same names. With neither model nor
    data, the demo model is looked at on the demo data.

    Raises:
      UsageError: If anything that was asked for is wrong.
    """
    return measure(request).found
