"""Risk control of anybody's losses: exact sums, and the test of every setting.

import apache_beam as beam
from calm_beam import transforms
from calm_beam.risk.setting_sums import RiskTest

tests = [RiskTest(delta=0.05, epsilon=0.05)]
with beam.Pipeline() as pipeline:
_ = (
pipeline
| beam.Create([("example-1", "8 bits", 0.0), ("example-1", "4 bits", 0.2)])  # (id, setting, loss), each once
| beam.CombineGlobally(transforms.SumLosses(tests))
| transforms.ControlRisk(tests, order=["8 bits", "4 bits"])
| beam.Map(print)
)
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import apache_beam as beam

from calm_beam.risk.setting_sums import LossSums, RiskTest, SettingResult, control_risk

from .summing import SumMerged


class SumLosses(SumMerged):
    """Sums losses exactly, by setting; for `CombineGlobally` and, for groups, `CombinePerKey`.

    Takes tuples of id, setting and loss, and gives `LossSums`, which do not depend on order, sharding or workers. Ids
    tell examples apart: one that has several losses under a setting, equal or not, ends in an error of `ControlRisk`,
    also where whole files were read twice. Per key, ids are compared within each key. The sums hold 16 bytes for each
    example, and the examples of one key may be 67 million.
    """

    def __init__(self, tests: Sequence[RiskTest]) -> None:
        """Keeps what will be asked of the sums."""
        super().__init__(functools.partial(LossSums, tuple(tests)))

    def add_input(self, accumulator: LossSums, element: tuple[str, str, float]) -> LossSums:
        """Adds one loss."""
        example_id, setting, loss = element
        accumulator.add(example_id, setting, loss=loss)
        return accumulator


@dataclasses.dataclass
class ControlRisk(beam.PTransform):
    """Tests every setting, given `LossSums`: yields a `SettingResult` for each test and setting.

    Attributes:
      tests: Those that the sums were made for.
      order: Settings in testing order, fixed before the losses were seen; the safest first.
    """

    tests: Sequence[RiskTest]
    order: Sequence[str]

    def expand(self, sums: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of `SettingResult`."""
        return sums | "TestSettings" >> beam.FlatMap(_tested, tests=tuple(self.tests), order=tuple(self.order))


def _tested(sums: LossSums, *, tests: tuple[RiskTest, ...], order: tuple[str, ...]) -> Iterator[SettingResult]:
    yield from control_risk(sums, tests, order=order)
