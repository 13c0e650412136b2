"""Training on several devices that share the model."""

import os
import subprocess
import sys

import pytest

from calm_beam.training.config import ClassifierConfig, TrainingConfig

_PROGRAM = """
import dataclasses
import sys

import jax
import numpy as np

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.training import train as training, train_classifier as classifying
from calm_beam.training.config import AdafactorConfig, ClassifierConfig, MuonConfig, TrainingConfig
from calm_beam.training.saved_state import ResumeError
from calm_beam.training.train import train
from calm_beam.training.train_classifier import train_classifier
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_config

use_compilation_cache()
assert len(jax.local_devices()) == 8
is_t5 = sys.argv[1] == "t5"
model = (
    build_config(num_heads=8, num_encoder_layers=1, num_decoder_layers=2, exit_norms=True, exit_heads=True)
    if is_t5
    else build_llama_config(vocab_size=64, emb_dim=16, num_heads=8, mlp_dim=32, num_decoder_layers=2)
)
generator = np.random.default_rng(0)
pairs = [tuple(tuple(generator.integers(2, 64, 6).tolist()) for _ in range(2)) for _ in range(40)]
shapes = set()
update = training.update

def watched(*arguments, **named):
    parameters, state = update(*arguments, **named)
    # In addition to what is copied to every device, such as counts and norms.
    largest = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    shapes.add((parameters["decoder/layers_0/mlp/wo/kernel"].addressable_shards[0].data.shape, largest.size
        // largest.addressable_shards[0].data.size))
    return parameters, state

training.update = watched
for optimizer in (MuonConfig(), AdafactorConfig()):
    config = TrainingConfig(
        steps=6, batch_tokens=100, num_shapes=1, max_input_length=8, max_target_length=8,
        dropout_rate=0.1 if is_t5 else 0.0, save_every=4, optimizer=optimizer,
    )
    alone = train(config, model, pairs=pairs, validation_pairs=pairs[:9])
    saved = []
    shapes.clear()
    divided = dataclasses.replace(config, model_parallelism=8)
    together = train(divided, model, pairs=pairs, validation_pairs=pairs[:9], on_save=saved.append)
    assert shapes == {((4, 16), 8)}, shapes
    # Dropout draws the same, and rounding differs.
    np.testing.assert_allclose(together.validation.losses, alone.validation.losses, rtol=1e-3)
    (state,) = saved
    resumed = train(divided, model, pairs=pairs, validation_pairs=pairs[:9], resume_from=state)
    for name, array in together.arrays.items():
        np.testing.assert_array_equal(resumed.arrays[name], array, err_msg=name)
    try:
        train(config, model, pairs=pairs, validation_pairs=pairs[:9], resume_from=state)
    except ResumeError as error:
        assert "model_parallelism: 8, now None" in str(error), error
    else:
        raise AssertionError("a run went on with another number of devices")

shapes.clear()
states_and_labels = classifying._states_and_labels

def watched_states(model, parameters, **named):
    shapes.add(parameters["decoder/layers_0/mlp/wo/kernel"].addressable_shards[0].data.shape)
    return states_and_labels(model, parameters, **named)

classifying._states_and_labels = watched_states
for dtype in ("float32", "bfloat16"):
    config = ClassifierConfig(batch_tokens=100, num_shapes=1, max_input_length=8, max_target_length=8, dtype=dtype)
    learn = dict(arrays=together.arrays, pairs=pairs, validation_pairs=pairs[:9])
    alone = train_classifier(config, model, **learn)
    shapes.clear()
    together_classified = train_classifier(dataclasses.replace(config, model_parallelism=8), model, **learn)
    assert shapes == {(4, 16)}, shapes
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    for name in ("decoder/meta_cls/kernel", "decoder/meta_cls/bias"):
        np.testing.assert_allclose(
            together_classified.arrays[name], alone.arrays[name], atol=tolerance * np.abs(alone.arrays[name]).max()
        )
print("same")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["t5", "llama"])
def test_eight_devices_train_as_one(architecture: str) -> None:
    """Eight devices have the losses of one, each with its part of weights and optimiser; a resumed run has its bits.

    A run is not resumed with another number of devices. An exit classifier trains on them as on one.
    """
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, architecture],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "same\n", run.stderr


def test_the_number_of_devices_is_checked() -> None:
    """Fewer than one device is refused."""
    with pytest.raises(ValueError, match="model_parallelism must be at least 1, got 0"):
        TrainingConfig(steps=1, model_parallelism=0)
    with pytest.raises(ValueError, match="model_parallelism must be at least 1, got 0"):
        ClassifierConfig(model_parallelism=0)
