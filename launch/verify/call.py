"""A test of a manifest's promises as one function of Python."""

import dataclasses

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.errors import UsageError
from calm_beam.launch.flags.call import calling

from .request import VerifyRequest
from .run import verify_thresholds
from .settings import verify_certified
from .verified import Verified


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCall(VerifyRequest):
    """A test of promises as Python asks for it.

    Attributes:
      options: Of the pipelines that decode, among them their runner; in this process if omitted.
    """

    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_of_settings and self.options is not None:
            raise UsageError("options are of pipelines that decode, and losses or scores need none: leave one out.")


@calling(VerifyCall)
def verify(request: VerifyCall) -> Verified:
    """Tests the promises of a manifest on fresh data, and returns what was found out about each.

        found = calm.verify(manifest="calibration", data="fresh/*.jsonl", checkpoint="checkpoints/my_t5")
        assert not found.is_broken

    It is what `calm-beam verify` runs, and takes all of its options, by the same names. A manifest of
    `calm-beam certify` is tested on fresh `losses`, or scores (`baseline` and `candidates`), and needs no model.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been decoded.
      ManifestError: If the manifest cannot be trusted, or is of the other kind.
      PipelineError: If a pipeline fails.
    """
    if request.is_of_settings:
        return verify_certified(request)
    return verify_thresholds(request, request.options if request.options is not None else PipelineOptions([]))
