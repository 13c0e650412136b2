"""The serving decoder, called as a sweep is."""

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.outputs.generate import ServedBranches
from calm_beam.precision import DTYPES, FLOAT32, Precision
from tests.builders import build_checkpoint, build_prompts

_SETTINGS = DecodeSettings(
    rule=ExitRule(schedule="decay", tau=4.0), thresholds=(0.9, 0.3), max_input_length=16, max_decode_length=8
)
_PROMPTS = build_prompts(3, 9, 5, 12, 4, 7)
_REQUESTS = [Request(prompt) for prompt in _PROMPTS]


def _served(checkpoint: Checkpoint, *, precision: Precision = FLOAT32) -> ServedBranches:
    branches = sweep_branches(_SETTINGS.rule, _SETTINGS.thresholds, max_decode_length=8)
    decoder = Decoder(checkpoint, branches[:1], max_input_length=16, batch_size=4, precision=precision)
    return ServedBranches(decoder, branches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_lane_is_what_is_served_there(dtype: str) -> None:
    """Each threshold, and the full model, is decoded by itself by the batch decoder in that precision."""
    checkpoint, precision = build_checkpoint(), Precision(dtype=dtype)
    results = dict(_served(checkpoint, precision=precision).decode(_REQUESTS))
    assert sorted(results) == list(range(len(_PROMPTS)))
    for lane, threshold in enumerate((None, *_SETTINGS.thresholds)):
        alone = Decoder(
            checkpoint,
            [Branch.at(_SETTINGS.rule, threshold, max_decode_length=8)],
            max_input_length=16,
            batch_size=4,
            precision=precision,
        )
        for index, of_prompt in alone.decode(_PROMPTS):
            result = of_prompt.branch(0)
            assert results[index].lengths[lane] == result.length
            np.testing.assert_array_equal(results[index].tokens[lane], result.tokens)
            np.testing.assert_array_equal(results[index].exit_layers[lane], result.exit_layers)
            # In bfloat16, the rest of the batch may change a rounding; float32's confidences differ more.
            atol = 0 if dtype == "float32" else 1e-3
            np.testing.assert_allclose(results[index].confidences[lane], result.confidences, rtol=0, atol=atol)


def test_it_gives_what_a_sweep_gives() -> None:
    """It gives the sweep's outputs but for near ties, of which there are none here."""
    checkpoint = build_checkpoint()
    served = dict(_served(checkpoint).decode(_REQUESTS))
    sweep = Decoder(
        checkpoint, sweep_branches(_SETTINGS.rule, _SETTINGS.thresholds, max_decode_length=8), max_input_length=16
    )
    for index, result in sweep.decode(_PROMPTS):
        np.testing.assert_array_equal(served[index].tokens, result.tokens)
        np.testing.assert_array_equal(served[index].exit_layers, result.exit_layers)


def test_a_prompt_counts_once() -> None:
    """A prompt counts once for any number of thresholds; its tokens are those of the full model."""
    decoder = _served(build_checkpoint())
    results = dict(decoder.decode(_REQUESTS))
    assert decoder.work.prompts == len(_PROMPTS)
    assert decoder.work.tokens == sum(int(result.lengths[0]) for result in results.values())
    assert decoder.slots == 4
