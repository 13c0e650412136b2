"""Device memory of programs, as their compilers report it, against the forecast of `decoding/memory.py`."""

import pytest

from benchmarks.programs import MODELS, Placement
from benchmarks.programs.loops import served
from benchmarks.programs.steps import Steps
from calm_beam.decoding.memory import Demand, least_need
from calm_beam.exits.rule import ExitRule
from calm_beam.model import parameter_shapes
from calm_beam.model.sharding import values_per_device
from calm_beam.precision import Precision
from tools.accelerators import described
from tools.accelerators.compiled import compiled

pytestmark = [pytest.mark.compilers, pytest.mark.timeout(600)]

_BFLOAT16 = Precision(dtype="bfloat16")
_SOURCE, _STEPS = 512, 64


@pytest.mark.parametrize("model", ["T5", "Llama"])
@pytest.mark.parametrize("device", ["v5e", "H100"])
def test_single_prompts_take_no_more_than_forecast(device: str, model: str) -> None:
    """Single prompts need no more than the forecast for weights, KV cache and all intermediate arrays."""
    config = MODELS[model]
    placement = Placement(described.devices(device, 1), config)
    program = served(config, _BFLOAT16, placement, rule=ExitRule(confidence="state"), source=_SOURCE, steps=_STEPS)
    need = least_need(config, Demand(num_branches=1, steps=_STEPS, source=_SOURCE, precision=_BFLOAT16))
    made = compiled(program, platform=described.platform_of(device))
    assert made.memory.argument_size_in_bytes <= need.weights
    assert made.held_bytes <= need.total


@pytest.mark.parametrize("model", ["T5", "Llama"])
@pytest.mark.parametrize("device", ["v5e", "H100"])
def test_prefill_takes_no_more_than_forecast(device: str, model: str) -> None:
    """Prefill of four long prompts fits the forecast; position biases are not looked up by pair (134 MB on TPUs)."""
    config = MODELS[model]
    placement = Placement(described.devices(device, 1), config)
    need = least_need(config, Demand(num_branches=1, steps=1, source=_SOURCE, rows=4, precision=_BFLOAT16))
    made = compiled(
        Steps(config, _BFLOAT16, placement).admit(rows=4, source=_SOURCE), platform=described.platform_of(device)
    )
    assert made.held_bytes <= need.total
    assert made.memory.temp_size_in_bytes + made.memory.output_size_in_bytes <= need.source


def test_each_of_four_devices_has_its_part_of_the_weights() -> None:
    """Each of four devices holds its share of the weights, as `check_devices` counts it, and a few more numbers."""
    config = MODELS["T5"]
    placement = Placement(described.devices("v5e", 4), config)
    program = served(config, _BFLOAT16, placement, rule=ExitRule(confidence="classifier"))
    part = values_per_device(parameter_shapes(config), placement.division) * _BFLOAT16.number_bytes
    assert 0.95 * part < compiled(program, platform="tpu").memory.argument_size_in_bytes < 1.05 * part
