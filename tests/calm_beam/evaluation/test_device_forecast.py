"""Least times of steps on accelerators, against figures computed by hand."""

import dataclasses

import pytest

from benchmarks.programs.models import LARGE_MODELS
from calm_beam.evaluation.device_forecast import DEVICES, Part, StepParts, device_forecast
from calm_beam.exits.rule import ExitRule
from calm_beam.precision import Precision
from tests.calm_beam.model.llama.builders import build_llama_config

_BFLOAT16 = Precision(dtype="bfloat16")
_SOFTMAX, _STATE = ExitRule(), ExitRule(confidence="state")
_MICROSECONDS = 1e6


@pytest.mark.parametrize(
    ("name", "full", "never_left", "by_softmax", "by_state", "gains"),
    [("T5-small", 97, 378, 100, 60, (0.97, 1.6)), ("T5-large", 979, 2827, 348, 268, (2.8, 3.7))],
)
def test_figures_by_hand(
    name: str, full: float, never_left: float, by_softmax: float, by_state: float, gains: tuple[float, float]
) -> None:
    """TPU v5e, one prompt, 192 positions, bfloat16, exits at layer 2: bytes over 819 GB/s, computed by hand."""
    found = device_forecast(LARGE_MODELS[name], "v5e", _BFLOAT16, positions=192)
    depth = found.parts.layers
    seconds = [
        found.full_seconds(),
        found.exit_seconds(depth, _SOFTMAX),
        found.exit_seconds(2, _SOFTMAX),
        found.exit_seconds(2, _STATE),
    ]
    assert [each * _MICROSECONDS for each in seconds] == pytest.approx(
        [full, never_left, by_softmax, by_state], abs=0.6
    )
    assert (found.gain(2, _SOFTMAX), found.gain(2, _STATE)) == pytest.approx(gains, rel=0.02)


def test_what_pays_on_a_small_model() -> None:
    """The head takes 41 % of T5-small's step: softmax pays at layer 1 only, state at all layers below the last."""
    found = device_forecast(LARGE_MODELS["T5-small"], "v5e", _BFLOAT16, positions=192)
    assert found.head_share() == pytest.approx(0.41, abs=0.01)
    assert found.pays_up_to(_SOFTMAX) == 1
    assert found.pays_up_to(_STATE) == 7
    assert found.pays_up_to(ExitRule(min_exit_layer=2)) == 2


def test_how_many_must_leave() -> None:
    """With tests at layer 2 only, each token that stays costs T5-small a second head call: half must exit."""
    small, large = (
        device_forecast(LARGE_MODELS[name], "v5e", _BFLOAT16, positions=192) for name in ("T5-small", "T5-large")
    )
    # By hand: 40.2 microseconds of the head, over 97 + 40.2 - 60.1.
    assert small.needed_share(2, _SOFTMAX) == pytest.approx(0.52, abs=0.005)
    # 80.3 over 979.5 + 80.3 - 267.9.
    assert large.needed_share(2, _SOFTMAX) == pytest.approx(0.10, abs=0.005)
    assert small.needed_share(7, _STATE) == 0
    # Never exit and no test, since no layer may exit.
    assert small.pays_up_to(ExitRule(min_exit_layer=8)) is None


def test_parts_of_a_decoder_only_model() -> None:
    """Projections, feed-forward, norms, keys and values of few heads, and a tied head are counted by hand."""
    config = build_llama_config(vocab_size=50, emb_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=7)
    found = StepParts.of(config, Precision(), positions=10, rows=3)
    kernels = 12 * 24 + 2 * 12 * 12 + 24 * 12 + 3 * 12 * 7
    assert found.layer == Part(
        bytes=4 * (kernels + 2 * 12) + 3 * 4 * 2 * 10 * 12, operations=3 * (2 * (kernels + 2 * 12) + 4 * 10 * 24)
    )
    assert found.skipped == Part(bytes=4 * 2 * 12 * 12, operations=3 * 2 * 2 * 12 * 12)
    assert found.head == Part(bytes=4 * 12 * 50, operations=3 * 2 * 12 * 50)


def test_many_rows_are_bound_by_operations() -> None:
    """Twice the rows take twice the time if the units are busy, and hardly more if the memory is."""
    config = LARGE_MODELS["T5-large"]

    def seconds(rows: int, dtype: str) -> float:
        return device_forecast(config, "v5e", Precision(dtype=dtype), positions=1, rows=rows).full_seconds()

    assert seconds(2, "bfloat16") < 1.01 * seconds(1, "bfloat16")
    assert seconds(8192, "bfloat16") == pytest.approx(2 * seconds(4096, "bfloat16"))
    # Float32 products are six of bfloat16 on a TPU, and read twice the bytes.
    assert seconds(4096, "float32") == pytest.approx(6 * seconds(4096, "bfloat16"))
    assert seconds(1, "float32") == pytest.approx(2 * seconds(1, "bfloat16"), rel=0.01)


@pytest.mark.parametrize("device", list(DEVICES))
def test_times_grow_with_the_exit_layer(device: str) -> None:
    """On every device, later exits take longer; a mean layer is between its neighbours, the last the full model."""
    found = device_forecast(LARGE_MODELS["T5-small"], device, _BFLOAT16, positions=64)
    seconds = [found.exit_seconds(layer, _STATE) for layer in range(1, 9)]
    assert seconds == sorted(seconds)
    assert seconds[-1] == found.full_seconds()
    assert found.mean_seconds(2.5, _STATE) == pytest.approx((seconds[1] + seconds[2]) / 2)
    assert found.mean_seconds(2, _STATE) == seconds[1]


def test_what_cannot_be_forecast_is_refused() -> None:
    """Unknown devices, layers that may not exit, and numbers below 1 are refused."""
    config = LARGE_MODELS["T5-small"]
    with pytest.raises(ValueError, match=r"device must be one of v4, v5e, .*; got 'v9'\."):
        device_forecast(config, "v9", _BFLOAT16, positions=1)
    with pytest.raises(ValueError, match="positions must be at least 1, got 0"):
        device_forecast(config, "v5e", _BFLOAT16, positions=0)
    with pytest.raises(ValueError, match="rows must be at least 1, got -1"):
        device_forecast(config, "v5e", _BFLOAT16, positions=1, rows=-1)
    found = device_forecast(config, "v5e", _BFLOAT16, positions=1)
    with pytest.raises(ValueError, match=r"layer must be one that may exit, of 3, 5, 7, 8; got 4\."):
        found.exit_seconds(4, dataclasses.replace(_STATE, min_exit_layer=3, exit_interval=2))
