"""Answers in shards as one function of Python."""

import dataclasses

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.errors import UsageError
from calm_beam.launch.flags.call import calling
from calm_beam.serving.tally import Tally

from .pipeline import answer_in_shards
from .request import GenerateRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCall(GenerateRequest):
    """Answers as Python asks for them.

    Attributes:
      options: Of the pipeline, among them its runner; in this process if omitted.
    """

    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_in_shards:
            raise UsageError(
                "output must be a folder for answers in shards, with a slash at its end. calm_beam.Generator answers "
                "prompts at once."
            )


@calling(GenerateCall)
def generate(request: GenerateCall) -> Tally:
    """Answers files of prompts under a manifest, into a folder, and returns counts of what became of them.

        counts = calm.generate(manifest="calibration", input="prompts/*.jsonl.gz", output="answers/")

    It is what `calm-beam generate --output=answers/` runs, and takes all of its options, by the same names.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      PipelineError: If the pipeline fails; `resume=True` answers the missing prompts only.
    """
    done = answer_in_shards(request, request.options if request.options is not None else PipelineOptions([]))
    if isinstance(done, str):
        raise UsageError(f"the job is written down in {done} as a template, and has not run: there are no answers yet.")
    return done.total
