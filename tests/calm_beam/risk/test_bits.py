"""The numbers that decide about thresholds have the same bits on every machine."""

import functools
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests import old_processor
from tests.calm_beam.risk import bits


@functools.cache
def _computed(*, as_on_an_old_processor: bool) -> dict[str, Any]:
    """Returns the results of a fresh process."""
    environment = {**os.environ, **(old_processor.environment() if as_on_an_old_processor else {})}
    command = [sys.executable, "-m", "tests.calm_beam.risk.bits"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return json.loads(done.stdout)


def test_an_old_processor_gives_the_same_bits() -> None:
    """Without the instructions that numpy and libm choose at run time, thousands of values have the same bytes."""
    new, old = (_computed(as_on_an_old_processor=flag) for flag in (False, True))
    assert len(new["digests"]) == 13
    assert old["digests"] == new["digests"]
    assert old["rows"] == new["rows"]


@pytest.mark.skipif(
    "X86_V3" not in old_processor.NUMPY_FEATURES, reason="this processor has no instructions that can be switched off"
)
def test_the_check_sees_a_processor() -> None:
    """Exponentials of numpy and libm do differ between the two processes (the twin)."""
    assert _computed(as_on_an_old_processor=True)["theirs"] != _computed(as_on_an_old_processor=False)["theirs"]


def test_bits_are_those_that_were_committed() -> None:
    """Single p-values and digests of thousands equal the committed ones on every machine."""
    assert bits.computed_here() == json.loads(bits.OUTPUT.read_text(encoding="utf-8"))


def test_values_are_no_constants() -> None:
    """The compared values range from near 0 to 1; otherwise the comparison would prove little."""
    for name in ("hoeffding", "hoeffding_bentkus", "exact_binomial", "empirical_bernstein", "signed_mixture", "wsr"):
        values = np.concatenate([*bits.p_values(name), *bits.large_sets(name)])
        assert values.min() > 0
        assert values.max() == 1
        assert np.count_nonzero((values > 1e-6) & (values < 0.5)) > 10
        assert np.unique(values).size > 60
