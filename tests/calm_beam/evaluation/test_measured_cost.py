"""The cost of a token, estimated from the times of runs with known exits."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import BranchResult
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.evaluation.serving_speed import Serving, measured_cost
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from tests.pipelines import write_model

_EXITS = ExitRule(min_exit_layer=1, exit_interval=1)


class _Clock:
    """A clock whose seconds decoders advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Serving(Serving):
    """Decodes nothing: tokens exit at the layer of a threshold, and take their cost."""

    def decoder(self, rule: ExitRule, threshold: float | None) -> "_Decoder":  # type: ignore[override]
        return _Decoder(rule, threshold)


_COST = TokenCost(layers=4, layer=0.5, output=3.0, tests={Need.LOGITS: 0.25, Need.STATES: 0.125})
_CLOCK = _Clock()


class _Decoder:
    def __init__(self, rule: ExitRule, threshold: float | None) -> None:
        self._rule, self._threshold = rule, threshold

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, BranchResult]]:
        for index, prompt in enumerate(prompts):
            layers = [self._layer(position) for position in range(len(prompt))]
            _CLOCK.now += sum(_COST.at(layer, self._rule) for layer in layers)
            result = BranchResult(
                tokens=np.ones(len(prompt), np.int32),
                exit_layers=np.array(layers, np.int32),
                confidences=np.ones(len(prompt), np.float32),
                length=len(prompt),
                is_finite=True,
            )
            yield index, result

    def _layer(self, position: int) -> int:
        if self._threshold is None or self._threshold == 1:
            return 4
        return 1 if self._threshold == 0 or position % 2 else 4


@pytest.mark.parametrize("batch", [1, 2])
def test_seconds_are_told_apart(tmp_path_factory: pytest.TempPathFactory, batch: int) -> None:
    """Costs of layers, tests and the rest are recovered from runs that mix them."""
    checkpoint = load_checkpoint(str(write_model(tmp_path_factory.mktemp("cost") / "model")))
    settings = DecodeSettings(rule=ExitRule(), thresholds=(0.5,), max_input_length=8, max_decode_length=8)
    serving = _Serving(checkpoint=checkpoint, settings=settings, batch=batch, asked={})
    prompts = [[5] * length for length in (2, 3, 5, 4)]
    told: list[tuple[int, int]] = []
    found = measured_cost(
        serving,
        prompts,
        needs=(Need.LOGITS, Need.STATES),
        exits=_EXITS,
        clock=_CLOCK,
        on_decoded=lambda newly, in_all: told.append((newly, in_all)),
    )
    # Seven ways, each once to count and twice to time at least, whichever comes first in time.
    assert {in_all for _, in_all in told} == {7 * 3 * 4}
    assert sum(newly for newly, _ in told) == 7 * 3 * 4
    assert found.layers == 4
    assert found.layer == pytest.approx(_COST.layer)
    assert found.output == pytest.approx(_COST.output)
    assert found.tests == pytest.approx(_COST.tests)


def test_nothing_to_measure_by_is_refused() -> None:
    """Without prompts there is nothing to time, and without tests layers cannot be separated: both are refused."""
    settings = DecodeSettings(rule=ExitRule(), thresholds=(0.5,), max_input_length=8, max_decode_length=8)
    serving = _Serving(checkpoint=None, settings=settings, batch=1, asked={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="measuring needs at least one prompt, got none"):
        measured_cost(serving, [], needs=(Need.LOGITS,), exits=_EXITS)
    with pytest.raises(ValueError, match="measuring needs at least one kind of exit test, got none"):
        measured_cost(serving, [[5]], needs=(), exits=_EXITS)
