"""Fingerprints of sets of examples."""

import re

from calm_beam.outputs.totals import CalibrationTotals, Layout, content_sum_of, fingerprint_text, merged_sums
from tests.calm_beam.calibration.builders import build_example, build_generation
from tests.plans import all_specs


def test_order_and_parts_do_not_matter() -> None:
    """Any order gives the same fingerprint, and those of parts merge to it; a missing example changes it."""
    examples = [build_example(id=name) for name in "abc"]
    whole = content_sum_of(examples)
    assert content_sum_of(reversed(examples)) == whole
    assert merged_sums((content_sum_of(examples[:1]), content_sum_of(examples[1:]))) == whole
    assert content_sum_of(examples[:2]) != whole
    assert content_sum_of([]) == 0


def test_text_is_that_of_the_totals() -> None:
    """The fingerprint of examples equals that of their generations' totals."""
    specs = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.1,), epsilons=(0.05,))
    generations = [build_generation(example=build_example(id=name)) for name in "ab"]
    totals = CalibrationTotals.of_examples(generations, Layout.of(specs, thresholds=2))
    text = fingerprint_text(content_sum_of(generation.example for generation in generations))
    assert text == totals.data_fingerprint()
    assert re.fullmatch("sha256-sum:[0-9a-f]{64}", text)
