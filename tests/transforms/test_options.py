"""Transforms take the commands' options, with the same names, defaults and refusals."""

import pickle
from typing import Any

import pytest

from calm_beam.errors import UsageError
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.generate.request import GenerateRequest
from calm_beam.options import Options, options_of
from calm_beam.options.option import default_of
from calm_beam.transforms import Generate, Sweep

# Arguments that a pipeline step requires, and the grid, which a command may also give by its step.
_OWN = {"output", "thresholds"}


@pytest.mark.parametrize(("step", "request_"), [(Sweep, CalibrateRequest), (Generate, GenerateRequest)])
def test_options_have_one_default(step: type[Options], request_: type[Options]) -> None:
    """Options that transforms and commands share have the same defaults."""
    of_request = {name for name, _ in options_of(request_)}
    common = [name for name, _ in options_of(step) if name in of_request - _OWN]
    assert len(common) > 15
    assert {name: default_of(step, name) for name in common} == {name: default_of(request_, name) for name in common}


@pytest.mark.parametrize("step", [Sweep, Generate])
def test_options_are_listed(step: type[Options]) -> None:
    """The docstring has every option, though it is declared elsewhere."""
    doc = step.__doc__ or ""
    assert doc.count("Args:") == 1
    assert [name for name, _ in options_of(step) if f"\n  {name}: " not in doc] == []


@pytest.mark.parametrize(
    ("step", "given", "message"),
    [
        (Sweep, {"dtype": "float16"}, r"^dtype: invalid choice: 'float16' \(choose from 'float32', 'bfloat16'\)\.$"),
        (Sweep, {"batch_size": 0}, r"^batch_size: expected a whole number of at least 1, got 0\.$"),
        (Sweep, {"max_failures": 3}, r"^max_failures belongs to on_error='worst_case', which is missing\.$"),
        (Generate, {"probe_salt": "x"}, r"^probe_salt belongs to probe_share, which is missing\.$"),
        (Generate, {"max_failures": 3}, r"^max_failures belongs to on_error='list', which is missing\.$"),
    ],
)
def test_refusals_name_arguments(step: Any, given: dict[str, object], message: str) -> None:
    """An invalid option is refused when the step is made, under the caller's name for it."""
    with pytest.raises(UsageError, match=message):
        step(**{"manifest": "m"} if step is Generate else {"model": "m"}, output="o", **given)


def test_a_step_can_be_labelled_and_pickled() -> None:
    """Options stay as given, and Beam may still set its attributes on a transform."""
    step = Sweep(model="m", output="o", thresholds=(0.9, 0.5), batch_size=4)
    step.label = "SweepOnce"
    assert step.label == "SweepOnce"
    assert pickle.loads(pickle.dumps(step)) == step
    with pytest.raises(AttributeError):
        step.batch_size = 8  # type: ignore[misc]
