"""Writing what a calibration found."""

import dataclasses

import apache_beam as beam

from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.calibration.result import CalibrationOutcome
from calm_beam.storage import absolute, make_folder


@dataclasses.dataclass
class WriteManifest(beam.PTransform):
    """Writes risk table, list of failures and manifest into a directory, the manifest last.

        outcomes | WriteManifest("calibration")

    A step that is run again writes the same once more; of two runs that write into one directory, one fails.

    Attributes:
      output: The directory; made if it is not there.
      earlier: The result there that may be replaced; whatever else is there makes the step fail.
    """

    output: str
    earlier: EarlierResult = dataclasses.field(default_factory=EarlierResult)

    def expand(self, outcomes: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str with the manifest's path, given one of an `CalibrationOutcome`."""
        output = absolute(self.output)
        make_folder(output)
        return outcomes | "Publish" >> beam.Map(_publish, output=output, earlier=self.earlier)


def _publish(outcome: CalibrationOutcome, *, output: str, earlier: EarlierResult) -> str:
    return publish(output, outcome.manifest, rows=outcome.rows, failures=outcome.failures, earlier=earlier)
