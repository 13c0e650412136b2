"""Rows that skip decoder layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model import architecture_of
from calm_beam.model.heads import layer_dropout_rates, passed_by
from calm_beam.model.interface import Taught
from calm_beam.precision import FLOAT32
from tests.builders import build_arrays, build_config, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

_T5, _LLAMA = build_config(num_decoder_layers=3), build_llama_config()
_CHECKPOINTS = {
    "t5": checkpoint_of(_T5, build_arrays(_T5, 0)),
    "llama": checkpoint_of(_LLAMA, build_llama_arrays(_LLAMA, 0)),
}
_ROWS = 200
_TAUGHT = Taught(
    source_tokens=np.tile(np.array([[5, 9, 7, 3, 4]], np.int32), (_ROWS, 1)),
    source_lengths=np.full(_ROWS, 5, np.int32),
    targets=np.tile(np.array([[3, 4, 1]], np.int32), (_ROWS, 1)),
    target_lengths=np.full(_ROWS, 3, np.int32),
)


def test_deeper_layers_are_passed_by_more_often() -> None:
    """The first layer is never skipped, the last at the given rate, which grows in powers of 2."""
    rates = layer_dropout_rates(9, 0.4)
    assert (rates[0], rates[-1]) == (0, pytest.approx(0.4))
    assert rates[4] == pytest.approx(0.4 * (2**0.5 - 1))
    assert rates == sorted(rates)
    assert layer_dropout_rates(1, 0.4) == [0]


def test_whole_rows_pass_by() -> None:
    """Whole rows skip at about the rate, and leave as they entered."""
    before, after = jnp.zeros((4000, 2, 3)), jnp.ones((4000, 2, 3))
    out = np.asarray(passed_by(before, after, rate=0.25, key=jax.random.key(0)))
    assert set(np.unique(out.reshape(4000, -1).mean(axis=1))) == {0, 1}
    # Five standard deviations are 0.034.
    assert abs((1 - out.mean()) - 0.25) < 0.034


@pytest.mark.parametrize("name", _CHECKPOINTS)
def test_states_of_rows_that_pass_layers_by(name: str) -> None:
    """A row that skips a layer has the state of the layer below; without dropout none skips."""
    config = _CHECKPOINTS[name].config
    network = architecture_of(config).network(config, precision=FLOAT32, layer_dropout=0.5)
    apply = jax.jit(_applied(network, _CHECKPOINTS[name]), static_argnames="deterministic")
    still = np.asarray(apply(jax.random.key(0), deterministic=True))
    assert (still == still[:, :1]).all()
    states = np.asarray(apply(jax.random.key(0), deterministic=False))
    np.testing.assert_array_equal(states[0], still[0])
    passes = (states[1:] == states[:-1]).all(axis=(2, 3)).mean(axis=1)
    # Five standard deviations of 200 rows are 0.18.
    np.testing.assert_allclose(passes, layer_dropout_rates(3, 0.5)[1:], rtol=0, atol=0.18)
    assert (states != np.asarray(apply(jax.random.key(1), deterministic=False))).any()


def _applied(network: Any, checkpoint: Any) -> Any:
    variables = {"params": checkpoint.parameters(FLOAT32)}

    def apply(key: jax.Array, *, deterministic: bool) -> jax.Array:
        states: jax.Array = network.apply(
            variables, _TAUGHT, deterministic=deterministic, rngs={"dropout": key}, method="teacher_forced"
        )
        return states

    return apply
