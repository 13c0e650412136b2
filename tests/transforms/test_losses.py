"""Risk control of losses from any source, as a pipeline."""

import random

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from calm_beam import transforms
from calm_beam.risk.testing import LossSums, RiskTest, SettingResult, control_risk

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


@pytest.mark.parametrize("times", [1, 3])
def test_losses_that_are_flattened_in_several_times_are_refused(times: int) -> None:
    """Losses that are flattened in three times, as by overlapping patterns, end the run, wherever copies are summed."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    parts = [pipeline | f"Read{number}" >> beam.Create(_rows(0)) for number in range(times)]
    found = (
        parts
        | beam.Flatten()
        | beam.Reshuffle()
        | beam.CombineGlobally(transforms.SumLosses(_TESTS))
        | transforms.ControlRisk(_TESTS, order=_ORDER)
        | beam.Map(lambda result: result.n)
    )
    assert_that(found, equal_to([80] * 6))
    if times == 1:
        pipeline.run().wait_until_finish()
    else:
        with pytest.raises(
            Exception, match="160 of 240 losses under setting '2 bits' are of examples that were counted"
        ):
            pipeline.run().wait_until_finish()


def test_distinct_takes_rows_out_that_come_twice() -> None:
    """As the error advises, Distinct counts equal rows once; one id with several losses is still refused."""
    for more, message in (([], None), ([("example 3", setting, 0.5) for setting in _ORDER], "1 of 81 losses")):
        pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
        found = (
            pipeline
            | beam.Create([*_rows(0), *_rows(0), *more])
            | beam.Distinct()
            | beam.CombineGlobally(transforms.SumLosses(_TESTS))
            | transforms.ControlRisk(_TESTS, order=_ORDER)
            | beam.Map(lambda result: result.n)
        )
        assert_that(found, equal_to([80] * 6))
        if message is None:
            pipeline.run().wait_until_finish()
        else:
            with pytest.raises(Exception, match=message):
                pipeline.run().wait_until_finish()


@pytest.mark.parametrize("options", [[], ["--direct_runner_bundle_repeat=1"]])
def test_the_pipeline_gives_what_the_function_gives(options: list[str]) -> None:
    """Per key, in any order, and with every bundle run twice, results equal those of the losses in memory."""
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
