"""Risk control of anybody's losses, as a pipeline."""

import random

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from calm_beam import transforms
from calm_beam.risk.setting_sums import LossSums, RiskTest, SettingResult, control_risk

_TESTS = (
    RiskTest(delta=0.3, epsilon=0.05),
    RiskTest(delta=0.3, epsilon=0.05, p_value="signed_mixture"),
)
_ORDER = ("8 bits", "4 bits", "2 bits")


def _rows(seed: int) -> list[tuple[str, str, float]]:
    generator = random.Random(seed)
    return [
        (f"example {index}", setting, generator.random() ** power)
        for index in range(80)
        for setting, power in zip(_ORDER, (9, 4, 1), strict=True)
    ]


@pytest.mark.parametrize("options", [[], ["--direct_runner_bundle_repeat=1"]])
def test_the_pipeline_gives_what_the_function_gives(options: list[str]) -> None:
    """Per key, in any order, and with every bundle run twice, results are those of the losses in memory."""
    expected: list[SettingResult] = []
    elements: list[tuple[str, tuple[str, str, float]]] = []
    for group in ("en", "fr"):
        rows, sums = _rows(len(elements)), LossSums(_TESTS)
        for example_id, setting, loss in rows:
            sums.add(example_id, setting, loss=loss)
        expected.extend(control_risk(sums, _TESTS, order=_ORDER))
        elements.extend((group, row) for row in rows)
    random.Random(5).shuffle(elements)
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(options))
    found = (
        pipeline
        | beam.Create(elements)
        | beam.Reshuffle()
        | beam.CombinePerKey(transforms.SumLosses(_TESTS))
        | beam.Values()
        | transforms.ControlRisk(_TESTS, order=_ORDER)
    )
    assert_that(found, equal_to(expected))
    pipeline.run().wait_until_finish()
